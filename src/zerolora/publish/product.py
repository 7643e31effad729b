"""What is pushed: the files of an adapter or a merged model, checked against the hashes that its stage recorded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, read_object, sha256
from zerolora.methods.peft_format import CONFIG
from zerolora.methods.registry import TRAINABLE, check_published
from zerolora.model.manifest import BASE, is_weight
from zerolora.publish.finished import FinishedRun, command, remedy

KINDS = ("adapter", "merged")
PUSH = "pushed"
"""Of the manifest that is pushed along: by it a later push knows what is its own."""
CARD = "README.md"
NAMING = {CONFIG: "base_model_name_or_path", "config.json": "_name_or_path", "tokenizer_config.json": "name_or_path"}
"""Files that may say where a model was loaded from, and under which key."""


@dataclass(frozen=True)
class PushedModel:
    """A directory of files to be pushed."""

    kind: str
    """adapter or merged."""
    directory: Path
    files: dict[str, dict[str, Any]]
    """sha256 and bytes of each file, by name, as they are in the directory."""
    base: dict[str, Any]
    """Name, revision and weights of the base model (model/manifest.py)."""
    rewritten: dict[str, str]
    """The text of files that are pushed in another form, by name."""

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


def product_of(run: FinishedRun, kind: str) -> PushedModel:
    """Return what a run made.

    Every byte is read and compared with the manifest. Raises UserError if the run made nothing of this kind, or a file
    is missing or is not the one that the manifest lists.
    """
    if kind not in KINDS:
        raise UserError(f"--what {shown(kind)}: write one of {', '.join(KINDS)}")
    method, adapter = run.settings.train.method, run.directory / "adapter"
    trained = run.read(adapter / MANIFEST)
    if kind == "adapter":
        if not TRAINABLE[method].peft_type:
            raise UserError(f"--what adapter: run {run.name} has none, since its method is {method}; write merged")
        directory, files = adapter, trained["files"]
    else:
        merged = run.read(manifest := run.directory / "merged" / MANIFEST)
        if not merged.get("enabled", True):
            raise UserError(
                f"--what merged: {manifest}: nothing was merged; write adapter, or merge.enabled: true, and run again"
            )
        directory, files = Path(merged["path"]), merged["files"]
    _check_bytes(run, directory, files)
    if kind == "adapter":
        check_published(adapter, run.model)
    rewritten = {}
    for name, key in NAMING.items():
        if name in files:
            config = read_object(directory / name, command(run.name))
            value = config.get(key)
            if isinstance(value, str) and (portable := _portable(value)) != value:
                rewritten[name] = json.dumps(config | {key: portable}, ensure_ascii=False, indent=2) + "\n"
    base = trained[BASE] | {"name": _portable(trained[BASE]["name"])}
    return PushedModel(kind, directory, files, base, rewritten)


def _portable(name: str) -> str:
    """Return a model's name; of a path that only this machine knows, the last part."""
    return f"./{Path(name).name}" if name.startswith(("/", "~")) else name


def weights_of(files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the sha256 of the files that hold weights, by name."""
    return {name: entry["sha256"] for name, entry in sorted(files.items()) if is_weight(name)}


def _check_bytes(run: FinishedRun, directory: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path}: is missing; {remedy(run.name)}, or restore it: `dvc checkout --force {path}`")
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            raise UserError(
                f"{path}: is not the file that the manifest of its stage lists, so nothing is pushed; restore it: "
                f"`dvc checkout --force {path.parent}`, or delete it and {remedy(run.name)}"
            )
