"""A finished run, as far as its files prove it: its settings, and results that are those of these settings."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
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
from zerolora.files import read_object
from zerolora.json_file import LARGEST

CONFIG = Path("config/config.yaml")
RESULTS = Path("results")
MODELS = Path("resources/models")
RECORD = Path("dvc.lock")


@dataclass(frozen=True)
class FinishedRun:
    """A run whose last stage has ended, and whose results are those of the present config and code."""

    name: str
    config: Config
    resolved: Resolved
    hashes: dict[str, str]
    """md5 of each output file that the record has, by path."""

    @property
    def settings(self) -> RunSettings:
        """Return the settings of the run's stages."""
        return self.resolved.runs[self.name]

    @property
    def dataset(self) -> str:
        """Return the name of its data set."""
        return self.settings.dataset

    @property
    def prepared(self) -> PrepareSettings:
        """Return the settings of its data set."""
        return self.resolved.prepare[self.dataset]

    @property
    def directory(self) -> Path:
        """Return the directory of its results."""
        return RESULTS / self.name

    @property
    def data(self) -> Path:
        """Return the directory of its prepared data."""
        return RESULTS / "data" / self.dataset

    @property
    def model(self) -> Path:
        """Return the directory of what its base model is."""
        return MODELS / self.prepared.model

    def read(self, path: Path, reader: Callable[[Path, str], Any] = read_object) -> Any:
        """Return the JSON in an output. Raises UserError if it is missing, or not the file that was recorded."""
        value = reader(path, command(self.name))
        expected = self.hashes.get(path.as_posix())
        if expected and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != expected:
            raise UserError(f"{path}: is not the file that {RECORD} lists; restore it: `dvc checkout --force {path}`")
        return value


def finished_run(name: str) -> FinishedRun:
    """Return a run of the project in the working directory.

    Raises UserError if there is no such run, it has not ended well, or its results are those of other settings or code.
    """
    config = load(CONFIG)
    if name not in config.all_runs:
        raise UserError(f"--run {shown(name)}: {CONFIG} has no such run; write one of {', '.join(config.all_runs)}")
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
    """Return the code fingerprints that the run's stages have now."""
    now = codes(run.resolved)
    of_run = run.resolved.runs[run.name]
    of_shared = {stage: now.shared[getattr(of_run, kind)][stage] for kind, stage in SHARED_STAGES._asdict().items()}
    return {**now.named, **now.runs[run.name], **of_shared}


def command(run: str) -> str:
    """Return the command that finishes a run, and has its settings where DVC reads them."""
    return f"snakemake --profile profiles/local {RESULTS / 'config.json'} {RESULTS / run / 'accepted.json'}"


def remedy(run: str) -> str:
    """Return what to do about a run that is not finished."""
    return f"run `{command(run)}`"


def _gate_failure(run: FinishedRun) -> str | None:
    """Return one line if the run has come to its gate and did not pass it."""
    difference, gate = run.directory / "metrics/difference.json", run.settings.accept.fail_if
    if gate is None or not difference.is_file():
        return None
    try:
        failure = parse(gate).failure(read_object(difference, "zerolora report"))
    except KeyError:  # accept says which metrics there are
        return None
    if failure is None:
        return None
    return (
        f"run {run.name} did not pass its gate, evaluate.fail_if: {failure}; change what it was trained on, or the gate"
    )


def _recorded_stages(run: FinishedRun) -> dict[str, dict[str, Any]]:
    """Return the stages of the record that made the run's results, its data, its base model and what it is compared
    with, by name."""
    if not RECORD.is_file():
        return {}
    shared = {RESULTS / getattr(run.settings, name) for name in Shared._fields}
    folders = {run.directory, run.data, run.model, RESULTS / "base" / run.dataset, *shared}

    def is_of_run(paths: list[Path]) -> bool:
        if not any(path.is_relative_to(folder) for path in paths for folder in folders):
            return False
        # The record keeps tasks that the config no longer has.
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
