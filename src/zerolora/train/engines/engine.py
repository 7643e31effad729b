"""The interface of an engine, and the code that engines share: the optimizer, its states and their names."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from zerolora.config.settings import TrainingPlan, TrainSettings
from zerolora.machine.devices import on_gpu
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.launch.rendezvous import rendezvous

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHT = "weight"
Loading = Literal["whole", "sharded", "first_rank"]
"""How ranks read the base weights: each rank all of them, each its shards, or only rank 0."""
Tensors = dict[str, torch.Tensor]
"""By parameter name."""


class Engine(torch.nn.Module):
    """An engine: call it, then `backward` and `step`, once for each micro-batch."""

    module: Any
    """The adapted model."""
    optimizer: Any
    divisor: int
    """The engine divides gradients by this: the ranks, in DeepSpeed times the accumulation."""
    reentrant = False
    """The kind of activation checkpointing that works with the engine (torch.utils.checkpoint)."""

    def __init__(self, model: Any, config: ZeroJson, plan: TrainingPlan, device: torch.device) -> None:
        """Prepare `model` for training. Collective."""
        super().__init__()
        self.recipe = OPTIMIZERS[plan.optimizer]

    @staticmethod
    def load_library() -> None:
        """Import the engine's library, before the ranks of a node are forked; computes nothing."""

    @staticmethod
    def connect(config: ZeroJson, device: torch.device) -> None:
        """Connect the ranks, before the model is loaded. Collective."""
        rendezvous(backend(device))

    @staticmethod
    def loading(config: ZeroJson) -> Loading:
        """Return how ranks read the base weights."""
        return "whole"

    @staticmethod
    def keep(config: ZeroJson, plan: TrainingPlan, device: torch.device) -> Callable[[Any], Any]:
        """Return a function of a parameter that every rank has just read, quantized or not, which returns what this
        rank keeps of it until the engine is made. Collective."""
        raise NotImplementedError

    @staticmethod
    def updates_on_host(config: ZeroJson, device: torch.device) -> bool:
        """Return whether the optimizer updates tensors on the host."""
        return not on_gpu(device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""
        raise NotImplementedError

    def step(self) -> None:
        """Update the adapter if this was the step's last micro-batch."""
        raise NotImplementedError

    def gather_for_rows(self, paths: Sequence[str]) -> None:
        """Expect that inside these modules of the base model, others are called once for each row, on every rank of
        another number of rows."""

    def gradient_norm(self) -> torch.Tensor | float | None:
        """Return the norm of the last gradient before clipping, where it is; None if it was not computed."""
        raise NotImplementedError

    def unscaled(self, norm: float) -> float | None:
        """Return the norm of the last gradient, from that of `gradient_norm`; None if fp16 overflowed."""
        return norm

    def reduced(self) -> tuple[int, int, float]:
        """Return calls, bytes and exposed seconds of the last step's all-reduces that stopwatch.py cannot count."""
        return 0, 0, 0.0

    def part(self, part: str) -> Tensors:
        """Return master weights (WEIGHT) or a state of the optimizer (optimizers/optimizer.py, `states`): whole fp32
        tensors on the host of rank 0, nothing on other ranks. Collective; states exist after the first step."""
        first = torch.distributed.get_rank() == 0
        tensors = {}
        with self.unpacked([part]):
            for name, parameter in trained(self.module).items():
                if part != WEIGHT and part not in self.recipe.parts(parameter.shape):
                    continue
                whole = self.whole(parameter, part)  # one at a time, to save GPU memory
                if first:
                    tensors[plain(name)] = whole.detach().float().cpu().clone()
        return tensors

    def unpacked(self, parts: Iterable[str], write: bool = False) -> AbstractContextManager[None]:
        """Provide the optimizer's states as fp32 tensors by their names in checkpoints (optimizers/optimizer.py)."""
        return self.recipe.unpacked(self.inner, list(parts), write)

    def restore(self, parts: dict[str, Tensors], updates: int, loss_scale: dict[str, float]) -> None:
        """Set weights and states to whole tensors from `part`, of any engine, after `updates` updates of the optimizer.
        Collective; every rank passes the same."""
        raise NotImplementedError

    def loss_scale(self) -> dict[str, float]:
        """Return the state of fp16's dynamic loss scale; empty in other precisions."""
        return {}

    def updates(self) -> int:
        """Return the number of updates by the optimizer; fewer than steps if fp16 overflowed."""
        return max((int(state["step"]) for state in self.inner.state.values()), default=0)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The library's optimizer, which has the states."""
        raise NotImplementedError

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        """Return a part of one parameter, whole. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the engine's resources."""


class TorchEngine(Engine):
    """The common part of DDP and FSDP: accumulation, clipping and an optimizer on fp32 adapter weights."""

    def __init__(self, model: Any, config: ZeroJson, plan: TrainingPlan, device: torch.device) -> None:
        super().__init__(model, config, plan, device)
        self.rounded = None if plan.weights == "fp32" else DTYPES[plan.weights]
        for parameter in trained(model).values():
            parameter.data = parameter.data.to(self.rounded).float()
        self.accumulation, self.clipping = plan.accumulation, config.engine.gradient_clipping
        self.divisor = torch.distributed.get_world_size()
        self.micro_step = 0
        self.norm: torch.Tensor | None = None
        self.module = self.wrap(model, config, DTYPES[plan.precision], device)
        self.held = {parameter: self.updated(parameter) for parameter in trained(self.module).values()}
        """The tensor that the optimizer updates, by parameter."""
        adapter = {name: self.held[parameter] for name, parameter in trained(self.module).items()}
        self.optimizer = build_optimizer(adapter, plan, self.updates_on_host(config, device))

    def wrap(self, model: Any, config: ZeroJson, dtype: torch.dtype, device: torch.device) -> Any:
        """Return the model on its device, ready for calls on every rank; it computes in `dtype`."""
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
        """Return this rank's part of a whole tensor, in the layout of `held`: the parameter, or its state."""
        return value

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.last:
            if self.clipping:
                self._clip(list(trained(self.module).values()))
            self.update()
            self._round()
        self.micro_step = (self.micro_step + 1) % self.accumulation

    def update(self) -> None:
        """Update the adapter with the gradients of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _round(self) -> None:
        """Round weights, and states of their type, to train.weights: an optimizer that updates weights of 16 bits
        computes in fp32 and rounds what it writes."""
        if self.rounded is None:
            return
        for held in self.held.values():
            states = self.inner.state[held] if self.recipe.states_as_weights else {}
            for tensor in (held.data, *(states[name] for name in self.recipe.states if name in states)):
                tensor.copy_(tensor.to(self.rounded))

    def gradient_norm(self) -> torch.Tensor | None:
        return self.norm.to_local() if isinstance(self.norm, DTensor) else self.norm

    def _clip(self, parameters: list[torch.Tensor]) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, and keep the norm."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.norm = self.norm_of_all_ranks(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.clipping, self.norm)

    def norm_of_all_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of the gradient over all ranks, from that of this rank."""
        return norm


def backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device."""
    return "nccl" if on_gpu(device) else "gloo"


def build_optimizer(adapter: dict[str, Any], settings: TrainSettings, on_host: bool) -> torch.optim.Optimizer:
    """Return the optimizer of trained tensors by name, which updates them on the host or on a GPU. With LoRA+ the
    second factors are a separate group, with `plus_ratio` times the learning rate."""
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
        on_host,
    )


def trained(model: Any) -> dict[str, Any]:
    """Return the trained parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain(name: str) -> str:
    """Return a parameter's name in peft, without the suffixes of a parametrization."""
    return name.replace(".parametrizations", "").removesuffix(".original")
