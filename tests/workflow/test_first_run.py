"""What `zerolora init` writes for a model and rows, run to its end."""

import json
from collections.abc import Callable

import pytest
import yaml
from conftest import Project
from engines import dvc_ran, snakemake_ran

pytestmark = [pytest.mark.slow]


def test_a_model_and_a_file_become_an_adapter(make_project: Callable[[str], Project]) -> None:
    """Without test rows, the validation rows are evaluated. Slow: a whole run."""
    project = make_project("own")
    said = project.run("zerolora", "init", "--model", "model", "--data", "rows.json", "--force")
    lines = said.stdout.splitlines()
    columns = [line.partition(",")[0] for line in lines if line.startswith("column ")]
    assert columns == ["column  instruction: read as instruction", "column  output: read as output"]
    assert len(lines) == len(columns) + 6
    config = project.directory / "config/config.yaml"
    config.write_text(config.read_text().replace("test: 1}", "test: 0}"))
    project.snakemake("all")
    trained = json.loads((project.directory / "results/rows/metrics/train.json").read_text())
    assert trained["steps"] == 12 and (project.directory / "results/rows/report.html").is_file()
    row = json.loads((project.directory / "results/compare/rows/rows.json").read_text())
    assert row["reason"] == "evaluated on the validation rows, which also choose the best adapter"
    assert "Nothing to be done" in project.snakemake("all").stderr
    assert "up to date" in project.run("dvc", "status").stdout
    # The same in shorthands, without hardware: every stage has the same settings.
    long = yaml.safe_load(config.read_text())
    ((name, (model,)),) = [(group, entry.values()) for group, entry in long["fetch"].items()]
    data = {key: value for key, value in long["prepare"]["rows"].items() if key != "model"}
    assert name == "directory" and model["license"] == "unknown"
    short = {key: value for key, value in long.items() if key in ("render", "train")}
    project.write_config(yaml.safe_dump({"model": model["path"], "data": data, **short}))
    assert snakemake_ran(project) == {"resolve"}
    assert "up to date" in project.run("dvc", "status").stdout
    # Without held-out rows nothing is judged, and the report says so.
    data["split"] = {"validation": 0, "test": 0}
    project.write_config(yaml.safe_dump({"model": model["path"], "data": data, **short}))
    project.snakemake("all")
    row = json.loads((project.directory / "results/compare/rows/rows.json").read_text())
    assert row["status"] == "done" and row["reason"] == "not evaluated: no row is held out (split)"
    trained = json.loads((project.directory / "results/rows/metrics/train.json").read_text())
    assert not {"loss_validation", "loss", "accuracy"} & {*row, *trained} and trained["published_step"] == 13
    page = (project.directory / "results/rows/report.html").read_text()
    assert "Not evaluated: no row is held out (split)." in page and "validation loss" not in page
    assert "up to date" in project.run("dvc", "status").stdout
    # A file of config/experiments is a run over this config.
    experiment = project.directory / "config/experiments/other.yaml"
    experiment.write_text("train: {seed: 7}\n")
    assert "train@other" in snakemake_ran(project) and "train@rows" not in snakemake_ran(project)
    table = project.directory / "results/compare/table.csv"
    assert "\nother," in table.read_text() and "up to date" in project.run("dvc", "status").stdout
    experiment.unlink()
    project.run("zerolora", "expand")
    assert "compare" in dvc_ran(project) and "\nother," not in table.read_text()
    assert "Nothing to be done" in project.snakemake("all").stderr
    refused = project.run("snakemake", "--profile", "profiles/slurm", "--forcerun", "report", "all", check=False)
    line = "config/config.yaml: hardware: is missing, which stands for this machine, but the jobs run on others"
    assert refused.returncode == 1 and line in refused.stderr and "Traceback" not in refused.stderr
