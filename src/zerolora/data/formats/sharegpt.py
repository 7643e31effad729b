"""sharegpt: turns with `from` and `value`, as ShareGPT's exports hold them."""

from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.chat import call_of, conversation, message_of, role_of
from zerolora.data.formats.messages import has_roles
from zerolora.data.formats.values import filled, json_of, objects_of, text_of

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "ipython"), "tool"),
    "function_call": "assistant",
}


def _sharegpt(row: Row) -> Example:
    name = row.name("conversations")
    messages = []
    for number, turn in enumerate(objects_of(row.needed("conversations"), name)):
        messages.append(_turn(turn, f"{name}[{number}]"))
    if system := row.optional_text("system"):
        if messages and messages[0]["role"] == "system":
            raise BadRow(f"{row.name('system')} and {name}[0] are both system prompts; keep one")
        messages.insert(0, message_of("system", system))
    return conversation(messages, row, name)


def _turn(turn: dict[str, Any], name: str) -> dict[str, Any]:
    role = role_of(turn, "from", SPEAKERS, name)
    value = turn.get("value")
    if turn["from"] == "function_call":
        return {
            **message_of("assistant", ""),
            "tool_calls": [call_of(json_of(value, f"{name}.value"), f"{name}.value")],
        }
    text = text_of(value, f"{name}.value")
    return message_of(role, filled(text, f"{name}.value") if role == "assistant" else text)


def _fits(row: Row) -> bool:
    turns = row.get("conversations")
    return turns is not None and (row.get("messages") is not None or not has_roles(turns))


FORM = Form(
    name="sharegpt",
    fields=("conversations", "system", "tools"),
    needed=("conversations",),
    convert=_sharegpt,
    example={"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    fits=_fits,
)
