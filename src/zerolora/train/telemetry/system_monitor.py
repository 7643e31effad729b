"""System monitor: the load of processors, memory and the GPU, read at most a few times a second."""

import time

import psutil
import torch

EVERY = 0.2  # seconds; of shorter spans, shares of busy time say little (psutil.cpu_percent says 0.1)


class SystemMonitor:
    """The state of this rank's node and GPU. Percent are since the reading before; a GPU's are of up to a second."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        psutil.cpu_percent(None)  # begins the first span
        self._taken = -EVERY
        self._last: dict[str, float | None] = {}

    def now(self) -> dict[str, float | None]:
        """Return cpu_percent of all the node's cores, host_memory_bytes in use on it, gpu_percent of the time in which
        a kernel ran on this rank's GPU, and gpu_memory_bytes in use on it; None for what cannot be read."""
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
        if self.device.type == "cuda":
            from pynvml import NVMLError

            try:  # a part of a GPU (MIG) has no utilisation of its own, and containers may lack the driver's library
                result["gpu_memory_bytes"] = torch.cuda.device_memory_used(self.device)
                result["gpu_percent"] = torch.cuda.utilization(self.device)
            except (NVMLError, RuntimeError):
                pass
        return result
