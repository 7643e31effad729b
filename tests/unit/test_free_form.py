"""Which answers are free-form, and bits per byte; the columns of a comparison follow (evaluate/free_form.py)."""

import math
from pathlib import Path

import pytest
from comparison import results_of, row

from zerolora.evaluate.free_form import bits_per_byte, is_free_form
from zerolora.report.comparison_columns import columns_of
from zerolora.report.comparison_terminal import show

SENTENCE = "The harbour office opens at nine and closes at five. "


@pytest.mark.parametrize(
    ("answers", "free"),
    [
        ([f"{number}" for number in range(10)], True),  # no two alike
        ([f"{number}" for number in range(9)], False),  # too few to tell
        (["yes", "no"] * 20, False),
        ([f"{number % 9}" for number in range(10)], False),
        ([SENTENCE] * 4, True),
        (["yes", "no", SENTENCE], False),  # most are short
        ([], False),
    ],
)
def test_answers_that_hardly_any_answer_equals_are_free_form(answers: list[str], free: bool) -> None:
    assert is_free_form(answers) is free


def test_a_byte_of_uniform_probability_has_eight_bits() -> None:
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)


def test_the_loss_comes_before_the_exact_match_of_free_form_answers(tmp_path: Path) -> None:
    free = {"free_form": True, "bits_per_byte": 0.75}
    rows = {"one": row(**free), "two": row(1, **free)}
    titles = [column.title for column in columns_of([{"run": name, **each} for name, each in rows.items()], {})]
    assert titles.index("loss") < titles.index("bits a byte") < titles.index("exact match") < titles.index("wall time")
    assert "accuracy" not in titles
    header = show(results_of(tmp_path / "free", rows), colour=False).splitlines()[0]
    assert "loss" in header and "bits a byte" in header and "accuracy" not in header
    mixed = show(results_of(tmp_path / "mixed", rows | {"three": row()}), colour=False).splitlines()[0]
    assert mixed.index("accuracy") < mixed.index("loss")
