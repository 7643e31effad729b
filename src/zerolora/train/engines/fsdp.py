"""torch's fully_shard (FSDP2): one unit a decoder layer, and the rest of the model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from zerolora.compat.bitsandbytes_patches import is_packed, on_meta
from zerolora.config.settings import TrainingPlan
from zerolora.errors import UserError
from zerolora.machine.devices import on_gpu
from zerolora.planner.zero_json import FsdpOptions, ZeroJson
from zerolora.train.engines.engine import DTYPES, WEIGHT, Loading, Tensors, TorchEngine, backend
from zerolora.train.launch.rendezvous import broadcast_json, rendezvous


class FSDP(TorchEngine):
    """torch's fully_shard."""

    @staticmethod
    def connect(config: ZeroJson, device: torch.device) -> None:
        # Offloaded tensors are clipped, gathered and saved by collectives on the host.
        both = _options(config).offload and on_gpu(device)
        rendezvous("cpu:gloo,cuda:nccl" if both else backend(device))

    @staticmethod
    def loading(config: ZeroJson) -> Loading:
        return "first_rank"

    @staticmethod
    def keep(config: ZeroJson, plan: TrainingPlan, device: torch.device) -> Callable[[Any], Any]:
        options = _options(config)
        ranks, rank, home = options.mesh[-1], torch.distributed.get_rank(), _home(options, device)

        def keep(parameter: Any) -> Any:
            if is_packed(parameter):
                whole = parameter.detach().as_subclass(torch.Tensor)
                parameter.data = _own_chunk(whole, ranks, rank % ranks).to(home, copy=True)
                parameter.whole_shape = whole.shape
                return parameter
            # As in a model that only rank 0 reads.
            return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad) if rank else parameter

        return keep

    @staticmethod
    def updates_on_host(config: ZeroJson, device: torch.device) -> bool:
        return _options(config).offload or not on_gpu(device)

    def wrap(self, model: Any, config: ZeroJson, dtype: torch.dtype, device: torch.device) -> Any:
        options = _options(config)
        shape = tuple(options.mesh)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = MixedPrecisionPolicy(DTYPES[options.param_dtype], DTYPES[options.reduce_dtype])
        offload = CPUOffloadPolicy(pin_memory=on_gpu(device)) if options.offload else OffloadPolicy()
        rules: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        source, chunks = _take_values(model)
        layers = model._no_split_modules  # of the transformers model, also through peft's
        for module in model.modules():
            if type(module).__name__ in layers:
                fully_shard(module, reshard_after_forward=options.reshard_after_forward, **rules)
        fully_shard(model, **rules)
        for unit in _units(model):
            unit.set_force_sum_reduction_for_comms(device.type == "cpu")  # gloo has no average
        _fill(model, source, chunks, device, _home(options, device))
        return model

    def forward(self, **inputs: Any) -> Any:
        self.module.set_requires_gradient_sync(self.last)
        return self.module(**inputs)

    def norm_of_all_ranks(self, norm: Any) -> Any:
        # Reduced once: otherwise each clipped gradient, and each read of the norm, would reduce it again.
        return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)

    def updated(self, parameter: Any) -> Any:
        return parameter if self.recipe.dtensors else torch.nn.Parameter(_shard(parameter))

    def update(self) -> None:
        if self.recipe.dtensors:
            super().update()
            return
        for parameter, held in self.held.items():
            held.data = _shard(parameter)  # the first forward pass has moved those of unequal shards
            held.grad = None if parameter.grad is None else parameter.grad.to_local()
            if held.numel() == 0:
                # More ranks than rows: nothing to update, but part() gathers the states.
                held.grad = None
                if not self.optimizer.state[held]:
                    self.recipe.start(self.optimizer, held, 0)
            parameter.grad = None
        super().update()

    def part(self, part: str) -> Tensors:
        self._reshard()
        return super().part(part)

    def restore(self, parts: dict[str, Tensors], updates: int, loss_scale: dict[str, float]) -> None:
        self._reshard()
        super().restore(parts, updates, loss_scale)

    def _reshard(self) -> None:
        """Reshard every parameter: the last used unit is still gathered, outside of the mesh."""
        for unit in _units(self.module):
            unit.reshard()

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        held = parameter if part == WEIGHT else self.optimizer.state[self.held[parameter]][part]
        if not isinstance(held, DTensor):
            shape, stride = parameter.shape, parameter.stride()
            held = held.to(parameter.device)  # torch takes paged states for the host's
            held = DTensor.from_local(held, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
        whole: torch.Tensor = held.full_tensor()
        return whole

    def distributed(self, value: torch.Tensor, parameter: Any, held: Any) -> torch.Tensor:
        shards = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
        return shards if isinstance(held, DTensor) else shards.to_local()


def _shard(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a sharded parameter, sharing its memory."""
    shard: torch.Tensor = parameter.detach().to_local()
    return shard


def _options(config: ZeroJson) -> FsdpOptions:
    options = config.engine.fsdp
    assert options, "render writes them for each strategy of this engine"
    return options


def _units(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _home(options: FsdpOptions, device: torch.device) -> torch.device:
    """Return the device of shards between uses."""
    return torch.device("cpu") if options.offload else device


def _own_chunk(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's shard as FSDP divides a tensor; the last ranks' may be empty."""
    chunks = torch.chunk(whole, ranks)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def _take_values(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the values of all parameters by name, and of those of which `keep` left a chunk, that chunk.

    In the model whole shapes replace them: fully_shard would move the values of a whole unit to the device.
    """
    source, chunks = {}, {}
    replaced: dict[Any, Any] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "whole_shape"):
            chunks[name] = parameter.detach().as_subclass(torch.Tensor)
            source[name] = replaced[parameter] = on_meta(parameter, parameter.whole_shape)
        else:
            source[name] = parameter.detach()
            replaced[parameter] = torch.nn.Parameter(source[name].to("meta"), parameter.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replaced[parameter]
    return source, chunks


def _fill(
    model: Any,
    source: dict[str, torch.Tensor],
    chunks: dict[str, torch.Tensor],
    device: torch.device,
    home: torch.device,
) -> None:
    """Make this rank's `chunks` of weights their shards, and fill the others with what rank 0 distributes of the
    weights that it alone read; the other ranks' `source` has only shapes. Shards are on `home`, everything else on
    `device`. Raises UserError if ranks built different models."""
    # Computed buffers, such as rotary frequencies, exist on every rank.
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    filled = set(chunks)
    own = {parameter: chunks.pop(name) for name, parameter in model.named_parameters() if name in filled}

    def materialized(tensor: Any) -> torch.Tensor:
        if not tensor.is_meta:
            assert isinstance(tensor, torch.Tensor)
            return tensor
        if tensor not in own:
            return torch.empty_like(tensor, device=home)
        shape, stride = tensor.shape, tensor.stride()
        # The chunk itself: a copy would double this rank's part of the model.
        return DTensor.from_local(own.pop(tensor), tensor.device_mesh, tensor.placements, shape=shape, stride=stride)

    model._apply(materialized)
    for name, buffer in buffers.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = buffer
    first = torch.distributed.get_rank() == 0
    _check_same(source, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = source.pop(name)
            if name in filled:
                continue
            whole = whole.to(device) if first else torch.empty(whole.shape, dtype=whole.dtype, device=device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def _check_same(source: dict[str, torch.Tensor], device: torch.device) -> None:
    """Raise UserError on a rank whose parameters differ from rank 0's: the others would wait for it forever."""
    mine = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in source.items()]
    first: list[Any] = broadcast_json(mine, device)
    if mine == first:
        return
    counts = f"{len(mine)} parameters", f"{len(first)} parameters"
    own, other = next((pair for pair in zip(mine, first, strict=False) if pair[0] != pair[1]), counts)
    raise UserError(
        f"rank {torch.distributed.get_rank()} built another model than rank 0 ({own} instead of {other}); every node "
        "must see the same weights and have the environment of envs/requirements.lock"
    )
