"""The common form of rows of all formats."""

from typing import Any, NamedTuple

SAMPLED = "zerolora_sample"
"""The column of provenance in rows of sampled answers (`zerolora.data.sampled_rows`), which every form passes over. Its
name is not one that other data would have."""


class BadRow(Exception):
    """The mistake in a row, and the remedy. prepare's policy decides whether the row is dropped."""


class Example(NamedTuple):
    """A conversation, a plain text, or tokens: exactly one of `messages`, `text` and `tokens` is set.

    A message is {"role", "content"} and may have "reasoning_content", "tool_calls", "tool_call_id" and "name"; roles
    are system, user, assistant and tool. `labels` goes with `tokens`.

    supervised: for each message whether the row itself excludes it from the loss (False) or includes it (True), None if
    the config's `loss` decides; None for all. prompt: the number of messages in the prompt, whose answers `loss:
    assistant` excludes. input: the part after the line break in the last question of an alpaca row, "" without one.
    thoughts: the row's name of "reasoning_content", "" without thoughts.

    rejected: of a pair, the whole conversation with the rejected answer; `messages` is that with the chosen one, and
    both begin with the same `prompt` messages. desirable: the label of a labelled answer, the messages after `prompt`.
    arguments: the variables of the chat template that the row sets; None without any.
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
    rejected: list[dict[str, Any]] | None = None
    desirable: bool | None = None
    arguments: dict[str, Any] | None = None

    def without_system(self) -> "Example":
        """Return the row without the system prompt that it begins with."""
        if not self.messages or self.messages[0]["role"] != "system":
            return self
        return self._replace(
            messages=self.messages[1:],
            rejected=self.rejected and self.rejected[1:],
            supervised=self.supervised and self.supervised[1:],
            prompt=max(self.prompt - 1, 0),
        )
