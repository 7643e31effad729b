"""The common form to which rows of all formats are converted."""

from typing import Any, NamedTuple


class BadRow(Exception):
    """The mistake in one row, and what to write instead. Whether the row is dropped depends on prepare's policy."""


class Example(NamedTuple):
    """A conversation, a plain text, or tokens: exactly one of `messages`, `text` and `tokens` is set.

    A message is {"role", "content"} and may have "reasoning_content", "tool_calls", "tool_call_id" and "name"; roles
    are system, user, assistant and tool. `labels` goes with `tokens`.

    supervised: for each message whether the row itself takes it out of the loss (False) or puts it in (True), None if
    the config's `loss` decides; None for all. prompt: the number of messages that only ask, whose answers `loss:
    assistant` leaves out. input: the part behind the line break in the last question of an alpaca row, "" without one.
    thoughts: the row's own name of "reasoning_content", "" if no message has it.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    labels: list[int] | None = None
    supervised: list[bool | None] | None = None
    prompt: int = 0
    input: str = ""
    thoughts: str = ""
