"""Compare liger-kernel's kernels with the operations that they replace, on tiny models in Triton's interpreter.

    PYTHONPATH=tests:tests/kernels:FOLDER python tests/kernels/compared.py

FOLDER is that of tests/kernels/install. Prints JSON.
"""

import json
import os
from typing import Any

import interpreter  # noqa: F401  # before liger_kernel
import torch
import torch.distributed
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
from torch.autograd.graph import saved_tensors_hooks
from training_plan import training_plan
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zerolora.config.settings import TrainSettings
from zerolora.data.prepared_rows import IGNORED
from zerolora.methods.registry import TRAINABLE
from zerolora.model import fused_kernels
from zerolora.planner.zero_json import ZeroJson
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Buckets, Target, nested
from zerolora.train import kernels
from zerolora.train.adapter import base_of
from zerolora.train.engines import engine_class
from zerolora.train.feed import collate
from zerolora.train.isolation import check_kernels
from zerolora.train.loss import make_chunked, token_losses

TINY: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTH = 8  # the interpreter takes milliseconds for each token and norm
BLOCK = 512  # bytes, as in model/tracer.py
CPU = torch.device("cpu")
METHODS = ("dora", "ia3", "vera", "full")


def built(family: str, method: str = "lora", fused: bool = True, checkpointing: bool | None = None) -> Any:
    """Return a model with an adapter; `checkpointing`: whether it is reentrant, None for none."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**TINY | ({"num_local_experts": 4} if family == "mixtral" else {}))
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.config.use_cache = False
    make_chunked(model)
    if fused:
        kernels.use(model, fused_kernels.parts(family, activation_of(config)))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    settings = TrainSettings(method=method, device="cpu")
    model = TRAINABLE[method].build(model, settings, ())
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad and method != "full":
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def activation_of(config: Any) -> str:
    """Return the activation of a model's MLP, by its config's name for it."""
    return getattr(config, "hidden_activation", None) or config.hidden_act


def batch_of(length: int) -> dict[str, Any]:
    """Return a row, of which the second half is supervised."""
    tokens = torch.randint(3, TINY["vocab_size"], (length,), generator=torch.Generator().manual_seed(0)).tolist()
    labels = [IGNORED] * (length // 2) + tokens[length // 2 :]
    return collate([[{"input_ids": tokens, "labels": labels, "source": 0}]], False, CPU)


def step(model: Any, length: int = LENGTH) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return losses, gradients, and the bytes that the graph saves for a row, without weights, in blocks."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # alive, so that no address occurs twice
        return tensor

    model.zero_grad()
    torch.manual_seed(2)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = token_losses(model, batch_of(length))
    size = sum(-(-each.nbytes() // BLOCK) * BLOCK for key, each in saved.items() if key not in weights)
    losses.sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return losses.detach(), gradients, size


def of(family: str, method: str = "lora", checkpointing: bool | None = None) -> dict[str, Any]:
    """Return what the library computes in a model, and how much losses, gradients and saved bytes change with it."""
    model = built(family, method, checkpointing=checkpointing)
    fused = step(model)
    with kernels.off(base_of(model)):
        own = step(model)
    assert fused[1].keys() == own[1].keys()
    gradients = [((fused[1][name] - each).norm() / each.norm()).item() for name, each in own[1].items() if each.any()]
    return {
        "described": kernels.described(base_of(model)),
        "loss": ((fused[0] - own[0]).norm() / own[0].norm()).item(),
        "gradient": max(gradients),
        "gradients": len(gradients),
        "on": fused[2],
        "off": own[2],
    }


def of_engine(name: str) -> dict[str, float]:
    """Return how much the losses and the gradients' norm of a step under a strategy in bf16 change with the kernels."""
    strategy, results = STRATEGIES[name], []
    target = Target(device="cpu", precision="bf16", nodes=1, ranks_per_node=1, nvme=None)
    options = nested(strategy.options(Buckets(reduce=1, allgather=1, prefetch=1, persistence=1, live=1), target)) | {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 1,
        "bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_clipping": 1.0,
    }  # fmt: skip
    plan = training_plan(engine=strategy.engine, strategy=name, precision="bf16")
    config, kind = ZeroJson(options=options, choice=plan), engine_class(strategy.engine)
    kind.load_library()
    for fused in (True, False):
        model = built("llama", fused=fused).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
        engine = kind(model, config, plan, CPU)
        assert kernels.in_use(base_of(engine.module)) == fused
        engine.train()
        losses = token_losses(engine, batch_of(LENGTH))
        engine.backward(losses.sum() * engine.divisor)
        engine.step()
        results.append((losses.detach(), torch.as_tensor(engine.gradient_norm(), dtype=torch.float32)))
        engine.close()
    names = ("losses", "gradient norm")
    return {name: ((a - b).norm() / b.norm()).item() for name, a, b in zip(names, *results, strict=True)}


def of_wrong_kernel() -> dict[str, Any]:
    """Return what the check of the output sees if a kernel computes another activation."""
    from liger_kernel.transformers.geglu import LigerGEGLUMLP

    model = built("llama")
    right = check_kernels(model, base_of(model), CPU)
    for module in base_of(model).modules():
        if type(module).__name__ == "LlamaMLP":
            module.__dict__["forward"] = LigerGEGLUMLP.forward.__get__(module)
    result = {"right": right, "wrong": check_kernels(model, base_of(model), CPU)}
    kernels.remove(base_of(model))
    with torch.no_grad():
        removed = token_losses(model, batch_of(LENGTH))
        own = token_losses(built("llama", fused=False), batch_of(LENGTH))
    return result | {"removed": bool(torch.equal(removed, own))}


def of_losses(softcap: float | None) -> dict[str, float]:
    """Return how much losses of one kernel and their gradient differ from torch's."""
    torch.manual_seed(0)
    logits, targets = 8 * torch.randn(5, 300), torch.randint(300, (5,))
    own = logits.clone().requires_grad_()
    capped = softcap * (own / softcap).tanh() if softcap else own
    expected = torch.nn.functional.cross_entropy(capped, targets, reduction="none")
    expected.sum().backward()
    plain = kernels.fused_losses(logits.clone(), targets, softcap, False)
    losses = kernels.fused_losses(logits, targets, softcap, True)
    assert own.grad is not None
    return {
        "losses": (losses - expected).abs().max().item(),
        "without gradient": (plain - expected).abs().max().item(),
        "gradient": (logits - own.grad).abs().max().item(),
    }


def main() -> None:
    """Print everything as JSON."""
    import liger_kernels  # imports this module

    os.environ["LOCAL_RANK"] = "0"  # which DeepSpeed requires
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    result = {
        "library": sorted(MODEL_TYPE_TO_APPLY_LIGER_FN),
        "kernel for losses": kernels.has_fused_losses(),
        "families": {family: of(family) for family in fused_kernels.FAMILIES},
        "methods": {method: of("llama", method) for method in METHODS},
        "checkpointing": {str(kind): of("llama", checkpointing=kind) for kind in (False, True)},
        "engines": {name: of_engine(name) for name in ("zero3", "fsdp")},
        "benchmark": liger_kernels.of_model({"model_type": "llama", "hidden_act": "silu", **TINY}, LENGTH),
        "losses": {str(softcap): of_losses(softcap) for softcap in (None, 5.0)},
        "check": of_wrong_kernel(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
