"""messages: turns with `role` and `content`, as in OpenAI's chat API; some data sets call them conversations."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.chat import CONVERSATION, KEYS, chat, conversation
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.row_values import objects_of

MESSAGE = ("role", "content", "tool_calls", "function_call", "tool_call_id", "name", "tools", "functions", *KEYS)
"""The keys of a message in OpenAI's form."""


def has_roles(row: Row) -> bool:
    """Return whether `conversations` has OpenAI's keys; errors are left to the conversion."""
    try:
        turns = objects_of(row.get("conversations"), "")
    except (BadRow, RecursionError):
        return False
    keys = row.reading.keys
    return bool(turns) and keys.get("role", "role") in turns[0] and keys.get("from", "from") not in turns[0]


def _messages(row: Row) -> Example:
    other = row.get("messages") is None and row.get("conversations") is not None
    field = "conversations" if other else "messages"
    return conversation(chat(row, field), row, field)


FORM = Form(
    name="messages",
    fields=("messages", "conversations", *CONVERSATION),
    needed=("messages",),
    convert=_messages,
    example={"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    fits=lambda row: row.get("messages") is not None or has_roles(row),
    keys=MESSAGE,
)
