"""What nothing reads never changes in silence what is learned, for any form and kind of value, anywhere in rows."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from dangerous_values import DANGEROUS, HARMLESS, Kind, answer, prompt, second_answer
from test_prepare import Folder

from zerolora.config.settings import PrepareSettings
from zerolora.config.values import fields
from zerolora.data.example import BadRow
from zerolora.data.formats import FORMS, parse
from zerolora.data.formats.leaves import Unread
from zerolora.data.formats.reading import Reading
from zerolora.data.prepare import prepare
from zerolora.errors import UserError

ROWS = 5
NAMES = [
    *("source", "id", "category", "url", "model", "date", "language", "title", "topic", "metadata", "index", "type"),
    *("quality", "is_correct", "note", "x", "Score", "0", "response_b", "__index_level_0__", "chosen_model", "text_2"),
    *("my column", " leading", "a.b", "meta.source.x", "..", ".", "trailing.", "keep[]", "a[].b", "messages[].y", "[]"),
    *(
        "品質",
        "naïve",
        "Ünïcode",
        "\u200b",
        "emoji 🙂",
        "line\nbreak",
        'quote"',
        "{x}",
        "a: b",
        "#",
        "- x",
        "~",
        "null",
    ),
]
"""Names of columns that no form reads."""


def asked(row: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt(row)}]


def conversation(row: int) -> list[dict[str, Any]]:
    return [*asked(row), {"role": "assistant", "content": answer(row)}]


def spoken(row: int) -> list[dict[str, Any]]:
    return [{"from": "human", "value": prompt(row)}, {"from": "gpt", "value": answer(row)}]


class Case(NamedTuple):
    """Rows of a form, and the column of their messages, if any."""

    form: str
    row: Callable[[int], dict[str, Any]]
    messages: str = ""

    def __str__(self) -> str:
        return f"{self.form}-{self.messages}" if self.messages else self.form


CASES = [
    Case("alpaca", lambda row: {"instruction": prompt(row), "input": "", "output": answer(row)}),
    Case("prompt", lambda row: {"prompt": prompt(row), "completion": answer(row)}),
    Case("prompt", lambda row: {"prompt": asked(row), "completion": conversation(row)[1:]}, "completion"),
    Case("messages", lambda row: {"messages": conversation(row)}, "messages"),
    Case("sharegpt", lambda row: {"conversations": spoken(row)}, "conversations"),
    Case("text", lambda row: {"text": f"{prompt(row)} {answer(row)}"}),
    Case("tokens", lambda row: {"input_ids": [1, 100 + row, 2]}),
    Case("preference", lambda row: {"prompt": prompt(row), "chosen": answer(row), "rejected": second_answer(row)}),
    Case(
        "preference",
        lambda row: {
            "chosen": conversation(row),
            "rejected": [*asked(row), {"role": "assistant", "content": second_answer(row)}],
        },
        "chosen",
    ),
    Case(
        "preference",
        lambda row: {
            "prompt": prompt(row),
            "answers": [{"answer": answer(row), "rank": 1}, {"answer": second_answer(row), "rank": 2}],
        },
        "answers",
    ),
    Case("labelled", lambda row: {"prompt": prompt(row), "completion": answer(row), "label": row % 2 == 0}),
    Case("labelled", lambda row: {"messages": conversation(row), "label": row % 2 == 0}, "messages"),
]


CUTS: list[tuple[int, ...]] = [(), (ROWS - 1,), *((cut,) for cut in range(1, ROWS - 1)), (1, ROWS - 1)]
"""Where rows are cut into chunks."""


class Place(NamedTuple):
    """Where a value is put: `leaf` is the name of the leaf that it becomes, `put` adds it to a row."""

    name: str
    leaf: Callable[[Case, str], str]
    put: Callable[[Case, dict[str, Any], str, Any], None]
    fits: Callable[[Case], bool]


def _put_in_messages(case: Case, row: dict[str, Any], name: str, value: Any) -> None:
    for message in row[case.messages]:
        message[name] = value


def _put_in_parts(case: Case, row: dict[str, Any], name: str, value: Any) -> None:
    for message in row[case.messages]:
        message["content"] = [{"type": "text", "text": message["content"], name: value}]


PLACES = [
    Place("column", lambda _, name: name, lambda _, row, name, value: row.update({name: value}), lambda _: True),
    Place(
        "field",
        lambda _, name: f"info.{name}",
        lambda _, row, name, value: row.update({"info": {"release": "1.2", name: value}}),
        lambda _: True,
    ),
    Place("key", lambda case, name: f"{case.messages}[].{name}", _put_in_messages, lambda case: bool(case.messages)),
    Place(
        "part",
        lambda case, name: f"{case.messages}[].content[].{name}",
        _put_in_parts,
        lambda case: bool(case.messages) and case.form != "sharegpt" and case.messages != "answers",
    ),
]
TABLE = [(case, place) for case in CASES for place in PLACES if place.fits(case)]


def rows_with(
    case: Case, place: Place, name: str, kind: Kind, absent: bool = False, odd: bool = True
) -> list[dict[str, Any]]:
    """Return rows with a value of a kind in each; the last one has the odd value, which the others lack if `absent`."""
    rows = []
    for number in range(ROWS):
        row = copy.deepcopy(case.row(number))
        last = number == ROWS - 1
        if last or not absent:
            place.put(case, row, name, kind.odd(number) if last and odd else kind.usual(number))
        rows.append(row)
    return rows


def unread_of(rows: list[dict[str, Any]], case: Case, cuts: tuple[int, ...] = (), ignore: str = "") -> Unread:
    """Return what nothing reads of rows that are cut into chunks, merged as `prepare` does."""
    reading = Reading(ignored=frozenset([ignore] if ignore else []))
    whole = Unread()
    for start, end in zip((0, *cuts), (*cuts, len(rows)), strict=True):
        chunk = Unread()
        for number, row in enumerate(rows[start:end], start + 1):
            parse(row, case.form, reading, unread=chunk, place=f"rows.jsonl:{number}")
        whole.merge(chunk.end())
    return whole


def names_of(*seed: Any) -> Iterator[str]:
    """Yield names of columns, drawn by a seed."""
    drawn = random.Random("/".join(map(str, seed)))  # noqa: S311
    while True:
        yield drawn.choice(NAMES)


def is_of(name: str, leaf: str) -> bool:
    """Return whether the name in an error is a leaf, a part of it, or the object that it is in."""
    return name == leaf or name.startswith(f"{leaf}.") or leaf.startswith(f"{name}.")


def stops(rows: list[dict[str, Any]], case: Case, leaf: str, cuts: tuple[int, ...] = ()) -> bool:
    """Return whether reading rows ends with an error that names a leaf: one of what nothing reads, or of a row."""
    try:
        undecided = unread_of(rows, case, cuts).undecided
    except BadRow as error:
        return leaf.rpartition("[].")[2] in str(error)
    held = [name for name in undecided if is_of(name, leaf)]
    return any(undecided[name].place.startswith("rows.jsonl:") for name in held)


def test_no_form_is_left_out() -> None:
    assert {case.form for case in CASES} == set(FORMS)
    assert not {name.rpartition(".")[2] for name in NAMES} & set(fields())


@pytest.mark.parametrize(("case", "place"), TABLE, ids=lambda each: str(each) if isinstance(each, Case) else each.name)
def test_a_dangerous_value_stops_whatever_its_name_and_its_place(case: Case, place: Place) -> None:
    """With the odd value in the last row, the rows whole and cut into chunks at every position."""
    silent = []
    for absent in (False, True):
        for kind, name in zip(DANGEROUS, names_of(case, place.name, absent), strict=False):
            rows, leaf = rows_with(case, place, name, kind, absent), place.leaf(case, name)
            for cuts in CUTS if place.name == "column" else CUTS[:2]:
                if not stops(rows, case, leaf, cuts):
                    silent.append((kind.name, name, absent, cuts))
    assert silent == []


@pytest.mark.parametrize(("case", "place"), TABLE, ids=lambda each: str(each) if isinstance(each, Case) else each.name)
def test_an_ignored_leaf_stops_nothing(case: Case, place: Place) -> None:
    for kind, name in zip(DANGEROUS, names_of(case, place.name, "ignored"), strict=False):
        rows, leaf = rows_with(case, place, name, kind), place.leaf(case, name)
        if place.name == "part" and name == "type":
            continue  # the kind of the part, which must be text
        if place.name == "field":
            leaf = "info"
        assert not unread_of(rows, case, (3,), ignore=leaf).undecided, (kind.name, name)


SAME_IN_ALL_ROWS = {
    **dict.fromkeys(("verdict as a boolean", "verdict as a number", "deleted", "is test"), "all rows are judged alike"),
    **dict.fromkeys(("verdict as good or bad", "verdict as yes or no", "switch as text"), "all rows are judged alike"),
    **dict.fromkeys(("preferred letter", "name of the winner", "tie among winners"), "the same answer always wins"),
    **dict.fromkeys(("rank", "score as an integer", "score as a float", "score as text", "margin"), "one score"),
    **dict.fromkeys(("signed preference", "review result", "quality", "toxicity", "spam", "weight"), "one grade"),
    **dict.fromkeys(("fold", "class as an integer", "class as text", "language of the answer"), "one class"),
    **dict.fromkeys(("mode of thinking", "temperature", "code language", "permission of the author"), "one setting"),
    **dict.fromkeys(("number of turns to use", "start of the answer"), "one setting"),
    **dict.fromkeys(("short system prompt", "instruction suffix", "persona", "second answer"), "at most three words"),
    **dict.fromkeys(("target beside text", "template arguments"), "at most three words"),
    **dict.fromkeys(
        ("parent row", "role of a message", "name of another column", "duplicate of a row"), "one reference"
    ),
}
"""Kinds that pass if all rows have one value, the odd one, and why: it does not tell rows apart."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_short_value_passes_if_all_rows_have_it(case: Case) -> None:
    passed = set()
    for kind in DANGEROUS:
        rows = [{**case.row(number), "x": kind.odd(0)} for number in range(ROWS)]
        if not unread_of(rows, case, (2, 5)).undecided:
            passed.add(kind.name)
    assert passed == {*SAME_IN_ALL_ROWS}


