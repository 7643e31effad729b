"""Peak memory of this process and of all ranks."""

import contextlib
import resource
from pathlib import Path

import torch
import torch.distributed

from zerolora.machine.devices import on_gpu


class PeakMemory:
    """The peak memory of this process since this object was created, in bytes.

    Host: peak resident set (VmHWM on Linux). GPU: peak of torch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Reset the peaks."""
        # "5" resets the high-water mark (man 5 proc). Where that is not allowed, the peak is since the process's start.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        # torch refuses to before CUDA is initialised.
        if on_gpu(self.device) and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.device)

    def host(self) -> int:
        """Return the peak resident bytes of this process."""
        try:
            status = Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def gpu(self) -> int:
        """Return the peak bytes of torch's allocator; 0 on CPU."""
        return torch.cuda.max_memory_allocated(self.device) if on_gpu(self.device) else 0

    def of_all_ranks(self) -> dict[str, int]:
        """Return the highest GPU and host peak of any rank and the sum of the host peaks. Collective."""
        own = torch.tensor([self.gpu(), self.host()], dtype=torch.int64, device=self.device)
        worst, total = own.clone(), own.clone()
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(total)
        return {
            "peak_gpu_bytes_worst_rank": int(worst[0]),
            "peak_host_bytes_worst_rank": int(worst[1]),
            "peak_host_bytes_all_ranks": int(total[1]),
        }
