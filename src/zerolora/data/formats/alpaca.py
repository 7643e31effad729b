"""alpaca: an instruction, its input and the answer, as in Stanford Alpaca's data."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.chat import message_of
from zerolora.data.formats.values import filled, list_of, text_of
from zerolora.errors import shown


def _alpaca(row: Row) -> Example:
    messages = [message_of("system", system)] if (system := row.optional_text("system")) else []
    for number, pair in enumerate(list_of(row.get("history") or [], row.name("history"))):
        name = f"{row.name('history')}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"{name} is {shown(pair)}; write [question, answer]")
        question, answer = (
            filled(text_of(part, f"{name}[{place}]"), f"{name}[{place}]") for place, part in enumerate(pair)
        )
        messages += [message_of("user", question), message_of("assistant", answer)]
    parts = [row.text("instruction"), row.optional_text("input")]
    messages.append(message_of("user", "\n".join(part for part in parts if part)))
    messages.append(message_of("assistant", row.text("output")))
    return Example(messages=messages)


FORM = Form(
    name="alpaca",
    fields=("instruction", "input", "output", "system", "history"),
    needed=("instruction", "output"),
    convert=_alpaca,
    example={"instruction": "Add.", "input": "1 + 4", "output": "5"},
)
