"""What the loop sees of an engine, and what all engines share: the optimizer, its states and their names."""

from typing import Any

import torch
import torch.distributed

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW names them
Parts = dict[str, dict[str, torch.Tensor]]  # weight and moments, each by parameter name


class Engine(torch.nn.Module):
    """What the loop sees of an engine: call it, then `backward` and `step` once a micro-batch."""

    module: Any
    """The adapted model."""
    optimizer: Any
    divisor: int
    """By what the engine divides gradients: ranks, and accumulation if it divides by that."""
    resumable = True
    """Whether `part` and `restore` work."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""
        raise NotImplementedError

    def step(self) -> None:
        """Update the adapter if this was the step's last micro-batch."""
        raise NotImplementedError

    def gradient_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None where nobody needed it, or fp16 overflowed
        and the step was left out."""
        raise NotImplementedError

    def reduced(self) -> tuple[int, int, float]:
        """Return calls, bytes and exposed seconds of the last step's all-reduces that no function of torch.distributed
        was called for (collectives.py)."""
        return 0, 0, 0.0

    def part(self, part: str) -> dict[str, torch.Tensor]:
        """Return master weights ("weight") or one of AdamW's MOMENTS: whole tensors by parameter name, fp32 on the host
        of rank 0, nothing on other ranks. Collective; moments are there after the first step."""
        first = torch.distributed.get_rank() == 0
        found = {}
        for name, parameter in trained(self.module).items():
            whole = self.whole(parameter, part)  # one at a time, so that little stands on a GPU
            if first:
                found[plain(name)] = whole.detach().float().cpu().clone()
        return found

    def restore(self, parts: Parts, updates: int, loss_scale: dict[str, float]) -> None:
        """Set weights and moments to whole tensors that `part` returned, here or under another engine, after `updates`
        updates of the optimizer. Collective; every rank gives the same."""
        raise NotImplementedError

    def loss_scale(self) -> dict[str, float]:
        """Return the state of fp16's dynamic loss scale; empty in other precisions."""
        return {}

    def updates(self) -> int:
        """Return how often the optimizer has updated the adapter; fewer than steps if fp16 overflowed."""
        states = self.inner.state.values()
        return int(next(iter(states))["step"]) if states else 0

    @property
    def inner(self) -> torch.optim.AdamW:
        """torch's own optimizer, which holds the moments."""
        raise NotImplementedError

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        """Return a part of one parameter, whole. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the engine holds."""


def precision_of(config: dict[str, Any]) -> str:
    """Return the precision that a rendered config computes in: bf16, fp16 or fp32."""
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """Return the type that a rendered config computes in, and keeps frozen weights in."""
    return DTYPES[precision_of(config)]


def adamw(model: Any, settings: dict[str, Any]) -> torch.optim.AdamW:
    """Return the optimizer; with LoRA+ second factors are a group of their own, whose rate is `ratio` times higher."""
    adapter, ratio = trained(model), settings["lora"]["plus_ratio"]
    groups: list[dict[str, Any]] = [{"params": list(adapter.values()), "ratio": 1.0}]
    if ratio != 1:
        second = [name for name in adapter if "lora_B" in name]
        groups[0]["params"] = [parameter for name, parameter in adapter.items() if name not in second]
        groups.append({"params": [adapter[name] for name in second], "ratio": ratio})
    return torch.optim.AdamW(groups, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])


def trained(model: Any) -> dict[str, Any]:
    """Return the trained parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain(name: str) -> str:
    """Return a parameter's name as peft gives it, without what a parametrization adds."""
    return name.replace(".parametrizations", "").removesuffix(".original")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def fresh_state(tensor: torch.Tensor, updates: int) -> dict[str, torch.Tensor]:
    """Return AdamW's state as its first step makes it, but for the number of updates (torch/optim/adamw.py)."""
    moments = {name: torch.zeros_like(tensor, memory_format=torch.preserve_format).detach() for name in MOMENTS}
    return {"step": torch.tensor(float(updates)), **moments}
