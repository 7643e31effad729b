"""A record of what each finished job wrote: size, time and sha256 of every file.

Snakemake watches the files that a rule declares, by time; the adapter or the merged weights beside a `manifest.json` it
does not watch at all. The record holds, for each stage, the declared outputs and every file that a manifest among them
lists. A file whose size and time are those of the record is taken to be unchanged; any other is hashed. So a run with
nothing to do costs one `stat` a file.
"""

import json
import os
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from zerolora.files import MANIFEST, sha256, write_text

RECORD = Path(".snakemake/outputs.json")
IGNORED = (".snakemake_timestamp", ".*.tmp", "*.pyc")  # as .dvcignore has them


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


def record(stage: str, declared: list[str]) -> None:
    """Record the files that a job of `stage` has just written: its declared outputs and what their manifests list."""
    stages = _read()
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
    stages[stage] = {"declared": declared, "directories": directories, "files": files}
    _write(stages)


def check(only: str | None = None) -> Findings:
    """Compare the recorded files, of every stage or of one, with those on disk."""
    stages = _read()
    found = Findings()
    refreshed = False
    for stage, entry in stages.items():
        if only not in (None, stage):
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
    stages = _read()
    for path, entry in stages[stage]["files"].items():
        entry[:2] = _stat(Path(path))
    _write(stages)


def recorded() -> set[str]:
    """Return the stages that have a record."""
    return set(_read())


def remove_declared(stage: str) -> None:
    """Delete a stage's declared outputs and its record, so that Snakemake runs it again."""
    stages = _read()
    for path in stages.pop(stage, {"declared": []})["declared"]:
        Path(path).unlink(missing_ok=True)
    _write(stages)


def forget(stage: str) -> None:
    """Drop the record of a stage that the config no longer has."""
    stages = _read()
    stages.pop(stage, None)
    _write(stages)


def _listed(manifest: Path) -> dict[str, Any]:
    """Return the entries of a manifest whose files lie beside it; weights may lie elsewhere."""
    value = json.loads(manifest.read_text(encoding="utf-8"))
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
    try:
        value = json.loads(RECORD.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(stages: dict[str, Any]) -> None:
    write_text(RECORD, json.dumps(stages, indent=0, sort_keys=True))
