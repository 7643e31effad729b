"""A record of what each finished job wrote: size, time and sha256 of every file.

Snakemake watches the files that a rule declares, by time; the adapter or the merged weights beside a `manifest.json` it
does not watch at all. The record holds, for each stage, the declared outputs and every file that a manifest among them
lists. A file whose size and time are those of the record is taken to be unchanged; any other is hashed. So a run with
nothing to do costs one `stat` a file.

The record has a line of JSON for each job as it starts, and one as it ends; of several lines of one stage the last one
holds. So a job among thousands adds two lines, and a line that a kill cut short is the only one lost. A stage whose
last line is of a start was killed: it runs again, and what it left is never called damaged.
"""

import json
import os
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST, sha256, write_text
from zerolora.model import foreign

RECORD = Path(".snakemake/outputs.jsonl")
BEGUN = "begun"
IGNORED = (".snakemake_timestamp", ".*.tmp", "*.pyc")  # as .dvcignore has them


@dataclass
class _Kept:
    """The record as last read or written by this process."""

    stamp: tuple[int, int, int] | None = None
    stages: dict[str, Any] = field(default_factory=dict)
    lines: int = 0


_kept = _Kept()


@dataclass
class Findings:
    """What is not as its job left it: paths by stage."""

    changed: dict[str, list[str]] = field(default_factory=dict)
    added: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.missing)

    @property
    def stages(self) -> set[str]:
        """The stages with any finding."""
        return self.changed.keys() | self.added.keys() | self.missing.keys()

    def drop(self, stage: str) -> None:
        """Leave out a stage."""
        for kind in (self.changed, self.added, self.missing):
            kind.pop(stage, None)


def begin(stage: str, declared: list[str]) -> None:
    """Record that a job of `stage` starts, before it touches its declared outputs."""
    _set(stage, {BEGUN: declared})


def begun() -> dict[str, list[str]]:
    """Return the declared outputs of the stages whose job started and has not ended well since."""
    return {stage: entry[BEGUN] for stage, entry in _read().items() if BEGUN in entry}


def record(stage: str, declared: list[str]) -> None:
    """Record the files that a job of `stage` has just written: its declared outputs and what their manifests list."""
    files: dict[str, list[Any]] = {}
    directories = []
    for output in declared:
        path = Path(output)
        if path.name == MANIFEST:
            directories.append(str(path.parent))
            for name, entry in _listed(path).items():
                files[str(path.parent / name)] = [*_stat(path.parent / name), entry["sha256"]]
    for output in declared:
        if output not in files:
            files[output] = [*_stat(Path(output)), sha256(Path(output))]
    _set(stage, {"declared": declared, "directories": directories, "files": files})


def check(only: str | None = None) -> Findings:
    """Compare the recorded files, of every stage or of one, with those on disk."""
    stages = _read()
    found = Findings()
    refreshed = _kept.lines > 2 * len(stages)
    for stage in stages if only is None else stages.keys() & {only}:
        entry = stages[stage]
        if BEGUN in entry:
            continue
        for path, (size, time, digest) in entry["files"].items():
            try:
                now = _stat(Path(path))
            except (FileNotFoundError, NotADirectoryError):
                found.missing.setdefault(stage, []).append(path)
                continue
            if now == (size, time):
                continue
            if now[0] == size and sha256(Path(path)) == digest:
                entry["files"][path] = [*now, digest]
                refreshed = True
            else:
                found.changed.setdefault(stage, []).append(path)
        for directory in entry["directories"]:
            added = _files_below(directory) - entry["files"].keys()
            if added:
                found.added.setdefault(stage, []).extend(sorted(added))
    if refreshed:
        _write(stages)
    return found


def restat(stage: str) -> None:
    """Take the sizes and times of a stage's files as they are now, after DVC has hashed and linked them."""
    entry = _read()[stage]
    for path, file in entry["files"].items():
        file[:2] = _stat(Path(path))
    _set(stage, entry)


