"""alpaca: an instruction, its input and the answer, as in Stanford Alpaca's data."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.chat import CONVERSATION, Turn, conversation, message_of, with_thoughts
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.reading import REASONING
from zerolora.data.formats.row_values import filled, list_of, text_of
from zerolora.errors import shown


def history_of(row: Row) -> list[Turn]:
    """Return the earlier questions and answers of a row."""
    turns: list[Turn] = []
    history = row.get("history")
    for number, pair in enumerate(list_of(history, row.name("history")) if history else ()):
        name = f"{row.name('history')}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"{name} is {shown(pair)}; use [question, answer]")
        question, answer = (
            filled(text_of(part, f"{name}[{index}]"), f"{name}[{index}]") for index, part in enumerate(pair)
        )
        turns += [Turn(message_of("user", question)), Turn(message_of("assistant", answer))]
    return turns


def _alpaca(row: Row) -> Example:
    turns = history_of(row)
    instruction, further = row.text("instruction"), row.optional_text("input", "context")
    question = f"{instruction}\n{further}" if further else instruction
    turns.append(Turn({"role": "user", "content": question}))
    turns.append(with_thoughts(row, {"role": "assistant", "content": row.text("output")}))
    return conversation(turns, row, "output", further=further)


FORM = Form(
    name="alpaca",
    fields=("instruction", "input", "output", "context", "history", *CONVERSATION, *REASONING),
    needed=("instruction", "output"),
    convert=_alpaca,
    example={"instruction": "Add.", "input": "1 + 4", "output": "5"},
)
