"""Runs that continue from an adapter, and one that trains all weights: the whole DAG, in both engines."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Project
from engines import dvc_changed, edges_of, edit_config, snakemake_would_run
from loopback_hub import REPOSITORY, REVISION, Hub, serving

from zerolora.config.file import load
from zerolora.errors import UserError
from zerolora.files import sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OF_A_RUN = ("pack", "estimate", "render", "train", "merge", "evaluate", "report", "accept")
ORIGIN = "results/default/adapter"


@pytest.fixture(scope="module")
def project(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished: an adapter, one that continues from it, and all weights."""
    project = copy_finished("continued")
    edit_config(
        project,
        **{
            "runs.whole": {"dataset": "rows", "train": {"method": "full"}},
            "continued.second": {"dataset": "rows", "train": {"from_adapter": ORIGIN, "learning_rate": 2e-3}},
        },
    )
    project.snakemake("all")
    return project


def read(project: Project, name: str) -> Any:
    return json.loads((project.directory / "results" / name).read_text())


def test_it_continues_from_the_end_of_the_other_run(project: Project) -> None:
    """Its first loss is lower than the other run's: on the same rows, with the other adapter."""
    first, second = (read(project, f"{run}/metrics/train.json") for run in ("default", "second"))
    assert second["loss_first"] < first["loss_first"]
    manifest = read(project, "second/adapter/manifest.json")
    digest = sha256(project.directory / ORIGIN / "adapter_model.safetensors")
    assert manifest["from_adapter"] == {"directory": ORIGIN, "sha256": digest}
    page = (project.directory / "results/second/report.html").read_text()
    assert f"{ORIGIN} (sha256 {digest})" in page


def test_all_weights_go_through_the_whole_dag(project: Project) -> None:
    files = read(project, "whole/adapter/manifest.json")["files"]
    page = (project.directory / "results/whole/report.html").read_text()
    assert files["model.safetensors"]["sha256"] in page
    model = json.loads((project.directory / "resources/models/tiny/manifest.json").read_text())
    assert read(project, "whole/metrics/train.json")["trainable_parameters"] == model["parameters"]


def test_both_engines_track_its_dependencies(project: Project) -> None:
    assert dvc_changed(project) == set()
    assert snakemake_would_run(project) == set()
    assert "train@default" in edges_of(project)["train@second"]
    edit_config(project, **{"runs.default.train": {"learning_rate": 5e-3}})
    of_both = {f"{stage}@{run}" for run in ("default", "second") for stage in OF_A_RUN[3:]}
    assert snakemake_would_run(project) == {"resolve", "compare"} | of_both
    edit_config(project, **{"runs.default.train": {}})


def test_an_adapter_of_the_hub_is_fetched_by_itself(project: Project) -> None:
    files = {path.name: path.read_bytes() for path in (project.directory / ORIGIN).iterdir()}
    with serving(Hub({**files, "training_args.bin": b"a pickle", "README.md": b"# Theirs"})) as hub:
        edit_config(
            project,
            **{
                "fetch.adapter": {"theirs": {"repository": REPOSITORY, "revision": REVISION, "license": "MIT"}},
                "continued.third": {"dataset": "rows", "train": {"from_adapter": "resources/adapters/theirs"}},
            },
        )
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(project.directory.parent / "home"), "HF_TOKEN": ""}
        target = "resources/adapters/theirs/manifest.json"
        project.run("snakemake", "--profile", "profiles/local", target, **own)
    actual = json.loads((project.directory / target).read_text())
    assert sorted(actual["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert actual["source"] == {"repository": REPOSITORY, "revision": REVISION}
    assert "fetch_adapter@theirs" in edges_of(project)["train@third"]
    # Its own run of Snakemake has resolved the settings.
    assert snakemake_would_run(project) == {"compare"} | {f"{stage}@third" for stage in OF_A_RUN}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"train.from_adapter": ORIGIN},
            "train.from_adapter: would apply to all runs; set it in each run of `continued`",
        ),
        (
            {"runs.whole.train": {"from_adapter": ORIGIN}},
            "runs.whole.train.from_adapter: is only allowed in `continued`",
        ),
        ({"continued.second.train": {}}, "continued.second: needs an adapter; set train: {from_adapter"),
        ({"continued.second.train": {"from_adapter": "results/none/adapter"}}, "'results/none/adapter' is not a run's"),
        ({"continued.second.train": {"from_adapter": "results/second/adapter"}}, "continues from second itself"),
        (
            {"continued.second.train": {"from_adapter": "resources/adapters/x"}},
            "is not fetched; add x to fetch.adapter",
        ),
        ({"continued.default": {"dataset": "rows"}}, "continued.default: default is in runs too"),
        (
            {"continued.second.train": {"from_adapter": ORIGIN, "lora": {"init": "pissa"}}},
            f"lora.init: pissa, but the factors start as those of {ORIGIN}; use default",
        ),
        (
            {"fetch.adapter": {"x": {"repository": REPOSITORY, "revision": REVISION, "license": "MIT"}}},
            "fetch.adapter.x: no run continues from it; set train: {from_adapter: resources/adapters/x}",
        ),
    ],
)
def test_a_mistake_is_one_line(make_project: Callable[[str], Project], values: dict[str, Any], said: str) -> None:
    project = make_project("mistaken-start")
    edit_config(
        project,
        **{
            "runs.whole": {"dataset": "rows"},
            "continued.second": {"dataset": "rows", "train": {"from_adapter": ORIGIN}},
        },
    )
    edit_config(project, **values)
    with pytest.raises(UserError) as raised:
        load(project.directory / "config/config.yaml")
    assert said in str(raised.value)
    if "second.train" not in str(values):
        assert len(str(raised.value).splitlines()) == 1
