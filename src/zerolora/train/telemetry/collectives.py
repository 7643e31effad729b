"""The collectives of a rank: calls and bytes of each, and the time that this rank waits for them.

DeepSpeed and FSDP2 call functions of torch.distributed, which `watch` replaces by counting ones. torch's DDP does not
call them; its engine reports its reductions (engines/ddp.py, DDP.reduced).
"""

import functools
from typing import Any

import torch

from zerolora.compat.torch_patches import Function, wrap_collectives, wrap_waits
from zerolora.train.telemetry.stopwatch import Stopwatch

Counts = dict[str, dict[str, int]]


class Collectives:
    """Counts of one rank's collectives since `mark`; a stopwatch gets the time that it waits for them.

    Bytes are those of full buffers, as in strategies/traffic.py: the tensor of an all-reduce or broadcast, the output
    of a gather, the input of a reduce-scatter. A rank of n sends (n-1)/n of them, twice as many to all-reduce.
    """

    def __init__(self, times: Stopwatch) -> None:
        self.times = times
        self._counts: Counts = {}
        self._inside = False

    def watch(self) -> None:
        """Count from now on, until the process ends. Call it before deepspeed.init_distributed, which keeps references
        to some of the functions."""
        wrap_collectives(self._counted)
        wrap_waits(self._timed, gpu=self.times.stream is not None)

    def mark(self) -> None:
        """Count from zero."""
        self._counts = {}

    def counts(self) -> Counts:
        """Return {collective: {"calls", "bytes"}} since `mark`."""
        return {name: dict(counted) for name, counted in self._counts.items()}

    def add(self, collective: str, calls: int, size: int) -> None:
        """Count `calls` of a collective, of `size` bytes in total."""
        counted = self._counts.setdefault(collective, {"calls": 0, "bytes": 0})
        counted["calls"] += calls
        counted["bytes"] += size

    def _counted(self, function: Function, collective: str, position: int, keyword: str) -> Function:
        timed = self._timed(function)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if not self._inside:  # some of these functions call each other
                self.add(collective, 1, _bytes(named[keyword] if keyword in named else arguments[position]))
            return timed(*arguments, **named)

        return call

    def _timed(self, function: Function) -> Function:
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
