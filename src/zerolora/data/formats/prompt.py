"""prompt: a prompt and its completion, two texts or two lists of messages."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.chat import chat, conversation, message_of
from zerolora.errors import shown


def _prompt(row: Row) -> Example:
    parts = [(row.needed(field), row.name(field)) for field in ("prompt", "completion")]
    if all(isinstance(value, str) for value, _ in parts):
        messages = [message_of("user", row.text("prompt")), message_of("assistant", row.text("completion"))]
    elif all(isinstance(value, list) for value, _ in parts):
        messages = [message for value, name in parts for message in chat(value, name)]
    else:
        seen = " and ".join(f"{name} is {shown(value)}" for value, name in parts)
        raise BadRow(f"{seen}; write two texts, or two lists of messages")
    return conversation(messages, row, row.name("completion"))


FORM = Form(
    name="prompt",
    fields=("prompt", "completion", "tools"),
    needed=("prompt", "completion"),
    convert=_prompt,
    example={"prompt": "1 + 4 =", "completion": "5"},
)
