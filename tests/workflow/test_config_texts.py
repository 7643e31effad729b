"""Any text may stand in the config, and a data path that leads nowhere stops both engines with one line."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import Project
from engines import dvc_changed, edit_config, snakemake_would_run
from transformers import AutoTokenizer

from zerolora.data.prepared_rows import open_split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BRACES = "{word} {run} {{twice}} {0} { %s"


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project whose texts hold braces, with its data set prepared."""
    project = make_project("texts")
    path = project.directory / "rows.json"
    rows = [{"{question}": row.pop("instruction"), **row} for row in json.loads(path.read_text())]
    path.write_text(json.dumps(rows))
    edit_config(
        project,
        **{
            "prepare.rows.system": BRACES,
            "prepare.rows.columns": {"instruction": "{question}"},
            "fetch.directory.tiny.license": f"my licence {BRACES}",
        },
    )
    project.commit("braces")
    project.snakemake("results/config.json", "results/data/rows/manifest.json")
    return project


def test_braces_reach_the_stages_as_they_are(project: Project) -> None:
    results = project.directory / "results"
    assert json.loads((results / "config.json").read_text())["prepare"]["rows"]["system"] == BRACES
    manifest = json.loads((project.directory / "resources/models/tiny/manifest.json").read_text())
    assert manifest["license"] == f"my licence {BRACES}"
    assert json.loads((results / "data/rows/stats.json").read_text())["read_rows"] == 20
    row = open_split(results / "data/rows", "test")[0]
    text = str(AutoTokenizer.from_pretrained(project.directory / "model").decode(row["input_ids"]))
    assert text.startswith(f"<|im_start|>system\n{BRACES}<|im_end|>")


def test_braces_rerun_nothing(project: Project) -> None:
    assert not {"resolve", "fetch@tiny", "prepare@rows"} & snakemake_would_run(project)
    assert not {"resolve", "fetch@tiny", "prepare@rows"} & dvc_changed(project)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "rows.jsn",
            "there is no such file or directory; correct the path, or bring the data (`dvc pull`, fetch.data)",
        ),
        ("rows {word}.json", "Snakemake takes {...} in a file's name for a wildcard; rename the file"),
    ],
)
@pytest.mark.parametrize("engine", [("snakemake", "--profile", "profiles/local", "all"), ("dvc", "repro")])
def test_a_data_path_that_cannot_be_watched_fails_before_anything_runs(
    project: Project, engine: tuple[str, ...], path: str, said: str
) -> None:
    if "{" in path:
        (project.directory / path).write_text("[]")
    edit_config(project, **{"prepare.rows.path": path})
    config = (project.directory / "config/config.yaml").read_text().splitlines()
    (number,) = (number for number, text in enumerate(config, 1) if text.strip().startswith("path: rows"))
    try:
        result = project.run(*engine, check=False)
    finally:
        edit_config(project, **{"prepare.rows.path": "rows.json"})
    output = result.stdout + result.stderr
    told = [line for line in output.splitlines() if "config/config.yaml:" in line]
    assert told == [f"config/config.yaml:{number}: prepare.rows.path: {path!r}: {said}"], output
    assert "Traceback" not in output
    assert result.returncode == 2 if engine[0] == "snakemake" else result.returncode != 0


def test_until_a_stage_runs_it_and_all_before_it(make_project: Callable[[str], Project]) -> None:
    """A dry run names them without announcing a change of the plan; both engines record what ran."""
    project = make_project("until")
    until = ["snakemake", "--profile", "profiles/local", "--until", "render"]
    planned = project.run(*until, "--dry-run").stdout
    stages = {"resolve", "fetch", "prepare", "pack", "estimate", "render"}
    assert set(re.findall(r"^ +\d+  (\w+)  ", planned, re.MULTILINE)) == stages
    assert "alteration" not in planned
    assert "not recorded in DVC" not in project.run(*until).stderr
    results = project.directory / "results"
    assert (results / "default/zero.json").is_file()
    assert not (results / "default/adapter").exists() and not (results / "base").exists()
    for left in (snakemake_would_run(project), dvc_changed(project)):
        assert "train@default" in left and not {stage.partition("@")[0] for stage in left} & stages
