"""The time of each part of a step, by a clock that is almost free to read, and the collectives of a rank.

On CPU it is the host's clock. On a GPU it is events on the compute stream, which are read at the end of the step: its
sum over ranks has already waited for that stream.

DeepSpeed and FSDP2 call functions of torch.distributed, which `Collectives.watch` replaces by counting ones. torch's
DDP does not call them; its engine reports its reductions (engines/ddp.py, DDP.reduced).
"""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from zerolora.compat.torch_patches import Function, wrap_collectives, wrap_waits
from zerolora.machine.devices import on_gpu

Counts = dict[str, dict[str, int]]
PARTS = ("data", "forward", "backward", "communication", "optimizer")


class Stopwatch:
    """Laps of one step of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device) if on_gpu(device) else None
        self._laps: list[tuple[str, Any, Any, list[tuple[Any, Any]]]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._mark: Any = None
        self.total = 0.0
        """Seconds of the step up to its last lap, by the host's clock."""
        self.between = 0.0
        """Seconds from the end of the step before to its start; 0 for the first."""
        self.running = False
        """Whether a step is in progress."""
        self._begun, self._ended = 0.0, math.nan

    def start(self) -> None:
        """Begin a step."""
        self._begun = time.perf_counter()
        self.between = 0.0 if math.isnan(self._ended) else self._begun - self._ended
        self._laps, self._waits = [], []
        self._mark = self.now()
        self.running = True

    def stop(self) -> None:
        """End the step; its time ends with the last lap."""
        self.running = False

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`, one of PARTS, except for waits."""
        now = self.now()
        self._laps.append((part, self._mark, now, self._waits))
        self._mark, self._waits = now, []
        self._ended = time.perf_counter()
        self.total = self._ended - self._begun

    def waited(self, start: Any, end: Any) -> None:
        """Count the time between two marks as communication, in any lap."""
        self._waits.append((start, end))

    def now(self) -> Any:
        """Return a mark: a time in seconds on CPU, an event on a GPU."""
        if self.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since `start`. Waits for the stream."""
        result = dict.fromkeys(PARTS, 0.0)
        for part, start, end, waits in self._laps:
            waited = sum(self._between(*wait) for wait in waits)
            result[part] += self._between(start, end) - waited
            result["communication"] += waited
        return result

    def _between(self, start: Any, end: Any) -> float:
        if self.stream is None:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1000)


class Collectives:
    """Counts of one rank's collectives since `mark`; a stopwatch gets the time that it waits for them.

    Bytes are those of full buffers, as in strategies/strategy.py: the tensor of an all-reduce or broadcast, the output
    of a gather, the input of a reduce-scatter. A rank of n sends (n-1)/n of them, twice as many to all-reduce.
    """

    def __init__(self, times: Stopwatch) -> None:
        self.times = times
        self._counts: Counts = {}
        self._inside = False

    def watch(self) -> None:
        """Count from now on. Call it before deepspeed.init_distributed, which keeps references to some functions."""
        wrap_collectives(self._counted)
        wrap_waits(self._timed, gpu=self.times.stream is not None)

    def mark(self) -> None:
        """Count from zero."""
        self._counts = {}

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Neither count nor time the collectives of the block."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

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
