"""Delta debugging: which of the changes between a good and a bad state are enough to make the good one bad.

A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28, 2002, 183-200 (ddmin), from
coarse to fine as in G. Misherghi and Z. Su, HDD: Hierarchical Delta Debugging, ICSE 2006. A state is the set of changes
that it has. It knows nothing of what a change is, nor how a state is tried.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

State = frozenset[Hashable]
"""Changes that are applied to the good state."""
Test = Callable[[State], bool]
"""Whether a state is known to be bad. False also for one that cannot be tried, or whose result is not clear."""


@dataclass(frozen=True)
class Atom:
    """Changes that are tried together."""

    name: str
    changes: State
    parts: tuple["Atom", ...] = ()
    """Smaller atoms with the same changes; none if it cannot be split."""
    halves: bool = False
    """Whether it is split only while one of its parts is bad by itself, as rows are: a loss that is spread over many of
    them has no smallest set, and ddmin would try a number of states that grows with their square to find one."""


@dataclass(frozen=True)
class Cause:
    """Atoms that make the good state bad, none of which can be left out."""

    atoms: tuple[Atom, ...]

    @property
    def changes(self) -> State:
        """All of their changes."""
        return union(self.atoms)


@dataclass(frozen=True)
class Price:
    """The number of states that a search tries."""

    single: int
    """At most, if one atom is the only cause."""
    most: int
    """At most, whatever the causes are (Zeller and Hildebrandt, section 3.2: n^2 + 3 n for n atoms), of the first
    cause."""


def union(atoms: Iterable[Atom]) -> State:
    """Return the changes of all atoms."""
    return frozenset[Hashable]().union(*(atom.changes for atom in atoms))


def causes(atoms: Sequence[Atom], is_bad: Test) -> list[Cause]:
    """Return the causes that a state with all atoms has, the first one first; `is_bad` of no changes is False, of all
    True.

    What is left when a cause is taken out of the bad state is searched again as long as it is bad: two causes may each
    be enough. A cause of several atoms is one that none of them is by itself.
    """
    found: list[Cause] = []
    left = list(atoms)
    while left and (not found or is_bad(union(left))):
        cause = _narrowed(minimal(left, is_bad), is_bad)
        found.append(cause)
        left = [rest for atom in left for rest in _without(atom, cause.changes)]
    return found


def minimal(atoms: Sequence[Atom], is_bad: Test, base: State = frozenset()) -> list[Atom]:
    """Return atoms that are bad together over `base`, of which none can be left out, among some that are (ddmin)."""
    current, count = list(atoms), 2
    while len(current) > 1:
        parts = _split(current, count)
        smaller = next((part for part in parts if is_bad(base | union(part))), None)
        if smaller is not None:
            current, count = smaller, 2
            continue
        if count > 2:  # of two parts, the rest is the other one
            rests = ([atom for atom in current if atom not in part] for part in parts)
            smaller = next((rest for rest in rests if is_bad(base | union(rest))), None)
            if smaller is not None:
                current, count = smaller, max(count - 1, 2)
                continue
        if count >= len(current):
            break
        count = min(2 * count, len(current))
    return current


def price(atoms: Sequence[Atom]) -> Price:
    """Return what a search of these atoms takes."""
    deepest = max((_depth(atom) for atom in atoms), default=0)
    wide = sum(len(atom.parts) ** 2 + 3 * len(atom.parts) if not atom.halves else _depth(atom) for atom in atoms)
    # After the search: without the cause, is the rest still bad?
    return Price(_halvings(len(atoms)) + deepest + 1, len(atoms) ** 2 + 3 * len(atoms) + wide + 1)


def _narrowed(atoms: Sequence[Atom], is_bad: Test) -> Cause:
    """Split the atoms of a cause as far as they can be, one after the other."""
    done: list[Atom] = []
    waiting = list(atoms)
    while waiting:
        atom, *waiting = waiting
        base = union([*done, *waiting])
        if atom.halves:
            half = next((part for part in atom.parts if is_bad(base | part.changes)), None)
            if half is None:
                done.append(atom)
            else:
                waiting.insert(0, half)
        elif atom.parts:
            waiting = [*minimal(atom.parts, is_bad, base), *waiting]
        else:
            done.append(atom)
    return Cause(tuple(done))


def _without(atom: Atom, changes: State) -> list[Atom]:
    """Return what is left of an atom without some changes, in atoms that are as large as they can be."""
    if not atom.changes & changes:
        return [atom]
    return [rest for part in atom.parts for rest in _without(part, changes)] if atom.changes - changes else []


def _split(atoms: Sequence[Atom], count: int) -> list[list[Atom]]:
    ends = [round(len(atoms) * number / count) for number in range(count + 1)]
    return [list(atoms[start:end]) for start, end in pairwise(ends) if start < end]


def _halvings(count: int) -> int:
    """Return the states that ddmin tries at most to find one atom: both halves of each."""
    return 2 * math.ceil(math.log2(count)) if count > 1 else 0


def _depth(atom: Atom) -> int:
    """Return the states that it takes at most to split an atom to a single cause in it."""
    if atom.halves:
        return 2 + max(_depth(part) for part in atom.parts) if atom.parts else 0
    return _halvings(len(atom.parts)) + max((_depth(part) for part in atom.parts), default=0)
