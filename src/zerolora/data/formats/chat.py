"""Messages and tool calls, as several forms have them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.form import Row
from zerolora.data.formats.reading import FACTORS, MODES, REASONING, SWITCHES
from zerolora.data.formats.refused import MEDIA, refusal_of
from zerolora.data.formats.row_values import (
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

CALLING = "function_call"
"""Not a role of ours: the answer is calls, as JSON."""
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
OPENING = re.compile(r"\s*(<think(ing)?>|<thought>|<reasoning>)")
"""How a content begins that has its thoughts in it."""
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
"""By the names that OpenAI's form has, and those that other data have in it."""
NAMED = ("system", "user", "assistant", "tool")
OURS = frozenset({"system", "user", "assistant", "tool"})
CALL = '{"name": ..., "arguments": {...}}'
OF_CALL = ("id", "type", "index")
"""What a call may have beside what it calls, and with which arguments."""
CONVERSATION = ("system", "system_prompt", "tools", "functions")
"""The fields of every form of conversations, beside the conversation itself."""
_CONVERSATION, _REASONING = frozenset(CONVERSATION), frozenset(REASONING)
KEYS = (*REASONING, *FACTORS, *SWITCHES)
"""The keys that messages of every form may have."""


class Turn(NamedTuple):
    """A message; whether the row takes it out of the loss or puts it in (Example.learnt); its own list of tools."""

    message: dict[str, Any]
    learnt: bool | None = None
    tools: list[Any] | None = None
    thoughts: str = ""


def message_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversation(turns: list[Turn], row: Row, field: str, prompt: int = 0, further: str = "") -> Example:
    """Return turns, with the row's system prompt and tools, as an Example; the first `prompt` of them only ask, and the
    last question has `further` as its input.

    Raises BadRow if no answer is left to learn, or if system prompts or tools contradict each other.
    """
    tools = None
    if not row.lacks(_CONVERSATION):
        turns, prompt = _with_system(turns, row, row.name(field), prompt)
        tools = _tools(row)
    messages, learnt, thoughts = [], [], ""
    for message, included, own, key in turns:
        messages.append(message)
        learnt.append(included)
        thoughts = thoughts or key
        if own:
            if tools and own != tools:
                raise BadRow(
                    f"the tools of the system message of {row.name(field)} are not the row's; keep one of the lists"
                )
            tools = own
    answered = len(messages) > prompt and messages[-1]["role"] == "assistant"  # in most rows
    if not answered and "assistant" not in [message["role"] for message in messages[prompt:]]:
        raise BadRow(
            f"{row.name(field)} has no message of the assistant, so nothing to learn; add one or remove the row"
        )
    weighed = learnt.count(None) < len(learnt)
    return Example(messages, tools, None, None, None, learnt if weighed else None, prompt, further, thoughts)


def _with_system(turns: list[Turn], row: Row, name: str, prompt: int) -> tuple[list[Turn], int]:
    """Return turns that begin with the row's system prompt, and how many of them only ask."""
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
    """Return the tools of a row or message: `tools`, or `functions` as OpenAI had them before."""
    tools, functions = (_list_of_tools(row, field) for field in ("tools", "functions"))
    if functions:
        functions = [tool if "function" in tool else {"type": "function", "function": tool} for tool in functions]
    if tools and functions and tools != functions:
        raise BadRow(f"{row.name('tools')} and {row.name('functions')} are two lists of tools; keep one")
    return tools or functions


def _list_of_tools(row: Row, field: str) -> list[Any] | None:
    found, name = row.get(field), row.name(field)
    if is_blank(found):
        return None
    tools = objects_of(found, name)
    result: list[Any] = encodable(without_nulls(tools) if row.reading.filled and tools is found else tools, name)
    return result


def chat(row: Row, field: str) -> list[Turn]:
    """Return the turns of a field in OpenAI's form."""
    return turns_of(row, field, _checked, ("role", "content"), ROLES)


