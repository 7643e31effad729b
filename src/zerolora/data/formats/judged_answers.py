"""The prompt and the answers of a judged row, which many data sets write in forms of their own."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from zerolora.data.example import BadRow
from zerolora.data.formats.alpaca import history_of
from zerolora.data.formats.chat import ROLES, Turn, checked, message_of, turns_in
from zerolora.data.formats.form import Row
from zerolora.data.formats.messages import MESSAGE
from zerolora.data.formats.row_values import filled, is_blank, json_of, objects_of, text_of
from zerolora.data.formats.sharegpt import SPEAKERS, spoken
from zerolora.errors import shown

QUESTIONS = ("prompt", "question", "instruction")
"""Fields of a question; instruction may have an input, which is a question without it."""
LISTS = ("messages", "conversations")
ASKING = (*QUESTIONS, "input", "context", "history", *LISTS)
"""Fields of a prompt, besides CONVERSATION."""
TURNS = (*MESSAGE, "from", "value")
"""Keys of messages, of both kinds."""
OBJECTS = re.compile(r"""\s*(?:\[\s*)?\{\s*(["'])""")
"""Matches the beginning of a message, or of a list of them, as text; its group is the first quote."""
TRANSCRIPT = re.compile(r"\n\nHuman:|\s*Human:(?=.*\n\nAssistant:)", re.DOTALL)
"""Matches the beginning of a conversation in the form of Anthropic's hh-rlhf."""
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


class Prompt(NamedTuple):
    """The turns of a prompt, their field, the text that is the last one, if any, and its input (Example.input)."""

    turns: list[Turn]
    field: str
    text: str = ""
    further: str = ""


def messages_in(turns: list[Turn]) -> list[dict[str, Any]]:
    return [turn.message for turn in turns]


def present_in(row: Row, fields: Sequence[str]) -> list[str]:
    """Return the fields with a value; those with an empty one only if no other has any, so that it can be named."""
    present = [field for field in fields if row.get(field) is not None]
    return [field for field in present if not is_blank(row.get(field))] or present[:1]


def one_of(row: Row, fields: Sequence[str]) -> str:
    """Return the field that holds an answer, "" if none does. Raises BadRow for two of them."""
    present = present_in(row, fields)
    if len(present) > 1:
        raise BadRow(
            f"{row.name(present[0])} and {row.name(present[1])} are two answers of one kind; keep one, or set "
            f"ignore: [{row.name(present[1])}]"
        )
    return present[0] if present else ""


def said(row: Row, field: str) -> str | list[Turn]:
    """Return a field's text, or its messages: a list, one of them, either of both as JSON, or a transcript."""
    value, name = row.needed(field), row.name(field)
    if isinstance(value, (list, dict)) and not value:
        raise BadRow(f"{name} is empty; fill it in or remove the row")
    messages = _objects(row, value, name)
    if messages is not None:
        keys = row.reading.keys
        first = messages[0] if messages else {}
        by_name = keys.get("from", "from") in first and keys.get("role", "role") not in first
        filled_in = row.reading.filled and not isinstance(value, str)
        read, names, roles = (spoken, ("from", "value"), SPEAKERS) if by_name else (checked, ("role", "content"), ROLES)
        return turns_in(row, messages, name, filled_in, read, names, roles)
    text = filled(text_of(value, name), name)
    return transcript(text, name) if TRANSCRIPT.match(text) else text


def transcript(text: str, name: str) -> list[Turn]:
    r"""Return the turns of a text such as "\n\nHuman: Hi\n\nAssistant: Hello"; an empty last turn is left out."""
    parts = SPEAKER.split("\n\n" + text.lstrip())[1:]
    turns = [
        Turn(message_of({"Human": "user", "Assistant": "assistant"}[who], content.removeprefix(" ")))
        for who, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not turns[-1].message["content"].strip():
        turns.pop()
    if not turns:
        raise BadRow(f"{name} is empty; fill it in or remove the row")
    for number, (message, *_) in enumerate(turns):
        filled(message["content"], f"turn {number + 1} of {name}")
    return turns


def _objects(row: Row, value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return messages, maybe from JSON text in a cell of CSV; None for another text. Raises BadRow for Python's syntax,
    as in the output of pandas' to_csv."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        return objects_of(value, name)
    if not isinstance(value, str) or not (begin := OBJECTS.match(value)):
        return None
    keys, quote = row.reading.keys, begin[1]
    kinds = [(keys.get(role, role), keys.get(text, text)) for role, text in (("role", "content"), ("from", "value"))]
    if not any(f"{quote}{role}{quote}" in value and f"{quote}{text}{quote}" in value for role, text in kinds):
        return None
    if quote == "'":
        raise BadRow(f"{name} is {shown(value)}, as Python writes messages; write JSON, as json.dumps does")
    result = json_of(value, name)
    messages = objects_of([result] if isinstance(result, dict) else result, name)
    return messages if all(any(role in message for role, _ in kinds) for message in messages) else None


def prompt_of(row: Row) -> Prompt | None:
    """Return the prompt that a row has beside its answers, None without one. Raises BadRow for two different ones."""
    listed = [field for field in LISTS if not is_blank(row.get(field))]
    if len(listed) > 1:
        raise BadRow(f"{row.name(LISTS[0])} and {row.name(LISTS[1])} are two conversations; keep one")
    asked = _question(row, alone=not listed)
    if not listed:
        return asked
    turns = said(row, listed[0])
    if isinstance(turns, str):
        raise BadRow(f"{row.name(listed[0])} is {shown(turns)}; use a list of messages")
    if asked and not is_in(asked, turns):
        raise BadRow(
            f"{row.name(asked.field)} is not in {row.name(listed[0])}; keep one of them, or set ignore: "
            f"[{row.name(asked.field)}]"
        )
    return Prompt(turns, listed[0])


def _question(row: Row, alone: bool) -> Prompt | None:
    fields = [field for field in QUESTIONS if not is_blank(row.get(field))]
    if not fields and alone and not is_blank(row.get("input")):
        fields = ["input"]
    if not fields:
        return None
    field, *others = fields
    for other in others:
        if row.get(other) != row.get(field):
            raise BadRow(
                f"{row.name(field)} and {row.name(other)} are two questions; keep one, or set ignore: "
                f"[{row.name(other)}]"
            )
    asked = said(row, field)
    further = row.optional_text("input", "context") if "instruction" in fields else ""
    if not isinstance(asked, str):
        if further or not is_blank(row.get("history")):
            raise BadRow(f"{row.name(field)} is a conversation, so input and history cannot be added; keep it alone")
        return Prompt(asked, field)
    question = f"{asked}\n{further}" if further else asked
    return Prompt([*history_of(row), Turn(message_of("user", question))], field, question, further)


def is_in(asked: Prompt, turns: list[Turn]) -> bool:
    """Return whether turns include a prompt: at their beginning, or a text as their first or last question."""
    own, messages = messages_in(asked.turns), messages_in(turns)
    if own == messages[: len(own)]:
        return True
    questions = [message["content"] for message in messages if message["role"] == "user"]
    return len(own) == 1 and bool(asked.text) and asked.text in (*questions[:1], *questions[-1:])


def after_question(turns: list[Turn]) -> int:
    """Return the number of turns up to the last question."""
    users = [number for number, turn in enumerate(turns) if turn.message["role"] == "user"]
    return users[-1] + 1 if users else 0


def check_answer(answer: list[Turn], prompt: list[Turn], name: str) -> None:
    """Raise BadRow unless the turns after a prompt are one answer."""
    roles = [turn.message["role"] for turn in answer]
    if not roles:
        raise BadRow(f"{name} has no answer behind the prompt; add one or remove the row")
    if "user" in roles or "system" in roles:
        role = "user" if "user" in roles else "system"
        raise BadRow(
            f"{name} has a message of the {role} in its answer, so it answers another prompt; write the answers to one "
            "prompt, or remove the row"
        )
    if roles[-1] != "assistant":
        raise BadRow(f"{name} ends with a message of {roles[-1]}; end it with an answer of the assistant")
    if not prompt:
        raise BadRow(f"{name} has an answer without a prompt; set columns: {{prompt: ...}} with its column")
    if prompt[-1].message["role"] == "assistant" and roles[0] == "assistant":
        raise BadRow(f"the prompt of {name} ends with an answer of the assistant; end it with a question")
    if any(turn.supervised is not None for turn in answer) or any(turn.supervised for turn in prompt):
        raise BadRow(
            f"{name} has weights of turns, and an answer is compared as a whole; remove them, or name their key in "
            "ignore"
        )


def check_prompt_filled(row: Row) -> None:
    """Raise BadRow if a row has a field of its prompt, which is empty."""
    for field in (*QUESTIONS, *LISTS):
        if row.columns.get(field, field) in row.value:
            raise BadRow(f"{row.name(field)} is empty; fill it in or remove the row")


def check_all_read(row: Row, fields: tuple[str, ...]) -> None:
    """Raise BadRow for a field with a value that no other one makes superfluous and that was not read."""
    for field in fields:
        column = row.columns.get(field, field)
        if column not in row.read and not is_blank(held := row.get(field)):
            raise BadRow(
                f"{row.name(field)} is {shown(held)}, and the prompt and the answers are read from other columns; add "
                f"it to one of these, or set ignore: [{column}]"
            )
