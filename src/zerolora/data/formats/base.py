"""What a form of rows is, and a row's fields by the names that forms use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.values import filled, text_of
from zerolora.errors import shown

MANY = 20  # fields that a message names at most


class Row:
    """A row's fields, whatever the file calls their columns; "a.b" is column b inside column a."""

    def __init__(self, value: dict[str, Any], columns: dict[str, str]) -> None:
        self.value, self.columns = value, columns

    def get(self, field: str) -> Any:
        """Return a field's value, None if it has none. A column that holds another field is not also its own."""
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
        """Return a field's value. Raises BadRow if it has none."""
        found = self.get(field)
        if found is None:
            raise BadRow(
                f"{self.name(field)} is missing (the row has {self}); fill it in, or write columns: {{{field}: ...}} "
                "with the column that holds it"
            )
        return found

    def text(self, field: str) -> str:
        """Return a field's text. Raises BadRow if it is none, or blank."""
        return filled(text_of(self.needed(field), self.name(field)), self.name(field))

    def optional_text(self, field: str) -> str:
        """Return a field's text, "" if it has none or a blank one."""
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
    """A form of rows: a file of this folder defines one as `FORM`.

    fields: what the rows may hold, which `columns` of the config may map. needed: the fields that tell the form, unless
    `fits` does. convert: a row to an Example; raises BadRow, naming the column, its value and what to write. example: a
    row, as the table of docs/data.md shows it.
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
