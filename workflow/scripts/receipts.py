"""Receipts: what each finished job was made with, and the sha256 of every file that it read and wrote.

A job that ended well has `results/receipts/<stage>@<name>.json`, an output of its stage in DVC, so that a pull, a
checkout or DVC's run cache bring it with the files that it describes. Both engines go by it: a stage is up to date if
its receipt has today's parameters and code and the present content of its inputs and outputs. Dates decide nothing.

A job that has begun has the receipt {} until it ends well.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST, Stamp, sha256, stamp, write_json, write_text
from zerolora.model import foreign
from zerolora.receipt import Receipt, parse, path_of

HASHES = Path(".snakemake/hashes.json")
IGNORED = (".snakemake_timestamp", ".*.tmp", "*.pyc")  # as .dvcignore has them


@dataclass
class Findings:
    """What is not as its job left it: paths by stage."""

    changed: dict[str, list[str]] = field(default_factory=dict)
    added: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, stage: str) -> None:
        """Leave out a stage."""
        for kind in (self.changed, self.added, self.missing):
            kind.pop(stage, None)


class Hashes:
    """The sha256 of files, computed again only if the stamp of a file has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, str]] = {}
        self._is_changed = False
        self.promised: dict[str, str] = {}
        """Of files that a run would restore."""
        try:
            entries = json.loads(HASHES.read_text(encoding="utf-8"))
            self._known = {path: (tuple(stamp), str(digest)) for path, (stamp, digest) in entries.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._is_changed = True  # a cache alone: all is hashed again

    def of(self, path: str) -> str | None:
        """Return the sha256 of a file; None if there is none."""
        if path in self.promised:
            return self.promised[path]
        now = stamp(path)
        if now is None:
            return None
        known = self._known.get(path)
        if known and known[0] == now:
            return known[1]
        try:
            digest = sha256(Path(path))
        except OSError:
            return None
        self._keep(path, now, digest)
        return digest

    def take(self, path: str, digest: str) -> None:
        """Take the hash that a job has written of a file which it has just made."""
        if (now := stamp(path)) is not None:
            self._keep(path, now, digest)

    def accept_links(self, paths: Iterable[str]) -> None:
        """Keep the hashes of files that DVC has just linked into its cache, which are the same files or copies."""
        for path in paths:
            known, now = self._known.get(path), stamp(path)
            if known and now and known[0] != now and known[0][:2] == now[:2]:
                self._keep(path, now, known[1])

    def save(self) -> None:
        """Write the hashes for the next run."""
        if self._is_changed and HASHES.parent.is_dir():
            write_text(HASHES, json.dumps(self._known))
            self._is_changed = False

    def _keep(self, path: str, now: Stamp, digest: str) -> None:
        self._known[path], self._is_changed = (now, digest), True


class Receipts:
    """The receipts in the project's directory."""

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes
        self._read: dict[str, Receipt | None] = {}

    def of(self, stage: str) -> Receipt | None:
        """Return the receipt of a stage; None without a readable one of a job that ended well."""
        if stage not in self._read:
            self._read[stage] = parse(_text(path_of(stage)))
        return self._read[stage]

    def promise(self, stage: str, receipt: Receipt) -> None:
        """Take the receipt and the files that a run would restore for those that are there."""
        self._read[stage] = receipt
        self.hashes.promised.update(receipt.outputs)

    def void(self, stage: str) -> None:
        """Take a stage for one without a receipt."""
        self._read[stage] = None

    def begin(self, stage: str) -> None:
        """Write the receipt of a job that starts, before it touches its outputs."""
        self._read[stage] = None
        write_json(path_of(stage), {})

    def write(self, stage: str, params: Mapping[str, str], inputs: Iterable[str], declared: Iterable[str]) -> None:
        """Write the receipt of a job that has ended well: its declared outputs, and the files that their manifests
        list."""
        outputs: dict[str, str] = {}
        for path in declared:
            if os.path.basename(path) == MANIFEST:  # noqa: PTH119 (thousands of them)
                for name, entry in _listed(Path(path)).items():
                    file = str(Path(path).parent / name)
                    self.hashes.take(file, entry["sha256"])
                    outputs[file] = entry["sha256"]
            outputs[path] = self.hashes.of(path) or ""
        read = {path: self.hashes.of(path) or "" for path in inputs}
        receipt = Receipt(dict(params), read, outputs)
        write_json(path_of(stage), receipt._asdict() | {"sha256": receipt.digest})
        self._read[stage] = receipt

    def reread(self, stage: str) -> None:
        """Read a receipt again that DVC has restored."""
        self._read.pop(stage, None)

    def check(self, stages: Iterable[str]) -> Findings:
        """Compare the outputs of these stages with their receipts."""
        result = Findings()
        for stage in stages:
            receipt = self.of(stage)
            if receipt is None:
                continue
            for path, digest in receipt.outputs.items():
                now = self.hashes.of(path)
                if now is None:
                    result.missing.setdefault(stage, []).append(path)
                elif now != digest:
                    result.changed.setdefault(stage, []).append(path)
            for folder in receipt.folders:
                if added := files_below(folder) - receipt.outputs.keys():
                    result.added.setdefault(stage, []).extend(sorted(added))
        return result

    def changed_input(self, receipt: Receipt) -> str | None:
        """Return an input that is no longer what a job read; None if each is."""
        return next((path for path, digest in receipt.inputs.items() if self.hashes.of(path) != digest), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _listed(manifest: Path) -> dict[str, Any]:
    """Return the entries of a manifest whose files lie beside it; weights may lie elsewhere."""
    try:
        value = foreign.manifest(manifest, "snakemake all")
    except UserError:  # damaged: its own hash says so
        return {}
    if "path" in value and Path(value["path"]).resolve() != manifest.parent.resolve():
        return {}
    return {name: entry for name, entry in value.get("files", {}).items() if (manifest.parent / name).is_file()}


def files_below(directory: str) -> set[str]:
    """Return the files in a directory and below it, without those that DVC ignores."""
    result: set[str] = set()
    for entry in os.scandir(directory) if Path(directory).is_dir() else ():
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                result |= files_below(entry.path)
        elif not any(fnmatch(entry.name, pattern) for pattern in IGNORED):
            result.add(entry.path)
    return result
