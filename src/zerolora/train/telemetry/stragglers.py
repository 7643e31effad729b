"""Straggler detection: report a rank that computes slower than the others, which wait for it.

A whole step takes equally long on every rank, since ranks wait for each other. Frozen linear layers from the middle of
the model are timed, once their weights are gathered: they wait for no other rank at any ZeRO stage.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zerolora.machine.devices import on_gpu

# Judgement, not measured; the reason stands beside each.
LAYERS = 8  # timed linear layers; a decoder layer has 7
STEPS = 20  # of a comparison at least, so that one slow step does not count
SECONDS = 10.0  # of a comparison at least, so that a short disturbance does not count
SLOWER = 1.5  # times the median of the other ranks; different row lengths make a smaller difference
COMPARISONS = 2  # in succession, so that temporary slowness is not reported
_EVENT = functools.partial(torch.cuda.Event, enable_timing=True)


class ForwardTimer:
    """Seconds that this rank's device spends in part of the model during training."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """`model` is the engine's: its hooks run before these, so they are not timed."""
        self.on_gpu = on_gpu(device)
        self._seconds, self._began = 0.0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        frozen = [
            module
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad
        ]
        for module in frozen[len(frozen) // 2 :][:LAYERS]:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def taken(self) -> float:
        """Return the timed seconds since the last call. On a GPU the timed kernels must have ended."""
        seconds = self._seconds + sum(float(start.elapsed_time(end)) for start, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds

    def _begin(self, module: Any, _: Any) -> None:
        if not module.training:
            return
        if self.on_gpu:
            self._start = _EVENT()
            self._start.record()
        else:
            self._began = time.perf_counter()

    def _end(self, module: Any, *_: Any) -> None:
        if not module.training:
            return
        if self.on_gpu:
            end = _EVENT()
            end.record()
            self._events.append((self._start, end))
        else:
            self._seconds += time.perf_counter() - self._began


class TimedRank(Protocol):
    """A rank with its progress and timed seconds."""

    rank: int
    steps: int
    seconds: float

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank}"


class StragglerDetector:
    """Compares the forward seconds per step of all ranks at intervals."""

    def __init__(self) -> None:
        self._since = 0.0
        self._before: dict[int, tuple[int, float]] = {}
        self._slow: dict[int, int] = {}

    def judge(self, now: float, ranks: Sequence[TimedRank]) -> list[str]:
        """Return a line for each rank that has become slow; `now` is in seconds."""
        made = {rank.rank: rank.steps - self._before.get(rank.rank, (0, 0.0))[0] for rank in ranks}
        if min(made.values()) < STEPS or now - self._since < SECONDS:
            return []
        per_step = {
            rank.rank: (rank.seconds - self._before.get(rank.rank, (0, 0.0))[1]) / made[rank.rank] for rank in ranks
        }
        self._since, self._before = now, {rank.rank: (rank.steps, rank.seconds) for rank in ranks}
        return [line for rank in ranks if (line := self._became_slow(rank, per_step))]

    def _became_slow(self, rank: TimedRank, per_step: dict[int, float]) -> str | None:
        usual = statistics.median(seconds for other, seconds in per_step.items() if other != rank.rank)
        if not per_step[rank.rank] > SLOWER * usual:
            self._slow.pop(rank.rank, None)
            return None
        self._slow[rank.rank] = self._slow.get(rank.rank, 0) + 1
        if self._slow[rank.rank] != COMPARISONS:
            return None
        return (
            f"{rank.name} is slow: it computes {per_step[rank.rank] / usual:.1f} times as long as the others, "
            "which wait for it"
        )
