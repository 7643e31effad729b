"""Held-out preference data: figures computed by hand, and the evaluation of pairs and labelled answers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_prepare import Folder
from test_prepare_answers import LABELLED, PAIRS, of_kind
from transformers import AutoModelForCausalLM

from zerolora.config.settings import EvaluateRunSettings
from zerolora.data.prepared_rows import open_split
from zerolora.errors import UserError
from zerolora.evaluate import held_out_preference
from zerolora.evaluate.difference import difference
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.evaluate.intervals import mcnemar, normal_mean, tango, wilson
from zerolora.fail_if import OF_LABELLED, OF_PAIRS
from zerolora.files import read_json


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Folder:
    return Folder(tmp_path, tiny_model)


def evaluated(data: Path, model: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Evaluate a base model on the test rows; return metrics and answers."""
    settings, output = EvaluateRunSettings(split="test", max_new_tokens=4, check="exact"), data.parent
    evaluate(settings, data, EvaluatedModel(model), output, output / "answers.json")
    return read_json(output / "evaluate.json", ""), read_json(output / "answers.json", "")


def pairs(*each: tuple[float, float, int, int], own: int = 4) -> list[dict[str, Any]]:
    """Return the figures of pairs: both log-probabilities, both numbers of tokens."""
    names = ("chosen_log_probability", "rejected_log_probability", "chosen_tokens", "rejected_tokens")
    return [dict(zip(names, values, strict=True)) | {"answer_tokens": own} for values in each]


# Preferred by the sum: no, yes, tie; by token: yes, no, no. The chosen answer is longer, shorter, longer.
BEFORE = pairs((-6.0, -4.0, 4, 2), (-3.0, -4.0, 1, 2), (-5.0, -5.0, 2, 4))


def test_figures_of_pairs_are_those_computed_by_hand() -> None:
    assert held_out_preference.figures(BEFORE) == pytest.approx(
        {
            "preference_accuracy": (0 + 1 + 0.5) / 3,
            "preference_accuracy_per_token": (1 + 0 + 0) / 3,
            "preference_margin": (-2 + 1 + 0) / 3,
            "preference_margin_per_token": (0.5 - 1 - 1.25) / 3,
            "chosen_log_probability": -14 / 3,
            "rejected_log_probability": -13 / 3,
            "longer_answer_rate": 1 / 3,
            "chosen_tokens": 7 / 3,
            "rejected_tokens": 8 / 3,
            "answer_tokens": 4,
        }
    )
    even = pairs((-1.0, -2.0, 3, 3))
    assert held_out_preference.figures(even)["longer_answer_rate"] == 0.5
    assert {*held_out_preference.figures(even)} == {*OF_PAIRS, *held_out_preference.OF_DATA[:3]}
    assert held_out_preference.figures([]) == held_out_preference.figures([{}, {}]) == {}


def test_figures_of_labelled_answers_are_those_computed_by_hand() -> None:
    rows = held_out_preference.of_labelled([6.0, 1.0, 8.0], [2, 1, 4], [1, 0, 1])
    rows[0]["answer_tokens"], rows[2]["answer_tokens"] = 3, 6
    expected = {"desirable_log_probability": -7, "desirable_log_probability_per_token": -2.5, "desirable_tokens": 3}
    expected |= {"undesirable_log_probability": -1, "undesirable_log_probability_per_token": -1}
    assert held_out_preference.figures(rows) == expected | {"undesirable_tokens": 1, "answer_tokens": 4.5}
    assert {*held_out_preference.figures(rows)} == {*OF_LABELLED, *held_out_preference.OF_DATA[3:]}
    assert not any("undesirable" in name for name in held_out_preference.figures(rows[::2]))


