"""What becomes of the columns of a user's rows: which form reads them, and what the user leaves out or decides.

A column that no form reads is proposed for `ignore` only if its values and its name both say that it describes the row,
as a unique `id` or a `url`. Anything else is left to the user: a name alone, or values alone, may hide a verdict.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from mimetypes import MimeTypes
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerolora.data import TABLES
from zerolora.data.example import BadRow, Example
from zerolora.data.formats import FORMS, fitting, parse
from zerolora.data.formats.form import Row
from zerolora.data.formats.leaves import SHORT, may_be_constant, read_texts, repeats, unread_leaves
from zerolora.data.formats.mappings import mappings_of
from zerolora.data.formats.reading import Reading
from zerolora.data.formats.row_values import factor_of, is_blank
from zerolora.data.published import split_of
from zerolora.data.readers import chunks
from zerolora.errors import UserError, shown
from zerolora.types import RowKind
from zerolora.units import counted
from zerolora.yaml_file import written

MOST = 50_000
"""Rows that are looked at; `prepare` checks all."""
FIRST = 200
"""Rows of each file by which the form is chosen."""
DISTINCT = 1000
"""Values of a column that are kept apart."""
_DESCRIBING = """
author authors categories category chars characters code collection corpus count created creator dataset date dates
datetime db domain engine family file generator genre group hash href id idx index kind lang language languages len
length libraries library licence license line link links locale md model models modified number origin page path
product published repo resource row section sha site size source sources src sub subcategory subject
subset subtopic tag time timestamp title token tokens topic topics turns type types uid updated uri url urls uuid
version web website words
"""
METADATA = frozenset(_DESCRIBING.split())
IDENTIFIERS = frozenset(["hash", "href", "id", "idx", "index", "md", "path", "sha", "uid", "uri", "url", "uuid"])
"""Words in the names of columns that describe a row."""
_COUNTING = """
chars characters code count idx index len length number page row section size token tokens turns words
"""
COUNTING = frozenset(_COUNTING.split())
"""Those that describe a row by numbers: texts in a column of such a name alone may be content."""
MEDIA = frozenset(["image", "audio", "video"])
PDF = "application/pdf"
FILE_TYPES = MimeTypes()
"""Python's own table of the types of files, without the machine's."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ADDRESS = re.compile(r"(https?|ftp)://\S+|www\.\S+")
DATE = re.compile(r"\d{4}-\d\d(-\d\d)?([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)?|\d{1,2}/\d{1,2}/\d{4}")
IDENTIFIER = re.compile(r"\S{3,}")
_ANSWERING = """
bad both chosen correct draw fail false good incorrect no none pass rejected right tie true wrong yes
"""
ANSWERS = frozenset(_ANSWERING.split())
TYPES: dict[type, str] = {list: "lists", dict: "objects"}
FEW = 4
"""Classes whose names are plain words, which may be verdicts."""
SHORTEST = 3
"""Characters of a value that may describe a row."""

Status = Literal["read", "ignored", "redundant", "constant", "undecided"]


KINDS: dict[RowKind, str] = {"pairs": "pairs of answers", "labelled": "labelled answers", "texts": "texts to learn"}


class JudgedColumn(NamedTuple):
    """A column, or a key of messages: what becomes of it, why, and its first value."""

    leaf: str
    status: Status
    reason: str
    value: Any

    def line(self) -> str:
        """Return a line for the user."""
        what = self.reason if self.status == "read" else f"{self.status} ({self.reason})"
        return f"{self.leaf}: {what}, as in {shown(self.value)}"


