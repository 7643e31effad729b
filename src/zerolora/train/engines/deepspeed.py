"""DeepSpeed's engine, at any ZeRO stage. compat/deepspeed_patches.py has everything outside of its public API."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed

from zerolora.compat import deepspeed_patches as compat
from zerolora.compat.bitsandbytes_patches import is_packed
from zerolora.config.settings import TrainingPlan
from zerolora.machine.devices import on_gpu
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.engines.engine import DTYPES, WEIGHT, Engine, Loading, Tensors, backend, build_optimizer, trained
from zerolora.train.gradient_sums import GradientSums


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine."""

    # Stage 3 frees frozen weights inside the recomputation, where the other kind compares shapes (DeepSpeed#8148,
    # transformers#47254).
    reentrant = True

    @staticmethod
    def load_library() -> None:
        compat.apply_startup_patches()

    @staticmethod
    def connect(config: ZeroJson, device: torch.device) -> None:
        import deepspeed

        Engine.connect(config, device)
        DeepSpeedEngine.load_library()
        deepspeed.init_distributed(dist_backend=backend(device), verbose=False)

    @staticmethod
    def loading(config: ZeroJson) -> Loading:
        return "sharded" if config.engine.zero_optimization.stage == 3 else "whole"

    @staticmethod
    def keep(config: ZeroJson, plan: TrainingPlan, device: torch.device) -> Callable[[Any], Any]:
        shard, dtype = compat.sharder(config.options), DTYPES[plan.precision]

        def keep(parameter: Any) -> Any:
            whole = parameter.data.to(device)
            # DeepSpeed casts unsharded weights itself (engine.py, _cast_module_mixed_precision).
            parameter.data = whole.to(dtype) if whole.is_floating_point() and not is_packed(parameter) else whole
            shard(parameter)
            return parameter

        return keep

    @staticmethod
    def updates_on_host(config: ZeroJson, device: torch.device) -> bool:
        return config.engine.zero_optimization.offloads_optimizer or not on_gpu(device)

    def __init__(self, model: Any, config: ZeroJson, plan: TrainingPlan, device: torch.device) -> None:
        super().__init__(model, config, plan, device)
        import deepspeed

        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            # Of a model with sharded parameters DeepSpeed casts none. peft's are fp32 where the base's are uint8.
            for parameter in trained(model).values():
                if not hasattr(parameter, "ds_id"):
                    parameter.data = parameter.data.to(DTYPES[plan.precision])
        at_the_end = config.engine.zero_optimization.stage < 2 and not config.engine.data_types
        if plan.precision != "fp32" and plan.accumulation > 1 and at_the_end:
            # Before DeepSpeed's own hooks, which reduce the sum.
            GradientSums(trained(model).values(), lambda: bool(self.engine.is_gradient_accumulation_boundary()))
        self.client = build_optimizer(trained(model), plan, self.updates_on_host(config, device))
        parts = deepspeed.initialize(model=model, optimizer=self.client, config=config.options)
        self.engine, self.optimizer, *_ = parts
        if config.engine.zero_optimization.zero_quantized_nontrainable_weights:
            # Weights were sharded while they still counted as trained, so none is quantized yet (DeepSpeed#3954).
            self.optimizer.quantize_nontrainable_params()
        self.module = self.engine.module
        self.stage = self.engine.zero_optimization_stage()
        self.masters: dict[Any, torch.Tensor] = {}
        """At stage 0, the whole tensor that the optimizer updates, by parameter."""
        if self.stage == 0 and self.inner is self.optimizer:  # fp32
            self.masters = {parameter: parameter for parameter in trained(model).values()}
            compat.keep_clipped_norm(self.engine)
        elif self.stage == 0:
            self.masters = compat.stage0_masters(self.optimizer)
            compat.undo_first_step(self.optimizer, self.masters, self._start(0))
        self._scale = 1.0  # of the gradient whose norm DeepSpeed reports
        self._grow = compat.grow_scale_after_step(self.optimizer) if self.engine.fp16_enabled() else None
        if len(self.inner.param_groups) > 1:
            # Stages 1 and 2 read all states after the step of the first group (stage_1_and_2.py, step).
            compat.make_states(self.optimizer, self.inner, self._start(0))
        if self.stage == 3:
            compat.release_by_current_trace(self.optimizer)
            compat.record_training_alone(self.optimizer)
        self.divisor = torch.distributed.get_world_size() * plan.accumulation

    def forward(self, **inputs: Any) -> Any:
        return self.engine(**inputs)

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        if self.stage == 3 and mode and not self.training:
            # After a forward pass the weights that a backward pass would use first stay gathered, and the next pass
            # does not count them among live weights (partitioned_param_coordinator.py, reset_step).
            self.optimizer.empty_partition_cache()
        super().train(mode)
        return self

    def backward(self, loss: torch.Tensor) -> None:
        if self.stage == 0 and self.engine.fp16_enabled():
            self._scale = compat.stage0_scale(self.engine, self.optimizer)
            loss = loss.float() * self._scale
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()
        if self._grow:
            self._grow()

    def gather_for_rows(self, paths: Sequence[str]) -> None:
        if self.stage == 3:
            base = self.module.get_base_model() if hasattr(self.module, "peft_config") else self.module
            compat.gather_at_once(self.optimizer, [base.get_submodule(path) for path in paths])

    def gradient_norm(self) -> torch.Tensor | float | None:
        norm: torch.Tensor | float | None = self.engine.get_global_grad_norm()
        return norm

    def unscaled(self, norm: float) -> float | None:
        # DeepSpeed 0.19.7 reports 0 as the norm of a step that it left out.
        overflowed = self.engine.fp16_enabled() and not (math.isfinite(norm) and self.engine.was_step_applied())
        return None if overflowed else norm / self._scale

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.client

    def _start(self, updates: int) -> Callable[[torch.Tensor], None]:
        """Return a function that starts the state of a tensor after `updates` updates."""
        return lambda tensor: self.recipe.start(self.inner, tensor, updates)

    @contextlib.contextmanager
    def unpacked(self, parts: Iterable[str], write: bool = False) -> Iterator[None]:
        with super().unpacked(parts, write):
            compat.link_states(self.optimizer)
            yield
        compat.link_states(self.optimizer)

    def part(self, part: str) -> Tensors:
        with compat.read_from_nvme_once(self.optimizer):
            return super().part(part)

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            master = self.masters[parameter]
            return master if part == WEIGHT else self.inner.state[master][part]
        if part == WEIGHT:
            weight: torch.Tensor = safe_get_full_fp32_param(parameter)
            return weight
        state: torch.Tensor = safe_get_full_optimizer_state(parameter, part)
        return state

    def loss_scale(self) -> dict[str, float]:
        scaler = compat.scaler_of(self.engine, self.optimizer)
        return {name: getattr(scaler, name) for name in compat.SCALE if hasattr(scaler, name)}

    def restore(self, parts: dict[str, Tensors], updates: int, loss_scale: dict[str, float]) -> None:
        import deepspeed

        compat.set_scale(self.engine, self.optimizer, loss_scale)
        compat.make_states(self.optimizer, self.inner, self._start(updates))
        for name, parameter in trained(self.module).items():
            # Not only the master weight: a step alone would update the copy that computes.
            with deepspeed.zero.GatheredParameters([parameter] if self.stage == 3 else [], modifier_rank=0):
                parameter.data.copy_(parts[WEIGHT][name])
        with self.unpacked(parts, write=True), compat.read_from_nvme_once(self.optimizer, write=True):
            for name, parameter in trained(self.module).items():
                for part, tensors in parts.items():
                    if name in tensors:
                        self._set(parameter, part, tensors[name])

    def _set(self, parameter: Any, part: str, value: torch.Tensor) -> None:
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.to(self.engine.device)
        if self.stage == 0:
            self.whole(parameter, part).data.copy_(value)
        elif self.stage == 3:
            value = compat.own_shard(value, parameter)
            if part == WEIGHT:
                safe_set_local_fp32_param(parameter, value)
            else:
                safe_set_local_optimizer_state(parameter, value, part)
        elif part == WEIGHT:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, part)

    def close(self) -> None:
        self.engine.destroy()
