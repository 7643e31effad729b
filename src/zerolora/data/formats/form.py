"""The interface of a form of rows, and access to a row's fields by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.reading import Reading
from zerolora.data.formats.row_values import factor_of, filled, is_blank, text_of
from zerolora.errors import shown
from zerolora.types import RowKind

MANY = 20  # fields in a message


class Row:
    """A row's fields, independent of their columns' names; "a.b" is the field b inside the column a.

    A message is a Row as well, with its keys as columns and its name in the row as `path`, as in messages[1]; `inside`
    is the same for all messages, as in messages[]. read: the values of the columns that were read. turns: the messages.
    lists: the columns of messages, and their numbers. plain: the two keys of messages without other keys, which are
    converted without a Row, and their number. parts: the unread keys of the parts of a message's content, or of ranked
    answers.
    """

    __slots__ = ("columns", "ignored", "inside", "lists", "parts", "path", "plain", "read", "reading", "turns", "value")

    def __init__(self, value: dict[str, Any], reading: Reading, path: str = "") -> None:
        self.value, self.reading, self.path = value, reading, path
        self.columns, self.ignored, self.inside = reading.columns, reading.ignored, ""
        if path:
            self.inside = f"{path[: path.rindex('[')]}[]"
            self.columns, self.ignored = reading.keys, reading.ignored_keys(self.inside)
        self.read: dict[str, Any] = {}
        self.turns: list[Row] = []
        self.lists: list[tuple[str, int]] = []
        self.parts: list[tuple[str, Any]] = []
        self.plain: tuple[tuple[str, str], int] = (("", ""), 0)

    def lacks(self, fields: frozenset[str]) -> bool:
        """Return whether a row obviously has none of these fields. Fast, since most rows have few fields."""
        return not self.columns and fields.isdisjoint(self.value)

    def get(self, field: str) -> Any:
        """Return a field's value, if any. A column that is mapped to another field, or a part of it, does not count."""
        if not self.columns:
            if field not in self.value or field in self.ignored:
                return None
            self.read[field] = self.value[field]
            return self._named(field) if field in self.reading.classes else self.value[field]
        if field not in self.columns and field in self.reading.mapped:
            return None
        column = self.columns.get(field, field)
        if column in self.ignored:
            return None
        if column in self.value:
            result = self.value[column]
        elif "." in column:
            result = value_at(self.value, column)
        else:
            return None
        self.read[column] = result
        return self._named(column) if column in self.reading.classes else result

    def _named(self, column: str) -> Any:
        """Return the name of the class in a column, whose number the row has. Raises BadRow for another value."""
        held, names = self.read[column], self.reading.classes[column]
        if held is None or self.path:
            return held
        number = factor_of(held)
        if number is None or number not in range(len(names)):
            raise BadRow(
                f"{column} is {shown(held)}, and classes has names for 0 to {len(names) - 1}; correct the value, or "
                "name all classes"
            )
        return names[int(number)]

    def name(self, field: str) -> str:
        """Return the column that holds a field."""
        column = self.columns.get(field, field)
        return f"{self.path}.{column}" if self.path else column

    def needed(self, field: str) -> Any:
        """Return a field's value. Raises BadRow if there is none."""
        result = self.get(field)
        if result is None:
            raise BadRow(
                f"{self.name(field)} is missing (the row has {self}); fill it in, or set columns: {{{field}: ...}} "
                "with the column that holds it"
            )
        return result

    def text(self, field: str) -> str:
        """Return a field's text. Raises BadRow if it is missing, not a text, or blank."""
        result = self.get(field)
        if isinstance(result, str) and result.isascii() and result.strip():
            return result
        return filled(text_of(self.needed(field), self.name(field)), self.name(field))

    def optional_text(self, *fields: str) -> str:
        """Return the text of a field with several names, "" if it is missing or blank. Raises BadRow if the names have
        different texts."""
        result = first = ""
        for field in fields:
            held = self.get(field)
            if held is None:
                continue
            if not (type(held) is str and held.isascii()):
                text_of(held, self.name(field))
            if not held.strip():
                continue
            if result and held != result:
                raise BadRow(f"{self.name(first)} and {self.name(field)} are two texts for the same; keep one")
            result, first = held, field
        return result

    def turn(self, value: dict[str, Any], path: str) -> "Row":
        """Add a message of this row."""
        self.turns.append(Row(value, self.reading, path))
        return self.turns[-1]

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the path and value of every leaf of the row, or of a message, that is neither read nor blank, as in
        metadata.url or messages[].model."""
        above = f"{self.inside}." if self.inside else ""
        if self.columns or not self.read.keys() >= self.value.keys():
            for name, held in self.value.items():
                if name not in self.read and not is_blank(held):
                    yield from _leaves(name, held, self.read, above)
        yield from self.parts

    def __str__(self) -> str:
        fields = [
            f"{name if name.isprintable() else shown(name)}{' (null)' if held is None else ''}"
            for name, held in self.value.items()
        ]
        return ", ".join(fields[:MANY] + ["..."] * (len(fields) > MANY)) or "none"


def _leaves(name: str, held: Any, read: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an unread value: the fields of objects, and anything else as a whole, also an object with a
    key such as a.b, which is not the field b of a."""
    if not isinstance(held, dict) or any("." in key for key in held):
        yield above + name, held
        return
    for key, inner in held.items():
        path = f"{name}.{key}"
        if (path not in read or read[path] is not inner) and not is_blank(inner):
            yield from _leaves(path, inner, read, above)


def value_at(value: Any, path: str) -> Any:
    """Return the value of a column, or of a field inside columns of objects, as in a.b; None without it."""
    if path in value:
        return value[path]
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class Form:
    """A form of rows; a file in this folder defines it as `FORM`.

    fields: the fields of its rows, which `columns` of the config may map. needed: the fields by which it is detected,
    unless `fits` decides. convert: converts a row to an Example; raises BadRow, naming the column, its value and what
    to use. example: a row for the table of docs/data.md. keys: the fields of its messages, if any. rows: what a row
    holds.
    """

    name: str
    fields: tuple[str, ...]
    needed: tuple[str, ...]
    convert: Callable[[Row], Example]
    example: dict[str, Any]
    fits: Callable[[Row], bool] | None = None
    keys: tuple[str, ...] = ()
    rows: RowKind = "texts"

    def detected(self, row: Row) -> bool:
        """Return whether a row has the fields of this form."""
        return self.fits(row) if self.fits else all(row.get(field) is not None for field in self.needed)
