"""torch's own engines, DistributedDataParallel (DDP) and fully_shard (FSDP2), on fp32 adapter weights."""

import contextlib
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import parametrize

from zerolora.train.engines.base import DTYPES, WEIGHT, Engine, Parts, adamw, dtype_of, fresh_state, plain, trained
from zerolora.train.launch.rendezvous import broadcast_json


class _Torch(Engine):
    """What DDP and FSDP share: the loop's own accumulation, clipping and optimizer, on fp32 adapter weights."""

    def __init__(self, model: Any, config: dict[str, Any], settings: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        for parameter in trained(model).values():
            parameter.data = parameter.data.float()
        self.accumulation, self.clipping = settings["accumulation"], config["gradient_clipping"]
        self.divisor = torch.distributed.get_world_size()
        self.micro_step = 0
        self.norm: torch.Tensor | None = None
        self.module = self.shared(model, config, device)
        self.optimizer = adamw(model, settings)

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
        for name, parameter in trained(self.module).items():
            self.optimizer.state[parameter] = fresh_state(parameter, updates)
            for part, tensors in parts.items():
                held = parameter if part == WEIGHT else self.optimizer.state[parameter][part]
                held.data.copy_(self.placed(tensors[plain(name)], held))

    def placed(self, value: torch.Tensor, held: Any) -> torch.Tensor:
        """Return a whole tensor as this rank holds it."""
        return value

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.last:
            if self.clipping:
                self._clip(list(trained(self.module).values()))
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
    mine = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in source.items()]
    assert mine == broadcast_json(mine, device), "ranks built different models, and would wait for each other for ever"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = source.pop(name)
            whole = whole.to(device) if first else torch.empty(whole.shape, dtype=whole.dtype, device=device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