PASSED = {"constant licence", "constant source", "constant version", "constant date", "constant struct"}
BLANK = {"blank text", "white space", "null", "empty list"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_blank_constant_or_redundant_passes(case: Case) -> None:
    passed = set()
    for kind, name in zip(HARMLESS, names_of(case, "harmless"), strict=False):
        if not unread_of(rows_with(case, PLACES[0], name, kind), case, (3,)).undecided:
            passed.add(kind.name)
    assert passed == PASSED | BLANK | ({"copy of the prompt"} if case.form != "tokens" else set())


def drawn(number: int) -> tuple[Case, Place, Kind, str, bool]:
    """Return a drawn combination."""
    random_ = random.Random(number)  # noqa: S311
    case, place = random_.choice(TABLE)
    names = [name for name in NAMES if not (place.name == "part" and name == "type")]
    return case, place, random_.choice(DANGEROUS), random_.choice(names), random_.random() < 0.5


def settings_for(folder: Folder, case: Case, ignored: list[str]) -> PrepareSettings:
    return folder.settings(
        path="data",
        format=case.form,
        rows=FORMS[case.form].rows,
        split={"validation": 0, "test": 0},
        max_length=4096,
        ignore=ignored,
    )


def learned(folder: Folder, case: Case, rows: list[dict[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    """Return what `prepare` makes of rows in two files."""
    folder.write("data/a.jsonl", rows[:3])
    folder.write("data/b.jsonl", rows[3:])
    prepare(settings_for(folder, case, ignored), folder.manifest, folder.output, 1)
    return folder.all_rows()


@pytest.mark.parametrize("number", range(40))
def test_prepare_stops_with_a_line_to_paste(tmp_path: Path, tiny_model: Path, number: int) -> None:
    """In rows of two files, the odd value in the last row of the second one; ignored, the rows are learned as without
    it."""
    folder = Folder(tmp_path, tiny_model)
    case, place, kind, name, absent = drawn(number)
    rows, leaf = rows_with(case, place, name, kind, absent), place.leaf(case, name)
    with pytest.raises(UserError) as raised:
        learned(folder, case, rows, [])
    ignored: list[str] = []
    for line in str(raised.value).splitlines():
        head, _, paste = line.rpartition("ignore: [")
        ignored += yaml.safe_load(f"[{paste}")
        assert re.match(r".*data/[ab]\.jsonl:\d+: ", head) or " are undecided; " in head
    assert any(is_of(each, leaf) for each in ignored), str(raised.value)
    without = [case.row(row) for row in range(ROWS)]
    assert learned(folder, case, rows, ignored) == learned(folder, case, without, [])


def test_an_error_in_the_first_row_of_a_chunk_has_the_value_of_the_rows_before() -> None:
    """A list, which no chunk passes, after a chunk in which all rows have the same word, and after one without any."""
    cases: list[tuple[dict[str, Any], str]] = [({"mark": "fine"}, "'fine' in rows:1"), ({}, "missing in rows:1")]
    for first, said in cases:
        chunks = [Unread(), Unread()]
        for number, (chunk, row) in enumerate(zip(chunks, (first, {"mark": ["odd"]}), strict=True), 1):
            parse({"prompt": "a", "completion": "b", **row}, "prompt", Reading(), unread=chunk, place=f"rows:{number}")
            chunk.end()
        chunks[0].merge(chunks[1])
        (error,) = chunks[0].undecided.values()
        assert error.line().startswith(f"rows:2: mark is ['odd'], {said}, and nothing reads it")
