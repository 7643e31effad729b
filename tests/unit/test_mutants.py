"""Mutated files of every kind are refused in one line, or read as another reader reads them. A fork a case: 10 s."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mutants
from benchmarks.mutants import BAD, FileKind, campaign, kinds
from zerolora.errors import UserError

CASES = 8
KINDS = {kind.name: kind for kind in kinds()}


@pytest.mark.parametrize("name", KINDS)
def test_no_mutant_ends_badly(name: str) -> None:
    (ends,) = campaign(CASES, 20261125, [KINDS[name]]).values()
    assert sum(ends.values()) == CASES and not ends.keys() & set(BAD)


def refuses_all_but(sound: bytes, do: Any) -> Any:
    def read(path: Path) -> Any:
        return sound if path.read_bytes() == sound else do()

    return read


def fails() -> None:
    raise KeyError("x")


def two_lines() -> None:
    raise UserError("one\ntwo")


def forever() -> None:
    while True:
        time.process_time()


@pytest.mark.parametrize(
    ("do", "end"),
    [
        (fails, "traceback"),
        (two_lines, "traceback"),
        (lambda: b"other", "another meaning"),
        (lambda: bytearray(3 << 30), "too much memory"),
        (forever, "too slow"),
    ],
)
def test_a_case_that_ends_badly_is_counted(monkeypatch: pytest.MonkeyPatch, do: Any, end: str) -> None:
    monkeypatch.setattr(mutants, "SECONDS", 2)
    kind = FileKind("x", b"some bytes", refuses_all_but(b"some bytes", do), lambda content: content)
    assert campaign(1, 3, [kind]) == {"x": {end: 1}}
