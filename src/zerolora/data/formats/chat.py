"""Messages and tool calls of several forms."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.form import Row
from zerolora.data.formats.reading import FACTORS, MODES, REASONING, SWITCHES
from zerolora.data.formats.row_values import (
    INVISIBLE,
    encodable,
    factor_of,
    filled,
    is_blank,
    json_of,
    objects_of,
    text_of,
    without_nulls,
)
from zerolora.errors import shown

MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image", "image_path", "pixel_values"), "images"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
}
"""The medium in a content part of this type."""
TEXTS = ("text", "input_text", "output_text")
"""The types of parts with a text."""
CALLING = "function_call"
"""The pseudo-role of an answer that consists of calls, as JSON."""
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
OPENING = re.compile(r"\s*(<think(ing)?>|<thought>|<reasoning>)")
"""The beginning of a content that includes its thoughts."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    **dict.fromkeys(("observation", "tool_response", "function_response", "ipython"), "tool"),
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys((CALLING, "tool_call"), CALLING),
}
"""By the names of OpenAI's form and of other data."""
OURS = ("system", "user", "assistant", "tool")
CALL = '{"name": ..., "arguments": {...}}'
OF_CALL = ("id", "type", "index")
"""Further keys of a call."""
CONVERSATION = ("system", "system_prompt", "tools", "functions")
"""Further fields of every form of conversations."""
_CONVERSATION, _REASONING = frozenset(CONVERSATION), frozenset(REASONING)
KEYS = (*REASONING, *FACTORS, *SWITCHES)
"""Further keys of messages in every form."""


class Turn(NamedTuple):
    """A message, its supervision by the row (Example.supervised), its list of tools, and its key of thoughts."""

    message: dict[str, Any]
    supervised: bool | None = None
    tools: list[Any] | None = None
    thoughts: str = ""


def message_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversation(turns: list[Turn], row: Row, field: str, prompt: int = 0, further: str = "") -> Example:
    """Return turns, with the row's system prompt and tools, as an Example. prompt: the number of turns in the prompt.
    further: the input of the last question.

    Raises BadRow if there is no answer to learn, or if system prompts or tools contradict each other.
    """
    tools = None
    if not row.lacks(_CONVERSATION):
        turns, prompt = _with_system(turns, row, row.name(field), prompt)
        tools = _tools(row)
    messages, supervised, thoughts = [], [], ""
    for message, included, own, key in turns:
        messages.append(message)
        supervised.append(included)
        thoughts = thoughts or key
        if own:
            if tools and own != tools:
                raise BadRow(
                    f"the tools of the system message of {row.name(field)} are not the row's; keep one of the lists"
                )
            tools = own
    answered = len(messages) > prompt and messages[-1]["role"] == "assistant"  # true for most rows
    if not answered and "assistant" not in [message["role"] for message in messages[prompt:]]:
        raise BadRow(
            f"{row.name(field)} has no message of the assistant, so nothing to learn; add one or remove the row"
        )
    weighed = supervised.count(None) < len(supervised)
    return Example(messages, tools, None, None, None, supervised if weighed else None, prompt, further, thoughts)


def _with_system(turns: list[Turn], row: Row, name: str, prompt: int) -> tuple[list[Turn], int]:
    """Return turns that begin with the row's system prompt, and the number of turns in the prompt."""
    system = row.optional_text("system", "system_prompt")
    if not system or not turns:
        return turns, prompt
    first = turns[0].message
    if first["role"] != "system":
        return [Turn(message_of("system", system)), *turns], prompt and prompt + 1
    if first["content"] != system:
        column = row.name("system" if row.get("system") else "system_prompt")
        other = "the prompt's first message" if prompt else f"{name}[0]"
        raise BadRow(f"{column} and {other} are both system prompts; keep one")
    return turns, prompt


def _tools(row: Row) -> list[Any] | None:
    """Return the tools of a row or message: `tools`, or `functions` of OpenAI's earlier form."""
    tools, functions = (_list_of_tools(row, field) for field in ("tools", "functions"))
    if functions:
        functions = [tool if "function" in tool else {"type": "function", "function": tool} for tool in functions]
    if tools and functions and tools != functions:
        raise BadRow(f"{row.name('tools')} and {row.name('functions')} are two lists of tools; keep one")
    return tools or functions


def _list_of_tools(row: Row, field: str) -> list[Any] | None:
    values, name = row.get(field), row.name(field)
    if is_blank(values):
        return None
    tools = objects_of(values, name)
    result: list[Any] = encodable(without_nulls(tools) if row.reading.filled and tools is values else tools, name)
    return result


def chat(row: Row, field: str) -> list[Turn]:
    """Return the turns of a field in OpenAI's form."""
    return turns_of(row, field, checked, ("role", "content"), ROLES)


