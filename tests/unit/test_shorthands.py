"""`model` and `data` at the top level of a config, and a config without hardware."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pretended_driver import PretendedDriver

from zerolora.config.file import check_files, load
from zerolora.config.resolve import resolve
from zerolora.errors import UserError
from zerolora.machine import devices

COMMIT = "0123456789" * 4
HUB = f"some/Model-1B@{COMMIT}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a config beside a model and rows."""
    (tmp_path / "My Model").mkdir()
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config.yaml"


def long_form(**other: Any) -> dict[str, Any]:
    return {
        "hardware": {"host_memory": f"{psutil.virtual_memory().total // 2**30}GiB"},
        "fetch": {"directory": {"my-model": {"path": "My Model", "license": "unknown"}}},
        "prepare": {
            "rows": {"model": "my-model", "path": "rows.json", "split": {"validation": 0.05, "test": 0.05}}
        },
        "runs": {"rows": {"dataset": "rows"}},
    } | other  # fmt: skip


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("model: My Model\ndata: rows.json", {}),
        ("model: My Model\ndata: {path: rows.json}", {}),
        (
            "model: My Model\ndata: {path: rows.json, max_length: 64, split: {validation: 1, test: 1}}",
            {
                "prepare": {
                    "rows": {
                        "model": "my-model",
                        "path": "rows.json",
                        "max_length": 64,
                        "split": {"validation": 1, "test": 1},
                    }
                }
            },
        ),
        (
            "model: My Model\ndata: rows.json\nruns: {a: {train: {seed: 1}}, b: {}}",
            {"runs": {"a": {"dataset": "rows", "train": {"seed": 1}}, "b": {"dataset": "rows"}}},
        ),
        (
            "model: My Model\ndata: rows.json\ngrids: {g: {over: {train.seed: [1, 2]}}}",
            {"runs": {}, "grids": {"g": {"dataset": "rows", "over": {"train.seed": [1, 2]}}}},
        ),
        (
            f"model: {HUB}\ndata: rows.json",
            {
                "fetch": {"hub": {"model-1b": {"repository": "some/Model-1B", "revision": COMMIT}}},
                "prepare": {
                    "rows": {"model": "model-1b", "path": "rows.json", "split": {"validation": 0.05, "test": 0.05}}
                },
            },
        ),
        (
            "model: My Model\nprepare: {x: {path: rows.json, split: {validation: 1, test: 1}}}\n"
            "runs: {y: {dataset: x}}",
            {
                "prepare": {"x": {"model": "my-model", "path": "rows.json", "split": {"validation": 1, "test": 1}}},
                "runs": {"y": {"dataset": "x"}},
            },
        ),
    ],
    ids=["two lines", "keys", "other keys", "runs", "grid", "hub", "model alone"],
)
def test_shorthands_mean_their_long_form(config: Path, text: str, other: dict[str, Any]) -> None:
    config.write_text(text)
    short = load(config)
    check_files(config, short)
    config.write_text(yaml.safe_dump(long_form(**other)))
    assert resolve(short) == resolve(load(config))
    assert list(short.all_runs) == list(load(config).all_runs)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\nmodel: a/b@main\ndata: rows.json", "2: model: 'a/b@main': give the full 40-digit commit after @"),
        ("model: gone\ndata: rows.json", "1: model: 'gone': there is no such directory; correct it, or use"),
        ("model: 3\ndata: rows.json", "1: model: 3 is not valid; use a directory, or NAME@COMMIT of the hub"),
        ("model: My Model\ndata: [rows.json]", "2: data: ['rows.json']: give a file or directory of rows"),
        ("model: My Model\ndata: gone.json", "2: data.path: 'gone.json': there is no such file or directory"),
        ("model: My Model\ndata:\n  path: rows.json\n  max_lenth: 3", "4: data.max_lenth: there is no such key"),
        ("data: rows.json\nfetch: {}", "1: data.model: is missing; add it"),
        (
            "model: My Model\ndata: rows.json\nprepare: {rows: {path: rows.json}}",
            "2: data: prepare.rows, its entry, is in the file too; remove one of the two",
        ),
    ],
)  # fmt: skip
def test_invalid_shorthands_are_refused_where_they_are_written(config: Path, text: str, line: str) -> None:
    config.write_text(text)
    with pytest.raises(UserError) as raised:
        check_files(config, load(config))
    assert str(raised.value).startswith(f"{config}:{line}") and "\n" not in str(raised.value)


def test_config_without_hardware_uses_this_machines_gpus(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs: the plan is for the smaller memory and the older generation."""
    monkeypatch.setattr(devices, "driver_library", lambda: PretendedDriver(9.0, 7.5, memory=16 * 2**30))
    monkeypatch.setattr(devices, "fault", lambda: None)
    config.write_text("model: My Model\ndata: rows.json")
    hardware = load(config).hardware
    assert load(config).train.ranks_per_node == 2
    assert (hardware.device, hardware.gpus_per_node, hardware.gpu_memory) == ("cuda", 2, "16384MiB")
    assert hardware.compute_capability == 7.5
