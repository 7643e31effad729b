"""The common form to which rows of all formats are converted."""

from dataclasses import dataclass
from typing import Any


class BadRow(Exception):
    """The mistake in one row, and what to write instead. Whether the row is dropped depends on prepare's policy."""


@dataclass(frozen=True)
class Example:
    """A conversation, a plain text, or tokens: exactly one of `messages`, `text` and `tokens` is set.

    A message is {"role", "content"} and may have "tool_calls", "tool_call_id" and "name"; roles are system, user,
    assistant and tool. `labels` goes with `tokens`.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    labels: list[int] | None = None
