"""The interface of a form of rows, and access to a row's fields by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.reading import Reading
from zerolora.data.formats.row_values import filled, is_blank, text_of
from zerolora.errors import shown
from zerolora.types import RowKind

MANY = 20  # fields in a message


class Row:
    """A row's fields, independent of their columns' names; "a.b" is the field b inside the column a.

    A message is a Row as well, with its keys as columns and its name in the row as `path`, as in messages[1]. read: the
    values of the columns that were read. turns: the messages. plain: the two keys of messages without other keys, which
    are converted without a Row, and their number.
    """

    __slots__ = ("columns", "path", "plain", "read", "reading", "turns", "value")

    def __init__(self, value: dict[str, Any], reading: Reading, path: str = "") -> None:
        self.value, self.reading, self.path = value, reading, path
        self.columns = reading.keys if path else reading.columns
        self.read: dict[str, Any] = {}
        self.turns: list[Row] = []
        self.plain: tuple[tuple[str, str], int] = (("", ""), 0)

    def lacks(self, fields: frozenset[str]) -> bool:
        """Return whether a row obviously has none of these fields. Fast, since most rows have few fields."""
        return not self.columns and fields.isdisjoint(self.value)

    def get(self, field: str) -> Any:
        """Return a field's value, if any. A column that is mapped to another field does not count."""
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
            result = self.value[column]
        elif "." in column:
            result = self.value
            for part in column.split("."):
                result = result.get(part) if isinstance(result, dict) else None
        else:
            return None
        self.read[column] = result
        return result

    def name(self, field: str) -> str:
        """Return the column that holds a field."""
        column = self.columns.get(field, field)
        return f"{self.path}.{column}" if self.path else column

    def needed(self, field: str) -> Any:
        """Return a field's value. Raises BadRow if there is none."""
        result = self.get(field)
        if result is None:
            raise BadRow(
                f"{self.name(field)} is missing (the row has {self}); fill it in, or write columns: {{{field}: ...}} "
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
        """Yield the name and value of every unread column, or field inside a column, that is not blank."""
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
    """A form of rows; a file in this folder defines it as `FORM`.

    fields: the fields of its rows, which `columns` of the config may map. needed: the fields by which it is detected,
    unless `fits` decides. convert: converts a row to an Example; raises BadRow, naming the column, its value and what
    to write. example: a row for the table of docs/data.md. keys: the fields of its messages, if any. rows: what a row
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
