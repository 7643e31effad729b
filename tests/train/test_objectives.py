"""The contract of an objective: it trains alike on every engine and in any split of a global batch, resumes to the same
bytes, and is known to config and docs."""

import csv
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, metrics
from conftest import ROOT

from zerolora.config.schema import Train
from zerolora.train import objectives
from zerolora.train.objectives import OBJECTIVES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# An engine each, and the split of the same global batch in which it trains: ranks, rows of a micro-batch.
SPLITS = {"ddp": (1, 4), "fsdp": (2, 1), "zero3": (2, 2)}
# Sharded weights are gathered by the modules, of which no objective knows: each is trained with one of the two.
ENGINES = dict(zip(OBJECTIVES, itertools.cycle([("ddp", "fsdp"), ("ddp", "zero3")]), strict=False))
FILES = ("adapter/adapter_model.safetensors", "metrics/loss.csv", "metrics/train.json")


@pytest.fixture(scope="module", autouse=True)
def _rows(bench: Bench) -> None:
    bench.prefer()
    bench.teach()


def rows_of(objective: str) -> dict[str, Any]:
    """Return the arguments of a run on the rows that an objective needs."""
    kind, reference = OBJECTIVES[objective].rows, OBJECTIVES[objective].reference
    if kind == "texts":
        return {"packing": "packed"} | ({"teacher": "teacher"} if OBJECTIVES[objective].taught else {})
    named = {"data": kind, "packing": f"{kind}-packed"}
    return named | ({"reference": f"{kind}-reference"} if reference else {})


def train(bench: Bench, objective: str, strategy: str, name: str) -> tuple[Path, str]:
    """Train, and return the run's directory and what was printed."""
    ranks, micro_batch = SPLITS[strategy]
    result = bench.start(
        name,
        strategy,
        **rows_of(objective),
        objective=objective,
        ranks_per_node=ranks,
        micro_batch=micro_batch,
        global_batch=4,
        max_steps=2,
        epochs=2,
        validation_steps=1,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return bench.folder / name, result.stderr


def columns_of(run: Path) -> dict[str, list[float]]:
    """Return the columns of a run's loss.csv, by name."""
    with (run / "metrics/loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_config_docs_and_file_have_it(name: str) -> None:
    assert name in Train.model_json_schema()["properties"]["objective"]["enum"]
    assert f"| `{name}` |" in (ROOT / "docs/training.md").read_text()
    assert (Path(objectives.__file__).parent / f"{name}.py").is_file()
    objective = OBJECTIVES[name]
    assert {*objective.terms.values(), *objective.metrics.values(), *objective.before.values()} <= {*objective.units}
    assert objective.best in ("loss", *objective.metrics)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_engines_and_splits_train_alike_and_one_resumes_to_the_same_bytes(bench: Bench, objective: str) -> None:
    actual: list[dict[str, Any]] = []
    for strategy in ENGINES[objective]:
        name = f"{objective}-{strategy}"
        whole, said = train(bench, objective, strategy, name)
        columns = columns_of(whole)
        assert {*OBJECTIVES[objective].metrics} < {*columns}
        if OBJECTIVES[objective].taught:  # by a model of random weights
            ours, theirs = (columns[name][0] for name in ("cross_entropy", "teacher_cross_entropy"))
            warning = (
                f"the teacher predicts the labels of the first step no better.* is {theirs:.3g}, the model's {ours:.3g}"
            )
            assert theirs > ours and len(re.findall(warning, said)) == 1
        actual.append(columns)
        best = min(columns[f"{OBJECTIVES[objective].best}_validation"])
        assert metrics(whole)[f"{OBJECTIVES[objective].best}_validation"] == best
    for file in (bench.folder / "checkpoints" / name).glob("*/step-00000002.safetensors"):
        file.unlink()
    before = {file: (whole / file).read_bytes() for file in FILES}
    resumed, said = train(bench, objective, strategy, name)
    assert "the teacher predicts" not in said
    assert json.loads((resumed / "metrics/train_resources.json").read_text())["resumes"] == 1
    for file, content in before.items():
        assert (resumed / file).read_bytes() == content, file
    for columns in actual[1:]:
        assert columns.keys() == actual[0].keys()
        for name, values in columns.items():
            # In the first step rewards are 0 but for rounding, so neither is the higher one.
            start = int(name == "reward_accuracy" and OBJECTIVES[objective].reference)
            assert values[start:] == pytest.approx(actual[0][name][start:], rel=1e-5, abs=2e-5), name
