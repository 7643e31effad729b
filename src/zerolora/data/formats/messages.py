"""messages: turns with `role` and `content`, as in OpenAI's chat API; some data sets call them conversations."""

from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.chat import chat, conversation
from zerolora.data.formats.values import objects_of


def has_roles(value: Any) -> bool:
    """Tell whether turns have OpenAI's keys; the conversion reports what is wrong with others."""
    try:
        turns = objects_of(value, "")
    except (BadRow, RecursionError):
        return False
    return bool(turns) and "role" in turns[0] and "from" not in turns[0]


def _messages(row: Row) -> Example:
    other = row.get("messages") is None and row.get("conversations") is not None
    field = "conversations" if other else "messages"
    name = row.name(field)
    return conversation(chat(row.needed(field), name), row, name)


def _fits(row: Row) -> bool:
    return row.get("messages") is not None or has_roles(row.get("conversations"))


FORM = Form(
    name="messages",
    fields=("messages", "conversations", "tools"),
    needed=("messages",),
    convert=_messages,
    example={"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    fits=_fits,
)
