"""What is said of a run that goes wrong, while it runs: a gradient that explodes, throughput that falls.

A loss that is not finite is an error and ends training (loop.py). A fault is one line, and not again for QUIET steps.
"""

import math
from collections import deque
from statistics import median
from typing import Any

from zerolora.train.telemetry.stopwatch import PARTS

EXPLODES = 10  # times the running median of the norm
IN_A_ROW = 3  # steps above it; one such step happens in healthy runs, and clipping takes care of it
REMEMBERED = 50  # norms the median is of
ENOUGH = 10  # norms before there is a median to speak of
WINDOW = 20  # steps of a median of throughput
FALLEN = 0.7  # of the best window before
QUIET = 100  # steps until the same is said again


class Health:
    """The faults of one run, step after step."""

    def __init__(self) -> None:
        self.faults = {"gradient": 0, "throughput": 0}
        """How often each was reported."""
        self._said = dict.fromkeys(self.faults, -QUIET)
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._above = 0
        self._window: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._best: dict[str, float] = {}

    def judge(self, row: dict[str, Any]) -> list[str]:
        """Return what there is to say after a step; `row` is its line of telemetry (record.py)."""
        found = {"gradient": self._gradient(row), "throughput": self._throughput(row)}
        said = []
        for fault, text in found.items():
            if text and row["step"] - self._said[fault] >= QUIET:
                self._said[fault] = row["step"]
                self.faults[fault] += 1
                said.append(f"step {row['step']}: {text}")
        return said

    def _gradient(self, row: dict[str, Any]) -> str | None:
        norm = row["gradient_norm"]
        if norm is None:
            return None
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}; lower train.learning_rate"
        usual = median(self._norms) if len(self._norms) >= ENOUGH else math.inf
        if norm <= EXPLODES * usual:
            self._above = 0
            self._norms.append(norm)
            return None
        self._above += 1
        if self._above < IN_A_ROW:
            return None
        return (
            f"the gradient's norm is {norm:.4g}, for {self._above} steps more than {EXPLODES} times the usual "
            f"{usual:.4g}; lower train.learning_rate, or train.gradient_clipping"
        )

    def _throughput(self, row: dict[str, Any]) -> str | None:
        if row["tokens_per_second"] is None:
            return None
        self._window.append(row)
        if len(self._window) < WINDOW:
            return None
        now = {name: median(row[name] for row in self._window) for name in ("tokens_per_second", *_SECONDS)}
        if not self._best or now["tokens_per_second"] > self._best["tokens_per_second"]:
            self._best = now
        best, rate = self._best, now["tokens_per_second"]
        if rate >= FALLEN * best["tokens_per_second"]:
            return None
        worst = max(_SECONDS, key=lambda name: now[name] - best[name])
        return (
            f"{rate:.0f} tokens/s, after {best['tokens_per_second']:.0f} before (medians of {WINDOW} steps): "
            f"{worst.removesuffix('_seconds')} takes {now[worst]:.3g} s of a step, {best[worst]:.3g} s before; "
            "see what else runs there, and docs/telemetry.md"
        )


_SECONDS = tuple(f"{part}_seconds" for part in PARTS)
