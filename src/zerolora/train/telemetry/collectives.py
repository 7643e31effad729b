"""What ranks send each other: calls and bytes of each collective, and the time that this rank waits for them.

DeepSpeed and FSDP2 call the functions of torch.distributed; `watch` puts ones that count in their place. It comes
before deepspeed.init_distributed, which takes hold of some (deepspeed/comm/torch.py, TorchBackend.__init__). torch's
DDP calls none of them: it says itself what it did (torch_engines.py, DDP.reduced).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from zerolora.train.telemetry.stopwatch import Stopwatch

# Function: (collective, place and name of the argument that is the full buffer).
WATCHED = {
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather": ("all_gather", 0, "tensor_list"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "all_gather_single": ("all_gather", 0, "output_tensor"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "broadcast": ("broadcast", 0, "tensor"),
    "reduce": ("reduce", 0, "tensor"),
}
Counts = dict[str, dict[str, int]]


class Collectives:
    """Counts of one rank's collectives, since `mark`; what it waits for them goes to a stopwatch.

    Bytes are those of full buffers, as planner/cost.py's Collective.size: the tensor of an all-reduce or broadcast, the
    output of a gather, the input of a reduce-scatter. A rank of n sends (n-1)/n of them, to all-reduce twice as many.
    """

    def __init__(self, times: Stopwatch) -> None:
        self.times = times
        self._counts: Counts = {}
        self._inside = False

    def watch(self) -> None:
        """Count from now on, until the process ends."""
        for name, (collective, place, keyword) in WATCHED.items():
            counted = self._counted(getattr(torch.distributed, name), collective, place, keyword)
            # Both names of the function: torch's own collectives of several tensors compare by the second.
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                setattr(module, name, counted)
        work = torch.distributed.Work
        work.wait = self._timed(work.wait)  # type: ignore[method-assign]
        if self.times.stream is not None:
            # What runs on a stream of its own is exposed where the stream that computes waits for it.
            torch.cuda.Stream.wait_event = self._timed(torch.cuda.Stream.wait_event)  # type: ignore[method-assign]

    def mark(self) -> None:
        """Count from zero."""
        self._counts = {}

    def counts(self) -> Counts:
        """Return {collective: {"calls", "bytes"}} since `mark`."""
        return {name: dict(counted) for name, counted in self._counts.items()}

    def add(self, collective: str, calls: int, size: int) -> None:
        """Count `calls` of a collective, of `size` bytes together."""
        counted = self._counts.setdefault(collective, {"calls": 0, "bytes": 0})
        counted["calls"] += calls
        counted["bytes"] += size

    def _counted(self, function: Callable[..., Any], collective: str, place: int, keyword: str) -> Callable[..., Any]:
        timed = self._timed(function)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if not self._inside:  # some of these functions call others of them
                self.add(collective, 1, _bytes(named[keyword] if keyword in named else arguments[place]))
            return timed(*arguments, **named)

        return call

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            self._inside = True
            on_stream = self.times.stream is None or torch.cuda.current_stream() == self.times.stream
            exposed = self.times.running and on_stream
            start = self.times.now() if exposed else None
            try:
                return function(*arguments, **named)
            finally:
                self._inside = False
                if exposed:
                    self.times.waited(start, self.times.now())

        return call


def _bytes(buffer: Any) -> int:
    tensors = [buffer] if isinstance(buffer, torch.Tensor) else buffer
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
