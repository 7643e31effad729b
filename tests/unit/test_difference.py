"""The difference of two models on the same rows, against scipy and published values, and the gate."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import served
from scipy import optimize, stats

from zerolora.config.schema import Config
from zerolora.evaluate.difference import changed, compared, difference, with_unmerged
from zerolora.evaluate.intervals import Z, bootstrap_mean, disagree, mcnemar, paired, tango, wilson
from zerolora.fail_if import parse
from zerolora.files import write_json


def answers(right: list[int], **more: list[Any]) -> list[dict[str, Any]]:
    rows = [
        {"question": f"{at}", "expected": "", "answer": "", "format": True, "right": bool(value), "prompt_tokens": at}
        for at, value in enumerate(right)
    ]
    return [row | {name: values[at] for name, values in more.items()} for at, row in enumerate(rows)]


def test_base_adapter_and_merged_model_are_compared_in_pairs() -> None:
    base = answers([0] * 12)
    between = [{"answer": str(at), "format": True, "right": at < 8} for at in range(12)]
    merged = answers([0, 0] + [1] * 7 + [0] * 3, unmerged=between)  # two lost, one gained
    for at, row in enumerate(merged):
        row["answer"] = str(at) if at != 11 else "another"
    actual = difference({"rows": 12, "accuracy": 0.0}, {"rows": 12, "accuracy": 7 / 12}, (base, merged))
    assert actual["merged_over_unmerged_difference"] == pytest.approx(-1 / 12)
    assert actual["merged_over_unmerged_p"] == mcnemar(1, 2)
    assert (actual["merged_over_unmerged_gained"], actual["merged_over_unmerged_lost"]) == (1, 2)
    assert actual["merged_over_unmerged_rows"] == [0, 1, 8] and actual["merged_over_unmerged_texts"] == 1
    interval = [actual[f"merged_over_unmerged_difference_{end}"] for end in ("low", "high")]
    assert interval == list(tango(1, 2, 12))
    assert actual["unmerged_over_base_difference"] == pytest.approx(8 / 12)
    assert (actual["unmerged_over_base_gained"], actual["unmerged_over_base_p"]) == (8, mcnemar(8, 0))
    assert actual["difference"] == pytest.approx(7 / 12)  # between merged model and base
    assert with_unmerged(base, answers([1] * 12)) == {}


def test_mcnemars_p_is_the_exact_binomial() -> None:
    assert mcnemar(5, 0) == pytest.approx(2 / 2**5)
    assert mcnemar(0, 0) == mcnemar(4, 4) == 1
    assert mcnemar(7, 1) == pytest.approx(2 * (8 + 1) / 2**8) == mcnemar(1, 7)


@pytest.mark.parametrize(("gained", "lost", "rows"), [(12, 2, 50), (4, 0, 200), (0, 3, 40), (30, 30, 90), (1, 0, 5)])
def test_tangos_interval_holds_the_differences_that_its_score_allows(gained: int, lost: int, rows: int) -> None:
    """The maximum-likelihood share of lost rows is scipy's here, not that of the closed form."""

    def score(difference: float) -> float:
        counts, floor = (gained, lost, rows - gained - lost), max(0.0, -difference)

        def unlikely(share: float) -> float:
            shares = (share + difference, share, 1 - 2 * share - difference)
            return -sum(count * np.log(max(each, 1e-300)) for count, each in zip(counts, shares, strict=True) if count)

        fit = optimize.minimize_scalar(
            unlikely, bounds=(floor, (1 - difference) / 2), method="bounded", options={"xatol": 1e-12}
        )
        variance = rows * (2 * fit.x + difference - difference**2)
        return float((gained - lost - rows * difference) / np.sqrt(variance))

    low, high = tango(gained, lost, rows)
    assert -1 < low < (gained - lost) / rows < high < 1
    assert score(low) == pytest.approx(Z, abs=2e-3) and score(high) == pytest.approx(-Z, abs=2e-3)
    assert (-high, -low) == pytest.approx(tango(lost, gained, rows), abs=1e-12)


