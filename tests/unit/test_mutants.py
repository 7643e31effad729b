"""Mutated files of every kind are refused in one line, or read as another reader reads them. A fork a case: 10 s."""

import pytest

from benchmarks.mutants import BAD, campaign, kinds

CASES = 8
KINDS = {kind.name: kind for kind in kinds()}


@pytest.mark.parametrize("name", KINDS)
def test_no_mutant_ends_badly(name: str) -> None:
    (ends,) = campaign(CASES, 20261125, [KINDS[name]]).values()
    assert sum(ends.values()) == CASES and not ends.keys() & set(BAD)
