"""The names in a source's rows: the column, or key of a message, of each field, and those left out on purpose."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from zerolora.data.kinds import TABLES

Status = Literal["read", "ignored", "unread"]
Where = Literal["column", "key"]
Seen = Counter[tuple[Status, Where, str]]
"""In how many rows a column, or in how many messages a key, holds something, and what became of it."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the thoughts of an answer."""
MODES = frozenset({"on", "off", "yes", "no", "none", "auto", "low", "medium", "high", "enabled", "disabled"})
"""Texts of a column of such a name that say how much was thought, and are not thoughts."""
FACTORS = ("weight", "loss_weight", "loss_scale")
"""Names of a factor of the loss: 1 changes nothing."""
SWITCHES = ("loss", "train", "training", "loss_mask", "step_loss_mask")
"""Names of a switch: true puts a turn into the loss, whatever its role."""
TURN_KEYS = (
    *("role", "content", "from", "value", *REASONING),
    *("tool_calls", "function_call", "tool_call_id", "name", "tools", "functions"),
    *(*FACTORS, *SWITCHES),
)
"""The keys of messages that forms read, which `columns` of the config may map."""


@dataclass(frozen=True)
class Reading:
    """How the rows of a source are read, as its section of the config says.

    columns: the column of a field, and the key of a field of messages. roles: our role by a role's name in lower case.
    ignored: columns and keys that are left out on purpose. filled: the rows come from a table, whose types fill in null
    where another row has a value.
    """

    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    filled: bool = False
    keys: dict[str, str] = field(init=False, repr=False, compare=False)
    """Those of `columns` that messages may have."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", {name: key for name, key in self.columns.items() if name in TURN_KEYS})


class Names(Protocol):
    """A section of the config that says how rows are read."""

    @property
    def columns(self) -> Mapping[str, str]: ...

    @property
    def roles(self) -> Mapping[str, str]: ...

    @property
    def ignore(self) -> Sequence[str]: ...


def reading_of(section: Names, kind: str) -> Reading:
    """Return how rows of a kind of file (kinds.py) are read."""
    roles = {name.strip().lower(): role for name, role in section.roles.items()}
    return Reading(dict(section.columns), roles, frozenset(section.ignore), filled=kind in TABLES)
