"""Runs of preference objectives through all stages: their held-out preference, and what page and comparison show."""

import csv
import json
import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from conftest import Project
from engines import dvc_changed, snakemake_ran, snakemake_would_run

from zerolora.data.reference import records
from zerolora.evaluate import held_out_preference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # whole runs of a tiny model

RED = '<p class="bad"><b>✗ The {} answers became less likely</b>'


def rows() -> list[dict[str, str]]:
    """Return pairs whose answers differ in their last digit alone."""
    of_task = records("tens", 0)[:24]
    return [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": f"{row['output'][:-1]}#"} for row in of_task
    ]


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished: DPO with and without the term that keeps the chosen answers likely,
    KTO, and SFT on the chosen answers as the page suggests it."""
    project = make_project("preference")
    pairs = rows()
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    for name, each in (("pairs.json", pairs), ("labelled.json", labelled)):
        (project.directory / name).write_text(json.dumps(each, ensure_ascii=False), encoding="utf-8")
    data = project.config["prepare"].pop("rows") | {"check": "exact", "split": {"validation": 0, "test": 8}}
    chosen = {"format": "prompt", "columns": {"completion": "chosen"}, "ignore": ["rejected"]}
    project.config["prepare"] = {
        "pairs": data | {"path": "pairs.json"},
        "chosen": data | {"path": "pairs.json"} | chosen,
        "labelled": data | {"path": "labelled.json"},
    }
    project.config["train"] |= {"objective": "dpo", "max_steps": 4, "epochs": 4}
    project.config |= {"merge": {"version": False}}
    project.config["runs"] = {
        "helps": {"dataset": "pairs"},
        "harms": {
            "dataset": "pairs",
            "train": {"dpo": {"sft_weight": 0.0}, "learning_rate": 0.1},
            "merge": {"enabled": False},
        },
        "kto": {"dataset": "labelled", "train": {"objective": "kto"}},
        "sft": {
            "dataset": "chosen",
            "train": {"objective": "sft", "learning_rate": 0.1, "max_steps": 20, "epochs": 20},
        },
    }
    from_sft = {"from_adapter": "results/sft/adapter", "dpo": {"sft_weight": 0.0}, "learning_rate": 0.01}
    project.config["continued"] = {
        "spoils": {"dataset": "pairs", "train": from_sft, "merge": {"enabled": False}},
    }
    project.write_config()
    project.commit("pairs")
    snakemake_ran(project)
    return project


def read(project: Project, name: str) -> Any:
    return json.loads((project.directory / "results" / name).read_text(encoding="utf-8"))


def page(project: Project, run: str) -> str:
    return (project.directory / f"results/{run}/report.html").read_text(encoding="utf-8")


def test_results_are_there_and_both_engines_agree(project: Project) -> None:
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    for run in ("helps", "harms"):
        figures, answers = read(project, f"{run}/metrics/evaluate.json"), read(project, f"{run}/answers.json")
        assert len(answers) == figures["rows"] == 8
        assert held_out_preference.figures(answers).items() <= figures.items()
        difference = read(project, f"{run}/metrics/difference.json")
        base = read(project, "base/pairs/evaluate.json")
        change = figures["chosen_log_probability"] - base["chosen_log_probability"]
        assert difference["chosen_log_probability_difference"] == pytest.approx(change)


def test_page_warns_where_the_chosen_answers_became_less_likely(project: Project) -> None:
    assert read(project, "helps/metrics/difference.json")["chosen_log_probability_difference"] > 0
    assert read(project, "harms/metrics/difference.json")["chosen_log_probability_difference_high"] < 0
    assert RED.format("chosen") in page(project, "harms")
    assert "less likely" not in page(project, "helps") and "less likely" not in page(project, "sft")
    of_kto = read(project, "kto/metrics/difference.json")["desirable_log_probability_difference_high"]
    assert (RED.format("desirable") in page(project, "kto")) == (of_kto < 0)


def test_page_warns_of_a_continued_run_that_is_still_better_than_the_base_model(project: Project) -> None:
    """Its chosen answers are less likely than where it started, and more likely than under the base model."""
    change = read(project, "spoils/metrics/train.json")["chosen_change_last"]
    assert change < 0 < read(project, "spoils/metrics/difference.json")["chosen_log_probability_difference"]
    assert "<b>✗ Training made the chosen answers less likely</b>: on the last step" in page(project, "spoils")
    assert "On the last step" in page(project, "helps")


def test_page_draws_the_changes_of_both_answers(project: Project) -> None:
    """By their charts: the metrics of the objective in each step, and their units."""
    text = unescape(page(project, "helps"))
    for name in ("chosen_change", "rejected_change", "reward_margin", "reward_accuracy"):
        chart = re.search(rf'<figure class="chart" id="{name}-curve">.*?</figure>', text, re.DOTALL)
        assert chart and f"{name.replace('_', ' ')} per pair" in chart[0], name
    table = project.directory / "results/helps/metrics/loss.csv"
    with table.open(newline="") as file:
        steps = list(csv.DictReader(file))
    last = float(steps[-1]["chosen_change"])
    assert f"{last:.4g} at step {len(steps)}" in text
    assert "loss per pair" in unescape(page(project, "harms")) and "loss per" not in text  # two terms of two units
    of_kto = page(project, "kto")
    assert "desirable reward per desirable answer" in of_kto


def test_comparison_has_the_preferences_and_the_run_on_the_chosen_answers(project: Project) -> None:
    with (project.directory / "results/compare/table.csv").open(newline="") as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    assert set(table) == {"helps", "harms", "kto", "sft", "spoils"}
    assert float(table["helps"]["preference_accuracy"]) == read(project, "helps/summary.json")["pref"]
    assert table["sft"]["preference_accuracy"] == "" and float(table["sft"]["loss"]) > 0
    figures = [read(project, f"{folder}/evaluate.json") for folder in ("base/labelled", "kto/metrics")]
    change = figures[1]["desirable_log_probability"] - figures[0]["desirable_log_probability"]
    assert float(table["kto"]["desirable_log_probability_difference"]) == pytest.approx(change)
    assert table["harms"]["reason"].startswith("the chosen answers became less likely, by ")
    assert table["spoils"]["reason"].startswith("training made the chosen answers less likely, by ")
    assert table["helps"]["reason"] == ""
