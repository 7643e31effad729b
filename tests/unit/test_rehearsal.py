"""What needs no weights is refused by `zerolora check` and by a dry run, before anything is fetched or trained."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY_CONFIG, served, write_rows

from zerolora.check.rehearsal import faults
from zerolora.config.file import load
from zerolora.config.resolve import resolve

LONG = {"of": {"run": "default"}, "max_new_tokens": 600}
MISTAKES: list[tuple[str, Any, str, str]] = [
    ("train.lora.targets", ["q_projj"], "render@default", "train.lora.targets: 'q_projj' is not in the model"),
    ("train.global_batch", 10**6, "render@default", "train.global_batch is 1000000, but train.epochs"),
    ("prepare.rows.max_length", 16, "prepare@rows", "rows.json:2: has 5"),
    ("prepare.rows.split", {"validation": 100, "test": 1}, "prepare@rows", "rows.json: has 20 rows, and split takes"),
    ("prepare.rows.path", "empty.json", "prepare@rows", "empty.json: has 0 rows"),
    ("samples", {"own": LONG}, "sample@own", "samples.own.max_new_tokens: 600, and with the longest prompt, of 2"),
    ("fetch.directory.tiny.path", "none", "fetch@tiny", "none: there is no such directory"),
]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model, rows and a config, in which the test runs."""
    shutil.copytree(tiny_model, tmp_path / "model")
    write_rows(tmp_path / "rows.json", 20)
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "config").mkdir()
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, key: str = "train.seed", value: Any = 42) -> None:
    config: dict[str, Any] = copy.deepcopy(TINY_CONFIG)
    *parents, last = key.split(".")
    section = config
    for part in parents:
        section = section.setdefault(part, {})
    section[last] = value
    (folder / "config/config.yaml").write_text(yaml.safe_dump(config))


def test_each_mistake_stops_at_its_stage(folder: Path) -> None:
    assert faults(resolve(load(Path("config/config.yaml")))) == []
    for key, value, job, text in MISTAKES:
        write(folder, key, value)
        ((stage, said), *others) = faults(resolve(load(Path("config/config.yaml"))))
        assert (stage, others) == (job, []) and said.startswith(text), said
    assert {path.name for path in folder.iterdir()} == {"config", "model", "rows.json", "empty.json"}


def test_only_the_first_renders_of_a_plan_are_rehearsed(folder: Path) -> None:
    """The last of nine configurations is the wrong one; `zerolora check` finds it."""
    targets = [[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")]
    targets += [["q_proj", "k_proj"], ["q_projj"]]
    names = {f"t{number}": value for number, value in enumerate(targets)}
    write(folder, "grids", {"g": {"dataset": "rows", "over": {"train.lora.targets": names}}})
    resolved = resolve(load(Path("config/config.yaml")))
    planned = {f"render@{run.rendered}" for name, run in resolved.runs.items() if name != "default"}
    assert len(planned) == 9 and faults(resolved, planned) == []
    assert [job for job, _ in faults(resolved)] == ["render@g-t8"]


def test_check_and_the_dry_run_say_it(folder: Path) -> None:
    write(folder, "train.lora.targets", ["q_projj"])
    said = served("zerolora", "check", directory=folder)
    line = "train.lora.targets: 'q_projj' is not in the model"
    assert said.returncode == 1 and "render@default" in said.stdout and line in " ".join(said.stdout.split())
    options = ("--snakefile", str(ROOT / "workflow/Snakefile"), "--profile", str(ROOT / "profiles/local"))
    planned = served("snakemake", *options, "--dry-run", directory=folder)
    assert planned.returncode == 1 and f"\nrender@default: {line}" in planned.stderr + planned.stdout
    assert "File" not in planned.stderr and not (folder / "results").exists()


def test_packages_that_training_needs_are_named_before(folder: Path) -> None:
    """By check, by the dry run, and by render; the tracker's package is not in the lock."""
    write(folder, "train.tracker", "swanlab")
    text = "train.tracker is swanlab, whose package swanlab is not installed"
    said = served("zerolora", "check", directory=folder)
    assert said.returncode == 1 and text in " ".join(said.stdout.split())
    settings = resolve(load(Path("config/config.yaml"))).runs["default"].render
    assert settings.packages == {"train.tracker is swanlab": "swanlab"}
    write(folder, "train", json.loads(json.dumps(TINY_CONFIG["train"])) | {"method": "qlora", "optimizer": "lion"})
    assert {*resolve(load(Path("config/config.yaml"))).runs["default"].render.packages.values()} == {"bitsandbytes"}
