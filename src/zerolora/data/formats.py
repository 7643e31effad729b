"""The forms that rows come in, each brought to one Example."""

import json
import operator
from collections.abc import Iterator
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.rows import IGNORED
from zerolora.errors import shown

# The fields each form reads. `messages` lies under the name of `conversations` in some data sets.
FIELDS: dict[str, tuple[str, ...]] = {
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "sharegpt": ("conversations", "system", "tools"),
    "messages": ("messages", "conversations", "tools"),
    "prompt": ("prompt", "completion", "tools"),
    "text": ("text",),
    "tokens": ("input_ids", "labels"),
}
FORMATS = tuple(FIELDS)
NEEDED = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "ipython"), "tool"),
    "function_call": "assistant",
}
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MANY = 20  # fields are named in a message, no more
CALL = '{"name": ..., "arguments": {...}}'


def detect(value: dict[str, Any], columns: dict[str, str]) -> str:
    """Return the form of a row, judged by its fields. `columns` maps a field to its column; "a.b" is b inside a.

    Raises BadRow if no form fits, or more than one.
    """
    row = _Row(value, columns)
    fitting = [name for name, fields in NEEDED.items() if all(row.get(field) is not None for field in fields)]
    if len(fitting) == 1:
        return "messages" if fitting == ["sharegpt"] and _has_roles(row.get("conversations")) else fitting[0]
    if fitting:
        raise BadRow(
            f"its fields ({row}) fit {' and '.join(fitting)}; "
            f"write {' or '.join(f'format: {name}' for name in fitting)}"
        )
    raise BadRow(
        f"its fields ({row}) fit none of the formats {', '.join(FORMATS)}; say which columns hold what, "
        "as in columns: {instruction: question, output: answer}"
    )


def parse(value: dict[str, Any], format: str, columns: dict[str, str]) -> Example:
    """Return a row of this form as an Example; `columns` as for `detect`.

    Raises BadRow, naming the column, what it holds and what to write.
    """
    try:
        return _PARSERS[format](_Row(value, columns))
    except RecursionError:
        raise BadRow("is nested too deep; flatten it") from None


class _Row:
    """A row's fields by our names."""

    def __init__(self, value: dict[str, Any], columns: dict[str, str]) -> None:
        self.value, self.columns = value, columns

    def get(self, field: str) -> Any:
        """Return a field's value, None if it has none. A column that holds another field is not also its own."""
        if field not in self.columns and field in self.columns.values():
            return None
        column = self.name(field)
        if column in self.value:
            return self.value[column]
        found: Any = self.value
        for part in column.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def name(self, field: str) -> str:
        """Return the column that holds a field."""
        return self.columns.get(field, field)

    def needed(self, field: str) -> Any:
        """Return a field's value. Raises BadRow if it has none."""
        found = self.get(field)
        if found is None:
            raise BadRow(
                f"{self.name(field)} is missing (the row has {self}); fill it in, or write columns: {{{field}: ...}} "
                "with the column that holds it"
            )
        return found

    def text(self, field: str) -> str:
        """Return a field's text. Raises BadRow if it is none, or blank."""
        return _filled(_text(self.needed(field), self.name(field)), self.name(field))

    def optional_text(self, field: str) -> str:
        """Return a field's text, "" if it has none or a blank one."""
        found = self.get(field)
        text = "" if found is None else _text(found, self.name(field))
        return text if text.strip() else ""

    def __str__(self) -> str:
        fields = [
            f"{name if name.isprintable() else shown(name)}{' (null)' if held is None else ''}"
            for name, held in self.value.items()
        ]
        return ", ".join(fields[:MANY] + ["..."] * (len(fields) > MANY)) or "none"


def _alpaca(row: _Row) -> Example:
    messages = [_message("system", system)] if (system := row.optional_text("system")) else []
    for number, pair in enumerate(_list(row.get("history") or [], row.name("history"))):
        name = f"{row.name('history')}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"{name} is {shown(pair)}; write [question, answer]")
        question, answer = (
            _filled(_text(part, f"{name}[{place}]"), f"{name}[{place}]") for place, part in enumerate(pair)
        )
        messages += [_message("user", question), _message("assistant", answer)]
    parts = [row.text("instruction"), row.optional_text("input")]
    messages.append(_message("user", "\n".join(part for part in parts if part)))
    messages.append(_message("assistant", row.text("output")))
    return Example(messages=messages)


