"""torch's fully_shard (FSDP2): one unit a decoder layer, and the rest of the model."""

from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from zerolora.errors import UserError
from zerolora.train.engines.base import DTYPES, WEIGHT, Loading, Tensors, TorchEngine
from zerolora.train.launch.rendezvous import broadcast_json


class FSDP(TorchEngine):
    """torch's fully_shard."""

    @staticmethod
    def loading(config: dict[str, Any]) -> Loading:
        return "first_rank"

    def wrap(self, model: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
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

    def norm_of_all_ranks(self, norm: Any) -> Any:
        # Reduced here, once: as it comes, each gradient that it clips, and each look at it, would reduce it again.
        return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)

    def part(self, part: str) -> Tensors:
        for unit in _units(self.module):  # the last one to be used is still gathered, and no part of the mesh
            unit.reshard()
        return super().part(part)

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        whole: torch.Tensor = (parameter if part == WEIGHT else self.optimizer.state[parameter][part]).full_tensor()
        return whole

    def distributed(self, value: torch.Tensor, held: Any) -> torch.Tensor:
        return distribute_tensor(value.to(held.device), held.device_mesh, held.placements)


def _units(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _fill(model: Any, source: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give every rank its shards of the weights that rank 0 read; the other ranks' `source` has only shapes.

    Raises UserError if ranks built different models.
    """
    # What a model computes by itself, as rotary frequencies, is there on every rank.
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    first = torch.distributed.get_rank() == 0
    _check_same(source, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = source.pop(name)
            whole = whole.to(device) if first else torch.empty(whole.shape, dtype=whole.dtype, device=device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def _check_same(source: dict[str, torch.Tensor], device: torch.device) -> None:
    """Raise UserError on a rank whose parameters are not those of rank 0: it would make the others wait for ever."""
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
