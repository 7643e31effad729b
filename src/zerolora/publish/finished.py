"""Finished runs and their files to push, checked against the current config, the code, dvc.lock and the manifests."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolora.config.code import codes
from zerolora.config.compared import compared
from zerolora.config.file import load, read_values
from zerolora.config.grids import SHARED_STAGES, Shared
from zerolora.config.resolve import resolve, shared_settings
from zerolora.config.schema import Config
from zerolora.config.settings import PrepareSettings, Resolved, RunSettings
from zerolora.errors import UserError, shown
from zerolora.fail_if import parse
from zerolora.files import MANIFEST, read_object, sha256
from zerolora.json_file import LARGEST
from zerolora.methods.peft_format import CONFIG as ADAPTER_CONFIG
from zerolora.methods.registry import TRAINABLE, check_published
from zerolora.model.manifest import BASE, is_weight

CONFIG = Path("config/config.yaml")
RESULTS = Path("results")
MODELS = Path("resources/models")
RECORD = Path("dvc.lock")
KINDS = ("adapter", "merged")
PUSH = "pushed"
"""Key of the pushed manifest, which marks its files as those of a push."""
NAMING = {
    ADAPTER_CONFIG: "base_model_name_or_path",
    "config.json": "_name_or_path",
    "tokenizer_config.json": "name_or_path",
}
"""Files that may have the path of the base model, with the key."""


@dataclass(frozen=True)
class FinishedRun:
    """A run whose last stage has ended, and whose results match the current config and code."""

    name: str
    config: Config
    resolved: Resolved
    hashes: dict[str, str]
    """md5 of each output file in dvc.lock, by path."""

    @property
    def settings(self) -> RunSettings:
        """Settings of its stages."""
        return self.resolved.runs[self.name]

    @property
    def dataset(self) -> str:
        """Name of its data set."""
        return self.settings.dataset

    @property
    def prepared(self) -> PrepareSettings:
        """Settings of its data set."""
        return self.resolved.prepare[self.dataset]

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return RESULTS / self.name

    @property
    def data(self) -> Path:
        """Directory of its prepared data."""
        return RESULTS / "data" / self.dataset

    @property
    def model(self) -> Path:
        """Directory of its base model's config and tokenizer."""
        return MODELS / self.prepared.model

    @functools.cached_property
    def receipts(self) -> dict[str, dict[str, Any]]:
        """The receipts of its stages, by name: params, and the sha256 of inputs and outputs by path."""
        paths = [path for path in map(Path, sorted(self.hashes)) if path.parent == RESULTS / "receipts"]
        return {path.stem: receipt for path in paths if (receipt := self.read(path))}

    def read(self, path: Path, reader: Callable[[Path, str], Any] = read_object) -> Any:
        """Return the JSON in an output. Raises UserError if it is missing, or differs from dvc.lock."""
        value = reader(path, command(self.name))
        expected = self.hashes.get(path.as_posix())
        if expected and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != expected:
            raise UserError(f"{path}: is not the file that {RECORD} lists; restore it: `dvc checkout --force {path}`")
        return value


def finished_run(name: str) -> FinishedRun:
    """Return a run of the project in the working directory.

    Raises UserError if there is no such run, it is unfinished, or its results are from other settings or code.
    """
    config = load(CONFIG)
    if name not in config.all_runs:
        raise UserError(f"--run {shown(name)}: {CONFIG} has no such run; use one of {', '.join(config.all_runs)}")
    run = FinishedRun(name, config, resolve(config), {})
    accepted = run.directory / "accepted.json"
    if not accepted.is_file():
        raise UserError(_gate_failure(run) or f"run {name} is not finished: {accepted} is missing; {remedy(name)}")
    stages = _recorded_stages(run)
    if accepted.as_posix() not in {path for entry in stages.values() for path, _ in _outputs(entry)}:
        raise UserError(f"{RECORD}: has no record of run {name}, so its settings are unknown; {remedy(name)}")
    now = {**compared(run.resolved), "shared": shared_settings(run.resolved.runs), "code": _code(run)}
    for stage, entry in stages.items():
        for values in entry.get("params", {}).values():
            for key, value in values.items():
                _check_same(name, stage, key, value, _value(now, key))
    hashes = {path: md5 for entry in stages.values() for path, md5 in _outputs(entry)}
    return FinishedRun(name, config, run.resolved, hashes)


def _code(run: FinishedRun) -> dict[str, Any]:
    """Return the current code fingerprints of the run's stages."""
    now = codes(run.resolved)
    names = {stage: getattr(run.settings, kind) for kind, stage in SHARED_STAGES._asdict().items()}
    shared = {stage: now.shared[name][stage] for stage, name in names.items() if name}
    return {**now.named, **now.runs[run.name], **shared}