def turns_of(
    row: Row, field: str, read: Callable[[Row, bool], Turn], keys: tuple[str, str], roles: dict[str, str]
) -> list[Turn]:
    """Return the messages of a field, converted by `read(message, nulls may be filled in)`.

    keys: the keys of role and text. roles: the names of roles. Messages without other keys, the most frequent ones, are
    converted here.
    """
    value, name = row.needed(field), row.name(field)
    messages = objects_of(value, name)
    return turns_in(row, messages, name, row.reading.filled and messages is value, read, keys, roles)


def turns_in(
    row: Row,
    messages: list[dict[str, Any]],
    name: str,
    filled_in: bool,
    read: Callable[[Row, bool], Turn],
    keys: tuple[str, str],
    roles: dict[str, str],
) -> list[Turn]:
    """Return messages as `turns_of` does. name: their name in the row. filled_in: nulls may be filled in."""
    (role_key, text_key), turns, others = keys, [], 0
    row.lists.append((f"{name}[]", len(messages)))
    ignored = row.reading.ignored and not row.reading.ignored_keys(f"{name}[]").isdisjoint(keys)
    plain = not (row.reading.keys or row.reading.roles or ignored)
    for number, message in enumerate(messages):
        if plain and (len(message) == 2 or list(message.values()).count(None) == len(message) - 2):
            role, text = message.get(role_key), message.get(text_key)
            if type(role) is str and type(text) is str and (text.isascii() or _is_plain(text)):
                ours = roles.get(role)
                if ours in OURS and text.strip():
                    turns.append(Turn({"role": ours, "content": text}))
                    continue
        others += 1
        turns.append(read(row.turn(message, f"{name}[{number}]"), filled_in))
    row.plain = keys, row.plain[1] + len(turns) - others
    return turns


def _is_plain(text: str) -> bool:
    """Return whether a text can be encoded, and its first character after white space is visible."""
    first = text.lstrip()[:1]
    if first and ord(first) in INVISIBLE:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked(turn: Row, filled_in: bool) -> Turn:
    """Return a message in OpenAI's form."""
    role = role_of(turn, "role", ROLES)
    if role == CALLING:
        return finished(turn, calling_of(turn, "content"))
    calls = _calls(turn, filled_in)
    if calls and role != "assistant":
        who = shown(turn.get("role"))
        raise BadRow(f"{turn.name('tool_calls')} is in a message of {who}; only the assistant calls tools")
    text = _content(turn, bool(calls))
    if role == "assistant" and not calls:
        filled(text, turn.name("content"))
    message = {**message_of(role, text), **({"tool_calls": calls} if calls else {})}
    for field in ("tool_call_id", "name"):
        if (held := turn.get(field)) is not None:
            message[field] = text_of(held, turn.name(field))
    return finished(turn, message)


def finished(turn: Row, message: dict[str, Any]) -> Turn:
    """Return a message with its thoughts, weight and tools, whose keys are the same in every form."""
    if len(turn.value) == len(turn.read):
        return Turn(message)
    result = with_thoughts(turn, message) if message["role"] == "assistant" else Turn(message)
    return result._replace(supervised=_supervised(turn), tools=_tools(turn) if message["role"] == "system" else None)


def with_thoughts(row: Row, message: dict[str, Any]) -> Turn:
    """Return an answer with the thoughts in separate fields of the row or message."""
    if row.lacks(_REASONING) or not (reasoning := row.optional_text(*REASONING)):
        return Turn(message)
    name = next(row.columns.get(name, name) for name in REASONING if row.get(name) == reasoning)
    if reasoning.strip().lower() in MODES:
        raise BadRow(f"{name} is {shown(reasoning)}, which is not a thought; set ignore: [{name}]")
    if begin := OPENING.match(message["content"]):
        path = f"{row.path}.{name}" if row.path else name
        raise BadRow(f"{path} conflicts with a content that begins with {begin[1]}; keep one of the thoughts")
    return Turn({**message, "reasoning_content": reasoning}, thoughts=name)


def _supervised(turn: Row) -> bool | None:
    """Return False if a message is excluded from the loss, True if it is included, None without such a key."""
    result: bool | None = None
    first = ""
    for field in (*FACTORS, *SWITCHES):
        held = turn.get(field)
        if held is None:
            continue
        factor, name = factor_of(held), turn.name(field)
        if factor not in (0.0, 1.0):
            raise BadRow(
                f"{name} is {shown(held)}; use 1 = supervised or 0 = not supervised, since a turn has no other "
                f"weight, or ignore: [{turn.columns.get(field, field)}]"
            )
        switch = None if factor == 1.0 and field in FACTORS else bool(factor)
        if first and None not in (switch, result) and switch != result:
            raise BadRow(f"{first} and {name} contradict each other; keep one")
        result, first = result if switch is None else switch, name
    return result