@pytest.mark.parametrize(("gaining", "losing"), [(0.05, 0.05), (0.2, 0.1), (0.3, 0.02), (0.02, 0.01)])
def test_tangos_interval_covers_the_difference_as_often_as_it_says(gaining: float, losing: float) -> None:
    """Over all outcomes of 60 rows, each with its probability."""
    rows = 60
    covered = sum(
        stats.multinomial.pmf((b, c, rows - b - c), rows, (gaining, losing, 1 - gaining - losing))
        for b in range(31)
        for c in range(31)
        if b + c <= rows and tango(b, c, rows)[0] <= gaining - losing <= tango(b, c, rows)[1]
    )
    assert covered > 0.93


def test_degenerate_tables_have_an_interval_that_is_not_a_point() -> None:
    low, high = tango(20, 0, 20)
    assert (low, high) == pytest.approx((2 * wilson(20, 20)[0] - 1, 1.0))  # of 20 gained rows among 20 changed ones
    low, high = tango(0, 0, 50)
    assert -0.08 < low < 0 < high < 0.08


def test_an_interval_that_disagrees_with_p_is_said() -> None:
    assert disagree(*tango(4, 0, 200), mcnemar(4, 0))
    assert not disagree(*tango(40, 10, 200), mcnemar(40, 10)) and not disagree(*tango(3, 2, 200), mcnemar(3, 2))


def test_scores_are_bootstrapped_and_rights_are_not() -> None:
    assert paired(np.array([1.0, 0, -1, 0])) == tango(1, 1, 4)
    scores = np.random.default_rng(0).random(40)
    assert paired(scores) == bootstrap_mean(scores)


@pytest.mark.parametrize("scored", [False, True])
def test_bootstrap_equals_scipys_over_pairs(scored: bool) -> None:
    drawn = np.random.default_rng(5)
    if scored:
        one, other = drawn.random(80), drawn.random(80) + 0.1
    else:
        one, other = drawn.integers(0, 2, 80).astype(float), (drawn.random(80) < 0.8).astype(float)
    options: dict[str, Any] = {"paired": True, "method": "percentile", "n_resamples": 9999, "rng": drawn}
    pairs = stats.bootstrap((other, one), lambda a, b, axis: (a - b).mean(axis=axis), **options)
    theirs = pairs.confidence_interval
    ours = bootstrap_mean(other - one)
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.013)  # one row
    assert ours == bootstrap_mean(other - one)


def test_all_figures_of_two_models() -> None:
    before = answers([0] * 20 + [1] * 20, category=["a", "b"] * 20, f1=[0.0] * 40)
    after = answers([1] * 18 + [0] * 4 + [1] * 18, category=["a", "b"] * 20, f1=[0.5] * 40)
    actual = compared(before, after)
    assert (actual["base_accuracy"], actual["accuracy"], actual["difference"]) == (0.5, 0.9, 0.4)
    assert (actual["gained"], actual["lost"]) == (18, 2)
    assert actual["p"] == pytest.approx(stats.binomtest(18, 20).pvalue)
    assert actual["difference_low"] < 0.4 < actual["difference_high"]
    assert (actual["accuracy_low"], actual["accuracy_high"]) == wilson(36, 40)
    assert actual["f1_difference"] == actual["f1_difference_low"] == actual["f1_difference_high"] == 0.5
    assert (actual["a.answers"], actual["a.accuracy"]) == (20, 0.9)
    lengths = {name: value for name, value in actual.items() if name.startswith("prompt") and name.endswith("answers")}
    assert sum(lengths.values()) == 40 and len(lengths) == 3
    assert actual["prompt_tokens_0_13.difference"] == 1
    assert all(isinstance(value, int | float) for value in actual.values())
    assert [pair[1]["right"] for pair in changed(before, after)] == [False] * 2 + [True] * 18
    # No groups by length for few rows, and no figures without rows.
    assert not any("prompt_tokens" in name for name in compared(answers([0, 1]), answers([1, 1])))
    assert compared([], []) == {}
    with pytest.raises(ValueError, match="to other rows"):
        compared(answers([1]), [])
    disabled = {"enabled": False}
    assert difference(disabled, disabled, ([], [])) == disabled