def command(run: str) -> str:
    """Return the command that finishes a run and writes its settings for DVC."""
    return f"snakemake --profile profiles/local {RESULTS / 'config.json'} {RESULTS / run / 'accepted.json'}"


def remedy(run: str) -> str:
    """Return the remedy for an unfinished run."""
    return f"run `{command(run)}`"


def _gate_failure(run: FinishedRun) -> str | None:
    """Return one line if the run reached its gate and failed."""
    difference, gate = run.directory / "metrics/difference.json", run.settings.accept.fail_if
    if gate is None or not difference.is_file():
        return None
    try:
        failure = parse(gate).failure(read_object(difference, "zerolora stage report"))
    except KeyError:  # the stage accept lists the available metrics
        return None
    if failure is None:
        return None
    return f"run {run.name} did not pass its gate, evaluate.fail_if: {failure}; change its training or the gate"


def _recorded_stages(run: FinishedRun) -> dict[str, dict[str, Any]]:
    """Return, by name, the stages of dvc.lock for the run's results, data, base model, and the base model's results."""
    if not RECORD.is_file():
        return {}
    shared = {RESULTS / name for kind in Shared._fields if (name := getattr(run.settings, kind))}
    folders = {run.directory, run.data, run.model, RESULTS / "base" / run.dataset, *shared}

    def is_of_run(paths: list[Path]) -> bool:
        if not any(path.is_relative_to(folder) for path in paths for folder in folders):
            return False
        # dvc.lock keeps tasks that are no longer in the config.
        return any(path.parent.name != "tasks" or path.stem in run.resolved.tasks for path in paths)

    stages: dict[str, dict[str, Any]] = read_values(RECORD, longest=LARGEST).get("stages", {})
    return {name: entry for name, entry in stages.items() if is_of_run([Path(path) for path, _ in _outputs(entry)])}


def _outputs(entry: dict[str, Any]) -> list[tuple[str, str]]:
    return [(output["path"], output["md5"]) for output in entry.get("outs", ())]


def _value(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _check_same(run: str, stage: str, key: str, recorded: Any, now: Any) -> None:
    """Raise UserError, naming the first key that differs, unless two values are equal."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name in sorted({*recorded, *now}):
            _check_same(run, stage, f"{key}.{name}", recorded.get(name), now.get(name))
    elif recorded != now:
        was, is_ = ("at its default" if value is None else shown(value) for value in (recorded, now))
        what = "the code has changed" if key.startswith("code.") else f"{key} was {was}, and is {is_}"
        raise UserError(f"run {run} is out of date: since {stage} {what}; {remedy(run)}")


@dataclass(frozen=True)
class PushedModel:
    """A directory of files to push."""

    kind: str
    """adapter or merged."""
    directory: Path
    files: dict[str, dict[str, Any]]
    """sha256 and bytes of each file in the directory, by name."""
    base: dict[str, Any]
    """Name, revision and weights of the base model (model/manifest.py)."""
    rewritten: dict[str, str]
    """Changed texts of files, by name."""
    included: dict[str, Path] = field(default_factory=dict)
    """Files from elsewhere, by name."""

    def path(self, name: str) -> Path:
        """Return the file of a name."""
        return self.included.get(name, self.directory / name)

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of each file as it is pushed, by name."""
        own = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.rewritten.items()}
        return {name: entry["sha256"] for name, entry in self.files.items()} | own

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


def product_of(run: FinishedRun, kind: str) -> PushedModel:
    """Return a run's adapter or merged model.

    Every file is hashed and compared with the manifest. Raises UserError if the run has no output of this kind, or a
    file is missing or differs.
    """
    if kind not in KINDS:
        raise UserError(f"--what {shown(kind)}: use one of {', '.join(KINDS)}")
    method, adapter = run.settings.train.method, run.directory / "adapter"
    trained = run.read(adapter / MANIFEST)
    if kind == "adapter":
        if not TRAINABLE[method].peft_type:
            raise UserError(f"--what adapter: run {run.name} has no adapter: its method is {method}; use merged")
        directory, files = adapter, trained["files"]
    else:
        merged = run.read(manifest := run.directory / "merged" / MANIFEST)
        if not merged.get("enabled", True):
            raise UserError(
                f"--what merged: {manifest}: nothing was merged; use adapter, or set merge.enabled: true and run again"
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
    """Return a model's name; for an absolute path, only its last part."""
    return f"./{Path(name).name}" if name.startswith(("/", "~")) else name


def weights_of(files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the sha256 of the weight files, by name."""
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
