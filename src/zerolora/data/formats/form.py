"""The interface of a form of rows, and access to a row's fields by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.reading import Reading
from zerolora.data.formats.row_values import filled, is_blank, text_of
from zerolora.errors import shown

MANY = 20  # maximum number of fields that a message names


class Row:
    """A row's fields, independent of the names of their columns; "a.b" is the field b inside the column a.

    A message of a row is a Row too, whose columns are its keys; `path` is its name in the row, as in messages[1].
    read: the value of every column that was read. turns: the messages. plain: the keys of messages that hold nothing
    else and were read without a Row, and the number of these.
    """

    __slots__ = ("columns", "path", "plain", "read", "reading", "turns", "value")

    def __init__(self, value: dict[str, Any], reading: Reading, path: str = "") -> None:
        self.value, self.reading, self.path = value, reading, path
        self.columns = reading.keys if path else reading.columns
        self.read: dict[str, Any] = {}
        self.turns: list[Row] = []
        self.plain: tuple[tuple[str, str], int] = (("", ""), 0)

    def lacks(self, fields: frozenset[str]) -> bool:
        """Return whether it is plain that a row has none of these fields. Most rows have few of the many."""
        return not self.columns and fields.isdisjoint(self.value)

    def get(self, field: str) -> Any:
        """Return a field's value, None without one. A column that is mapped to another field does not count."""
        if not self.columns:
            if field not in self.value or field in self.reading.ignored:
                return None
            self.read[field] = self.value[field]
            return self.value[field]
        if field not in self.columns and field in self.columns.values():
            return None
        column = self.columns.get(field, field)
        if column in self.reading.ignored:
            return None
        if column in self.value:
            found = self.value[column]
        elif "." in column:
            found = self.value
            for part in column.split("."):
                found = found.get(part) if isinstance(found, dict) else None
        else:
            return None
        self.read[column] = found
        return found

    def name(self, field: str) -> str:
        """Return the column that holds a field."""
        column = self.columns.get(field, field)
        return f"{self.path}.{column}" if self.path else column

    def needed(self, field: str) -> Any:
        """Return a field's value. Raises BadRow if there is none."""
        found = self.get(field)
        if found is None:
            raise BadRow(
                f"{self.name(field)} is missing (the row has {self}); fill it in, or write columns: {{{field}: ...}} "
                "with the column that holds it"
            )
        return found

    def text(self, field: str) -> str:
        """Return a field's text. Raises BadRow if it is missing, not a text, or blank."""
        found = self.get(field)
        if isinstance(found, str) and found.isascii() and found.strip():
            return found
        return filled(text_of(self.needed(field), self.name(field)), self.name(field))

    def optional_text(self, *fields: str) -> str:
        """Return the text of a field that has one of several names, "" if it is missing or blank.

        Raises BadRow if two of the names hold different texts.
        """
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
        """Return a message of this row."""
        self.turns.append(Row(value, self.reading, path))
        return self.turns[-1]

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of every column, or field inside a column, that holds something and was not read."""
        if not self.columns:
            for name, held in self.value.items():
                if name not in self.read and not is_blank(held):
                    yield name, held
            return
        inside = [column for column in self.read if "." in column and column not in self.value]
        yield from _unread(self.value, self.read, "", inside)

    def __str__(self) -> str:
        fields = [
            f"{name if name.isprintable() else shown(name)}{' (null)' if held is None else ''}"
            for name, held in self.value.items()
        ]
        return ", ".join(fields[:MANY] + ["..."] * (len(fields) > MANY)) or "none"


def _unread(value: dict[str, Any], read: dict[str, Any], above: str, inside: list[str]) -> Iterator[tuple[str, Any]]:
    for key, held in value.items():
        name = above + key
        if name in read or is_blank(held):
            continue
        deeper = [column for column in inside if column.startswith(f"{name}.")]
        if deeper and isinstance(held, dict):
            yield from _unread(held, read, f"{name}.", deeper)
        else:
            yield name, held


@dataclass(frozen=True)
class Form:
    """A form of rows, which a file in this folder defines as `FORM`.

    fields: the fields of its rows, which `columns` of the config may map. needed: the fields by which it is detected,
    unless `fits` decides. convert: converts a row to an Example; raises BadRow, naming the column, its value and what
    to write. example: a row, as in the table of docs/data.md. keys: the fields of its messages, if it has some.
    """

    name: str
    fields: tuple[str, ...]
    needed: tuple[str, ...]
    convert: Callable[[Row], Example]
    example: dict[str, Any]
    fits: Callable[[Row], bool] | None = None
    keys: tuple[str, ...] = ()

    def detected(self, row: Row) -> bool:
        """Return whether a row has the fields of this form."""
        return self.fits(row) if self.fits else all(row.get(field) is not None for field in self.needed)