def turns_of(
    row: Row, field: str, read: Callable[[Row, bool], Turn], keys: tuple[str, str], roles: dict[str, str]
) -> list[Turn]:
    """Read the messages of a field, each by `read`, which gets the message and whether null may have been filled in.

    keys: the keys of role and text, and `roles` the names of roles: most messages hold nothing else, and are read here.
    """
    value, name = row.needed(field), row.name(field)
    messages = objects_of(value, name)
    filled_in = row.reading.filled and messages is value
    plain = not (row.reading.keys or row.reading.roles or row.reading.ignored)
    (role_key, text_key), turns, others = keys, [], 0
    for number, message in enumerate(messages):
        if plain and (len(message) == 2 or _holds_two(message)):
            role, text = message.get(role_key), message.get(text_key)
            if type(role) is str and type(text) is str and (text.isascii() or _is_encodable(text)):
                ours = roles.get(role)
                if ours in OURS and text.strip():
                    turns.append(Turn({"role": ours, "content": text}))
                    continue
        others += 1
        turns.append(read(row.turn(message, f"{name}[{number}]"), filled_in))
    row.plain = keys, row.plain[1] + len(turns) - others
    return turns


def _holds_two(message: dict[str, Any]) -> bool:
    """Return whether a message holds two values, beside null."""
    return list(message.values()).count(None) == len(message) - 2


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(turn: Row, filled_in: bool) -> Turn:
    role = role_of(turn, "role", ROLES)
    if role == CALLING:
        return finished(turn, calling_of(turn, "content"))
    calls = _calls(turn, filled_in)
    if calls and role != "assistant":
        who = shown(turn.get("role"))
        raise BadRow(f"{turn.name('tool_calls')} stands in a message of {who}; only the assistant calls tools")
    text = _content(turn.get("content"), turn.name("content"), bool(calls), turn.reading.ignored)
    if role == "assistant" and not calls:
        filled(text, turn.name("content"))
    message = {**message_of(role, text), **({"tool_calls": calls} if calls else {})}
    for field in ("tool_call_id", "name"):
        if (held := turn.get(field)) is not None:
            message[field] = text_of(held, turn.name(field))
    return finished(turn, message)


def finished(turn: Row, message: dict[str, Any]) -> Turn:
    """Return a message with what the keys of every form add to it: thoughts, weight and tools."""
    if len(turn.value) == len(turn.read):
        return Turn(message)
    answers = message["role"] == "assistant"
    if not answers:
        _check_no_thoughts(turn, message["role"])
    result = with_thoughts(turn, message) if answers else Turn(message)
    return result._replace(learnt=_learnt(turn), tools=_tools(turn) if message["role"] == "system" else None)


def with_thoughts(row: Row, message: dict[str, Any]) -> Turn:
    """Return an answer with its thoughts, which the row or message has beside it."""
    if row.lacks(_REASONING) or not (reasoning := row.optional_text(*REASONING)):
        return Turn(message)
    name = next(row.columns.get(name, name) for name in REASONING if row.get(name) == reasoning)
    if reasoning.strip().lower() in MODES:
        raise BadRow(f"{name} is {shown(reasoning)}, which is no thought; write ignore: [{name}]")
    if begin := OPENING.match(message["content"]):
        path = f"{row.path}.{name}" if row.path else name
        raise BadRow(f"{path} stands beside a content that begins with {begin[1]}; keep one of the thoughts")
    return Turn({**message, "reasoning_content": reasoning}, thoughts=name)


def _check_no_thoughts(turn: Row, role: str) -> None:
    """Raise BadRow if a message that is no answer has thoughts, which would be left out."""
    for field in () if turn.lacks(_REASONING) else REASONING:
        key = turn.columns.get(field, field)
        held = turn.value.get(key)
        says = isinstance(held, str) and held.strip() and held.strip().lower() not in MODES
        if says and factor_of(held) is None and key not in turn.reading.ignored:
            raise BadRow(
                f"{turn.path}.{key} stands in a message of {role}, and thoughts belong to an answer; move it there, or "
                f"write ignore: [{key}]"
            )


def _learnt(turn: Row) -> bool | None:
    """Return whether a message is taken out of the loss, or put in, None if the message says neither."""
    result: bool | None = None
    said = ""
    for field in (*FACTORS, *SWITCHES):
        held = turn.get(field)
        if held is None:
            continue
        factor, name = factor_of(held), turn.name(field)
        if factor not in (0.0, 1.0):
            raise BadRow(
                f"{name} is {shown(held)}; write 1 = learnt or 0 = not learnt, since a turn has no other weight, or "
                f"ignore: [{turn.columns.get(field, field)}]"
            )
        switch = None if factor == 1.0 and field in FACTORS else bool(factor)
        if said and None not in (switch, result) and switch != result:
            raise BadRow(f"{said} and {name} contradict each other; keep one")
        result, said = result if switch is None else switch, name
    return result


