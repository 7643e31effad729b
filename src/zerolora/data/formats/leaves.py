"""What no form reads: each such leaf is blank, ignored by name, redundant, or the same in all rows; or an error.

A leaf is a column, a field inside a column of objects (metadata.url), a key of the messages in a column
(messages[].model), or a key of the parts of their content (messages[].content[].citations).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerolora.data.example import Example
from zerolora.data.formats.form import Row
from zerolora.data.formats.reading import Reading, Seen, Status, Where
from zerolora.data.formats.row_values import factor_of
from zerolora.data.published import split_of
from zerolora.errors import shown
from zerolora.yaml_file import written

SHORT = 16
"""Characters of a text that may be part of another one by chance."""
WORDS = 3
"""Most words of a text that is passed if all rows have it: a longer one may be an instruction."""
LONGEST = 100
"""Most characters of such a text."""
FILE = re.compile(r"[/\\]|\.[A-Za-z]\w{0,4}$|^data:")
"""Matches a text that names a file, whose content is lost."""
MOST = 1000
"""Leaves of a source that are named."""


class Undecided(NamedTuple):
    """A leaf that nothing reads, with a value of it and the row's place, as in rows.jsonl:12; `other` says what another
    row has."""

    leaf: str
    value: Any
    place: str
    other: str = ""

    def line(self, pairs: bool = False) -> str:
        """Return the error: the place, the leaf, both values, and what to set."""
        other = f", {self.other}" if self.other else ""
        leaf = self.leaf if self.leaf.isprintable() else shown(self.leaf)
        here = f"{self.place}: {leaf} is {shown(self.value)}{other}, and nothing reads it"
        name, (*above, last) = written(self.leaf), self.leaf.split("[].")
        ways = [] if above[1:] else [f"map it in columns, as in {{FIELD: {written(last)}}}"]
        if not above and (self.value is None or isinstance(self.value, (str, int, float))):
            value = written(self.value) if len(str(self.value)) < LONGEST else "VALUE"
            ways.append(f"keep some rows by where: {{{name}: [{value}]}}")
            if pairs:
                ways.append(f"order the pairs by better: {{column: {name}, ...}}")
        rest = f"leave it out by ignore: [{name}]"
        return f"{here}; {', '.join(ways)}, or {rest}" if ways else f"{here}; {rest}"


class SharedValue(NamedTuple):
    """The value of a leaf that all rows, or all messages of a column, had so far: their number, and the first place."""

    value: Any
    place: str
    number: int


@dataclass
class Unread:
    """The unread leaves of some rows of a source, in their order.

    rows: their number. first, last: places of the first and the last one. messages: the number of messages by column,
    as in messages[]. constants: the leaves that had the same value in all rows. undecided: the first error of each
    leaf.
    """

    rows: int = 0
    first: str = ""
    last: str = ""
    messages: Counter[str] = field(default_factory=Counter)
    constants: dict[str, SharedValue] = field(default_factory=dict)
    undecided: dict[str, Undecided] = field(default_factory=dict)

    def add(self, row: Row, example: Example, place: str, seen: Seen | None = None) -> None:
        """Check the leaves of a converted row, and count their use in `seen`."""
        before = self.rows
        self.rows, self.first = before + 1, self.first or place
        for name, number in row.lists:
            self.messages[name] += number
        reading = row.reading
        texts: list[str] | None = None
        for leaf, held in unread_leaves(row):
            where: Where = "key" if self._in_messages(leaf) else "column"
            status: Status | None = None
            if reading.ignores(leaf):
                status = "ignored"
            elif where == "column" and leaf in reading.deciding:
                status = "read"
            else:
                if isinstance(held, str) and (len(text := held.strip()) > SHORT or " " in text):
                    texts = read_texts(example) if texts is None else texts
                    status = "redundant" if repeats(text, texts) else None
                if status is None and self._is_constant(leaf, held, place, before, reading.split):
                    status = "constant"
            if status and seen is not None:
                seen[status, where, leaf] += 1
        self.last = place

    def _is_constant(self, leaf: str, held: Any, place: str, before: int, split: str | None) -> bool:
        """Return whether all rows so far have this value; otherwise add an error. Parts of contents are not counted, so
        none of their keys passes."""
        known, in_messages = self.constants.get(leaf), self._in_messages(leaf)
        if known is None:
            if before and not in_messages:
                self._undecide(leaf, held, place, f"missing in {self.last}")
            elif leaf.count("[]") > 1 or not may_be_constant(leaf, held, split):
                self._undecide(leaf, held, place)
            elif len(self.constants) == MOST:
                self._undecide(leaf, held, place, f"one of more than {MOST:,} such columns")
            else:
                self.constants[leaf] = SharedValue(held, place, 1)
                return True
        elif not _same(held, known.value):
            self._undecide(leaf, held, place, f"{shown(known.value)} in {known.place}")
        elif known.number < before and not in_messages:
            self._undecide(leaf, held, place, f"missing in {self.last}")
        elif known.number > before and not in_messages:
            self._undecide(leaf, held, place, "given by two columns")
        else:
            self.constants[leaf] = known._replace(number=known.number + 1)
            return True
        return False

    def _in_messages(self, leaf: str) -> bool:
        """Return whether a leaf is in the messages of a column; the name of a column may have [] too."""
        return "[]" in leaf and _list_of(leaf) in self.messages

    def _held_by(self, leaf: str) -> int:
        """Return the number of rows, or of messages, that may have a leaf."""
        return self.messages[_list_of(leaf)] if self._in_messages(leaf) else self.rows

    def _undecide(self, leaf: str, value: Any, place: str, other: str = "") -> None:
        if leaf not in self.undecided and len(self.undecided) < MOST:
            self.undecided[leaf] = Undecided(leaf, value, place, other)

    def _before(self, leaf: str) -> str:
        """Return what the rows so far have in a leaf, for an error of the next one; "" without rows."""
        if known := self.constants.get(leaf):
            return f"{shown(known.value)} in {known.place}"
        return f"missing in {self.last}" if self.rows and not self._in_messages(leaf) else ""

    def end(self) -> "Unread":
        """Return this after the last row: a leaf that some rows or messages lack is an error."""
        for leaf, known in self.constants.items():
            if known.number < self._held_by(leaf):
                missing = "missing in other messages" if self._in_messages(leaf) else f"missing in {self.last}"
                self._undecide(leaf, known.value, known.place, missing)
        return self

    def merge(self, later: "Unread") -> None:
        """Add later rows of the same source, after `end` of both."""
        for name in {*self.messages, *later.messages}:
            self.messages.setdefault(name, 0)
            later.messages.setdefault(name, 0)
        for error in later.undecided.values():
            self._undecide(error.leaf, error.value, error.place, error.other or self._before(error.leaf))
        for leaf, known in self.constants.items():
            other = later.constants.get(leaf)
            if other and not _same(known.value, other.value):
                self._undecide(leaf, other.value, other.place, f"{shown(known.value)} in {known.place}")
            elif not other and later._held_by(leaf):
                self._undecide(leaf, known.value, known.place, f"missing in {later.first}")
        for leaf, known in later.constants.items():
            if leaf not in self.constants and self._held_by(leaf):
                self._undecide(leaf, known.value, known.place, f"missing in {self.last}")
        self.constants = {**later.constants, **self.constants}
        self.messages += later.messages
        self.rows += later.rows
        self.first, self.last = self.first or later.first, later.last or self.last


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _list_of(leaf: str) -> str:
    return leaf[: leaf.index("[]") + 2]


def unread_leaves(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of a converted row that is neither read nor blank."""
    yield from row.unread()
    for turn in row.turns:
        yield from turn.unread()


