"""DeepSpeed's engine, and what DeepSpeed 0.19.8 does otherwise than a LoRA run needs it."""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from zerolora.train.engines.base import WEIGHT, Engine, Parts, adamw, fresh_state, parameters_of, trained

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # as DeepSpeed's loss scalers name them


class DeepSpeed(Engine):
    """DeepSpeed's engine, at any ZeRO stage."""

    def __init__(self, model: Any, config: dict[str, Any], settings: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        import deepspeed

        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model, settings), config=config
        )
        if config["zero_optimization"].get("zero_quantized_nontrainable_weights"):
            # Weights were shared out while they still counted as trained, so none is quantized yet.
            self.optimizer.quantize_nontrainable_params()
        self.module = self.engine.module
        self.stage = self.engine.zero_optimization_stage()
        if self.inner is self.optimizer:  # stage 0 in fp32
            self.engine.clip_fp32_gradients = self._clip
        self._masters = self._whole_masters() if self.stage == 0 else {}
        if self.stage == 0 and self.inner is not self.optimizer:
            self._take_back_first_step()
        self._scale = 1.0  # of the gradients whose norm DeepSpeed tells
        self._grow: Callable[[], None] | None = None
        if self.engine.fp16_enabled():
            self._grow_late()
        if len(self.inner.param_groups) > 1:
            # Stages 1 and 2 look for all states once the first group has made its step (stage_1_and_2.py, step).
            self._make_states(0)
        if self.stage == 3:
            self._forget_with_the_trace()
        self.divisor = torch.distributed.get_world_size() * settings["accumulation"]
        self.resumable = config["zero_optimization"].get("offload_optimizer", {}).get("device") != "nvme"

    def forward(self, **inputs: Any) -> Any:
        return self.engine(**inputs)

    def train(self, mode: bool = True) -> "DeepSpeed":
        if self.stage == 3 and mode and not self.training:
            # A forward pass leaves gathered what a backward pass would use first, and the next one does not count it
            # among live weights (partitioned_param_coordinator.py, reset_step).
            self.optimizer.empty_partition_cache()
        super().train(mode)
        return self

    def backward(self, loss: torch.Tensor) -> None:
        if self.stage == 0 and (scaler := self._scaler()):
            # DeepSpeed scales the loss for its ZeRO optimizers only (engine.py, backward).
            self._scale = scaler.cur_scale
            loss = loss.float() * self._scale
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()
        if self._grow:
            self._grow()
            self._grow = None

    def gradient_norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm()
        overflowed = self.engine.fp16_enabled() and norm is not None and not math.isfinite(norm)
        return None if norm is None or overflowed else float(norm) / self._scale

    def _clip(self) -> None:
        """Clip as DeepSpeed does (engine.py, clip_fp32_gradients), and keep the norm, which it forgets."""
        from deepspeed.runtime.utils import clip_grad_norm_

        parameters, largest = self.engine.module.parameters(), self.engine.gradient_clipping()
        self.engine._global_grad_norm = clip_grad_norm_(parameters, largest, mpu=self.engine.mpu)

    def _take_back_first_step(self) -> None:
        """Undo the step without gradients by which stage 0's optimizer for 16 bits makes Adam's moments
        (unfused_optimizer.py, initialize_optimizer_states): it counts for their bias, and decays weights."""
        self._make_states(0)
        for low, high in self._masters.items():
            high.data.copy_(low.data)

    def _forget_with_the_trace(self) -> None:
        """Let stage 3 decide anew which weights to release when the order of modules is another than before. It keeps
        what it decided by module and place (partitioned_param_coordinator.py, __params_to_release), so that after a
        validation before the first step, where nothing is used again, every weight would be gathered twice for ever.
        """
        coordinator = self.optimizer.parameter_offload.get_param_coordinator()
        decide = type(coordinator)._PartitionedParameterCoordinator__params_to_release
        decided = inspect.getclosurevars(decide).nonlocals["func"]
        invalidate = coordinator._invalidate_trace

        def forget() -> None:
            invalidate()
            decided.cache_clear()

        coordinator._invalidate_trace = forget

    def _grow_late(self) -> None:
        """Let fp16's loss scale grow after a step. Stages 0 and 3 let it grow first, then unscale by it gradients that
        have the scale of before (stage3.py and unfused_optimizer.py, step)."""
        update = self.optimizer._update_scale

        def fall(overflowed: bool) -> None:
            if overflowed:
                update(overflowed)
            else:
                self._grow = functools.partial(update, overflowed)

        self.optimizer._update_scale = fall

    @property
    def inner(self) -> torch.optim.AdamW:
        return self.optimizer if isinstance(self.optimizer, torch.optim.AdamW) else self.optimizer.optimizer

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            master = self._masters[parameter]
            return master if part == WEIGHT else self.inner.state[master][part]
        if part == WEIGHT:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, part)

    def loss_scale(self) -> dict[str, float]:
        scaler = self._scaler()
        return {name: getattr(scaler, name) for name in SCALE if hasattr(scaler, name)}

    def _scaler(self) -> Any:
        """Return the object that holds fp16's loss scale, None in other precisions."""
        if not self.engine.fp16_enabled():
            return None
        return getattr(self.optimizer, "loss_scale_config", None) or self.optimizer.loss_scaler

    def restore(self, parts: Parts, updates: int, loss_scale: dict[str, float]) -> None:
        import deepspeed

        for name, value in loss_scale.items():
            setattr(self._scaler(), name, value)

        self._make_states(updates)
        for name, parameter in trained(self.module).items():
            # Not only the master: the copy that computes is made anew in a step only.
            with deepspeed.zero.GatheredParameters([parameter] if self.stage == 3 else [], modifier_rank=0):
                parameter.data.copy_(parts[WEIGHT][name])
            for part, tensors in parts.items():
                self._set(parameter, part, tensors[name])

    def _make_states(self, updates: int) -> None:
        """Make the optimizer's state, which AdamW makes in its first step, and let DeepSpeed know where it is."""
        held = self.optimizer.fp32_partitioned_groups_flat if self.stage == 3 else parameters_of(self.inner)
        for tensor in held:
            # A state that DeepSpeed knows already stays where it is: it looks for it only once.
            state = self.inner.state[tensor]
            if not state:
                state.update(fresh_state(tensor, updates))
            state["step"].fill_(updates)
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.optimizer._lazy_init_hp_params_optimizer_state()

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
            value = _own_share(value, parameter)
            if part == WEIGHT:
                safe_set_local_fp32_param(parameter, value)
            else:
                safe_set_local_optimizer_state(parameter, value, part)
        elif part == WEIGHT:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, part)

    def _whole_masters(self) -> dict[Any, torch.Tensor]:
        """Return what the optimizer updates, by parameter; at stage 0 each rank has it whole."""
        if self.inner is self.optimizer:
            return {parameter: parameter for parameter in parameters_of(self.inner)}
        groups = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        return {low: high for lows, highs in groups for low, high in zip(lows, highs, strict=True)}

    def close(self) -> None:
        self.engine.destroy()


def apply_startup_patches() -> None:
    """Take from DeepSpeed's start what costs seconds to minutes, and serves nothing here."""
    import deepspeed
    from deepspeed.runtime import compiler

    # It would compile this shared-memory transport on first use; gloo needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # All ranks read the same files and drew the same adapter, so rank 0 need not send them every weight. Nor are the
    # weights written to then: ranks of a node share the file's pages.
    deepspeed.DeepSpeedEngine._broadcast_model = lambda engine: None
    # It imports Muon to see that the optimizer is another, and decorating Muon's kernels loads torch's compiler.
    compile_later, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_later


def _own_share(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return this rank's share of a whole tensor as stage 3 cuts it: equal shares, the last filled up with zeros."""
    group = parameter.ds_process_group
    share = parameter.ds_tensor.ds_numel
    flat = value.flatten()
    filled = torch.nn.functional.pad(flat, (0, share * torch.distributed.get_world_size(group) - flat.numel()))
    return filled.narrow(0, share * torch.distributed.get_rank(group), share)
