"""What the loop sees of an engine, and what engines share: the optimizer, its states and their names."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from zerolora.config.settings import TrainSettings
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.launch.rendezvous import rendezvous
from zerolora.train.training_plan import TrainingPlan

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHT = "weight"
Loading = Literal["whole", "sharded", "first_rank"]
"""How ranks read the base weights: each all of them, each its shards, or rank 0 alone."""
Tensors = dict[str, torch.Tensor]
"""By parameter name."""


class Engine(torch.nn.Module):
    """What the loop sees of an engine: call it, then `backward` and `step` once a micro-batch."""

    module: Any
    """The adapted model."""
    optimizer: Any
    divisor: int
    """By what the engine divides gradients: ranks, and accumulation if it divides by that."""
    reentrant = False
    """Which kind of activation checkpointing the engine works with (torch.utils.checkpoint)."""

    def __init__(self, model: Any, config: ZeroJson, plan: TrainingPlan, device: torch.device) -> None:
        """Make `model` ready to be trained as `config` says. Collective."""
        super().__init__()
        self.recipe = OPTIMIZERS[plan.optimizer]

    @staticmethod
    def load_library() -> None:
        """Import what the engine needs, before the ranks of a node are forked; computes nothing."""

    @staticmethod
    def connect(config: ZeroJson, device: torch.device) -> None:
        """Let the ranks join, before the model loads. Collective."""
        rendezvous(backend(device))

    @staticmethod
    def loading(config: ZeroJson) -> Loading:
        """Return how ranks read the base weights."""
        return "whole"

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""
        raise NotImplementedError

    def step(self) -> None:
        """Update the adapter if this was the step's last micro-batch."""
        raise NotImplementedError

    def gradient_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None where nothing needed it, or where fp16
        overflowed and the step was skipped."""
        raise NotImplementedError

    def reduced(self) -> tuple[int, int, float]:
        """Return calls, bytes and exposed seconds of the last step's all-reduces that no function of torch.distributed
        was called for (telemetry/collectives.py)."""
        return 0, 0, 0.0

    def part(self, part: str) -> Tensors:
        """Return master weights (WEIGHT) or one of the optimizer's states (optimizers/optimizer.py, `states`): whole
        fp32 tensors on the host of rank 0, nothing on other ranks. Collective; states exist after the first step."""
        first = torch.distributed.get_rank() == 0
        tensors = {}
        with self.unpacked([part]):
            for name, parameter in trained(self.module).items():
                if part != WEIGHT and part not in self.recipe.parts(parameter.shape):
                    continue
                whole = self.whole(parameter, part)  # one at a time, so that little is held on a GPU
                if first:
                    tensors[plain(name)] = whole.detach().float().cpu().clone()
        return tensors

    def unpacked(self, parts: Iterable[str], write: bool = False) -> AbstractContextManager[None]:
        """Hold the optimizer's states as fp32 tensors, by their names in checkpoints (optimizers/optimizer.py)."""
        return self.recipe.unpacked(self.inner, list(parts), write)

    def restore(self, parts: dict[str, Tensors], updates: int, loss_scale: dict[str, float]) -> None:
        """Set weights and states to whole tensors that `part` returned, here or under another engine, after `updates`
        updates of the optimizer. Collective; every rank passes the same."""
        raise NotImplementedError

    def loss_scale(self) -> dict[str, float]:
        """Return the state of fp16's dynamic loss scale; empty in other precisions."""
        return {}

    def updates(self) -> int:
        """Return how often the optimizer has updated the adapter; fewer than steps if fp16 overflowed."""
        return max((int(state["step"]) for state in self.inner.state.values()), default=0)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The library's own optimizer, which holds the states."""
        raise NotImplementedError

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        """Return a part of one parameter, whole. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the engine holds."""


