"""Validation while training continues: the best adapter, early stopping, and both after a resume."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, metrics, rank_process

from zerolora.train.checkpoint.format import header
from zerolora.train.launch.stop_signals import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Each epoch is five steps. So fast a learner overshoots: its validation loss falls, and then rises.
LEARNED: dict[str, Any] = {
    "max_steps": 40,
    "epochs": 40,
    "schedule": "constant",
    "learning_rate": 0.05,
}
# A warm-up of two steps: of the steps that were planned, not of those that early stopping leaves.
WATCHED: dict[str, Any] = LEARNED | {"warmup_ratio": 0.05, "validation_steps": 2, "patience": 3}
FILES = ("adapter/adapter_model.safetensors", "metrics/train.json", "metrics/loss.csv")


@pytest.fixture(scope="module")
def watched(bench: Bench) -> Path:
    """Return a run that stops early."""
    return bench.run("early-stopped", "zero2", **WATCHED)


def validated(run: Path) -> dict[int, float]:
    with (run / "metrics/loss.csv").open(newline="") as file:
        return {
            int(row["step"]): float(row["loss_validation"]) for row in csv.DictReader(file) if row["loss_validation"]
        }


def test_it_stops_once_the_loss_has_not_fallen_for_long_enough(watched: Path) -> None:
    actual, losses = metrics(watched), validated(watched)
    assert list(losses) == list(range(2, actual["steps"] + 1, 2))
    best = min(losses, key=lambda step: losses[step])
    assert actual["steps"] == best + 2 * WATCHED["patience"] < WATCHED["max_steps"]
    assert actual["published_step"] == best
    assert actual["loss_validation"] == losses[best]
    assert len(actual["losses"]) == actual["steps"]


def test_the_rates_of_a_run_that_stopped_early_are_those_it_was_trained_with(watched: Path) -> None:
    rates = []
    for name in ("loss", "telemetry"):
        with (watched / f"metrics/{name}.csv").open(newline="") as file:
            rates.append([float(row["learning_rate"]) for row in csv.DictReader(file)])
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
    assert rates[0][:3] == [0.025, 0.05, 0.05]


def test_the_published_adapter_is_that_of_the_best_step(bench: Bench, watched: Path) -> None:
    best = metrics(watched)["published_step"]
    shorter = bench.run("shorter", "zero2", **LEARNED | {"max_steps": best, "warmup_steps": 2})
    assert (watched / FILES[0]).read_bytes() == (shorter / FILES[0]).read_bytes()
    assert metrics(shorter)["loss_validation"] == metrics(watched)["loss_validation"]


def test_best_checkpoint_stays_beside_the_last_two(bench: Bench, watched: Path) -> None:
    actual = metrics(watched)
    (folder,) = (path for path in (bench.folder / "checkpoints/early-stopped").iterdir() if path.is_dir())
    files = sorted(folder.glob("step-*"))
    steps = [header(path)["step"] for path in files]
    assert steps == [actual["published_step"], actual["steps"] - 1, actual["steps"]]
    assert header(files[-1])["best_step"] == actual["published_step"]


def handed_over(bench: Bench, name: str, step: int) -> None:
    """Give another run a checkpoint of the watched one."""
    (folder,) = (path for path in (bench.folder / "checkpoints/early-stopped").iterdir() if path.is_dir())
    kept = bench.folder / "checkpoints" / name / folder.name
    kept.mkdir(parents=True)
    shutil.copy(folder / f"step-{step:08d}.safetensors", kept)


def test_stopped_and_taken_up_again_it_is_the_same_bytes(bench: Bench, watched: Path) -> None:
    """Once after its first step, and once before the validation of its second."""
    for step in (1, 2):
        run = bench.begin("stopped", "zero2", **WATCHED)
        rank_process(run.pid, 0)
        os.kill(run.pid, signal.SIGUSR1)
        assert run.wait() == STOPPED, run.errors()
        assert f"step {step} of {WATCHED['max_steps']} is saved" in run.errors()
    stopped = bench.run("stopped", "zero2", **WATCHED)
    for file in FILES:
        assert (stopped / file).read_bytes() == (watched / file).read_bytes(), file


def test_another_engine_publishes_the_best_adapter_of_a_checkpoint(bench: Bench, watched: Path) -> None:
    """The last one, behind which there is nothing left to train."""
    handed_over(bench, "published", metrics(watched)["steps"])
    published = bench.run("published", "zero3", **WATCHED)
    for file in FILES:
        assert (published / file).read_bytes() == (watched / file).read_bytes(), file


def test_from_the_best_checkpoint_it_is_the_same_bytes(bench: Bench, watched: Path) -> None:
    handed_over(bench, "from-best", metrics(watched)["published_step"])
    again = bench.run("from-best", "zero2", **WATCHED)
    for file in FILES:
        assert (again / file).read_bytes() == (watched / file).read_bytes(), file
    assert json.loads((again / "metrics/train_resources.json").read_text())["resumes"] == 1


def test_the_last_adapter_is_published_if_that_is_wanted(bench: Bench, watched: Path) -> None:
    actual = metrics(bench.run("last", "zero2", **WATCHED | {"keep": "last"}))
    losses = validated(watched)
    assert actual["published_step"] == actual["steps"] == max(losses)
    assert actual["loss_validation"] == losses[actual["steps"]]
