"""The interface of a form of rows, and access to a row's fields by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.values import filled, text_of
from zerolora.errors import shown

MANY = 20  # maximum number of fields that a message names


class Row:
    """A row's fields, independent of the names of their columns; "a.b" is the field b inside the column a."""

    def __init__(self, value: dict[str, Any], columns: dict[str, str]) -> None:
        self.value, self.columns = value, columns

    def get(self, field: str) -> Any:
        """Return a field's value, None without one. A column that is mapped to another field does not count."""
        if field not in self.columns and field in self.columns.values():
            return None
        column = self.name(field)
        if column in self.value:
            return self.value[column]
        found: Any = self.value
        for part in column.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def name(self, field: str) -> str:
        """Return the column that holds a field."""
        return self.columns.get(field, field)

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
        return filled(text_of(self.needed(field), self.name(field)), self.name(field))

    def optional_text(self, field: str) -> str:
        """Return a field's text, "" if it is missing or blank."""
        found = self.get(field)
        text = "" if found is None else text_of(found, self.name(field))
        return text if text.strip() else ""

    def __str__(self) -> str:
        fields = [
            f"{name if name.isprintable() else shown(name)}{' (null)' if held is None else ''}"
            for name, held in self.value.items()
        ]
        return ", ".join(fields[:MANY] + ["..."] * (len(fields) > MANY)) or "none"


@dataclass(frozen=True)
class Form:
    """A form of rows, which a file in this folder defines as `FORM`.

    fields: the fields of its rows, which `columns` of the config may map. needed: the fields by which it is detected,
    unless `fits` decides. convert: converts a row to an Example; raises BadRow, naming the column, its value and what
    to write. example: a row, as in the table of docs/data.md.
    """

    name: str
    fields: tuple[str, ...]
    needed: tuple[str, ...]
    convert: Callable[[Row], Example]
    example: dict[str, Any]
    fits: Callable[[Row], bool] | None = None

    def detected(self, row: Row) -> bool:
        """Return whether a row has the fields of this form."""
        return self.fits(row) if self.fits else all(row.get(field) is not None for field in self.needed)