class RowLayout(NamedTuple):
    """How rows are read: what they hold, their form ("" for none), and settings of `prepare`. several: more than one
    form fits. named: the classes that tables name. given: what the user ignores."""

    rows: RowKind
    form: str
    several: bool
    columns: dict[str, str]
    named: dict[str, list[str]]
    found: list[JudgedColumn]
    given: list[str]

    @property
    def ignore(self) -> list[str]:
        """The entries of `ignore`."""
        return [*self.given, *(each.leaf for each in self.found if each.status == "ignored")]

    @property
    def undecided(self) -> list[str]:
        """What the user decides."""
        return [each.leaf for each in self.found if each.status == "undecided"]

    @property
    def passed(self) -> list[str]:
        """What `prepare` passes, if it holds for all rows."""
        return [each.leaf for each in self.found if each.status in ("redundant", "constant")]

    def settings(self) -> dict[str, Any]:
        """Return the settings of `prepare`, without `undecided`."""
        settings = {
            "format": self.form if self.several else None,
            "columns": self.columns,
            "classes": {column: self.named[column] for column in self.columns.values() if column in self.named},
            "ignore": self.ignore,
        }
        return {key: value for key, value in settings.items() if value}


class _Given(NamedTuple):
    """The columns of the fields and the ignored ones, as the user gives them, and the classes that tables name."""

    columns: dict[str, str]
    ignored: Sequence[str]
    named: dict[str, list[str]]


def layout_of(files: Sequence[Path], columns: dict[str, str], ignored: Sequence[str], name: str) -> RowLayout:
    """Return the layout of the rows of some files. columns, ignored: as the user gives them. name: of the data, for
    messages.

    Raises UserError if files hold different kinds of rows, or if no row has a column that the user names.
    """
    given = _Given(columns, ignored, _class_names(files))
    kinds: dict[RowKind, Path] = {}
    choice: _Choice | None = None
    for path in files:
        rows = list(islice(_rows([path]), FIRST))
        if found := _chosen(rows, given):
            kinds.setdefault(found.rows, path)
            choice = choice or found
    if len(kinds) > 1:
        held = " and ".join(f"{path} holds {KINDS[kind]}" for kind, path in kinds.items())
        raise UserError(f"--data {name}: {held}, which no run can train on together; name one of the files")
    choice = choice or _Choice("texts", columns, "")
    _check_given([*columns.values(), *ignored], files)
    found_columns = _judged_columns(_rows(files), choice, given)
    return RowLayout(choice.rows, choice.form, choice.several, choice.columns, given.named,
                  found_columns, [*ignored])  # fmt: skip


class _Choice(NamedTuple):
    """What rows hold, the columns of the fields, the form ("" for none), and whether several forms fit."""

    rows: RowKind
    columns: dict[str, str]
    form: str
    several: bool = False


def _check_given(named: Sequence[str], files: Sequence[Path]) -> None:
    """Raise UserError if no row has a column that the user names."""
    present = {leaf for _, row, _ in islice(_rows(files), FIRST) for leaf in _paths(row)} if named else set()
    last = {leaf.rpartition("[].")[2] for leaf in present}
    for column in named:
        if present and column not in present | last:
            raise UserError(f"--columns and --ignore: no row has {column}; it has {', '.join(sorted(present)[:20])}")


_Record = tuple[str, dict[str, Any], bool]
"""The place and value of a row, and whether a table has it."""


def _rows(files: Iterable[Path]) -> Iterator[_Record]:
    """Yield every row that can be read."""
    for path in files:
        for chunk in chunks(path):
            for place, value in chunk.records():
                if not isinstance(value, BadRow):
                    yield place, value, chunk.kind in TABLES


def _chosen(rows: list[_Record], given: _Given) -> _Choice | None:
    """Return how to read rows, None if no form does: with the fewest columns left for the user to decide, and the most
    that are read."""
    names = {leaf for _, row, _ in rows for leaf in _paths(row)}
    for kind in KINDS:
        choices: list[tuple[int, int, _Choice]] = []
        for mapping in [given.columns] if given.columns else [{}, *mappings_of(names, kind)]:
            for form in (name for name, each in FORMS.items() if each.rows == kind):
                choice = _Choice(kind, mapping, form)
                if not (fitting_rows := [row for row in rows if _is_read(row, choice, given)]):
                    continue
                found = _judged_columns(fitting_rows, choice, given)
                undecided = sum(1 for each in found if each.status == "undecided")
                choices.append((undecided, -sum(1 for each in found if each.status == "read"), choice))
        if choices:
            best = min(choices, key=lambda each: each[:2])[2]
            forms = {choice.form for *_, choice in choices if choice.columns == best.columns}
            return best._replace(several=len(forms) > 1)
    return None