def test_two_models_are_compared_on_the_same_pairs() -> None:
    # By the sum: yes, yes, no: one gained, one lost. By token: yes, no, yes: one gained.
    after = pairs((-7.0, -8.0, 4, 2), (-4.0, -5.0, 1, 2), (-9.0, -8.0, 2, 1), own=2)
    before = [*BEFORE[:2], pairs((-5.0, -5.5, 2, 1))[0]]
    actual = held_out_preference.compared(before, after)
    for name, base, tuned in (("preference_accuracy", 2, 2), ("preference_accuracy_per_token", 2, 2)):
        ends = [actual[f"{prefix}{name}_{end}"] for prefix in ("base_", "") for end in ("low", "high")]
        assert ends == [*wilson(base, 3), *wilson(tuned, 3)]
    assert [actual[f"preference_accuracy_{name}"] for name in ("gained", "lost", "p")] == [1, 1, mcnemar(1, 1)]
    assert actual["preference_accuracy_difference"] == 0
    ends = [actual[f"preference_accuracy_difference_{end}"] for end in ("low", "high")]
    assert ends == [*tango(1, 1, 3)] and ends[1] <= 1
    assert actual["chosen_log_probability_difference"] == pytest.approx(-2)
    half = 1.959963984540054 * math.sqrt(3) / math.sqrt(3)  # changes -1, -1, -4, whose deviation is the root of 3
    ends = [actual[f"chosen_log_probability_difference_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([-2 - half, -2 + half])
    assert actual["rejected_log_probability_difference"] == pytest.approx((-4 - 1 - 2.5) / 3)
    assert actual["preference_margin_difference"] == pytest.approx((3 + 0 - 1.5) / 3)
    assert actual["answer_tokens_difference"] == actual["answer_tokens_difference_high"] == -2
    assert held_out_preference.less_likely(actual) == "chosen"
    assert held_out_preference.less_likely(held_out_preference.compared(after, before)) == ""
    assert held_out_preference.less_likely({}) == ""
    within_chance = pairs((-9.0, -4.0, 4, 2), (-1.0, -4.0, 1, 2), (-5.0, -5.0, 2, 4))  # changes of -3, 2 and 0
    actual = held_out_preference.compared(BEFORE, within_chance)
    assert actual["chosen_log_probability_difference"] < 0 and held_out_preference.less_likely(actual) == ""


def test_a_single_answer_is_no_more_than_chance() -> None:
    actual = held_out_preference.compared(pairs((-6.0, -4.0, 4, 2)), pairs((-9.0, -4.0, 4, 2)))
    assert actual["chosen_log_probability_difference_high"] == -3 and held_out_preference.less_likely(actual) == ""
    both = held_out_preference.compared(pairs(*[(-6.0, -4.0, 4, 2)] * 2), pairs((-9.0, -4.0, 4, 2), (-9.1, -4.0, 4, 2)))
    assert held_out_preference.less_likely(both) == "chosen"


def test_figures_of_the_data_have_no_difference() -> None:
    rest = {"question": "a", "expected": "b", "answer": "c", "format": True, "right": True, "prompt_tokens": 3}
    answers = [[rest | row for row in BEFORE]] * 2
    figures = {"rows": 3, "loss": 1.0, **held_out_preference.figures(BEFORE)}
    actual = difference(figures, figures, (answers[0], answers[1]))
    assert {"longer_answer_rate", "base_preference_accuracy", "base_answer_tokens"} <= actual.keys()
    assert not {"base_longer_answer_rate", "base_chosen_tokens", "chosen_tokens_difference"} & actual.keys()
    assert actual["chosen_log_probability_difference"] == 0 and held_out_preference.less_likely(actual) == ""


def test_normal_interval_of_one_value_is_that_value() -> None:
    assert normal_mean(np.array([2.0])) == (2.0, 2.0)


def by_transformers(model: Any, ids: list[int], labels: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(logits[at - 1, label]) for at, label in enumerate(labels) if at and label >= 0)


def test_pairs_are_evaluated_by_both_answers(folder: Folder, tiny_model: Path) -> None:
    """The log-probabilities are those of transformers; the loss and the answers are about the chosen answers."""
    data = of_kind(folder, "pairs", PAIRS, split={"validation": 0, "test": 8})
    figures, answers = evaluated(data, tiny_model)
    rows, model = open_split(data, "test"), AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert len(answers) == figures["rows"] == len(rows) == 8
    for row, each in zip(rows, answers, strict=True):
        chosen = by_transformers(model, row["input_ids"], row["labels"])
        assert each["chosen_log_probability"] == pytest.approx(chosen, rel=1e-5)
        rejected = by_transformers(model, row["rejected_input_ids"], row["rejected_labels"])
        assert each["rejected_log_probability"] == pytest.approx(rejected, rel=1e-5)
        assert each["rejected"] == row["rejected"] and each["expected"] == row["expected"]
        assert each["chosen_tokens"] == row["chosen_supervised"]
        assert 1 <= each["answer_tokens"] <= 4
    sums = sum(each["chosen_log_probability"] for each in answers)
    assert figures["loss"] == pytest.approx(-sums / sum(rows["chosen_supervised"]), rel=1e-5)
    assert held_out_preference.figures(answers).items() <= figures.items()
    assert figures["longer_answer_rate"] == 0  # the rejected answers are sentences


def test_labelled_answers_are_evaluated_by_label(folder: Folder, tiny_model: Path) -> None:
    """Undesirable answers are not expected of the model, and have no part in the loss."""
    data = of_kind(folder, "labelled", LABELLED, split={"validation": 0, "test": 12})
    figures, answers = evaluated(data, tiny_model)
    rows, model = open_split(data, "test"), AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    sums = np.array([by_transformers(model, row["input_ids"], row["labels"]) for row in rows])
    good = np.array(rows["desirable"]) == 1
    assert 0 < good.sum() < len(rows) == figures["rows"]
    assert [each["question"] for each in answers] == [row["question"] for row in rows if row["desirable"]]
    assert figures["desirable_log_probability"] == pytest.approx(sums[good].mean(), rel=1e-5)
    assert figures["undesirable_log_probability"] == pytest.approx(sums[~good].mean(), rel=1e-5)
    assert figures["loss"] == pytest.approx(-sums[good].sum() / np.array(rows["supervised"])[good].sum(), rel=1e-5)


def test_held_out_rows_without_a_desirable_answer_are_refused(folder: Folder, tiny_model: Path) -> None:
    rows = [row | {"label": False} for row in LABELLED]
    data = of_kind(folder, "labelled", rows, split={"validation": 0, "test": 1})
    with pytest.raises(UserError, match="no desirable answer among 2 evaluated test rows;"):
        evaluated(data, tiny_model)


def test_change_since_the_start_of_training_prefers_validation_pairs() -> None:
    """It differs from the comparison with the base model where a run continues from another adapter."""
    trained = {"chosen_change_first": 0.0, "chosen_change_last": -32.4}
    assert held_out_preference.change_in_training(trained) == ("the last step", -32.4)
    validated = trained | {"chosen_change_validation": 1.5}
    assert held_out_preference.change_in_training(validated) == ("the validation pairs", 1.5)
    assert held_out_preference.change_in_training({"loss_last": 1.0}) is None
