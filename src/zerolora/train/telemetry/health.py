"""Warnings while training runs: a gradient that explodes, throughput that falls.

A loss that is not finite is an error and ends training (loop.py). A fault is reported in one line, and not again for
QUIET steps. The thresholds are judgement, not measured: each says what it avoids.
"""

import math
from collections import deque
from statistics import median
from typing import Any

from zerolora.train.telemetry.stopwatch import PARTS

EXPLODES = 10
"""Times the running median of the norm: an order of magnitude, far above the noise of single batches."""
IN_A_ROW = 3
"""Steps above it: single spikes happen in healthy runs, and clipping deals with them."""
REMEMBERED = 50
"""Norms that the median is taken of: enough to be steady, few enough to follow a norm that shrinks while training."""
ENOUGH = 10
"""Norms before the median is used; the first steps of the warm-up are unlike later ones."""
WINDOW = 20
"""Steps of a median of throughput: longer than a checkpoint or a slow read takes."""
FALLEN = 0.7
"""Of the best window before: less than that costs a run a third of its time, more may be the batches' lengths."""
QUIET = 100
"""Steps until the same fault is reported again."""


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
        """Return the warnings after a step; `row` is its line of telemetry (writer.py)."""
        result = {"gradient": self._gradient(row), "throughput": self._throughput(row)}
        said = []
        for fault, text in result.items():
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
