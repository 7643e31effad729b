"""Repeats: runs with the next seeds, what they share, and what their spread tells."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import results_of, row
from conftest import refusal
from scipy import stats
from test_compare import made
from test_grid_expansion import config_with

from zerolora.config.file import load
from zerolora.config.grids import unshared
from zerolora.config.resolve import resolve
from zerolora.report.comparison_columns import ACCURACY
from zerolora.report.comparison_terminal import show
from zerolora.report.pair import _over_seeds
from zerolora.report.repeats import RepeatedFigure, SeedGroup

SWEEP = {"dataset": "rows", "over": {"train.lora.r": [2, 8]}}


def runs_with(folder: Path, runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = load(config_with(folder, more.pop("grids", {}), runs=runs, **more))
    resolved = resolve(config)
    return {name: (run.train.seed, config.shared_by(name)) for name, run in resolved.runs.items()}


def test_repeats_have_the_next_seeds_and_share_what_the_seed_does_not_change(tmp_path: Path) -> None:
    own = {"dataset": "rows", "repeats": 3, "train": {"seed": 7}}
    runs = runs_with(tmp_path, {"one": own, "two": {"dataset": "rows", "repeats": 2}})
    of_one, of_two = (unshared(name) for name in ("one", "two"))
    assert runs == {
        "one": (7, of_one),
        "one-seed8": (8, of_one),
        "one-seed9": (9, of_one),
        "two": (42, of_two),
        "two-seed43": (43, of_two),
    }


def test_more_repeats_change_nothing_of_the_first(tmp_path: Path) -> None:
    (few, more) = (
        resolve(load(config_with(tmp_path, {}, runs={"one": {"dataset": "rows", "repeats": count}}))).runs
        for count in (1, 4)
    )
    assert few["one"] == more["one"] and len(more) == 4


def test_each_run_of_a_grid_is_repeated(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {}, grids={"sweep": SWEEP | {"repeats": 2}})
    assert {name: (seed, shared.estimated) for name, (seed, shared) in runs.items()} == {
        f"sweep-r{r}{suffix}": (seed, f"sweep-r{r}") for r in (2, 8) for suffix, seed in (("", 42), ("-seed43", 43))
    }


@pytest.mark.parametrize(
    ("runs", "grids", "said"),
    [
        ({}, {"sweep": SWEEP | {"repeats": 2, "over": {"train.seed": [1, 2]}}}, "repeats trains each run with several"),
        ({}, {"sweep": SWEEP | {"repeats": 0}}, "sweep.repeats: "),
        (
            {"one": {"dataset": "rows", "repeats": 2}, "one-seed43": {"dataset": "rows"}},
            {},
            "has a run one-seed43",
        ),
        ({"one": {"dataset": "rows", "repeats": 2, "train": {"seed": 2**63 - 1}}}, {}, "one.train.seed: "),
    ],
)
def test_repeats_that_cannot_be_are_one_line(runs: Any, grids: Any, said: str, tmp_path: Path) -> None:
    assert said in refusal(load, config_with(tmp_path, grids, runs=runs))


def group(name: str, values: Any) -> SeedGroup:
    return SeedGroup(tuple(f"{name}-seed{at}" for at in range(len(values))), tuple(map(float, values)))


def test_intervals_are_those_of_scipy() -> None:
    """Of unequal groups too, which scipy's test takes only with two values or more."""
    draw = np.random.default_rng(0)
    values = [draw.normal(mean, 0.1, count) for mean, count in ((0.5, 5), (0.55, 3), (0.8, 2))]
    figure = RepeatedFigure(ACCURACY, tuple(group(str(at), each) for at, each in enumerate(values)))
    expected = stats.tukey_hsd(*values).confidence_interval(0.95)
    for first, one in enumerate(figure.groups):
        low, high = stats.t.interval(0.95, len(one.values) - 1, np.mean(one.values), stats.sem(one.values))
        assert one.interval() == pytest.approx((low, high))
        assert one.deviation == pytest.approx(np.std(one.values, ddof=1))
        for second, other in enumerate(figure.groups):
            if first != second:
                ends = expected.low[second][first], expected.high[second][first]
                assert figure.difference(one, other)[1:] == pytest.approx(ends, rel=1e-3)


def test_of_equal_settings_none_is_called_the_best() -> None:
    """In 19 of 20 comparisons of four settings with the same mean, two of which ran only once; a test of each pair by
    itself would star a winner in more."""
    draw = np.random.default_rng(1)
    starred = naive = 0
    for _ in range(2000):
        values = [draw.normal(0, 1, count) for count in (5, 5, 1, 1)]
        figure = RepeatedFigure(ACCURACY, tuple(group(str(at), each) for at, each in enumerate(values)))
        pairs = [(one, other) for one in figure.groups for other in figure.groups if one is not other]
        starred += any(figure.difference(*pair)[1] > 0 for pair in pairs)
        spread = math.sqrt(sum(each.squares for each in figure.groups) / 8)
        naive += any(
            other.mean - one.mean > 2.306 * spread * math.sqrt(1 / len(one.values) + 1 / len(other.values))
            for one, other in pairs
        )
    assert 0.03 < starred / 2000 < 0.06 < naive / 2000


