"""prompt: a prompt and its completion, two texts or two lists of messages.

Of messages, only the answers in the completion are supervised.
"""

import re
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.chat import CONVERSATION, Turn, chat, conversation, message_of, with_thoughts
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.messages import MESSAGE
from zerolora.data.formats.reading import REASONING
from zerolora.data.formats.row_values import objects_of
from zerolora.errors import shown

OBJECTS = re.compile(r"""\s*\[\s*\{\s*(["'])""")
"""Matches the beginning of a list of objects as text; its group is the first quote."""


def _prompt(row: Row) -> Example:
    question, answer = row.needed("prompt"), row.needed("completion")
    if isinstance(question, str) and isinstance(answer, str) and not _are_messages(row, "prompt", question):
        supervised = with_thoughts(row, message_of("assistant", row.text("completion")))
        return conversation([Turn(message_of("user", row.text("prompt"))), supervised], row, "completion")
    if _are_messages(row, "prompt", question) and _are_messages(row, "completion", answer):
        prompt, completion = chat(row, "prompt"), chat(row, "completion")
        for field in REASONING:
            if row.get(field):
                raise BadRow(
                    f"{row.name(field)} conflicts with lists of messages; move it into the answer it belongs to"
                )
        return conversation([*prompt, *completion], row, "completion", prompt=len(prompt))
    seen = f"{row.name('prompt')} is {shown(question)} and {row.name('completion')} is {shown(answer)}"
    raise BadRow(f"{seen}; use two texts, or two lists of messages")


def _are_messages(row: Row, field: str, value: Any) -> bool:
    """Return whether a value is a list of messages, maybe as JSON text in a cell of CSV. Raises BadRow for a list in
    Python's syntax, as in the output of pandas' to_csv."""
    if not isinstance(value, str) or not (begin := OBJECTS.match(value)):
        return isinstance(value, list)
    role, quote, name = row.reading.keys.get("role", "role"), begin[1], row.name(field)
    if f"{quote}{role}{quote}" not in value:
        return False
    if quote == "'":
        raise BadRow(f"{name} is {shown(value)}, a list as Python writes it; write it as JSON, as json.dumps does")
    return all(role in message for message in objects_of(value, name))


FORM = Form(
    name="prompt",
    fields=("prompt", "completion", *CONVERSATION, *REASONING),
    needed=("prompt", "completion"),
    convert=_prompt,
    example={"prompt": "1 + 4 =", "completion": "5"},
    keys=MESSAGE,
)
