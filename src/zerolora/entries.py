"""Registries that are a table in one module: a dictionary of entries by name."""

from typing import Protocol, TypeVar


class Named(Protocol):
    """An entry of a table."""

    @property
    def name(self) -> str:
        """Its name in the config."""


Entry = TypeVar("Entry", bound=Named)


def entries_by_name(*entries: Entry) -> dict[str, Entry]:
    """Return the entries of a table by name, in the order of the table."""
    result = {entry.name: entry for entry in entries}
    assert len(result) == len(entries), "two entries have one name"
    return result
