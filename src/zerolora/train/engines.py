"""The engines that train an adapted model: DeepSpeed, torch's DistributedDataParallel (DDP) and fully_shard (FSDP2).

Under each the gradient of a step is the same: the sum, over ranks and micro-batches, of what `backward` was given,
divided by `divisor`. Compute is in the rendered precision; master weights, moments and clipping are fp32.
"""

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import parametrize

from zerolora.train.meeting import meet

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW names them
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # as DeepSpeed's loss scalers name them
Parts = dict[str, dict[str, torch.Tensor]]  # weight and moments, each by parameter name


def connect(config: dict[str, Any], device: torch.device) -> None:
    """Make the ranks meet. Before the model loads: stage 3 shares it out while reading."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    meet(backend)
    if "zero_optimization" in config:
        import deepspeed

        _lighten()
        deepspeed.init_distributed(dist_backend=backend, verbose=False)


def _lighten() -> None:
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


def start(model: Any, config: dict[str, Any], settings: dict[str, Any], device: torch.device) -> "Engine":
    """Return the engine of a rendered config, ready to train `model`. Collective."""
    engines = {"zero_optimization": DeepSpeed, "ddp": DDP, "fsdp": FSDP}
    kind = next(engines[section] for section in engines if section in config)
    return kind(model, config, settings, device)


def precision_of(config: dict[str, Any]) -> str:
    """Return the precision that a rendered config computes in: bf16, fp16 or fp32."""
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """Return the type that a rendered config computes in, and keeps frozen weights in."""
    return DTYPES[precision_of(config)]


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
        for name, parameter in _trained(self.module).items():
            whole = self.whole(parameter, part)  # one at a time, so that little stands on a GPU
            if first:
                found[_plain(name)] = whole.detach().float().cpu().clone()
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


class DeepSpeed(Engine):
    """DeepSpeed's engine, at any ZeRO stage."""

    def __init__(self, model: Any, config: dict[str, Any], settings: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        import deepspeed

        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(model, settings), config=config
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
        for name, parameter in _trained(self.module).items():
            # Not only the master: the copy that computes is made anew in a step only.
            with deepspeed.zero.GatheredParameters([parameter] if self.stage == 3 else [], modifier_rank=0):
                parameter.data.copy_(parts[WEIGHT][name])
            for part, tensors in parts.items():
                self._set(parameter, part, tensors[name])

    def _make_states(self, updates: int) -> None:
        """Make the optimizer's state, which AdamW makes in its first step, and let DeepSpeed know where it is."""
        held = self.optimizer.fp32_partitioned_groups_flat if self.stage == 3 else _parameters(self.inner)
        for tensor in held:
            # A state that DeepSpeed knows already stays where it is: it looks for it only once.
            state = self.inner.state[tensor]
            if not state:
                state.update(_fresh_state(tensor, updates))
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
            return {parameter: parameter for parameter in _parameters(self.inner)}
        groups = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        return {low: high for lows, highs in groups for low, high in zip(lows, highs, strict=True)}

    def close(self) -> None:
        self.engine.destroy()


class _Torch(Engine):
    """What DDP and FSDP share: the loop's own accumulation, clipping and optimizer, on fp32 adapter weights."""

    def __init__(self, model: Any, config: dict[str, Any], settings: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        for parameter in _trained(model).values():
            parameter.data = parameter.data.float()
        self.accumulation, self.clipping = settings["accumulation"], config["gradient_clipping"]
        self.divisor = torch.distributed.get_world_size()
        self.micro_step = 0
        self.norm: torch.Tensor | None = None
        self.module = self.shared(model, config, device)
        self.optimizer = _adamw(model, settings)

    def shared(self, model: Any, config: dict[str, Any], device: torch.device) -> Any:
        """Return the model on its device, ready to be called on every rank."""
        raise NotImplementedError

    @property
    def last(self) -> bool:
        """Whether gradients are reduced in this micro-batch."""
        return bool(self.micro_step == self.accumulation - 1)

    @property
    def inner(self) -> torch.optim.AdamW:
        return self.optimizer

    def restore(self, parts: Parts, updates: int, loss_scale: dict[str, float]) -> None:
        for name, parameter in _trained(self.module).items():
            self.optimizer.state[parameter] = _fresh_state(parameter, updates)
            for part, tensors in parts.items():
                held = parameter if part == WEIGHT else self.optimizer.state[parameter][part]
                held.data.copy_(self.placed(tensors[_plain(name)], held))

    def placed(self, value: torch.Tensor, held: Any) -> torch.Tensor:
        """Return a whole tensor as this rank holds it."""
        return value

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.last:
            if self.clipping:
                self._clip(list(_trained(self.module).values()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.micro_step = (self.micro_step + 1) % self.accumulation

    def gradient_norm(self) -> float | None:
        norm = self.norm.to_local() if isinstance(self.norm, DTensor) else self.norm
        return None if norm is None else float(norm)

    def _clip(self, parameters: list[torch.Tensor]) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, and keep the norm."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.norm = self.known(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.clipping, self.norm)

    def known(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all ranks' gradients."""
        return norm


class DDP(_Torch):
    """torch's DistributedDataParallel: everything on every rank."""

    def shared(self, model: Any, config: dict[str, Any], device: torch.device) -> Any:
        model.to(device)
        _compute_in(dtype_of(config), model)
        self.engine = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # All ranks read the same file and drew the same adapter: nothing to send.
            init_sync=False,
            broadcast_buffers=False,
            **config["ddp"],
        )
        self.engine._set_ddp_runtime_logging_sample_rate(1)  # else it keeps the times of one step in a hundred
        return model

    def forward(self, **inputs: Any) -> Any:
        with contextlib.nullcontext() if self.last else self.engine.no_sync():
            return self.engine(**inputs)

    def reduced(self) -> tuple[int, int, float]:
        assert self.engine.logger is not None
        self.engine.logger.set_runtime_stats_and_log()  # else done before the next forward pass
        found = self.engine._get_ddp_logging_data()
        sizes = found.get("rebuilt_bucket_sizes") or found["bucket_sizes"]
        # Times in ns, of the first bucket's start to the last one's end (torch/csrc/distributed/c10d/logger.cpp).
        exposed = (found.get("backward_comm_time", 0) - found.get("backward_compute_comm_overlap_time", 0)) / 1e9
        return found["num_buckets_reduced"], sum(map(int, sizes.split(","))), exposed

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        return parameter if part == WEIGHT else self.optimizer.state[parameter][part]


class FSDP(_Torch):
    """torch's fully_shard: one unit a decoder layer, and the rest of the model."""

    def shared(self, model: Any, config: dict[str, Any], device: torch.device) -> Any:
        options = config["fsdp"]
        shape = tuple(options["mesh"])
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = MixedPrecisionPolicy(DTYPES[options["param_dtype"]], DTYPES[options["reduce_dtype"]])
        source = {name: parameter.detach() for name, parameter in model.named_parameters()}
        layers = model.get_base_model()._no_split_modules
        for module in model.modules():
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard_after_forward"])
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for unit in _units(model):
            unit.set_force_sum_reduction_for_comms(device.type == "cpu")  # gloo knows no average
        _fill(model, source, device)
        return model

    def forward(self, **inputs: Any) -> Any:
        self.module.set_requires_gradient_sync(self.last)
        return self.module(**inputs)

    def known(self, norm: Any) -> Any:
        # Summed here, once: as it comes, each gradient that it clips, and each look at it, would sum it again.
        return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)

    def part(self, part: str) -> dict[str, torch.Tensor]:
        for unit in _units(self.module):  # the last one to be used is still whole, and no part of the mesh
            unit.reshard()
        return super().part(part)

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        return (parameter if part == WEIGHT else self.optimizer.state[parameter][part]).full_tensor()

    def placed(self, value: torch.Tensor, held: Any) -> torch.Tensor:
        return distribute_tensor(value.to(held.device), held.device_mesh, held.placements)


def _units(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class _Cast(torch.nn.Module):
    """A weight kept in fp32 and computed with in another type; its gradient comes back in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        return master.to(self.dtype)


def _compute_in(dtype: torch.dtype, model: Any) -> None:
    if dtype == torch.float32:
        return
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                parametrize.register_parametrization(module, name, _Cast(dtype), unsafe=True)


def _fill(model: Any, source: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give every rank its share of the weights that rank 0 read; the other ranks' `source` has only shapes."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    first = torch.distributed.get_rank() == 0
    listed = [[(name, tensor.shape, tensor.dtype) for name, tensor in source.items()]]
    mine = list(listed[0])
    torch.distributed.broadcast_object_list(listed)
    assert mine == listed[0], "ranks built different models, and would wait for each other for ever"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = source.pop(name)
            whole = whole.to(device) if first else torch.empty(whole.shape, dtype=whole.dtype, device=device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def _adamw(model: Any, settings: dict[str, Any]) -> torch.optim.AdamW:
    """Return the optimizer; with LoRA+ second factors are a group of their own, whose rate is `ratio` times higher."""
    trained, ratio = _trained(model), settings["lora"]["plus_ratio"]
    groups: list[dict[str, Any]] = [{"params": list(trained.values()), "ratio": 1.0}]
    if ratio != 1:
        second = [name for name in trained if "lora_B" in name]
        groups[0]["params"] = [parameter for name, parameter in trained.items() if name not in second]
        groups.append({"params": [trained[name] for name in second], "ratio": ratio})
    return torch.optim.AdamW(groups, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])


def _trained(model: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _plain(name: str) -> str:
    """Return a parameter's name as peft gives it, without what a parametrization adds."""
    return name.replace(".parametrizations", "").removesuffix(".original")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fresh_state(tensor: torch.Tensor, updates: int) -> dict[str, torch.Tensor]:
    """Return AdamW's state as its first step makes it, but for the number of updates (torch/optim/adamw.py)."""
    moments = {name: torch.zeros_like(tensor, memory_format=torch.preserve_format).detach() for name in MOMENTS}
    return {"step": torch.tensor(float(updates)), **moments}


def _own_share(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return this rank's share of a whole tensor as stage 3 cuts it: equal shares, the last filled up with zeros."""
    group = parameter.ds_process_group
    share = parameter.ds_tensor.ds_numel
    flat = value.flatten()
    filled = torch.nn.functional.pad(flat, (0, share * torch.distributed.get_world_size(group) - flat.numel()))
    return filled.narrow(0, share * torch.distributed.get_rank(group), share)
