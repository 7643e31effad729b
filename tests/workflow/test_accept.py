"""A run without merged weights, and its gate: both engines stop at it, with a report that says why."""

import json
from collections.abc import Callable

import pytest
from conftest import Project
from engines import dvc_changed, dvc_ran, edit_config, snakemake_ran, snakemake_would_run

pytestmark = pytest.mark.slow


def test_a_gate_stops_both_engines_and_the_report_says_why(copy_finished: Callable[[str], Project]) -> None:
    """It takes more than 5 s, as stages run nine times in all."""
    project = copy_finished("accept")
    edit_config(project, **{"merge.enabled": False, "evaluate.fail_if": "loss > base - 100"})
    failed = project.snakemake("all", check=False)
    assert failed.returncode == 1
    assert "evaluate.fail_if: loss > base - 100: loss " in failed.stdout + failed.stderr
    results = project.directory / "results/default"
    assert not (results / "accepted.json").exists()
    page = (results / "report.html").read_text()
    assert "Not accepted" in page and "loss &gt; base - 100" in page
    assert sorted(path.name for path in (results / "merged").iterdir()) == ["manifest.json"]
    assert json.loads((results / "merged/manifest.json").read_text()) == {"enabled": False, "files": {}}
    compared = json.loads((results / "metrics/difference.json").read_text())
    assert compared["loss"] != compared["base_loss"]
    assert compared["answers"] == 4

    by_dvc = project.run("dvc", "repro", check=False)
    assert by_dvc.returncode != 0
    assert not (results / "accepted.json").exists()

    edit_config(project, **{"evaluate.fail_if": "loss > base + 100"})
    assert snakemake_ran(project) == {"resolve", "report@default", "accept@default", "compare"}
    assert json.loads((results / "accepted.json").read_text())["accepted"]
    assert "Accepted" in (results / "report.html").read_text()
    assert dvc_changed(project) == set()

    edit_config(project, **{"evaluate.enabled": False, "evaluate.fail_if": None})
    assert dvc_ran(project) == {
        *("resolve", "evaluate_base@rows", "compare"),
        *(f"{stage}@default" for stage in ("evaluate", "report", "accept")),
    }
    assert snakemake_would_run(project) == set()
    assert "Not evaluated" in (results / "report.html").read_text()
    assert json.loads((results / "metrics/difference.json").read_text()) == {"enabled": False}
    assert "not evaluated: evaluate.enabled is false" in project.run("zerolora", "show").stdout

    # The adapter alone leaves the project too.
    edit_config(project, **{"export.targets": ["vllm_adapter"]})
    project.snakemake("export")
    loaded = json.loads((results / "export/vllm_adapter/manifest.json").read_text())["loaded"]
    assert (loaded["compared_with"], loaded["equal"]) == ("base and adapter", 3)
    edit_config(project, **{"export.targets": ["gguf"]})
    refused = project.snakemake("export", check=False)
    assert "export.targets: gguf is made from the merged model, but merge.enabled is false" in refused.stderr
