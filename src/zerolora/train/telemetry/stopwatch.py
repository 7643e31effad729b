"""The time of each part of a step, by a clock that is almost free to read.

On CPU it is the host's clock. On a GPU it is events on the compute stream, which are read at the end of the step: its
sum over ranks has already waited for that stream.
"""

import math
import time
from typing import Any

import torch

PARTS = ("data", "forward", "backward", "communication", "optimizer")


class Stopwatch:
    """Laps of one step of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
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
