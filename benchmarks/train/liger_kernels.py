"""Compare liger-kernel's kernels (train.kernels) with the operations that they replace: saved bytes, losses, gradients.

    .venv/bin/python benchmarks/train/liger_kernels.py

The kernels run in Triton's interpreter on a CPU (tests/kernels, which installs liger-kernel and Triton), where their
times mean nothing, so none is measured. Models have the shapes of config/recipes/models and random weights, but few
layers and a small vocabulary; LoRA on all linear layers, in fp32 and in bf16.

Saved bytes are those of the storages that the graph of a forward pass holds, without weights: a difference for each
part by itself, and for all together, beside what the memory estimate predicts (src/zerolora/memory/decoder.py). Losses
and gradients are compared with the model's own operations in the same precision, and in bf16 both with fp32, on the
same weights. Writes benchmarks/results/train_kernels.json.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch and the interpreter
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    tests = Path(__file__).resolve().parents[2] / "tests"
    installed = subprocess.run([tests / "kernels/install", sys.executable], capture_output=True, text=True, check=True)
    sys.path[:0] = [str(tests), str(tests / "kernels"), installed.stdout.strip(), str(tests.parent / "benchmarks")]
import compared
import torch
from measuring import PACKAGES, RESULTS, ROOT, machine, parser_of
from transformers import AutoConfig, AutoModelForCausalLM

from zerolora.config.settings import TrainSettings
from zerolora.files import write_json
from zerolora.memory.decoder import phases
from zerolora.methods.lora import LoraMethod
from zerolora.methods.registry import TRAINABLE
from zerolora.model import fused_kernels
from zerolora.model.fused_kernels import Part
from zerolora.model.projections import ForwardSpec, Trained
from zerolora.model.read_spec import from_config
from zerolora.train import kernels
from zerolora.train.adapter import base_of
from zerolora.train.engines.ddp import _compute_in
from zerolora.train.engines.engine import DTYPES
from zerolora.train.loss import make_chunked

MODELS = ROOT / "config/recipes/models"
CASES = ("llama-3.2-1b", "qwen2.5-1.5b", "gemma-3-1b", "phi-3-mini-4k")
SMALLER = {"num_hidden_layers": 1, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Sizes that cost memory and time, and that saved bytes of a layer do not depend on."""
ALL = "all"
Step = tuple[torch.Tensor, dict[str, torch.Tensor], int]
"""Of compared.py: losses, gradients, and saved bytes."""


def main() -> None:
    """Measure each model, write."""
    made = parser_of(__doc__)
    made.add_argument("--cases", nargs="+", default=list(CASES), help="models of config/recipes/models")
    made.add_argument("--tokens", type=int, default=8, help="tokens of the row, of which half are supervised")
    made.add_argument("--output", type=Path, default=RESULTS / "train_kernels.json")
    options = made.parse_args()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    result: dict[str, Any] = {"machine": machine((*PACKAGES, "liger-kernel", "triton")), "tokens": options.tokens}
    result |= {"layers": SMALLER["num_hidden_layers"], "models": {}}
    for case in options.cases:
        values = json.loads((MODELS / f"{case}.json").read_text(encoding="utf-8"))
        result["models"][case] = of_model(values | SMALLER, options.tokens)
        print(case, json.dumps(result["models"][case], indent=1), flush=True)
        write_json(options.output, result)


def of_model(values: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the figures of a model, from the values of its config.json, by precision."""
    result = {}
    exact: Step | None = None
    for precision in ("fp32", "bf16"):
        model = built(values, DTYPES[precision])
        base = base_of(model)
        parts = parts_of(values)
        own = compared.step(model, tokens)
        exact = exact or own
        fused = {}
        for name, some in subsets(parts).items():
            kernels.use(base, some)
            fused[name] = compared.step(model, tokens)
            described = kernels.described(base)
            kernels.remove(base)
        result[precision] = {
            "described": described,
            "saved_bytes_a_token": saved(values, precision, tokens, own, fused),
            "fused_from_own": difference(fused[ALL], own),
            "own_from_fp32": difference(own, exact),
            "fused_from_fp32": difference(fused[ALL], exact),
        }
        del model, base, own, fused
        gc.collect()
    return result


def saved(values: dict[str, Any], precision: str, tokens: int, own: Step, fused: dict[str, Step]) -> dict[str, Any]:
    """Return the bytes that a row's graph saves for each token: measured and predicted, without kernels, with all of
    them, and how many each part saves less."""
    predicted = {
        name: kept(values, precision, tokens, parts)
        for name, parts in ({"own": ()} | subsets(parts_of(values))).items()
    }
    measured = {"own": own[2], **{name: step[2] for name, step in fused.items()}}
    whole = {
        name: {"measured": measured[name] / tokens, "predicted": predicted[name] / tokens} for name in ("own", ALL)
    }
    less = {
        name: {
            "measured": (measured["own"] - measured[name]) / tokens,
            "predicted": (predicted["own"] - predicted[name]) / tokens,
        }
        for name in fused
    }
    return {"whole": whole, "less": less}


def subsets(parts: tuple[Part, ...]) -> dict[str, tuple[Part, ...]]:
    """Return each part by itself, and all of them, by name."""
    result: dict[str, tuple[Part, ...]] = {part: (part,) for part in parts}
    return result | {ALL: parts}


def parts_of(values: dict[str, Any]) -> tuple[Part, ...]:
    """Return the parts of a model that have kernels."""
    return fused_kernels.parts(values["model_type"], values.get("hidden_activation") or values["hidden_act"])


def kept(values: dict[str, Any], precision: str, tokens: int, parts: tuple[Part, ...]) -> int:
    """Return the bytes that all layers keep for the backward pass, as the estimate has them for DDP."""
    model, method = from_config(values, Path("config.json")), LoraMethod(r=8)
    width = DTYPES[precision].itemsize
    step = ForwardSpec(1, tokens, width, "sdpa", False, False, "fused", tokens // 2, on_cpu=True)
    trained = Trained(method, method.parameters(model, width).ranks, width, 1.0, kept=4 * (width == 2))
    return phases(model, replace(step, kernels=parts), trained)["kept"]["total"]


def built(values: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a model with LoRA in training mode; the base's weights are the same in any precision."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms of ones would hide a wrong factor
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(torch.bfloat16).to(dtype)
    model.config.use_cache = False
    make_chunked(model)
    model = TRAINABLE["lora"].build(model, TrainSettings(method="lora", device="cpu"), ())
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:  # zeros would hide the gradients of the first factors
            torch.nn.init.normal_(parameter, std=0.01)
    _compute_in(dtype, model)
    return model.train()


def difference(step: Step, other: Step) -> dict[str, float]:
    """Return how far losses, and the gradient that differs most, are from another step's, in norms of the latter."""
    own, others = ({plain(name): each for name, each in gradients.items()} for _, gradients, _ in (step, other))
    assert own.keys() == others.keys()
    gradients = [((own[name] - each).norm() / each.norm()).item() for name, each in others.items() if each.any()]
    return {"losses": ((step[0] - other[0]).norm() / other[0].norm()).item(), "gradients": max(gradients)}


def plain(name: str) -> str:
    """Return the name of a parameter, also of one that is cast in computation (torch.nn.utils.parametrize)."""
    return name.replace(".parametrizations.", ".").removesuffix(".original")


if __name__ == "__main__":
    main()
