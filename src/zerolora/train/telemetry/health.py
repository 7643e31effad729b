"""Warnings during training: an exploding gradient, falling throughput.

A loss that is not finite is an error and ends training (loop.py). A fault is reported in one line, and again after
QUIET steps at the earliest. The thresholds are judgement, not measured, each with its reason.
"""

import math
from collections import deque
from statistics import median
from typing import Any

from zerolora.train.telemetry.stopwatch import PARTS

EXPLODES = 10
"""Times the running median of the norm: an order of magnitude, far above the noise of single batches."""
IN_A_ROW = 3
"""Consecutive steps above it: single spikes happen in healthy runs, and clipping handles them."""
REMEMBERED = 50
"""Norms of the running median: enough to be steady, few enough to follow a norm that shrinks during training."""
ENOUGH = 10
"""Norms before the median is used, since the first steps of the warm-up differ from later ones."""
WINDOW = 20
"""Steps of a median of throughput: longer than a checkpoint or a slow read takes."""
FALLEN = 0.7
"""Share of the best earlier window: below it a run loses a third of its time, above it row lengths may be the cause."""
QUIET = 100
"""Steps until the same fault is reported again."""
SECONDS = tuple(f"{part}_seconds" for part in PARTS)


class Health:
    """The faults of one run."""

    def __init__(self) -> None:
        self.faults = {"gradient": 0, "throughput": 0}
        """The number of reports of each."""
        self._reported = dict.fromkeys(self.faults, -QUIET)
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._above = 0
        self._window: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._best: dict[str, float] = {}

    def judge(self, row: dict[str, Any]) -> list[str]:
        """Return the warnings after a step; `row` is its line of telemetry (writer.py)."""
        warnings = []
        for fault, text in (("gradient", self._gradient(row)), ("throughput", self._throughput(row))):
            if text and row["step"] - self._reported[fault] >= QUIET:
                self._reported[fault] = row["step"]
                self.faults[fault] += 1
                warnings.append(f"step {row['step']}: {text}")
        return warnings

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
        now = {name: median(row[name] for row in self._window) for name in ("tokens_per_second", *SECONDS)}
        if not self._best or now["tokens_per_second"] > self._best["tokens_per_second"]:
            self._best = now
        best, rate = self._best, now["tokens_per_second"]
        if rate >= FALLEN * best["tokens_per_second"]:
            return None
        worst = max(SECONDS, key=lambda name: now[name] - best[name])
        return (
            f"{rate:.0f} tokens/s, after {best['tokens_per_second']:.0f} before (medians of {WINDOW} steps): "
            f"{worst.removesuffix('_seconds')} takes {now[worst]:.3g} s of a step, {best[worst]:.3g} s before; "
            "see what else runs there, and docs/telemetry.md"
        )
