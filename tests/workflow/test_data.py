"""The whole DAG on data as people have it: a mixture of a hub data set, CSV and compressed JSONL, packed."""

import csv
import gzip
import json
from collections.abc import Callable, Iterator

import pytest
from conftest import Project
from engines import dvc_changed, edit_config, snakemake_ran, snakemake_would_run
from loopback_hub import REPOSITORY, REVISION, Hub, serving

from zerolora.data.reference import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    rows = [
        {"conversations": [{"from": "human", "value": f"{x}?"}, {"from": "gpt", "value": f"{x}!"}]} for x in range(20)
    ]
    with serving(Hub({"chat.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()})) as server:
        yield server


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project], hub: Hub) -> Project:
    """Return a project that snakemake has finished on three sources."""
    project = make_project("mixture")
    data = project.directory / "data"
    with (data / "own.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows([row["instruction"], row["output"]] for row in records("tens", 1)[:20])
    (data / "exam.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in records("tens", 2)[:5]).encode())
    )
    edit_config(
        project,
        **{
            "fetch.data": {
                "chat": {"repository": REPOSITORY, "revision": REVISION, "files": ["*.jsonl"], "license": "MIT"}
            },
            "prepare.rows.path": "data",
            "prepare.rows.sources": {
                "hub/chat": {"weight": 1.0},
                "own.csv": {"weight": 1.0, "columns": {"instruction": "question", "output": "answer"}},
                "exam.jsonl.gz": {"split": "test"},
            },
            "prepare.rows.split": {"validation": 4, "test": 0},
            "pack": {"packing": True, "capacity": 160},
            "train.max_steps": None,
        },
    )
    project.commit("three sources")
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(project.directory.parent / "home"), "HF_TOKEN": ""}
    result = project.run("snakemake", "--profile", "profiles/local", "all", "--until", "fetch_data", **own)
    assert "fetch_data" in result.stdout + result.stderr
    project.snakemake("all")
    return project


def test_three_sources_go_through_the_whole_dag(project: Project, hub: Hub) -> None:
    results = project.directory / "results"
    stats = json.loads((results / "data/rows/stats.json").read_text())
    assert {name: source["read_rows"] for name, source in stats["sources"].items()} == {
        "hub/chat": 20,
        "own.csv": 20,
        "exam.jsonl.gz": 5,
    }
    assert stats["test_rows"] == 5
    trained = json.loads((results / "default/metrics/train.json").read_text())
    shares = {name: trained[f"loss_share.{name}"] for name in stats["sources"]}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares["hub/chat"], shares["own.csv"]) > 0 == shares["exam.jsonl.gz"]
    packing = json.loads((results / "default/packing/stats.json").read_text())
    assert packing["train_packed_rows"] < packing["train_rows"] == stats["train_rows"]
    page = (results / "default/report.html").read_text()
    for text in ("hub/chat", "own.csv", f"{packing['train_efficiency']:.2%} full", "stop tokens"):
        assert text in page
    assert hub.downloads() == ["chat.jsonl"]


def test_the_engines_agree_on_fetched_data(project: Project) -> None:
    assert dvc_changed(project) == set()
    assert snakemake_would_run(project) == set()


def test_an_edit_of_the_data_shows_in_metrics_diff(project: Project) -> None:
    project.commit("results")
    with (project.directory / "data/own.csv").open("a", newline="") as file:
        csv.writer(file).writerow(["7=", ""])
    result = project.snakemake("results/data/rows/stats.json", check=False)
    assert result.returncode != 0
    assert "own.csv:22: answer is empty" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    edit_config(project, **{"prepare.rows.bad_row": "drop"})
    stats = "results/data/rows/stats.json"  # not among the headline metrics, so it is named
    project.snakemake(stats)
    diff = json.loads(project.run("dvc", "metrics", "diff", "--json", "--targets", stats).stdout)
    changed = diff[stats]
    assert changed["dropped_bad_rows"] == {"old": 0, "new": 1, "diff": 1}
    assert changed["sources.own.csv.read_rows"] == {"old": 20, "new": 21, "diff": 1}
    dropped = (project.directory / "results/data/rows/dropped.jsonl").read_text()
    assert "own.csv:22" in dropped


def test_another_capacity_tokenizes_nothing(project: Project) -> None:
    edit_config(project, **{"pack.capacity": 200})
    ran = snakemake_ran(project)
    assert "pack@default" in ran
    assert "prepare@rows" not in ran
