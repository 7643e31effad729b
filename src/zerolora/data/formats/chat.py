"""Messages and tool calls, as several forms hold them."""

from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Row
from zerolora.data.formats.values import MEDIA, encodable, filled, json_of, media_of, objects_of, text_of
from zerolora.errors import shown

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
CALL = '{"name": ..., "arguments": {...}}'


def message_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversation(messages: list[dict[str, Any]], row: Row, name: str) -> Example:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(f"{name} has no message of the assistant, so nothing to learn; add one or remove the row")
    return Example(messages=messages, tools=_tools(row))


def _tools(row: Row) -> list[Any] | None:
    found, name = row.get("tools"), row.name("tools")
    if found is None or found == [] or (isinstance(found, str) and not found.strip()):
        return None
    return encodable(objects_of(found, name), name) or None


def chat(value: Any, name: str) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form as those of an Example."""
    return [_checked(message, f"{name}[{number}]") for number, message in enumerate(objects_of(value, name))]


def _checked(message: dict[str, Any], name: str) -> dict[str, Any]:
    role = role_of(message, "role", ROLES, name)
    calls = _calls(message, name)
    if calls and role != "assistant":
        raise BadRow(
            f"{name}.tool_calls stands in a message of {shown(message['role'])}; only the assistant calls tools"
        )
    text = _content(message.get("content"), f"{name}.content", optional=bool(calls))
    if role == "assistant" and not calls:
        filled(text, f"{name}.content")
    result = {**message_of(role, text), **({"tool_calls": calls} if calls else {})}
    for field in ("tool_call_id", "name"):
        if field in message:
            result[field] = text_of(message[field], f"{name}.{field}")
    return result


def _calls(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if "function_call" in message:  # OpenAI's form from before a message could hold several
        return [call_of(message["function_call"], f"{name}.function_call")]
    calls = []
    for number, call in enumerate(objects_of(message.get("tool_calls") or [], f"{name}.tool_calls")):
        where = f"{name}.tool_calls[{number}]"
        kept = {"id": text_of(call["id"], f"{where}.id")} if "id" in call else {}
        calls.append({**kept, **call_of(call.get("function"), f"{where}.function")})
    return calls


def call_of(value: Any, name: str) -> dict[str, Any]:
    """Return a tool call as chat templates expect it: its arguments are an object, not JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadRow(f"{name} is {shown(value)}; write {CALL}")
    arguments = value.get("arguments")
    arguments = {} if arguments in (None, "") else json_of(arguments, f"{name}.arguments")
    if not isinstance(arguments, dict):
        raise BadRow(f"{name}.arguments is {shown(arguments)}; write an object, or one as JSON")
    return {"type": "function", "function": encodable({"name": value["name"], "arguments": arguments}, name)}


def _content(value: Any, name: str, optional: bool) -> str:
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        return text_of(value, name)
    texts = []
    for number, part in enumerate(value):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in MEDIA:
            raise media_of(part["type"], f"{name}[{number}]")
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRow(
                f'{name}[{number}] is {shown(part)}; only text can be trained on: write {{"type": "text", "text": ...}}'
            )
        texts.append(text_of(part.get("text"), f"{name}[{number}].text"))
    return "".join(texts)


def role_of(message: dict[str, Any], key: str, known: dict[str, str], name: str) -> str:
    found = message.get(key)
    if found is None:
        fields = ", ".join(map(shown, message)) or "no fields"
        raise BadRow(f"{name}.{key} is missing (it has {fields}); write one of {', '.join(known)}")
    if not isinstance(found, str) or found not in known:
        raise BadRow(f"{name}.{key} is {shown(found)}; write one of {', '.join(known)}")
    return known[found]
