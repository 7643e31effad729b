"""messages: turns with `role` and `content`, as in OpenAI's chat API; some data sets call them conversations."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.chat import CONVERSATION, KEYS, chat, conversation
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.row_values import is_blank, objects_of
from zerolora.errors import shown

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
    turns = chat(row, field)
    if not any(turn.message["role"] == "user" for turn in turns):
        _check_not_asked_beside(row, field)
    return conversation(turns, row, field)


def _check_not_asked_beside(row: Row, field: str) -> None:
    """Raise BadRow if another column has the question of messages without one, as in pairs with a prompt."""
    for name in ("prompt", "question", "instruction"):
        if name not in (*row.reading.ignored, *row.read) and not is_blank(held := row.value.get(name)):
            raise BadRow(
                f"{row.name(field)} has no question, and {name} is {shown(held)}; write format: prompt and columns: "
                f"{{prompt: {name}, completion: {row.name(field)}}}, or ignore: [{name}] to train without it"
            )


FORM = Form(
    name="messages",
    fields=("messages", "conversations", *CONVERSATION),
    needed=("messages",),
    convert=_messages,
    example={"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    fits=lambda row: row.get("messages") is not None or has_roles(row),
    keys=MESSAGE,
)