def _calls(turn: Row, filled_in: bool) -> list[dict[str, Any]]:
    calls, name, ignored = [], turn.name("tool_calls"), turn.ignored
    listed = turn.get("tool_calls")
    result = [] if is_blank(listed) else objects_of(listed, name)
    for number, call in enumerate(result):
        where = f"{name}[{number}]"
        identity = {"id": text_of(call["id"], f"{where}.id")} if call.get("id") is not None else {}
        function = call_of(call.get("function"), f"{where}.function", filled_in and result is listed, ignored)
        _check_keys(call, ("function", *OF_CALL), where, ignored)
        calls.append({**identity, **function})
    # OpenAI's earlier form, with a single call.
    if is_blank(called := turn.get("function_call")):
        return calls
    single = call_of(called, turn.name("function_call"), filled_in, ignored)
    if calls and [call["function"] for call in calls] != [single["function"]]:
        raise BadRow(f"{turn.name('function_call')} and {name} are not the same calls; keep one")
    return calls or [single]


def calling_of(turn: Row, field: str) -> dict[str, Any]:
    """Return a turn that calls tools: a call or a list of them, as JSON, with an optional thought before it."""
    value, name, ignored = turn.get(field), turn.name(field), turn.ignored
    thought = THOUGHT.match(value) if isinstance(value, str) else None
    called = json_of(value[thought.end() :] if thought else value, name)
    if isinstance(called, list) and called:
        calls = [call_of(call, f"{name}[{number}]", ignored=ignored) for number, call in enumerate(called)]
    else:
        calls = [call_of(called, name, ignored=ignored)]
    return {**message_of("assistant", text_of(thought[0], name) if thought else ""), "tool_calls": calls}


def call_of(value: Any, name: str, filled_in: bool = False, ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return a tool call in the form of chat templates, with its arguments as an object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadRow(f"{name} is {shown(value)}; write {CALL}")
    _check_keys(value, ("name", "arguments", *OF_CALL), name, ignored)
    raw = value.get("arguments")
    arguments = {} if raw is None or raw == "" else json_of(raw, f"{name}.arguments")
    if not isinstance(arguments, dict):
        raise BadRow(f"{name}.arguments is {shown(arguments)}; use an object, or one as JSON")
    if filled_in and arguments is raw:
        arguments = without_nulls(arguments)
    return {"type": "function", "function": encodable({"name": value["name"], "arguments": arguments}, name)}


def _check_keys(call: dict[str, Any], known: tuple[str, ...], name: str, ignored: frozenset[str]) -> None:
    """Raise BadRow for an unknown key of a call, such as arguments under another name, which would be lost."""
    for key, held in call.items():
        if key not in known and key not in ignored and not is_blank(held):
            word = shown(key)[1:-1]
            raise BadRow(
                f"{name}.{word} is {shown(held)}, and a call has only a name and arguments; write {CALL}, or ignore: "
                f"[{word}] to leave it out"
            )


def _content(turn: Row, optional: bool) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    value, name = turn.get("content"), turn.name("content")
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        return text_of(value, name)
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA:
            raise BadRow(
                f"{name}[{number}] holds {MEDIA[kind]}, which are not supported: only text can be trained on, of a "
                "vision-language model too; leave it out of the row"
            )
        if kind in ("thinking", "reasoning"):
            raise BadRow(f"{name}[{number}] contains thoughts; put them beside the content, as reasoning_content")
        if kind not in TEXTS:
            raise BadRow(
                f'{name}[{number}] is {shown(part)}; only text can be trained on: write {{"type": "text", "text": ...}}'
            )
        path = f"{turn.inside}.{turn.columns.get('content', 'content')}[]"
        turn.parts += [
            (f"{path}.{key}", held) for key, held in part.items() if key not in ("type", "text") and not is_blank(held)
        ]
        texts.append(text_of(part.get("text"), f"{name}[{number}].text"))
    return "".join(texts)


def role_of(turn: Row, key: str, known: dict[str, str]) -> str:
    """Return the role of a message by the config's `roles` or the names of the form, ignoring case."""
    result, name = turn.get(key), turn.name(key)
    if result is None:
        fields = ", ".join(map(shown, (key for key, held in turn.value.items() if held is not None))) or "no fields"
        raise BadRow(
            f"{name} is missing (it has {fields}); use one of {', '.join(known)}, or columns: {{{key}: ...}} with "
            "its key"
        )
    if isinstance(result, str):
        word = result if result in known and not turn.reading.roles else result.strip().lower()
        role = turn.reading.roles.get(word) or known.get(word)
        if role:
            return role
    word = result if isinstance(result, str) and result.isidentifier() else "NAME"
    raise BadRow(
        f"{name} is {shown(result)}; use one of {', '.join(known)}, or roles: {{{word}: ...}} with one of "
        f"{', '.join(OURS)}"
    )
