"""System monitor: the load of processors, memory and GPU, and the energy of GPUs."""

import time
from typing import Any

import psutil
import torch
import torch.distributed

from zerolora.machine.devices import on_gpu

EVERY = 0.2  # seconds; shorter spans make shares of busy time unreliable (psutil.cpu_percent recommends 0.1 or more)


class SystemMonitor:
    """The load of this rank's node and GPU. Percentages are since the previous reading; a GPU's span up to a second."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        psutil.cpu_percent(None)  # begins the first span
        self._taken = -EVERY
        self._last: dict[str, float | None] = {}

    def now(self) -> dict[str, float | None]:
        """Return cpu_percent over all cores and host_memory_bytes of the node, gpu_percent, the share of time with a
        running kernel, and gpu_memory_bytes of this rank's GPU; None for values that cannot be read."""
        if time.monotonic() - self._taken >= EVERY:
            self._taken = time.monotonic()
            memory = psutil.virtual_memory()
            self._last = {
                "cpu_percent": psutil.cpu_percent(None),
                "host_memory_bytes": memory.total - memory.available,
                **self._gpu(),
            }
        return self._last

    def _gpu(self) -> dict[str, float | None]:
        result: dict[str, float | None] = {"gpu_percent": None, "gpu_memory_bytes": None}
        if on_gpu(self.device):
            from pynvml import NVMLError

            try:  # a part of a GPU (MIG) has no utilisation, and containers may lack the driver's library
                result["gpu_memory_bytes"] = torch.cuda.device_memory_used(self.device)
                result["gpu_percent"] = torch.cuda.utilization(self.device)
            except (NVMLError, RuntimeError):
                pass
        return result


class EnergyMeter:
    """The energy of this rank's GPU, by NVML's counter (Volta and later); None on CPU, and if it cannot be read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = _handle_of(device) if on_gpu(device) else None
        self._began = self._last = self._read()

    def since_last(self) -> float | None:
        """Return the joules since the last call, or since this object was created."""
        before, self._last = self._last, self._read()
        return None if before is None or self._last is None else self._last - before

    def of_all_ranks(self) -> float | None:
        """Return the joules of all ranks' GPUs since this object was created; None if one is unknown. Collective."""
        now = self._read()
        known = self._began is not None and now is not None
        own = torch.tensor([now - self._began if known else 0.0, float(known)], dtype=torch.float64)  # type: ignore[operator]
        own = own.to(self.device)
        torch.distributed.all_reduce(own)
        return float(own[0]) if int(own[1]) == torch.distributed.get_world_size() else None

    def _read(self) -> float | None:
        """Return the joules since the driver was loaded."""
        if self._handle is None:
            return None
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except pynvml.NVMLError:  # a part of a GPU (MIG), or an older one
            return None


def _handle_of(device: torch.device) -> Any:
    """Return NVML's handle of a GPU, by UUID, as its numbers differ from CUDA's; None without the driver's library."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
