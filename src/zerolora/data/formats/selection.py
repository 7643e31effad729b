"""Which rows of a source are kept (`where`), and which of two answers is the better one (`better`)."""

from typing import Any, Literal

from zerolora.config.row_sections import COMPARISON, Better, Wanted
from zerolora.data.example import BadRow
from zerolora.data.formats.form import value_at
from zerolora.data.formats.reading import Reading
from zerolora.data.formats.row_values import factor_of
from zerolora.errors import shown
from zerolora.yaml_file import written

COMPARED = {
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}
OPPOSITE = {"<": ">", "<=": ">", ">": "<", ">=": "<"}


def selected(value: dict[str, Any], reading: Reading) -> bool:
    """Return whether `where` keeps a row. Raises BadRow if it compares a column that is no number."""
    return all(is_wanted(value_at(value, column), wanted, column) for column, wanted in reading.where.items())


def is_wanted(held: Any, wanted: Wanted, column: str) -> bool:
    """Return whether a value is in a list, or satisfies a comparison; null satisfies none.

    A text equals a number or a truth that it spells, since all cells of a CSV file are texts. Raises BadRow for a
    comparison with another text.
    """
    if isinstance(wanted, list):
        return any(_equal(held, each) for each in wanted)
    operator, bound = _parts(wanted)
    if held is None or held == "":
        return False
    return bool(COMPARED[operator](_number(held, column, wanted), bound))


def is_disjoint(one: dict[str, Wanted], other: dict[str, Wanted]) -> bool:
    """Return whether no row is kept by both, since they list different values of a column."""
    for column in one.keys() & other.keys():
        ours, theirs = one[column], other[column]
        listed = isinstance(ours, list) and isinstance(theirs, list)
        if listed and not any(_equal(each, held) for each in ours for held in theirs):
            return True
    return False


def _equal(held: Any, wanted: Any) -> bool:
    if isinstance(held, str) and not isinstance(wanted, str):
        return held.strip().lower() == written(wanted).lower() or (wanted is None and not held.strip())
    return isinstance(held, bool) == isinstance(wanted, bool) and bool(held == wanted)


def _parts(comparison: str) -> tuple[str, float]:
    match = COMPARISON.fullmatch(comparison)
    assert match
    return match[1], float(match[2])


def _number(held: Any, column: str, wanted: Any) -> float:
    number = None if isinstance(held, bool) else factor_of(held)
    if number is None:
        raise BadRow(f"{column} is {shown(held)}, and {shown(wanted)} compares numbers; correct it, or list its values")
    return number


def better_answer(value: dict[str, Any], better: Better) -> Literal["first", "second", "tie"]:
    """Return which answer of a pair is the better one: the first is that in the column of `chosen`.

    Raises BadRow for a value of which the config does not say it.
    """
    if better.scores:
        first, second = (_number(value_at(value, column), column, "better.scores") for column in better.scores)
        return "tie" if first == second else "first" if first > second else "second"
    column = better.column or ""
    held = value_at(value, column)
    assert better.first is not None
    if is_wanted(held, better.tie, column):
        return "tie"
    if is_wanted(held, better.first, column):
        return "first"
    if better.second is None:
        assert isinstance(better.first, str)
        operator, bound = _parts(better.first)
        if held is not None and COMPARED[OPPOSITE[operator]](_number(held, column, better.first), bound):
            return "second"
        if held is not None and _number(held, column, better.first) == bound:
            return "tie"
    elif is_wanted(held, better.second, column):
        return "second"
    raise BadRow(
        f"{column} is {shown(held)}, and better does not say which answer that prefers; add it to better.first, second "
        "or tie, or keep other rows by where"
    )
