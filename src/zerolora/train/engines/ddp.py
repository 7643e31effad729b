"""torch's DistributedDataParallel: every rank holds everything."""

import contextlib
from typing import Any

import torch
from torch.nn.utils import parametrize

from zerolora.compat.torch_patches import ddp_reductions, time_every_reduction
from zerolora.machine.devices import on_gpu
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.engines.engine import WEIGHT, TorchEngine


class DDP(TorchEngine):
    """torch's DistributedDataParallel."""

    def wrap(self, model: Any, config: ZeroJson, dtype: torch.dtype, device: torch.device) -> Any:
        model.to(device)
        _compute_in(dtype, model)
        self.engine = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if on_gpu(device) else None,
            # All ranks read the same files and drew the same adapter.
            init_sync=False,
            broadcast_buffers=False,
            **config.engine.ddp,
        )
        time_every_reduction(self.engine)
        return model

    def forward(self, **inputs: Any) -> Any:
        with contextlib.nullcontext() if self.last else self.engine.no_sync():
            return self.engine(**inputs)

    def reduced(self) -> tuple[int, int, float]:
        return ddp_reductions(self.engine)

    def whole(self, parameter: Any, part: str) -> torch.Tensor:
        tensor: torch.Tensor = parameter if part == WEIGHT else self.inner.state[parameter][part]
        return tensor


class _Cast(torch.nn.Module):
    """An fp32 weight that computes in another type; its gradient is fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        return master.to(self.dtype)


def _compute_in(dtype: torch.dtype, model: Any) -> None:
    if dtype == torch.float32:
        return
    for module in list(model.modules()):
        names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        for name in names:
            parametrize.register_parametrization(module, name, _Cast(dtype), unsafe=True)
        if names:
            module.register_state_dict_post_hook(_name_plainly)


def _name_plainly(module: Any, state: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
    """Restore the names of a module's weights in its state_dict, which peft reads for modules_to_save
    (peft/utils/other.py, ModulesToSaveWrapper.adapter_state_dict)."""
    for name in module.parametrizations:
        state[f"{prefix}{name}"] = state.pop(f"{prefix}parametrizations.{name}.original")
