"""The estimates of DeepSpeed and of `accelerate estimate-memory` for the same model.

Their own functions are called. Both know a number of parameters, but not which are trained, nor batch and length. All
results are in bytes; a GPU's, and a host's with all its ranks.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.strategies import STRATEGIES


@dataclass(frozen=True)
class Answer:
    """Bytes of one GPU and of one host; None where an estimator has no answer."""

    gpu: int | None
    host: int | None


def deepspeed_answer(
    strategy: str, total_parameters: int, largest_layer: int, ranks_per_node: int, nodes: int = 1
) -> Answer:
    """Return DeepSpeed's estimate: none for other engines and for stages 0 and 1.

    `largest_layer` is a number of parameters. Stage 3 is assumed to load with zero.Init, as training does.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    layout = STRATEGIES[strategy]
    if layout.engine != "deepspeed" or layout.stage < 2:
        return Answer(None, None)
    offloaded = layout.optimizer != "gpu"
    if layout.stage == 2:
        host, gpu = estimate_zero2_model_states_mem_needs(total_parameters, ranks_per_node, nodes, offloaded)
    else:
        # The third value is the largest layer's bytes, which the second includes.
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_parameters, largest_layer, ranks_per_node, nodes, offloaded, layout.parameters != "gpu", True
        )
    return Answer(gpu=int(gpu), host=int(host))


def accelerate_answer(config: Path, precision: str) -> Answer:
    """Return the largest value of `accelerate estimate-memory` for training with Adam.

    It assumes one GPU and training of the whole model, whatever the strategy.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    # As gather_data of that command calls it, with the size of the model in fp32.
    size, _ = calculate_maximum_sizes(_empty_model(config))
    usage = estimate_training_usage(size, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision])
    return Answer(int(max(usage.values())), None)


def model_parameters(config: Path) -> tuple[int, int]:
    """Return the model's parameters, and those of its largest layer, as DeepSpeed counts them.

    A layer is any module with weights of its own (stage3.py, model_to_params).
    """
    model = _empty_model(config, with_head=True)
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    return sum(each.numel() for each in model.parameters()), largest


@functools.lru_cache(maxsize=4)
def _empty_model(config: Path, with_head: bool = False) -> Any:
    """Return the model of a config.json on the meta device; `accelerate` builds it without its head."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    settings = AutoConfig.for_model(**json.loads(config.read_text(encoding="utf-8")))
    kind: Any = AutoModelForCausalLM if with_head else AutoModel
    with init_empty_weights():
        model = kind.from_config(settings, dtype=torch.float32)
    model.tie_weights()  # which moving the weights to the meta device undid
    return model


def baselines(config: Path, strategy: str, precision: str, ranks_per_node: int, nodes: int) -> dict[str, int | None]:
    """Return the GPU bytes of each estimator for a model's config.json under a strategy."""
    total, largest = model_parameters(config)
    return {
        "deepspeed": deepspeed_answer(strategy, total, largest, ranks_per_node, nodes).gpu,
        "accelerate": accelerate_answer(config, precision).gpu,
    }
