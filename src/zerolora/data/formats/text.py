"""text: plain text, supervised as a whole."""

from zerolora.data.example import Example
from zerolora.data.formats.form import Form, Row


def _text(row: Row) -> Example:
    return Example(text=row.text("text"))


FORM = Form(name="text", fields=("text",), needed=("text",), convert=_text, example={"text": "Once upon a time"})