def _sharegpt(row: _Row) -> Example:
    name = row.name("conversations")
    messages = []
    for number, turn in enumerate(_objects(row.needed("conversations"), name)):
        messages.append(_turn(turn, f"{name}[{number}]"))
    if system := row.optional_text("system"):
        if messages and messages[0]["role"] == "system":
            raise BadRow(f"{row.name('system')} and {name}[0] are both system prompts; keep one")
        messages.insert(0, _message("system", system))
    return _conversation(messages, row, name)


def _turn(turn: dict[str, Any], name: str) -> dict[str, Any]:
    role = _role(turn, "from", SPEAKERS, name)
    value = turn.get("value")
    if turn["from"] == "function_call":
        return {**_message("assistant", ""), "tool_calls": [_call(_json(value, f"{name}.value"), f"{name}.value")]}
    text = _text(value, f"{name}.value")
    return _message(role, _filled(text, f"{name}.value") if role == "assistant" else text)


def _messages(row: _Row) -> Example:
    other = row.get("messages") is None and row.get("conversations") is not None
    field = "conversations" if other else "messages"
    name = row.name(field)
    return _conversation(_chat(row.needed(field), name), row, name)


def _prompt(row: _Row) -> Example:
    parts = [(row.needed(field), row.name(field)) for field in ("prompt", "completion")]
    if all(isinstance(value, str) for value, _ in parts):
        messages = [_message("user", row.text("prompt")), _message("assistant", row.text("completion"))]
    elif all(isinstance(value, list) for value, _ in parts):
        messages = [message for value, name in parts for message in _chat(value, name)]
    else:
        seen = " and ".join(f"{name} is {shown(value)}" for value, name in parts)
        raise BadRow(f"{seen}; write two texts, or two lists of messages")
    return _conversation(messages, row, row.name("completion"))


def _plain(row: _Row) -> Example:
    return Example(text=row.text("text"))


