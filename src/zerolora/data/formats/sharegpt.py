"""sharegpt: turns with `from` and `value`, as in ShareGPT's exports."""

import re
from typing import Any

from zerolora.data.example import Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.chat import (
    CONVERSATION,
    KEYS,
    Turn,
    call_of,
    conversation,
    finished,
    message_of,
    role_of,
    turns_of,
)
from zerolora.data.formats.messages import has_roles
from zerolora.data.formats.values import filled, json_of, text_of

CALLING = "function_call"
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys((CALLING, "tool_call"), CALLING),
}
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def _sharegpt(row: Row) -> Example:
    return conversation(turns_of(row, "conversations", _turn, ("from", "value"), SPEAKERS), row, "conversations")


def _turn(turn: Row, filled_in: bool) -> Turn:
    role, value, name = role_of(turn, "from", SPEAKERS), turn.get("value"), turn.name("value")
    if role == CALLING:
        return finished(turn, _calling(value, name, turn.reading.ignored))
    text = text_of(value, name)
    return finished(turn, message_of(role, filled(text, name) if role == "assistant" else text))


def _calling(value: Any, name: str, ignored: frozenset[str]) -> dict[str, Any]:
    """Return a turn that calls tools: one call or a list of them, as JSON, behind a thought or not."""
    thought = THOUGHT.match(value) if isinstance(value, str) else None
    called = json_of(value[thought.end() :] if thought else value, name)
    if isinstance(called, list) and called:
        calls = [call_of(call, f"{name}[{number}]", ignored=ignored) for number, call in enumerate(called)]
    else:
        calls = [call_of(called, name, ignored=ignored)]
    return {**message_of("assistant", text_of(thought[0], name) if thought else ""), "tool_calls": calls}


def _fits(row: Row) -> bool:
    return row.get("conversations") is not None and (row.get("messages") is not None or not has_roles(row))


FORM = Form(
    name="sharegpt",
    fields=("conversations", *CONVERSATION),
    needed=("conversations",),
    convert=_sharegpt,
    example={"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    fits=_fits,
    keys=("from", "value", "tools", "functions", *KEYS),
)