class TorchEngine(Engine):
    """What DDP and FSDP share: accumulation, clipping and optimizer of their own, on fp32 adapter weights."""

    def __init__(self, model: Any, config: ZeroJson, plan: TrainingPlan, device: torch.device) -> None:
        super().__init__(model, config, plan, device)
        for parameter in trained(model).values():
            parameter.data = parameter.data.float()
        self.accumulation, self.clipping = plan.accumulation, config.engine.gradient_clipping
        self.divisor = torch.distributed.get_world_size()
        self.micro_step = 0
        self.norm: torch.Tensor | None = None
        self.module = self.wrap(model, config, DTYPES[plan.precision], device)
        self.held = {parameter: self.updated(parameter) for parameter in trained(self.module).values()}
        """What the optimizer updates, by parameter."""
        adapter = {name: self.held[parameter] for name, parameter in trained(self.module).items()}
        self.optimizer = build_optimizer(adapter, plan)

    def wrap(self, model: Any, config: ZeroJson, dtype: torch.dtype, device: torch.device) -> Any:
        """Return the model on its device, ready to be called on every rank; it computes in `dtype`."""
        raise NotImplementedError

    @property
    def last(self) -> bool:
        """Whether gradients are reduced in this micro-batch."""
        return bool(self.micro_step == self.accumulation - 1)

    @property
    def inner(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def updated(self, parameter: Any) -> Any:
        """Return the tensor that the optimizer updates for a parameter."""
        return parameter

    def restore(self, parts: dict[str, Tensors], updates: int, loss_scale: dict[str, float]) -> None:
        for held in self.held.values():
            self.recipe.start(self.optimizer, held, updates)
        with self.unpacked(parts, write=True):
            for name, parameter in trained(self.module).items():
                for part, tensors in parts.items():
                    if plain(name) in tensors:
                        held = parameter if part == WEIGHT else self.optimizer.state[self.held[parameter]][part]
                        held.data.copy_(self.distributed(tensors[plain(name)], parameter, held))

    def distributed(self, value: torch.Tensor, parameter: Any, held: Any) -> torch.Tensor:
        """Return a whole tensor of a parameter as this rank holds `held`: the parameter, or a state of it."""
        return value

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.last:
            if self.clipping:
                self._clip(list(trained(self.module).values()))
            self.update()
        self.micro_step = (self.micro_step + 1) % self.accumulation

    def update(self) -> None:
        """Update the adapter with the gradients of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_norm(self) -> float | None:
        norm = self.norm.to_local() if isinstance(self.norm, DTensor) else self.norm
        return None if norm is None else float(norm)

    def _clip(self, parameters: list[torch.Tensor]) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, and keep the norm."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.norm = self.norm_of_all_ranks(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.clipping, self.norm)

    def norm_of_all_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of the gradient over all ranks, of the norm that this rank has computed."""
        return norm


def backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def build_optimizer(adapter: dict[str, Any], settings: TrainSettings) -> torch.optim.Optimizer:
    """Return the optimizer of trained tensors by name. With LoRA+ the second factors are a group of their own, `ratio`
    times faster."""
    ratio = settings.lora.plus_ratio
    groups: list[dict[str, Any]] = [{"params": list(adapter.values()), "ratio": 1.0}]
    if ratio != 1:
        second = [name for name in adapter if "lora_B" in name]
        groups[0]["params"] = [parameter for name, parameter in adapter.items() if name not in second]
        groups.append({"params": [adapter[name] for name in second], "ratio": ratio})
    recipe = OPTIMIZERS[settings.optimizer]
    betas = settings.betas and (settings.betas[0], settings.betas[1])
    return recipe.build(
        groups,
        settings.learning_rate,
        settings.weight_decay,
        betas or recipe.betas,
        recipe.epsilon if settings.epsilon is None else settings.epsilon,
    )


def trained(model: Any) -> dict[str, Any]:
    """Return the trained parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain(name: str) -> str:
    """Return a parameter's name as peft gives it, without what a parametrization adds."""
    return name.replace(".parametrizations", "").removesuffix(".original")
