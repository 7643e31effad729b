"""prompt: a prompt and its completion, two texts or two lists of messages.

Of lists, the answers in the completion are learnt; those in the prompt belong to the question.
"""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.chat import CONVERSATION, Turn, chat, conversation, message_of, with_thoughts
from zerolora.data.formats.messages import MESSAGE
from zerolora.data.formats.reading import REASONING
from zerolora.errors import shown


def _prompt(row: Row) -> Example:
    parts = {row.name(field): row.needed(field) for field in ("prompt", "completion")}
    if all(isinstance(value, str) for value in parts.values()):
        answer = with_thoughts(row, message_of("assistant", row.text("completion")))
        return conversation([Turn(message_of("user", row.text("prompt"))), answer], row, "completion")
    if all(isinstance(value, list) for value in parts.values()):
        prompt, completion = chat(row, "prompt"), chat(row, "completion")
        for field in REASONING:
            if row.get(field):
                raise BadRow(
                    f"{row.name(field)} stands beside lists of messages; move it into the answer it belongs to"
                )
        return conversation([*prompt, *completion], row, "completion", prompt=len(prompt))
    seen = " and ".join(f"{name} is {shown(value)}" for name, value in parts.items())
    raise BadRow(f"{seen}; write two texts, or two lists of messages")


FORM = Form(
    name="prompt",
    fields=("prompt", "completion", *CONVERSATION, *REASONING),
    needed=("prompt", "completion"),
    convert=_prompt,
    example={"prompt": "1 + 4 =", "completion": "5"},
    keys=MESSAGE,
)
