"""sharegpt: turns with `from` and `value`, as in ShareGPT's exports."""

from zerolora.data.example import Example
from zerolora.data.formats.chat import (
    CALLING,
    CONVERSATION,
    KEYS,
    Turn,
    calling_of,
    conversation,
    finished,
    message_of,
    role_of,
    turns_of,
)
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.messages import has_roles
from zerolora.data.formats.row_values import filled, text_of

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys((CALLING, "tool_call"), CALLING),
}


def spoken(turn: Row, filled_in: bool) -> Turn:
    """Return a message in ShareGPT's form."""
    role, name = role_of(turn, "from", SPEAKERS), turn.name("value")
    if role == CALLING:
        return finished(turn, calling_of(turn, "value"))
    text = text_of(turn.get("value"), name)
    return finished(turn, message_of(role, filled(text, name) if role == "assistant" else text))


def _sharegpt(row: Row) -> Example:
    return conversation(turns_of(row, "conversations", spoken, ("from", "value"), SPEAKERS), row, "conversations")


FORM = Form(
    name="sharegpt",
    fields=("conversations", *CONVERSATION),
    needed=("conversations",),
    convert=_sharegpt,
    example={"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    fits=lambda row: row.get("conversations") is not None and (row.get("messages") is not None or not has_roles(row)),
    keys=("from", "value", "tools", "functions", *KEYS),
)
