"""The corpus of row layouts and the kinds of dangerous values are of the form that other tests expect."""

import json
from pathlib import Path
from typing import Any

import pytest
from dangerous_values import DANGEROUS, HARMLESS, Kind, answer, prompt, second_answer

LAYOUTS = Path(__file__).parent / "layouts"
NUMBERS = {"popular": 80, "unseen": 20}
ROWS = 300


def layouts(name: str) -> list[dict[str, Any]]:
    """Return the layouts of `<name>.jsonl`."""
    lines = (LAYOUTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


ALL = [layout for name in NUMBERS for layout in layouts(name)]


@pytest.mark.parametrize(("name", "number"), NUMBERS.items())
def test_number_of_layouts(name: str, number: int) -> None:
    assert len(layouts(name)) == number


def test_names_are_unique() -> None:
    names = [layout["name"] for layout in ALL]

    assert len(set(names)) == len(names)


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: str(layout["name"]))
def test_form_of_a_layout(layout: dict[str, Any]) -> None:
    assert set(layout) == {"name", "source", "looked_up", "goal", "rows"}
    assert layout["goal"] in {"sft", "dpo", "kto"}
    assert layout["looked_up"] is (layout["source"] != "memory")
    assert "/" in layout["source"] or layout["source"] == "memory"


def kinds(value: Any) -> set[str]:
    """Return the path and JSON kind of each leaf of `value` that is not null, list items under one path."""
    if isinstance(value, dict):
        return {f".{key}{kind}" for key, part in value.items() for kind in kinds(part)}
    if isinstance(value, list):
        return {f"[]{kind}" for part in value for kind in kinds(part)}
    return set() if value is None else {f":{type(value).__name__}"}


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: str(layout["name"]))
def test_rows_of_a_layout(layout: dict[str, Any]) -> None:
    rows = layout["rows"]

    assert len(rows) == 6
    assert len({json.dumps(row) for row in rows}) == 6
    assert all(list(row) == list(rows[0]) for row in rows)
    of_path = [kind.rsplit(":", 1) for kind in set().union(*(kinds(row) for row in rows))]
    assert len({path for path, _ in of_path}) == len(of_path), "a path with two kinds of value"


def test_sources_lists_what_is_from_memory() -> None:
    page = (LAYOUTS / "SOURCES.md").read_text(encoding="utf-8")

    named = {layout["name"] for layout in ALL if f"- {layout['name']}\n" in page}
    assert named == {layout["name"] for layout in ALL if not layout["looked_up"]}


def test_number_of_kinds() -> None:
    assert len(DANGEROUS) == 66
    assert len(HARMLESS) == 15
    assert len({kind.name for kind in [*DANGEROUS, *HARMLESS]}) == 81


@pytest.mark.parametrize("kind", [*DANGEROUS, *HARMLESS], ids=lambda kind: kind.name)
def test_values_are_json_and_depend_on_the_row_only(kind: Kind) -> None:
    for values in (kind.usual, kind.odd):
        first, second = ([values(row) for row in range(ROWS)] for _ in range(2))

        assert first == second
        assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize("kind", DANGEROUS, ids=lambda kind: kind.name)
def test_odd_value_is_in_no_ordinary_row(kind: Kind) -> None:
    usual = [kind.usual(row) for row in range(ROWS)]

    assert all(kind.odd(row) not in usual for row in range(ROWS))


def test_some_kinds_are_the_same_in_all_ordinary_rows() -> None:
    steady = [kind.name for kind in DANGEROUS if all(kind.usual(row) == kind.usual(0) for row in range(ROWS))]

    assert len(steady) > 20


def test_texts_of_a_row() -> None:
    texts = [text(row) for text in (prompt, answer, second_answer) for row in range(ROWS)]

    assert len(set(texts)) == 3 * ROWS