def repeated(folder: Path, accuracies: dict[str, list[float]], **more: Any) -> Path:
    """Write the results of runs with these accuracies by seed."""
    rows, overrides = {}, {}
    for rate, (name, values) in enumerate(accuracies.items()):
        for at, value in enumerate(values):
            run = f"{name}-seed{42 + at}" if at else name
            rows[run] = row(0, accuracy=value, loss=1 - value)
            overrides[run] = {"train.learning_rate": rate, "train.seed": 42 + at} | more.get(run, {})
    return results_of(folder, rows, **overrides)


CLEAR = {"bad": [0.50, 0.51, 0.49], "good": [0.70, 0.71, 0.69]}
UNCLEAR = {"bad": [0.50, 0.60, 0.40], "good": [0.55, 0.65, 0.45]}


def test_a_clear_winner_is_shown_with_its_mean(tmp_path: Path) -> None:
    results = repeated(tmp_path, CLEAR)
    output = made(results)
    page, table = (output / "index.html").read_text(), (output / "table.md").read_text()
    assert "highest accuracy" in page and "good, mean of 3 seeds" in page
    said = "good has the highest mean accuracy, by more than seeds explain."
    assert said in page and said in table and said in show(results, colour=False)
    assert "| `good` | 3 | 0.700 ± 0.010 (0.675–0.725) |" in table
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["repeats.good.accuracy_mean"] == pytest.approx(0.7)
    assert metrics["repeats.good.accuracy_low"] == pytest.approx(0.7 - 4.30265 * 0.01 / math.sqrt(3), rel=1e-5)


def test_what_seeds_do_not_tell_apart_has_no_winner(tmp_path: Path) -> None:
    output = made(repeated(tmp_path, UNCLEAR))
    page = (output / "index.html").read_text()
    assert "good has the highest mean accuracy, not distinguishable by seeds from bad." in page
    assert "highest accuracy" not in page and "lowest loss" not in page
    assert "shortest step" in page


def test_a_run_without_repeats_is_judged_by_the_spread_of_the_others(tmp_path: Path) -> None:
    said = (made(repeated(tmp_path, UNCLEAR | {"once": [0.7]})) / "table.md").read_text()
    assert "once has the highest mean accuracy, not distinguishable by seeds from bad, good." in said
    assert "| `once` | 1 |" not in said, "one seed has no spread"


def test_only_runs_that_differ_in_their_seed_alone_are_repeats(tmp_path: Path) -> None:
    other = {"good-seed43": {"train.lora.r": 8}, "good-seed44": {"train.seed": 42}}
    table = (made(repeated(tmp_path, {"good": [0.70, 0.71, 0.69]}, **other)) / "table.md").read_text()
    assert "seeds" not in table


def test_two_runs_compared_by_hand_have_their_seeds_compared(tmp_path: Path) -> None:
    lines = list(_over_seeds(repeated(tmp_path, UNCLEAR), "good-seed43", "bad"))
    assert len(lines) == 3
    assert lines[0].startswith("Mean accuracy 0.550 of 3 seeds and 0.500 of 3 seeds: -0.05, 95 % interval ")
    assert lines[0].endswith("; not distinguishable by seeds")
    assert list(_over_seeds(repeated(tmp_path, CLEAR), "good-seed43", "good")) == []


def test_groups_on_other_rows_are_not_compared(tmp_path: Path) -> None:
    """Nor losses of other objectives, whose accuracies may be."""
    names = ["bad", "bad-seed43", "bad-seed44"]
    rows = made(repeated(tmp_path / "rows", CLEAR, **{name: {"dataset": "hard"} for name in names}))
    page = (rows / "index.html").read_text()
    assert "| `bad` | 3 |" in (rows / "table.md").read_text() and "| `good` | 3 |" in (rows / "table.md").read_text()
    assert "more than seeds explain" not in page and "highest accuracy" not in page
    loss = made(repeated(tmp_path / "loss", CLEAR, **{name: {"train.objective": "dpo"} for name in names}))
    text = (loss / "table.md").read_text()
    assert "good has the highest mean accuracy, by more than seeds explain." in text and "lowest mean loss" not in text
    three = made(repeated(tmp_path / "three", CLEAR | {"other": [0.1, 0.2]}, **{n: {"dataset": "hard"} for n in names}))
    said = "Of good, other, good has the highest mean accuracy, by more than seeds explain."
    assert said in (three / "table.md").read_text()
    # Rounds train on rows of their own, and are evaluated on those of the first data set.
    first = {name: {"dataset": "rows"} for name in names}
    rounds = {name.replace("bad", "good"): {"dataset": "round1", "held_out": "rows"} for name in names}
    page = made(repeated(tmp_path / "rounds", CLEAR, **first, **rounds)) / "table.md"
    assert "good has the highest mean accuracy, by more than seeds explain." in page.read_text()