def _reading(choice: _Choice, given: _Given, filled: bool) -> Reading:
    mapped = {column: given.named[column] for column in choice.columns.values() if column in given.named}
    return Reading(choice.columns, ignored=frozenset(given.ignored), filled=filled, classes=mapped)


def _is_read(record: _Record, choice: _Choice, given: _Given) -> bool:
    """Return whether a row has the fields of a form, and values that it reads."""
    _, value, filled = record
    reading = _reading(choice, given, filled)
    try:
        if choice.form in fitting(value, reading, choice.rows):
            parse(value, choice.form, reading)
            return True
    except BadRow:
        pass
    return False


def _paths(value: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the columns of a row and the fields of objects in them."""
    for name, held in value.items():
        yield f"{above}{name}"
        if isinstance(held, dict):
            yield from _paths(held, f"{above}{name}.")
        elif isinstance(held, list):
            for each in held[:FIRST]:
                if isinstance(each, dict):
                    yield from _paths(each, f"{above}{name}[].")


@dataclass
class _Facts:
    """What is known of the values of a leaf."""

    first: Any = None
    rows: int = 0
    values: Counter[str] = field(default_factory=Counter)
    hashes: set[int] = field(default_factory=set)
    numbers: bool = True
    """All values are numbers."""
    start: float | None = None
    """The first one less its row, while all values follow the row numbers."""
    in_order: bool = True
    lengths: set[str] | None = None
    """The lengths of texts that all values are."""
    redundant: bool = True
    frame: bool = True
    """All values contain the texts that are read."""
    rests: set[int] = field(default_factory=set)
    """Numbers of characters that values have beside the texts that are read."""
    twin: str = ""
    """A column that had the same value in a row."""
    column: str = ""
    """A column that a value names."""

    def add(self, leaf: str, number: int, held: Any, texts: list[str], row: Row) -> None:
        """Add the value of a row. texts: what the form reads."""
        self.first = held if self.rows == 0 else self.first
        self.rows += 1
        self.hashes.add(hash(repr(held)))
        if len(self.values) < DISTINCT:
            self.values[held if isinstance(held, str) else repr(held)] += 1
        factor = None if isinstance(held, bool) else factor_of(held)
        self.numbers &= factor is not None
        if factor is not None:
            self.start = factor - number if self.start is None else self.start
            self.in_order &= factor == self.start + number
            lengths = {name for name, length in _lengths(texts) if length == factor}
            self.lengths = lengths if self.lengths is None else self.lengths & lengths
        text = held.strip() if isinstance(held, str) else ""
        self.redundant &= (len(text) > SHORT or " " in text) and repeats(text, texts)
        parts = [each.strip() for each in row.read.values() if isinstance(each, str) and each.strip()]
        self.frame &= len(parts) > 1 and all(each in text for each in parts)
        if self.frame and len(self.rests) <= FEW:
            self.rests.add(len(text) - sum(map(len, parts)))
        if text:
            self.column = self.column or next((name for name in row.value if text == name), "")
            same = (name for name, other in row.value.items() if other == held and name != leaf)
            self.twin = self.twin or next(same, "")


def _lengths(texts: list[str]) -> Iterator[tuple[str, int]]:
    for number, text in enumerate(texts):
        yield f"characters {number}", len(text)
        yield f"words {number}", len(text.split())
    yield "characters", sum(map(len, texts))
    yield "messages", len(texts)


def _owner(leaf: str, totals: Counter[str]) -> str:
    """Return the messages that a leaf is in, as in messages[], among those that are counted; "" for a column."""
    owner = leaf[: leaf.index("[]") + 2] if "[]" in leaf else ""
    return owner if owner in totals else ""


def _judged_columns(records: Iterable[_Record], choice: _Choice, given: _Given) -> list[JudgedColumn]:
    """Return what becomes of every column, those that are read first."""
    facts: dict[str, _Facts] = {}
    read: dict[str, Any] = {}
    totals: Counter[str] = Counter()
    for number, (_, value, filled) in enumerate(islice(records, MOST)):
        reading = _reading(choice, given, filled)
        row, example = _converted(value, choice.form, reading)
        if row is None:
            continue
        totals[""] += 1
        for name, messages in row.lists:
            totals[name] += messages
        texts = read_texts(example) if example else []
        for name, held in row.read.items():
            if not is_blank(held):
                read.setdefault(name, held)
        for leaf, held in unread_leaves(row):
            if not reading.ignores(leaf):
                facts.setdefault(leaf, _Facts()).add(leaf, number, held, texts, row)
    fields = {column: field for field, column in choice.columns.items()}
    columns = [
        JudgedColumn(name, "read", f"mapped to {fields[name]}" if name in fields else f"read as {name}", held)
        for name, held in read.items()
    ]
    return columns + [
        JudgedColumn(leaf, *_judged(leaf, each, facts, totals[_owner(leaf, totals)]), each.first)
        for leaf, each in facts.items()
    ]


def _converted(value: dict[str, Any], form: str, reading: Reading) -> tuple[Row | None, Example | None]:
    row = Row(value, reading)
    if not form:
        return row, None
    try:
        return row, FORMS[form].convert(row)
    except (BadRow, RecursionError):
        return None, None


def _judged(leaf: str, facts: _Facts, others: dict[str, _Facts], total: int) -> tuple[Status, str]:
    """Return what becomes of a leaf that the form does not read, and why. total: the number of rows or messages."""
    if facts.redundant:
        return "redundant", "part of a text that is read"
    if len(facts.hashes) == 1 and facts.rows >= total and may_be_constant(leaf, facts.first, None):
        return "constant", "the same in all rows"
    if facts.frame and len(facts.rests) <= FEW:
        return "ignored", "the row as a text, which contains the other columns"
    if not isinstance(facts.first, (str, int, float)):
        return "undecided", f"it holds {TYPES.get(type(facts.first), 'bytes')}"
    if danger := next(_dangers(leaf, facts, others, total), ""):
        return "undecided", danger
    proof = _proof(leaf, facts, total)
    return ("ignored", proof) if proof else ("undecided", "numbers" if facts.numbers else "nothing reads it")


def _proof(leaf: str, facts: _Facts, total: int) -> str:
    """Return how values and name prove that a leaf describes the row; "" if they do not."""
    words = [word.lower() for word in WORD.findall(leaf.rpartition(".")[2])]
    if not words or words[-1] not in METADATA or not ANSWERS.isdisjoint(words):
        return ""
    values = [value.strip() for value in facts.values]
    unique = len(facts.hashes) == facts.rows == total
    if facts.numbers:
        proofs = {
            "the number of the row": facts.in_order,
            "the length of a text": bool(facts.lengths),
            "a unique number": unique and words[-1] in IDENTIFIERS and _are_identifiers(values),
        }
    else:
        proofs = {
            "an address": all(map(ADDRESS.fullmatch, values)),
            "a date": all(map(DATE.fullmatch, values)),
            "unique": unique and words[-1] in IDENTIFIERS and all(map(IDENTIFIER.fullmatch, values)),
            f"one of {len(values):,} classes": METADATA.issuperset(words) and not COUNTING.issuperset(words),
        }
    return next((proof for proof, holds in proofs.items() if holds), "")


def _dangers(leaf: str, facts: _Facts, others: dict[str, _Facts], total: int) -> Iterator[str]:
    """Yield why a leaf may change the meaning of a row."""
    values = [*facts.values]
    lower = {value.strip().lower() for value in values}
    for split in map(split_of, [*values, leaf.rpartition(".")[2]]):
        if split not in ("", "train"):
            yield f"it names the split {split}"
    if facts.rows < total:
        yield f"some rows have none: {shown(facts.first)}"
    if facts.column:
        yield f"a value is the name of the column {facts.column}"
    if facts.twin:
        yield f"a value is that of the column {facts.twin}"
    if lower & ANSWERS:
        yield f"{shown(min(lower & ANSWERS))} may be a verdict"
    if len(facts.hashes) < 3:
        yield f"{counted(len(facts.hashes), 'value')}: {', '.join(map(shown, values))}"
    if not facts.numbers:
        yield from _dangers_of_texts(values)
    for name, other in others.items():
        if name != leaf and len(other.hashes) == other.rows > 1 and facts.hashes & other.hashes:
            yield f"it refers to {name} of other rows"


def _dangers_of_texts(values: list[str]) -> Iterator[str]:
    """Yield why the texts of a leaf may change the meaning of a row."""
    for kind in filter(None, map(_medium, values)):
        yield f"it names files of the type {kind}"
    if any(len(value.strip()) < SHORTEST for value in values):
        yield f"{shown(min(values, key=len))} may be a verdict"
    if any(len(value.split()) > 2 for value in values):
        yield "it holds texts"
    words = [value.strip().lower() for value in values]
    if len(words) <= FEW and all(word.isalpha() and word.islower() for word in words):
        yield f"few plain words: {', '.join(map(shown, values))}"


def _medium(value: str) -> str:
    """Return the type of the file that a path, an address or data names, by Python's own table; "" if it is no medium
    whose content is lost."""
    kind, _ = FILE_TYPES.guess_type(re.split("[?#]", value.strip())[0])
    return kind if kind and (kind.partition("/")[0] in MEDIA or kind == PDF) else ""


def _are_identifiers(values: list[str]) -> bool:
    """Return whether numbers are whole, and too large for scores and counts."""
    return all(float(value) == int(float(value)) and abs(float(value)) >= 1000 for value in values)


def _class_names(files: Sequence[Path]) -> dict[str, list[str]]:
    """Return the names of the classes in the columns of tables."""
    names: dict[str, list[str]] = {}
    for path in files:
        names = {**class_names(path), **names}
    return names


def class_names(path: Path) -> dict[str, list[str]]:
    """Return each column's class names, from a table's metadata; empty for other files."""
    import json

    import pyarrow
    from pyarrow import parquet

    kind = path.suffix.lower().removeprefix(".")
    if kind not in TABLES:
        return {}
    try:
        if kind == "parquet":
            metadata = parquet.read_schema(path).metadata
        else:
            with pyarrow.memory_map(str(path)) as source:
                stream = source.read_at(6, 0) != b"ARROW1"
                reader = pyarrow.ipc.open_stream(source) if stream else pyarrow.ipc.open_file(source)
                metadata = reader.schema.metadata
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError):
        return {}
    return {
        str(column): [str(name) for name in feature["names"]]
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
    }


def undecided_block(layout: RowLayout, indent: str) -> list[str]:
    """Return the lines of `undecided`, each with its reason, and how to learn classes that a table names."""
    lines = [f"{indent}undecided:"]
    for column in layout.found:
        if column.status != "undecided":
            continue
        ways = "map it in columns, keep rows by where, or ignore it"
        if names := layout.named.get(column.leaf):
            classes = f"{{{written(column.leaf)}: [{', '.join(map(written, names))}]}}"
            ways = f"to learn it, columns: {{completion: {written(column.leaf)}, ...}} and classes: {classes}"
        lines.append(f"{indent}- {written(column.leaf)}  # {column.reason}, as in {shown(column.value)}; {ways}")
    return lines
