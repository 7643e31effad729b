"""The part of mask.html that says, for each source, what becomes of every column and every key of its messages."""

import html
from typing import NamedTuple

from zerolora.data.formats.reading import FACTORS, REASONING, SWITCHES, Seen
from zerolora.data.statistics import printed

EFFECTS = {
    **dict.fromkeys(("messages", "conversations"), "the turns"),
    **dict.fromkeys(
        ("role", "from"), "whose turn it is, which decides with <code>loss</code> whether it is supervised"
    ),
    **dict.fromkeys(("content", "value"), "the text of a turn: supervised where the turn is"),
    **dict.fromkeys(FACTORS, "0: the turn is not supervised; 1 changes nothing"),
    **dict.fromkeys(SWITCHES, "false or 0: the turn is not supervised; true or 1: it is, whatever its role"),
    **dict.fromkeys(
        REASONING, "the thoughts of an answer, in the template's place for them: supervised where the answer is"
    ),
    **dict.fromkeys(("tool_calls", "function_call"), "calls of tools: supervised where the turn is"),
    **dict.fromkeys(("tools", "functions"), "the tools that the template lists: context"),
    **dict.fromkeys(("system", "system_prompt"), "the system message, a turn of its own"),
    **dict.fromkeys(("instruction", "input", "context"), "the question, a turn of the user"),
    "history": "earlier questions and answers, turns of user and assistant",
    "output": "the answer, a turn of the assistant",
    "prompt": "the question, whose answers are not supervised with <code>loss: assistant</code> or <code>last</code>",
    "completion": "the answer, or the turns behind the prompt",
    "text": "supervised as a whole",
    "input_ids": "the tokens: supervised where labels say so, all of them without labels",
    "labels": "the tokens that are supervised; -100 = context",
    **dict.fromkeys(("attention_mask", "position_ids"), "checked: a single row without padding"),
    **dict.fromkeys(("tool_call_id", "name"), "given to the template"),
}
"""What a field does, as HTML."""


class ReadSource(NamedTuple):
    """A source as it was read: its name and form, the columns and keys of its fields, and what became of each name."""

    name: str
    form: str
    columns: dict[str, str]
    seen: Seen


def names_table(source: ReadSource, template: str, loss: object) -> str:
    """Return a source's columns and keys as an HTML table: those that were read first, then those that were not."""
    fields = {column: field for field, column in source.columns.items()}
    order = {"read": 0, "ignored": 1, "unread": 2}
    lines = []
    for (status, where, name), number in sorted(
        source.seen.items(), key=lambda item: (order[item[0][0]], item[0][1], item[0][2])
    ):
        effect = {
            "read": EFFECTS.get(fields.get(name, name), "read by the form"),
            "ignored": "left out, since <code>ignore</code> names it",
            "unread": "<b>not read</b>: it changes nothing",
        }[status]
        what = "column, in rows" if where == "column" else "key, in messages"
        lines.append(
            f"<tr><td>{html.escape(printed(name))}</td><td>{what}</td><td>{number:,}</td><td>{effect}</td></tr>"
        )
    title = f"{source.name}: read as {source.form or 'nothing'}, template {template}, loss {loss}"
    return (
        f"<h2>{html.escape(title)}</h2>"
        f"<table><tr><th>name</th><th>is a</th><th>number</th><th>what becomes of it</th></tr>{''.join(lines)}</table>"
    )