FIGURES = {"accuracy": 0.75, "base_accuracy": 0.8, "difference": -0.05, "difference_low": -0.1, "difference_high": 0.0}
FIGURES |= {"p": 0.02, "loss": 1.5, "base_loss": 2.0}


@pytest.mark.parametrize(
    ("condition", "failure"),
    [
        ("accuracy < base - 0.01", "accuracy 0.75 < 0.79 (base 0.8 - 0.01); difference -0.050"),
        ("accuracy < base - 0.1", None),
        ("accuracy<=0.75", "accuracy 0.75 <= 0.75; difference"),
        ("accuracy<0.75", None),
        ("loss > base + 0.5", None),
        ("loss >= base", None),
        ("loss > 1", "loss 1.5 > 1"),
    ],
)
def test_gate_fails_if_its_condition_is_true(condition: str, failure: str | None) -> None:
    actual = parse(condition).failure(FIGURES)
    assert actual is None if failure is None else actual and actual.startswith(failure)


@pytest.mark.parametrize(
    "text", ["", "accuracy", "accuracy < other", "accuracy < base * 2", "a == 1", "x < 1; y", "1<2"]
)
def test_invalid_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a condition; use METRIC < NUMBER"):
        parse(text)


def test_config_refuses_an_impossible_gate(tmp_path: Path) -> None:
    from conftest import TINY_CONFIG

    from zerolora.config.cross_checks import impossible

    def mistakes(objective: str = "sft", **evaluate: Any) -> list[str]:
        config = json.loads(json.dumps(TINY_CONFIG))
        config["train"]["objective"] = objective
        config["evaluate"] |= evaluate
        return [text for where, text in impossible(Config.model_validate(config)) if where == ("evaluate", "fail_if")]

    assert mistakes(fail_if="accuracy < base - 0.01") == []
    assert "rows has no metric bleu; use one of loss, format_rate, accuracy" in mistakes(fail_if="bleu < 1")[0]
    assert not mistakes(fail_if="merged_kl_share > 0.01")
    assert not mistakes("dpo", fail_if="preference_accuracy < base + 0.1")
    assert not mistakes("kto", fail_if="desirable_log_probability < base")
    for objective in ("sft", "kto"):
        assert "rows has no metric preference_accuracy" in mistakes(objective, fail_if="preference_accuracy < 0.5")[0]
    assert "has no metric merged_kl_share" in mistakes(fail_if="merged_kl_share > base + 1")[0]
    assert "needs an evaluation; set evaluate.enabled: true" in mistakes(fail_if="loss > 1", enabled=False)[0]


def test_accept_command_shows_the_figures_of_a_failure(tmp_path: Path) -> None:
    write_json(tmp_path / "difference.json", FIGURES)
    command = (
        "zerolora",
        "stage",
        "accept",
        "--difference",
        "difference.json",
        "--output",
        "accepted.json",
        "--settings",
    )
    failed = served(*command, '{"fail_if": "accuracy < base - 0.01"}', directory=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.strip() == (
        "zerolora: evaluate.fail_if: accuracy < base - 0.01: accuracy 0.75 < 0.79 (base 0.8 - 0.01); "
        "difference -0.050, 95 % interval -0.100 to +0.000, p 0.02"
    )
    assert not (tmp_path / "accepted.json").exists()
    unknown = served(*command, '{"fail_if": "bleu < 0.2"}', directory=tmp_path)
    assert unknown.returncode == 2 and "has no bleu; use one of accuracy, loss" in unknown.stderr
    for gate in ("null", '"loss > 2"'):
        served(*command, f'{{"fail_if": {gate}}}', directory=tmp_path).check_returncode()
        assert json.loads((tmp_path / "accepted.json").read_text())["accepted"]
