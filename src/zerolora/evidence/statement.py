"""in-toto statements: a claim about files by their sha256. What others wrote is read in bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Predicate
from pydantic import Field

from zerolora import json_file
from zerolora.errors import UserError, shown
from zerolora.files import canonical
from zerolora.json_kinds import Expected, JsonObject, Text, check

TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
LARGEST = 16 << 20
"""Bytes of a statement's file; one of a model in a thousand files has a megabyte."""
REMEDY = "get this statement again from whoever wrote it"

Sha256 = Annotated[
    str,
    Predicate(lambda text: len(text) == 64 and set(text) <= set("0123456789abcdef")),
    Expected("a sha256 of 64 hexadecimal digits"),
]
Digests = Mapping[str, str]
"""sha256 of files by name."""


class FileDigest(JsonObject):
    """Hashes of a file; others than sha256 are ignored."""

    sha256: Sha256


class SubjectKeys(JsonObject):
    """A file that a statement is about."""

    name: Text
    digest: FileDigest


class StatementKeys(JsonObject):
    """A statement."""

    type_: Text = Field(alias="_type")
    subject: Annotated[list[SubjectKeys], Field(min_length=1)]
    predicateType: Text
    predicate: dict[str, Any]


@dataclass(frozen=True)
class Statement:
    """A statement as it was read."""

    subjects: dict[str, str]
    """sha256 by name."""
    kind: str
    """Type of the predicate, an address."""
    predicate: dict[str, Any]


def described(name: str, sha256: str, **more: Any) -> dict[str, Any]:
    """Return in-toto's descriptor of a file."""
    return {"name": name, "digest": {"sha256": sha256}} | more


def written(subjects: Digests, kind: str, predicate: dict[str, Any]) -> bytes:
    """Return a statement as canonical JSON: the same statement has the same bytes."""
    value = {
        "_type": TYPE,
        "subject": [described(name, digest) for name, digest in sorted(subjects.items())],
        "predicateType": kind,
        "predicate": predicate,
    }
    return canonical(value).encode()


def parsed(path: Path, content: bytes) -> Statement:
    """Return the statement in the bytes of file `path`. Raises UserError if it is none, or names a file twice."""
    value = json_file.parsed(path, json_file.decoded(path, content), REMEDY)
    check(value, StatementKeys, path, REMEDY)
    if value["_type"] != TYPE:
        raise UserError(f"{path}: _type is {shown(value['_type'])}; expected {TYPE}; {REMEDY}")
    subjects = {each["name"]: each["digest"]["sha256"] for each in value["subject"]}
    if len(subjects) < len(value["subject"]):
        twice = json_file.repeated(each["name"] for each in value["subject"])
        raise UserError(f"{path}: names {shown(twice)} twice; {REMEDY}")
    return Statement(subjects, value["predicateType"], value["predicate"])
