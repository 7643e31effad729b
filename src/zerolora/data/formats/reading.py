"""The names in a source's rows: the column or message key of each field, and the ignored ones."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from zerolora.config.schema import Source
from zerolora.config.settings import TaskRowsSettings
from zerolora.data import TABLES

Status = Literal["read", "ignored", "unread"]
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
    ignored: ignored columns and keys. filled: the rows are from a table, which fills in null where another row has a
    value. arguments: the variables that the chat template reads (`zerolora.data.template`).
    """

    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    filled: bool = False
    arguments: frozenset[str] = frozenset()

    @cached_property
    def keys(self) -> dict[str, str]:
        """The entries of `columns` for messages."""
        return {name: key for name, key in self.columns.items() if name in TURN_KEYS}


def reading_of(section: Source | TaskRowsSettings, kind: str) -> Reading:
    """Return the reading of a section for a kind of file (`zerolora.data`)."""
    roles: dict[str, str] = {name.strip().lower(): role for name, role in section.roles.items()}
    return Reading(dict(section.columns), roles, frozenset(section.ignore), filled=kind in TABLES)
