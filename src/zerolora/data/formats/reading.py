"""How the rows of a source are read: the column of each field, what is ignored, and which rows are kept."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from zerolora.config.row_sections import Better, Wanted
from zerolora.config.schema import Source
from zerolora.config.settings import TaskRowsSettings
from zerolora.data import TABLES

Status = Literal["read", "ignored", "redundant", "constant"]
Where = Literal["column", "key"]
Seen = Counter[tuple[Status, Where, str]]
"""The number of rows with a value in a column, or of messages with a value in a key, by use."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the thoughts of an answer."""
MODES = frozenset({"on", "off", "yes", "no", "none", "auto", "low", "medium", "high", "enabled", "disabled"})
"""Values of such a column that are a mode of thinking, not thoughts."""
FACTORS = ("weight", "loss_weight", "loss_scale")
"""Names of a factor of the loss: 1 changes nothing."""
SWITCHES = ("loss", "train", "training", "loss_mask", "step_loss_mask")
"""Names of a switch: true includes a turn in the loss, whatever its role."""
TURN_KEYS = (
    *("role", "content", "from", "value", *REASONING),
    *("tool_calls", "function_call", "tool_call_id", "name", "tools", "functions"),
    *(*FACTORS, *SWITCHES),
)
"""The keys of messages that `columns` of the config may map."""


@dataclass(frozen=True)
class Reading:
    """How to read the rows of a source, from its section of the config.

    columns: the column of a field, or the key of a field of messages. roles: our role by a role's name in lower case.
    ignored: names of columns and of keys of messages, and paths such as a.b and messages[].key. filled: the rows are
    from a table, which fills in null where another row has a value. classes: names of the classes of a column. where:
    the values of a column in the rows that are kept. better: which of two answers is the better one. split: the split
    of the source, if any.
    """

    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    filled: bool = False
    classes: dict[str, list[str]] = field(default_factory=dict)
    where: dict[str, Wanted] = field(default_factory=dict)
    better: Better | None = None
    split: str | None = None

    @cached_property
    def keys(self) -> dict[str, str]:
        """The entries of `columns` for messages."""
        return {name: key for name, key in self.columns.items() if name in TURN_KEYS}

    @cached_property
    def mapped(self) -> frozenset[str]:
        """The columns that are mapped, and those of objects of which a field is."""
        return frozenset(name for column in self.columns.values() for name in _names_of(column))

    @cached_property
    def swapped(self) -> "Reading":
        """The same with the columns of the two answers exchanged."""
        chosen, rejected = (self.columns.get(name, name) for name in ("chosen", "rejected"))
        return replace(self, columns={**self.columns, "chosen": rejected, "rejected": chosen})

    @cached_property
    def deciding(self) -> frozenset[str]:
        """The columns by which rows are kept, or answers ordered."""
        return frozenset([*self.where, *(self.better.columns if self.better else ())])

    @cached_property
    def _ignored(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _keys(self) -> dict[str, frozenset[str]]:
        return {}

    def ignores(self, leaf: str) -> bool:
        """Return whether `ignore` has a leaf or what it is inside of, or the name of a key without its column."""
        if leaf not in self._ignored:
            self._ignored[leaf] = not self.ignored.isdisjoint(_names_of(leaf))
        return self._ignored[leaf]

    def ignored_keys(self, messages: str) -> frozenset[str]:
        """Return the ignored keys of the messages in a column, as in messages[]."""
        if messages not in self._keys:
            inside = f"{messages}."
            paths = {name.removeprefix(inside) for name in self.ignored if name.startswith(inside)}
            self._keys[messages] = self.ignored | paths
        return self._keys[messages]


def _names_of(leaf: str) -> Iterator[str]:
    """Yield the names under which `ignore` may have a leaf."""
    for name in (leaf, leaf.rpartition("[].")[2]):
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            yield ".".join(parts[:end])


def reading_of(section: Source | TaskRowsSettings, kind: str) -> Reading:
    """Return the reading of a section for a kind of file (`zerolora.data`)."""
    roles: dict[str, str] = {name.strip().lower(): role for name, role in section.roles.items()}
    reading = Reading(dict(section.columns), roles, frozenset(section.ignore), filled=kind in TABLES)
    if isinstance(section, Source):
        reading = replace(
            reading, classes=section.classes, where=section.where, better=section.better, split=section.split
        )
    return reading
