"""The statement of a rebuild: a test result of in-toto, in which each product that came out equal is a passed test.

PASSED is equal to the byte, WARNED within bounds, FAILED different. What in-toto's predicate has no place for is in its
key `zerolora_rebuild`. The reasons that `zerolora rebuild` found stay in its rebuild.json: they may quote rows.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolora import json_file
from zerolora.errors import UserError, shown
from zerolora.evidence import statement
from zerolora.evidence.machine_words import MachineKeys, in_words
from zerolora.evidence.statement import LARGEST, REMEDY, TEST_RESULT, Digests, Sha256, Statement
from zerolora.json_kinds import Flag, JsonObject, Null, Number, Text, check
from zerolora.model.manifest import is_weight
from zerolora.units import counted

DETAILS = "zerolora_rebuild"
RESULTS = {"equal to the byte": "PASSED", "equal within bounds": "WARNED", "different": "FAILED"}
"""in-toto's word for each verdict of `zerolora rebuild`."""
VERDICTS = {result: verdict for verdict, result in RESULTS.items()}
FILES = ("results/", "work/merged/")
"""Folders of products that are files; checkpoints and orders of rows have digests of their own kind."""
COMMIT = re.compile("[0-9a-f]{40,64}")
AGAIN = "write it again with `zerolora rebuild`"


class ComparedProduct(JsonObject):
    """A product of the source and of the rebuild; no digest where one of them lacks it."""

    path: Text
    original: Sha256 | Null = None
    rebuilt: Sha256 | Null = None
    equal: Flag
    note: Text = ""
    """How it was compared, if not byte by byte."""


class RebuildKeys(JsonObject):
    """A rebuild.json."""

    repository: Text | Null = None
    revision: Text | Null = None
    version: Text
    machine: Text | MachineKeys
    verdict: Literal["equal to the byte", "equal within bounds", "different"]
    products: Annotated[list[ComparedProduct], Field(min_length=1)]
    seconds: Number


class DetailKeys(JsonObject):
    """What a rebuild's statement has besides in-toto's keys."""

    machine: Text | MachineKeys


class ResultKeys(JsonObject):
    """in-toto's test result."""

    result: Literal["PASSED", "WARNED", "FAILED"]
    passedTests: list[Text] = Field([])
    warnedTests: list[Text] = Field([])
    failedTests: list[Text] = Field([])
    zerolora_rebuild: DetailKeys


@dataclass(frozen=True)
class Rebuild:
    """What a statement says of a rebuild."""

    verdict: str
    machine: str
    files: Digests
    """sha256 of all files that were compared, by name."""
    equal: frozenset[str]
    """sha256 of those that came out the same."""

    def has_weights_of(self, files: Digests) -> bool:
        """Return whether the rebuild compared all weights among these files."""
        return not self._missing(files)

    def check_about(self, files: Digests, path: Path) -> None:
        """Raise UserError unless the rebuild compared all weights among these files."""
        if missing := self._missing(files):
            raise UserError(f"{path}: is a statement of another model: it does not name this {missing}; {REMEDY}")

    def _missing(self, files: Digests) -> str | None:
        """Return a file of weights that was not compared; without files of weights, any file."""
        known = set(self.files.values())
        # Of the model itself: a folder may hold checkpoints.
        weights = {name: digest for name, digest in files.items() if is_weight(name) and "/" not in name} or files
        return next((name for name, digest in sorted(weights.items()) if digest not in known), None)

    def equal_among(self, files: Digests) -> str:
        """Return in words how many of these files came out the same."""
        return f"{sum(digest in self.equal for digest in files.values())} of {counted(len(files), 'file')}"


def statement_of(path: Path) -> bytes:
    """Return the statement of a rebuild.json.

    Raises UserError if it is none, its verdict contradicts its digests, or it compared no file.
    """
    value = json_file.read_foreign(path, AGAIN, LARGEST)
    check(value, RebuildKeys, path, AGAIN)
    subjects, passed, others = {}, [], {}
    for product in value["products"]:
        name, original, rebuilt = product["path"], product.get("original"), product.get("rebuilt")
        if product["equal"] != (original is not None and original == rebuilt):
            raise UserError(f"{path}: equal of {name} contradicts its two digests; {AGAIN}")
        if product["equal"]:
            passed.append(name)
        else:
            others[name] = rebuilt
        # The digest of another product is not the sha256 of a file, nor that of one that was compared in part.
        if original is not None and name.startswith(FILES) and not (product["equal"] and product.get("note")):
            subjects[name] = original
    if not subjects:
        raise UserError(f"{path}: compared no file of the results, so it states nothing of them; rebuild the whole run")
    result = RESULTS[value["verdict"]]
    predicate = {
        "result": result,
        "configuration": [{"uri": f"pkg:generic/zerolora@{value['version']}"}, *_source(value)],
        "passedTests": sorted(passed),
        "warnedTests": sorted(others) if result == "WARNED" else [],
        "failedTests": sorted(others) if result != "WARNED" else [],
        DETAILS: {"machine": value["machine"], "seconds": value["seconds"], "rebuilt": others},
    }
    content = statement.written(subjects, TEST_RESULT, predicate)
    read(statement.parsed(path, content), path)
    return content


def _source(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was rebuilt: a repository of the hub, or a commit of the project; nothing for a directory."""
    repository, revision = value.get("repository") or "", value.get("revision") or ""
    if repository and not PurePath(repository).is_absolute():
        return [{"uri": f"hf://{repository}"}]
    return [{"name": "project", "digest": {"gitCommit": revision}}] if COMMIT.fullmatch(revision) else []


def read(found: Statement, path: Path) -> Rebuild:
    """Return what the statement in file `path` says. Raises UserError if it is of no rebuild, or contradicts itself."""
    if found.kind != TEST_RESULT or DETAILS not in found.predicate:
        raise UserError(
            f"{path}: is no statement of a rebuild, but of type {shown(found.kind)}; `zerolora attest` writes one"
        )
    check(found.predicate, ResultKeys, path, REMEDY)
    result, passed = found.predicate["result"], set(found.predicate.get("passedTests", []))
    others = found.subjects.keys() - passed
    others |= {name for key in ("warnedTests", "failedTests") for name in found.predicate.get(key, [])}
    if result == "PASSED" and others:
        raise UserError(f"{path}: says {VERDICTS[result]}, but not of {min(others)}; {REMEDY}")
    return Rebuild(
        VERDICTS[result],
        in_words(found.predicate[DETAILS]["machine"]),
        found.subjects,
        frozenset(digest for name, digest in found.subjects.items() if name in passed - others),
    )


def headline(rebuilds: Iterable[Rebuild]) -> str | None:
    """Return `rebuilt on 2 machines: equal to the byte`; None if no rebuild was. A machine counts once."""
    machines = {each.machine for each in rebuilds if each.verdict == "equal to the byte"}
    return f"rebuilt on {counted(len(machines), 'machine')}: equal to the byte" if machines else None
