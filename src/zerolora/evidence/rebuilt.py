"""The statement of a rebuild: a test result of in-toto, in which each product that came out equal is a passed test.

PASSED is equal to the byte, WARNED within bounds, FAILED different. What in-toto's predicate has no place for is in its
key `zerolora_rebuild`. The reasons that `zerolora rebuild` found stay in its rebuild.json: they may quote rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolora import json_file
from zerolora.errors import UserError
from zerolora.evidence import statement
from zerolora.evidence.statement import LARGEST, REMEDY, TEST_RESULT, Digests, Sha256, Statement
from zerolora.files import canonical
from zerolora.json_kinds import Flag, JsonObject, Null, Number, Text, check
from zerolora.model.manifest import is_weight
from zerolora.units import counted

DETAILS = "zerolora_rebuild"
RESULTS = {"equal to the byte": "PASSED", "equal within bounds": "WARNED", "different": "FAILED"}
"""in-toto's word for each verdict of `zerolora rebuild`."""
VERDICTS = {result: verdict for verdict, result in RESULTS.items()}
AGAIN = "write it again with `zerolora rebuild`"


class ComparedProduct(JsonObject):
    """A file of the source and of the rebuild; no sha256 where one of them lacks it."""

    path: Text
    sha256: Sha256 | Null = None
    rebuilt_sha256: Sha256 | Null = None
    equal: Flag


class RebuildKeys(JsonObject):
    """A rebuild.json."""

    source: Text
    repository: Text | Null = None
    revision: Text | Null = None
    version: Text
    machine: Text | dict[str, Any]
    verdict: Literal["equal to the byte", "equal within bounds", "different"]
    products: Annotated[list[ComparedProduct], Field(min_length=1)]
    seconds: Number


class DetailKeys(JsonObject):
    """What a rebuild's statement has besides in-toto's keys."""

    machine: Text | dict[str, Any]


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
        weights = {name: digest for name, digest in files.items() if is_weight(name)} or files
        return next((name for name, digest in sorted(weights.items()) if digest not in known), None)

    def equal_among(self, files: Digests) -> str:
        """Return in words how many of these files came out the same."""
        return f"{sum(digest in self.equal for digest in files.values())} of {counted(len(files), 'file')}"


def statement_of(path: Path) -> bytes:
    """Return the statement of a rebuild.json. Raises UserError if it is none, or its verdict contradicts its hashes."""
    value = json_file.read_foreign(path, AGAIN, LARGEST)
    check(value, RebuildKeys, path, AGAIN)
    passed, others, different = [], [], {}
    for product in value["products"]:
        name, digest, rebuilt = product["path"], product.get("sha256"), product.get("rebuilt_sha256")
        if product["equal"] != (digest is not None and digest == rebuilt):
            raise UserError(f"{path}: equal of {name} contradicts its two sha256; {AGAIN}")
        if product["equal"]:
            passed.append(name)
        else:
            others.append(name)
            different[name] = rebuilt
    subjects = {each["path"]: each["sha256"] for each in value["products"] if each.get("sha256")}
    if PurePath(source := value["source"]).is_absolute() or source.startswith("~"):
        source = PurePath(source).name
    configuration: dict[str, Any] = {"name": value.get("repository") or source}
    if revision := value.get("revision"):
        configuration["digest"] = {"gitCommit": revision}
    result = RESULTS[value["verdict"]]
    content = statement.written(
        subjects,
        TEST_RESULT,
        {
            "result": result,
            "configuration": [configuration],
            "passedTests": sorted(passed),
            "warnedTests": sorted(others) if result == "WARNED" else [],
            "failedTests": sorted(others) if result != "WARNED" else [],
            DETAILS: {
                "machine": value["machine"],
                "version": value["version"],
                "seconds": value["seconds"],
                "rebuilt": different,
            },
        },
    )
    read(statement.parsed(path, content), path)
    return content


def read(found: Statement, path: Path) -> Rebuild:
    """Return what the statement in file `path` says. Raises UserError if it is of no rebuild, or contradicts itself."""
    if found.kind != TEST_RESULT or DETAILS not in found.predicate:
        raise UserError(f"{path}: is no statement of a rebuild; `zerolora attest` writes one")
    check(found.predicate, ResultKeys, path, REMEDY)
    result, passed = found.predicate["result"], found.predicate.get("passedTests", [])
    for name in passed:
        if name not in found.subjects:
            raise UserError(f"{path}: passedTests has {name}, which is none of its files; {REMEDY}")
    if result == "PASSED" and (others := found.subjects.keys() - set(passed)):
        raise UserError(f"{path}: says {VERDICTS[result]}, but not of {min(others)}; {REMEDY}")
    machine = found.predicate[DETAILS]["machine"]
    return Rebuild(
        VERDICTS[result],
        machine if isinstance(machine, str) else _in_words(machine),
        found.subjects,
        frozenset(found.subjects[name] for name in passed),
    )


def _in_words(machine: Mapping[str, Any]) -> str:
    parts = (value for _, value in sorted(machine.items()) if value)
    return ", ".join(each if isinstance(each, str) else canonical(each) for each in parts)


def headline(rebuilds: Iterable[Rebuild]) -> str | None:
    """Return `rebuilt on 2 machines: equal to the byte`; None if no rebuild was. A machine counts once."""
    machines = {each.machine for each in rebuilds if each.verdict == "equal to the byte"}
    return f"rebuilt on {counted(len(machines), 'machine')}: equal to the byte" if machines else None