def _calls(turn: Row, filled_in: bool) -> list[dict[str, Any]]:
    calls, name, ignored = [], turn.name("tool_calls"), turn.reading.ignored
    listed = turn.get("tool_calls")
    found = [] if is_blank(listed) else objects_of(listed, name)
    for number, call in enumerate(found):
        where = f"{name}[{number}]"
        kept = {"id": text_of(call["id"], f"{where}.id")} if call.get("id") is not None else {}
        function = call_of(call.get("function"), f"{where}.function", filled_in and found is listed, ignored)
        _check_keys(call, ("function", *OF_CALL), where, ignored)
        calls.append({**kept, **function})
    # OpenAI's form from before a message could hold several.
    if is_blank(called := turn.get("function_call")):
        return calls
    single = call_of(called, turn.name("function_call"), filled_in, ignored)
    if calls and [call["function"] for call in calls] != [single["function"]]:
        raise BadRow(f"{turn.name('function_call')} and {name} are not the same calls; keep one")
    return calls or [single]


def calling_of(turn: Row, field: str) -> dict[str, Any]:
    """Return a turn that calls tools: one call or a list of them, as JSON, behind a thought or not."""
    value, name, ignored = turn.get(field), turn.name(field), turn.reading.ignored
    thought = THOUGHT.match(value) if isinstance(value, str) else None
    called = json_of(value[thought.end() :] if thought else value, name)
    if isinstance(called, list) and called:
        calls = [call_of(call, f"{name}[{number}]", ignored=ignored) for number, call in enumerate(called)]
    else:
        calls = [call_of(called, name, ignored=ignored)]
    return {**message_of("assistant", text_of(thought[0], name) if thought else ""), "tool_calls": calls}


def call_of(value: Any, name: str, filled_in: bool = False, ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return a tool call as chat templates expect it: its arguments are an object, not JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadRow(f"{name} is {shown(value)}; write {CALL}")
    _check_keys(value, ("name", "arguments", *OF_CALL), name, ignored)
    given = value.get("arguments")
    arguments = {} if given is None or given == "" else json_of(given, f"{name}.arguments")
    if not isinstance(arguments, dict):
        raise BadRow(f"{name}.arguments is {shown(arguments)}; write an object, or one as JSON")
    if filled_in and arguments is given:
        arguments = without_nulls(arguments)
    return {"type": "function", "function": encodable({"name": value["name"], "arguments": arguments}, name)}


def _check_keys(call: dict[str, Any], known: tuple[str, ...], name: str, ignored: frozenset[str]) -> None:
    """Raise BadRow for a key of a call that would be lost, as arguments of another name."""
    for key, held in call.items():
        if key not in known and key not in ignored and not is_blank(held):
            word = shown(key)[1:-1]
            raise BadRow(
                f"{name}.{word} is {shown(held)}, and a call has a name and arguments alone; write {CALL}, or ignore: "
                f"[{word}] to leave it out"
            )


def _content(value: Any, name: str, optional: bool, ignored: frozenset[str]) -> str:
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
            raise BadRow(f"{name}[{number}] holds thoughts; write them beside the content, as reasoning_content")
        if kind != "text":
            raise BadRow(
                f'{name}[{number}] is {shown(part)}; only text can be trained on: write {{"type": "text", "text": ...}}'
            )
        for key, held in part.items() if len(part) > 2 else ():
            if key not in ignored and not is_blank(held) and refusal_of(key, held, "key", "messages"):
                raise BadRow(
                    f"{name}[{number}].{key} is of a part, and a turn is learnt as a whole; write it beside content, "
                    f"or ignore: [{key}]"
                )
        texts.append(text_of(part.get("text"), f"{name}[{number}].text"))
    return "".join(texts)


def role_of(turn: Row, key: str, known: dict[str, str]) -> str:
    """Return our role of a message, by the config's `roles` or by the names of the form, in any case."""
    found, name = turn.get(key), turn.name(key)
    if found is None:
        fields = ", ".join(map(shown, (key for key, held in turn.value.items() if held is not None))) or "no fields"
        raise BadRow(
            f"{name} is missing (it has {fields}); write one of {', '.join(known)}, or columns: {{{key}: ...}} with "
            "its key"
        )
    if isinstance(found, str):
        word = found if found in known and not turn.reading.roles else found.strip().lower()
        role = turn.reading.roles.get(word) or known.get(word)
        if role:
            return role
    raise BadRow(
        f"{name} is {shown(found)}; write one of {', '.join(known)}, or roles: {{{_word(found)}: ...}} with one of "
        f"{', '.join(NAMED)}"
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else "NAME"
