"""What other estimators answer for the same model: DeepSpeed's own, and `accelerate estimate-memory`.

Their functions are called, not copied. Both know a number of parameters and nothing of what is trained, of a batch or
of its length. All results are in bytes; a GPU's, and a host's with all its ranks.
"""

import argparse
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.strategies import STRATEGIES


@dataclass(frozen=True)
class Answer:
    """Bytes of one GPU and of one host; None where an estimator says nothing."""

    gpu: int | None
    host: int | None


def deepspeed_answer(
    strategy: str, total_parameters: int, largest_layer: int, ranks_per_node: int, nodes: int = 1
) -> Answer:
    """Return what DeepSpeed's estimators answer: nothing for other engines and for stages 0 and 1, which they lack.

    `largest_layer` are parameters too. Stage 3 is taken to load with zero.Init, as training does.
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
        # The third answer is the largest layer's bytes, which the second one has in it.
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_parameters, largest_layer, ranks_per_node, nodes, offloaded, layout.parameters != "gpu", True
        )
    return Answer(gpu=int(gpu), host=int(host))


def accelerate_answer(config: Path, precision: str) -> Answer:
    """Return what `accelerate estimate-memory` answers for training with Adam: the most that it names.

    It knows one GPU, the whole model, and neither adapters nor strategies: every strategy gets this answer.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    # As gather_data of that command calls it: the size is always that of the model in fp32.
    size, _ = calculate_maximum_sizes(_empty_model(config))
    usage = estimate_training_usage(size, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision])
    return Answer(int(max(usage.values())), None)


def model_parameters(config: Path) -> tuple[int, int]:
    """Return the model's parameters, and those of its largest layer, as DeepSpeed counts them.

    A layer is whatever module owns weights (stage3.py, model_to_params).
    """
    model = _empty_model(config, with_head=True)
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    return sum(each.numel() for each in model.parameters()), largest


@functools.lru_cache(maxsize=4)
def _empty_model(config: Path, with_head: bool = False) -> Any:
    """Return the model of a config.json on the meta device; without its head it is what `accelerate` makes."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    settings = AutoConfig.for_model(**json.loads(config.read_text(encoding="utf-8")))
    kind: Any = AutoModelForCausalLM if with_head else AutoModel
    with init_empty_weights():
        model = kind.from_config(settings, dtype=torch.float32)
    model.tie_weights()  # which moving the weights to the meta device undid
    return model


def baselines(config: Path, strategy: str, precision: str, ranks_per_node: int, nodes: int = 1) -> dict[str, Answer]:
    """Return the answer of each estimator for a model's config.json under a strategy."""
    total, largest = model_parameters(config)
    return {
        "deepspeed": deepspeed_answer(strategy, total, largest, ranks_per_node, nodes),
        "accelerate": accelerate_answer(config, precision),
    }


def main() -> None:
    """Print every strategy's answers for one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="bf16")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args()
    for strategy in STRATEGIES:
        answers = baselines(options.config, strategy, options.precision, options.ranks_per_node, options.nodes)
        print(strategy, *(f"{name}: {answer.gpu} {answer.host}" for name, answer in answers.items()), sep="  ")


if __name__ == "__main__":
    main()
