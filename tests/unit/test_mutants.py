"""Mutated files of every kind are refused in one line or read as another reader reads them; each case is a fork."""

import pytest

from benchmarks.mutants import BAD, campaign, kinds

CASES = 8
KINDS = {kind.name: kind for kind in kinds()}


@pytest.mark.parametrize("name", KINDS)
def test_mutated_files_are_refused_or_read_right(name: str) -> None:
    (ends,) = campaign(CASES, 20261125, [KINDS[name]]).values()
    assert sum(ends.values()) == CASES and not ends.keys() & set(BAD)
