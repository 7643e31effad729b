"""Variants of the loop: what is learned at another rate, with noise, or until it gets no better."""

import math

import pytest
import torch
from training_plan import training_plan

from zerolora.train.attention import lengths
from zerolora.train.engines.engine import build_optimizer
from zerolora.train.module_forwards import add_noise
from zerolora.train.validation import Validations

ALPHA = 5.0


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 16)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table


def noise_of(of_rows: list[list[int]]) -> torch.Tensor:
    """Return the noise on a batch of packed rows: [packed rows, tokens, width]."""
    model = Embedding().train()
    ids = torch.zeros(len(of_rows), sum(of_rows[0]), dtype=torch.long)
    plain: torch.Tensor = model.table(ids)
    add_noise(model, ALPHA)
    lengths.set(of_rows)
    noisy: torch.Tensor = model.table(ids)
    assert torch.equal(model.eval().table(ids), plain)
    return (noisy - plain).detach()


def test_noise_is_as_loud_as_the_row_alone_is_short() -> None:
    """In a packed row too: of a row of 4 tokens and one of 400, the short one is ten times as loud."""
    noise = noise_of([[4, 400], [400, 4]])
    for row, (begin, end) in ((0, (0, 4)), (1, (400, 404))):
        assert ALPHA / math.sqrt(4 * 16) * 0.8 < noise[row, begin:end].abs().max() <= ALPHA / math.sqrt(4 * 16)
    for row, (begin, end) in ((0, (4, 404)), (1, (0, 400))):
        assert ALPHA / math.sqrt(400 * 16) * 0.8 < noise[row, begin:end].abs().max() <= ALPHA / math.sqrt(400 * 16)


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_second_factors_learn_at_a_rate_of_their_own(ratio: float) -> None:
    adapter = {f"q_lora_{name}": torch.nn.Parameter(torch.zeros(2)) for name in "AB"}
    settings = training_plan(learning_rate=0.1, lora={"plus_ratio": ratio})
    groups = build_optimizer(adapter, settings).param_groups
    rates = {id(parameter): group["ratio"] for group in groups for parameter in group["params"]}
    assert rates == {id(adapter["q_lora_A"]): 1.0, id(adapter["q_lora_B"]): ratio}


def validations(*found: float, patience: int | None = None) -> Validations:
    result = Validations(training_plan(validation_steps=10, patience=patience))
    for number, each in enumerate(found, start=1):
        result.add(10 * number, {"loss": each})
    return result


@pytest.mark.parametrize(
    ("found", "best", "exhausted"),
    [
        ((3.0, 2.0, 1.0), 30, False),
        ((3.0, 1.0, 2.0, 2.0), 20, True),
        ((1.0, 1.0, 1.0), 10, True),
        ((math.nan, 2.0, math.nan), 20, False),
        ((2.0, math.nan, math.nan), 10, True),
    ],
)
def test_the_best_is_the_first_of_the_lowest(found: tuple[float, ...], best: int, exhausted: bool) -> None:
    result = validations(*found, patience=2)
    assert (result.best_of_all[0], result.exhausted) == (best, exhausted)
    again = Validations(training_plan(validation_steps=10, patience=2))
    again.restore(result.state(), {})
    assert (again.best_of_all[0], again.exhausted) == (best, exhausted)


def test_a_step_is_validated_once() -> None:
    result = validations(1.0)
    assert [step for step in range(31) if result.due(step)] == [20, 30]
    assert not validations().due(0)
