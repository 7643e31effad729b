"""Energy that GPUs take, by NVML's counter of millijoules since the driver was loaded (Volta and later)."""

from typing import Any

import torch
import torch.distributed


class EnergyMeter:
    """The energy of this rank's GPU; None is read on CPU, and of a GPU that does not tell it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = _handle_of(device) if device.type == "cuda" else None
        self._began = self._last = self._read()

    def since_last(self) -> float | None:
        """Return the joules since the last call, or since this object was created; None if they cannot be read."""
        before, self._last = self._last, self._read()
        return None if before is None or self._last is None else self._last - before

    def of_all_ranks(self) -> float | None:
        """Return the joules of the GPUs of all ranks since this object was created; None if one of them cannot be read.
        Collective."""
        now = self._read()
        known = self._began is not None and now is not None
        own = torch.tensor([now - self._began if known else 0.0, float(known)], dtype=torch.float64)  # type: ignore[operator]
        own = own.to(self.device)
        torch.distributed.all_reduce(own)
        return float(own[0]) if int(own[1]) == torch.distributed.get_world_size() else None

    def _read(self) -> float | None:
        if self._handle is None:
            return None
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except pynvml.NVMLError:  # a part of a GPU (MIG), or an older one
            return None


def _handle_of(device: torch.device) -> Any:
    """Return NVML's handle of a GPU, which it knows by another number than CUDA; None without the driver's library."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
