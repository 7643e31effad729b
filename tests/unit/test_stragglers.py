"""Ranks are compared by computing time; a persistent straggler is named once."""

from dataclasses import dataclass

import torch

from zerolora.train.telemetry.stragglers import COMPARISONS, SECONDS, STEPS, ForwardTimer, StragglerDetector


@dataclass
class Rank:
    rank: int
    steps: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"rank {self.rank} on node{self.rank + 1}"


def compared(*turns: list[float], steps: int = STEPS, seconds: float = SECONDS) -> list[list[str]]:
    """Return the messages after each turn; `turns` are the step seconds of each rank."""
    ranks = [Rank(number) for number in range(len(turns[0]))]
    detector, said = StragglerDetector(), []
    for turn, times in enumerate(turns, start=1):
        for rank, time in zip(ranks, times, strict=True):
            rank.steps += steps
            rank.seconds += steps * time
        said.append(detector.judge(turn * seconds, ranks))
    return said


SLOW = "rank 1 on node2 is slow: it computes 2.0 times as long as the others, which wait for it"


def test_slow_rank_is_named_once() -> None:
    assert compared(*[[1.0, 2.0, 1.0]] * (COMPARISONS + 2)) == [[]] * (COMPARISONS - 1) + [[SLOW], [], []]


def test_rank_that_is_slow_again_is_named_again() -> None:
    said = compared(*[[1.0, 2.0]] * COMPARISONS, [1.0, 1.0], *[[1.0, 2.0]] * COMPARISONS)
    assert [line for lines in said for line in lines] == [SLOW, SLOW]


def test_brief_or_small_differences_are_not_reported() -> None:
    assert compared(*[[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]] * 3) == [[]] * 6
    assert compared(*[[1.0, 1.4, 0.9]] * 4) == [[]] * 4
    assert compared(*[[1.0, 9.0]] * 4, steps=STEPS // 4 - 1) == [[]] * 4
    assert compared(*[[1.0, 9.0]] * 4, seconds=SECONDS / 5) == [[]] * 4


def test_only_training_of_frozen_layers_is_timed() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]).requires_grad_(False)
    timer = ForwardTimer(model, torch.device("cpu"))
    model(torch.zeros(1, 8))
    assert timer.taken() > 0
    assert timer.taken() == 0
    model.eval()(torch.zeros(1, 8))
    assert timer.taken() == 0
    trained = torch.nn.Linear(8, 8)
    timer = ForwardTimer(trained, torch.device("cpu"))
    trained(torch.zeros(1, 8))
    assert timer.taken() == 0
