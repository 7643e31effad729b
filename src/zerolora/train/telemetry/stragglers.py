"""How fast a rank computes by itself, so that one that keeps the others waiting is found.

A whole step takes every rank equally long, since they wait for each other. So what is timed is a part of the forward
pass that waits for nobody at any ZeRO stage: frozen linear layers from the middle of the model, from when their weights
are there.
"""

import statistics
import time
from typing import Any, Protocol

import torch

LAYERS = 8  # of a decoder layer's linear layers there are 7
STEPS = 20  # that a comparison spans at least
SECONDS = 10.0  # as well, so that it is no chance
SLOWER = 1.5  # times the median of the others
COMPARISONS = 2  # in succession


class Pace:
    """Seconds that this rank's device spends in part of a model while it trains."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """`model` as an engine left it: what an engine does before a layer runs comes first, and is not counted."""
        self.on_gpu = device.type == "cuda"
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
        """Return the seconds since the last call. On a GPU all that was begun must have ended."""
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds

    def _begin(self, module: Any, _: Any) -> None:
        if not module.training:
            return
        if self.on_gpu:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        else:
            self._began = time.perf_counter()

    def _end(self, module: Any, *_: Any) -> None:
        if not module.training:
            return
        if self.on_gpu:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((self._start, end))
        else:
            self._seconds += time.perf_counter() - self._began


class Paced(Protocol):
    """A rank of which it is known what it has done so far."""

    rank: int
    steps: int
    seconds: float

    @property
    def name(self) -> str:
        """Return how the rank is called."""


class StragglerDetector:
    """The paces of all ranks, compared now and then."""

    def __init__(self) -> None:
        self._since = 0.0
        self._before: dict[int, tuple[int, float]] = {}
        self._slow: dict[int, int] = {}

    def judge(self, now: float, ranks: list[Any]) -> list[str]:
        """Return a line for each rank that is found to be slow, the first time that it is. `now` in seconds."""
        made = {rank.rank: rank.steps - self._before.get(rank.rank, (0, 0.0))[0] for rank in ranks}
        if min(made.values()) < STEPS or now - self._since < SECONDS:
            return []
        paces = {
            rank.rank: (rank.seconds - self._before.get(rank.rank, (0, 0.0))[1]) / made[rank.rank] for rank in ranks
        }
        self._since, self._before = now, {rank.rank: (rank.steps, rank.seconds) for rank in ranks}
        return [line for rank in ranks if (line := self._found(rank, paces))]

    def _found(self, rank: Paced, paces: dict[int, float]) -> str | None:
        usual = statistics.median(pace for other, pace in paces.items() if other != rank.rank)
        if not paces[rank.rank] > SLOWER * usual:
            self._slow.pop(rank.rank, None)
            return None
        self._slow[rank.rank] = self._slow.get(rank.rank, 0) + 1
        if self._slow[rank.rank] != COMPARISONS:
            return None
        return (
            f"{rank.name} is slow: it computes {paces[rank.rank] / usual:.1f} times as long as the others, "
            "which wait for it"
        )