def recorded() -> set[str]:
    """Return the stages that have a record of a job that ended well."""
    return {stage for stage, entry in _read().items() if BEGUN not in entry}


def hashes() -> dict[str, tuple[tuple[int, int], str]]:
    """Return size and time, and sha256, of each recorded file."""
    return {
        path: ((size, time), digest)
        for entry in _read().values()
        for path, (size, time, digest) in entry.get("files", {}).items()
    }


def declared() -> dict[str, str]:
    """Return the stage of each declared output of the stages that have such a record."""
    return {path: stage for stage, entry in _read().items() if BEGUN not in entry for path in entry["declared"]}


def remove_declared(stage: str) -> None:
    """Delete a stage's declared outputs and its record, so that Snakemake runs it again."""
    entry = _read().get(stage, {})
    for path in entry.get("declared", entry.get(BEGUN, [])):
        Path(path).unlink(missing_ok=True)
    _set(stage, None)


def forget(stage: str) -> None:
    """Drop the record of a stage that the config no longer has."""
    _set(stage, None)


def _listed(manifest: Path) -> dict[str, Any]:
    """Return the entries of a manifest whose files lie beside it; weights may lie elsewhere."""
    try:
        value = foreign.manifest(manifest, "snakemake all")
    except UserError:  # damaged: its own hash says so
        return {}
    if "path" in value and Path(value["path"]).resolve() != manifest.parent.resolve():
        return {}
    return {name: entry for name, entry in value.get("files", {}).items() if (manifest.parent / name).is_file()}


def _files_below(directory: str) -> set[str]:
    found: set[str] = set()
    for entry in os.scandir(directory) if Path(directory).is_dir() else ():
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                found |= _files_below(entry.path)
        elif not any(fnmatch(entry.name, pattern) for pattern in IGNORED):
            found.add(entry.path)
    return found


def _stat(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _read() -> dict[str, Any]:
    """Return the record; one that is gone or broken counts as empty, and DVC's hashes are then asked."""
    stamp = _stamp()
    if stamp is None or stamp != _kept.stamp:
        _kept.stages, _kept.lines, broken = {}, 0, False
        text = RECORD.read_text(encoding="utf-8", errors="replace") if stamp else ""
        for line in text.splitlines():
            try:
                stage, entry = json.loads(line)
            except (ValueError, TypeError):
                stage, entry = None, {}
            if not isinstance(stage, str) or not _is_entry(entry):
                broken = True
                continue
            _kept.lines += 1
            _keep(stage, entry)
        _kept.stamp = stamp
        if broken:  # a line added behind it would be lost as well
            _write(_kept.stages)
    return _kept.stages


def _is_entry(entry: Any) -> bool:
    """Tell whether a value of JSON has the shape that `begin`, `record` or `forget` writes."""
    match entry:
        case None:
            return True
        case {"begun": declared, **rest} if not rest:
            return _are_texts(declared)
        case {"declared": declared, "directories": directories, "files": dict(files)}:
            return _are_texts(declared) and _are_texts(directories) and all(map(_is_file, files.values()))
    return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_file(value: Any) -> bool:
    match value:
        case [int(), int(), str()]:
            return True
    return False


def _set(stage: str, entry: dict[str, Any] | None) -> None:
    """Set the entry of a stage; None removes it."""
    _read()
    _keep(stage, entry)
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps([stage, entry]) + "\n")
    _kept.lines += 1
    _kept.stamp = _stamp()


def _keep(stage: str, entry: dict[str, Any] | None) -> None:
    if entry is None:
        _kept.stages.pop(stage, None)
    else:
        _kept.stages[stage] = entry


def _write(stages: dict[str, Any]) -> None:
    write_text(RECORD, "".join(json.dumps([stage, entry]) + "\n" for stage, entry in sorted(stages.items())))
    _kept.stages, _kept.lines, _kept.stamp = stages, len(stages), _stamp()


def _stamp() -> tuple[int, int, int] | None:
    try:
        status = RECORD.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
