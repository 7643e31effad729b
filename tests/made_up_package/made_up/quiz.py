"""quiz: a question, its answer and an optional hint."""

from zerolora.data.example import Example
from zerolora.data.formats.chat import message_of
from zerolora.data.formats.form import Form, Row


def _quiz(row: Row) -> Example:
    hint = row.optional_text("hint")
    question = row.text("question") + (f"\nHint: {hint}" if hint else "")
    return Example(messages=[message_of("user", question), message_of("assistant", row.text("answer"))])


FORM = Form(
    name="quiz",
    fields=("question", "answer", "hint"),
    needed=("question", "answer"),
    convert=_quiz,
    example={"question": "What is 1 + 4?", "answer": "5", "hint": "Less than 6."},
)