def _tokens(row: _Row) -> Example:
    tokens = _numbers(row.needed("input_ids"), row.name("input_ids"))
    if len(tokens) < 2:
        raise BadRow(
            f"{row.name('input_ids')} has {len(tokens)} tokens; a row needs 2, since each is learned from those before"
        )
    if (lowest := min(tokens)) < 0:
        raise BadRow(f"{row.name('input_ids')}[{tokens.index(lowest)}] is {lowest}; token numbers begin at 0")
    if row.get("labels") is None:
        return Example(tokens=tokens, labels=list(tokens))
    name = row.name("labels")
    labels = _numbers(row.get("labels"), name)
    if len(labels) != len(tokens):
        raise BadRow(
            f"{name} has {len(labels)} entries for {len(tokens)} tokens; write one for each, {IGNORED} = not learned"
        )
    for place, (label, token) in enumerate(zip(labels, tokens, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(
                f"{name}[{place}] is {label} where the token is {token}; write {token}, or {IGNORED} = not learned"
            )
    if all(label == IGNORED for label in labels[1:]):
        raise BadRow(f"{name} are {IGNORED} behind the first token, so nothing is learned; remove the row")
    return Example(tokens=tokens, labels=labels)


def _conversation(messages: list[dict[str, Any]], row: _Row, name: str) -> Example:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(f"{name} has no message of the assistant, so nothing to learn; add one or remove the row")
    return Example(messages=messages, tools=_tools(row))


def _tools(row: _Row) -> list[Any] | None:
    found, name = row.get("tools"), row.name("tools")
    if found is None or found == [] or (isinstance(found, str) and not found.strip()):
        return None
    return _encodable(_objects(found, name), name) or None


def _chat(value: Any, name: str) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form as those of an Example."""
    return [_checked(message, f"{name}[{number}]") for number, message in enumerate(_objects(value, name))]


def _checked(message: dict[str, Any], name: str) -> dict[str, Any]:
    role = _role(message, "role", ROLES, name)
    calls = _calls(message, name)
    if calls and role != "assistant":
        raise BadRow(
            f"{name}.tool_calls stands in a message of {shown(message['role'])}; only the assistant calls tools"
        )
    text = _content(message.get("content"), f"{name}.content", optional=bool(calls))
    if role == "assistant" and not calls:
        _filled(text, f"{name}.content")
    result = {**_message(role, text), **({"tool_calls": calls} if calls else {})}
    for field in ("tool_call_id", "name"):
        if field in message:
            result[field] = _text(message[field], f"{name}.{field}")
    return result


def _calls(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if "function_call" in message:  # OpenAI's form from before a message could hold several
        return [_call(message["function_call"], f"{name}.function_call")]
    calls = []
    for number, call in enumerate(_objects(message.get("tool_calls") or [], f"{name}.tool_calls")):
        where = f"{name}.tool_calls[{number}]"
        kept = {"id": _text(call["id"], f"{where}.id")} if "id" in call else {}
        calls.append({**kept, **_call(call.get("function"), f"{where}.function")})
    return calls


def _call(value: Any, name: str) -> dict[str, Any]:
    """Return a tool call as chat templates expect it: its arguments are an object, not JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadRow(f"{name} is {shown(value)}; write {CALL}")
    arguments = value.get("arguments")
    arguments = {} if arguments in (None, "") else _json(arguments, f"{name}.arguments")
    if not isinstance(arguments, dict):
        raise BadRow(f"{name}.arguments is {shown(arguments)}; write an object, or one as JSON")
    return {"type": "function", "function": _encodable({"name": value["name"], "arguments": arguments}, name)}


def _content(value: Any, name: str, optional: bool) -> str:
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        return _text(value, name)
    texts = []
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRow(
                f'{name}[{number}] is {shown(part)}; only text can be learned: write {{"type": "text", "text": ...}}'
            )
        texts.append(_text(part.get("text"), f"{name}[{number}].text"))
    return "".join(texts)


def _role(message: dict[str, Any], key: str, known: dict[str, str], name: str) -> str:
    found = message.get(key)
    if found is None:
        fields = ", ".join(map(shown, message)) or "no fields"
        raise BadRow(f"{name}.{key} is missing (it has {fields}); write one of {', '.join(known)}")
    if not isinstance(found, str) or found not in known:
        raise BadRow(f"{name}.{key} is {shown(found)}; write one of {', '.join(known)}")
    return known[found]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _has_roles(value: Any) -> bool:
    """Tell whether turns have OpenAI's keys; what is wrong with others, `parse` says better."""
    try:
        turns = _objects(value, "")
    except (BadRow, RecursionError):
        return False
    return bool(turns) and "role" in turns[0] and "from" not in turns[0]


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, without the keys that Arrow fills with null where another row has them."""
    found = _list(value, name)
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise BadRow(f"{name}[{number}] is {shown(item)}; write an object")
    return _without_nulls(found)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_without_nulls(held) for held in value]
    return value


def _list(value: Any, name: str) -> list[Any]:
    """Return a list, which may be written as JSON, as in a cell of CSV."""
    found = _json(value, name) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(found, list):
        raise BadRow(f"{name} is {shown(value)}; write a list")
    return found


def _json(value: Any, name: str) -> Any:
    """Return what a JSON text says; what is not text comes back as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is {shown(value)}, which is not JSON ({error}); correct it") from None


def _numbers(value: Any, name: str) -> list[int]:
    found, numbers = _list(value, name), []
    if set(map(type, found)) <= {int}:
        return found
    for place, item in enumerate(found):
        try:
            if isinstance(item, bool):
                raise TypeError
            numbers.append(operator.index(item))
        except TypeError:
            raise BadRow(f"{name}[{place}] is {shown(item)}; write a token number") from None
    return numbers


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is missing; write a text" if value is None else f"{name} is {shown(value)}; write a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{name} holds half a character ({shown(value[error.start])}, at {error.start + 1}), "
            "which UTF-8 cannot hold; remove it"
        ) from None
    return value


def _filled(text: str, name: str) -> str:
    if not text.strip():
        raise BadRow(f"{name} is empty; fill it in or remove the row")
    return text


def _encodable(value: Any, name: str) -> Any:
    """Return nested objects if all texts in them can be encoded."""
    for path, text in _texts(value, name):
        _text(text, path)
    return value


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield f"a key of {name}", key
            yield from _texts(held, f"{name}.{shown(key)[1:-1]}")
    elif isinstance(value, list):
        for number, held in enumerate(value):
            yield from _texts(held, f"{name}[{number}]")


_PARSERS = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
    "prompt": _prompt,
    "text": _plain,
    "tokens": _tokens,
}