def repeats(text: str, texts: Iterable[str]) -> bool:
    """Return whether a text is one of several words that are read, or part of one that is not so by chance."""
    return any(text in each if len(text) > SHORT else text == each.strip() for each in texts)


def read_texts(example: Example) -> list[str]:
    """Return the texts that a leaf may repeat without a further meaning. Of judged answers none counts: which one a
    leaf repeats may be the verdict."""
    if example.text is not None:
        return [example.text]
    messages = example.messages or []
    if example.rejected or example.desirable is not None:
        messages = messages[: example.prompt]
    return [text for message in messages for text in _strings(message)]


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _strings(each)]


def may_be_constant(leaf: str, held: Any, split: str | None) -> bool:
    """Return whether a value may be passed if all rows have it: it is a number, a truth or a few words, and neither a
    split that is held out nor a file."""
    if (number := factor_of(held)) is not None:
        return number == 0 or split_of(leaf.rpartition(".")[2]) in ("", "train", split)
    if not isinstance(held, str) or len(held) > LONGEST or len(held.split()) > WORDS:
        return False
    return (
        split_of(held) in ("", "train", split) and not FILE.search(held.strip()) and held.lstrip()[:1] not in ("[", "{")
    )


def undecided_lines(unread: Unread, reading: Reading, most: int, pairs: bool = False) -> list[str]:
    """Return the errors of the rows of a source, each in a line, of at most `most` leaves."""
    errors = list(unread.undecided.values())
    lines = [error.line(pairs) for error in errors[:most]]
    if len(errors) > 1:
        names = ", ".join(written(name) for name in [*sorted(reading.ignored), *unread.undecided][:MOST])
        undecided = f"{len(errors):,} columns or keys are undecided; to leave out all of them: ignore: [{names}]"
        lines.append(undecided)
    return lines
