"""NEFTune noise, early stopping and the best checkpoint."""

import math

import pytest
import torch
from training_plan import training_plan

from zerolora.train.attention import lengths
from zerolora.train.neftune import add_noise
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


def test_noise_depends_on_the_length_of_each_row() -> None:
    """Also in packed rows: a row of 4 tokens has ten times the noise of one of 400."""
    noise = noise_of([[4, 400], [400, 4]])
    for row, (begin, end) in ((0, (0, 4)), (1, (400, 404))):
        assert ALPHA / math.sqrt(4 * 16) * 0.8 < noise[row, begin:end].abs().max() <= ALPHA / math.sqrt(4 * 16)
    for row, (begin, end) in ((0, (4, 404)), (1, (0, 400))):
        assert ALPHA / math.sqrt(400 * 16) * 0.8 < noise[row, begin:end].abs().max() <= ALPHA / math.sqrt(400 * 16)


def validations(*losses: float, patience: int | None = None) -> Validations:
    result = Validations(training_plan(validation_steps=10, patience=patience))
    for number, each in enumerate(losses, start=1):
        result.add(10 * number, {"loss": each})
    return result


@pytest.mark.parametrize(
    ("losses", "best", "exhausted"),
    [
        ((3.0, 2.0, 1.0), 30, False),
        ((3.0, 1.0, 2.0, 2.0), 20, True),
        ((1.0, 1.0, 1.0), 10, True),
        ((math.nan, 2.0, math.nan), 20, False),
        ((2.0, math.nan, math.nan), 10, True),
    ],
)
def test_best_is_the_first_of_the_lowest(losses: tuple[float, ...], best: int, exhausted: bool) -> None:
    result = validations(*losses, patience=2)
    assert (result.best_of_all[0], result.exhausted) == (best, exhausted)
    again = Validations(training_plan(validation_steps=10, patience=2))
    again.restore(result.state(), {})
    assert (again.best_of_all[0], again.exhausted) == (best, exhausted)


def test_step_is_validated_once() -> None:
    result = validations(1.0)
    assert [step for step in range(31) if result.due(step)] == [20, 30]
    assert not validations().due(0)
