"""The arguments of the chat template in a row: columns of their names, and the keys of `chat_template_kwargs`."""

from typing import Any

from zerolora.data.example import BadRow
from zerolora.data.formats.form import Row
from zerolora.data.formats.row_values import encodable, is_blank, json_of, without_nulls
from zerolora.data.records import STRICT
from zerolora.errors import shown

KEYWORDS = "chat_template_kwargs"
"""The column of an object of arguments, named as in transformers and vLLM."""


def arguments_of(row: Row, fields: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the arguments of the template in a row, and mark their columns as read; None without any.

    fields: the fields of the row's form, which are no arguments. Raises BadRow for two values of an argument, a field
    of the form in `chat_template_kwargs`, or a text that may mean another value.
    """
    names = row.reading.arguments
    if not names or (KEYWORDS not in row.value and names.isdisjoint(row.value)):
        return None
    result: dict[str, Any] = {}
    for name in sorted(names.intersection(row.value).difference(fields)):
        if is_blank(held := row.get(name)):
            continue
        result[name] = encodable(_typed(held, name), name)
    for name, held in _keywords(row, fields).items():
        if name in result and (type(held), held) != (type(result[name]), result[name]):
            raise BadRow(
                f"{name} is {shown(result[name])}, and {KEYWORDS}.{name} is {shown(held)}; keep one of the values"
            )
        result[name] = held
    return result or None


def _keywords(row: Row, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments in the column `chat_template_kwargs`."""
    value = row.get(KEYWORDS)
    row.read.pop(KEYWORDS, None)
    if is_blank(value):
        return {}
    held = json_of(value, KEYWORDS)
    if not isinstance(held, dict):
        raise BadRow(f"{KEYWORDS} is {shown(held)}; use an object, or one as JSON")
    if row.reading.filled and held is value:
        held = without_nulls(held)
    held = {name: each for name, each in held.items() if each is not None}
    paths = {name: f"{KEYWORDS}.{name}" for name in held}
    if own := [name for name in held if name in fields]:
        raise BadRow(
            f"{paths[own[0]]} is {shown(held[own[0]])}, which is a field of the row; move it into the column {own[0]}"
        )
    ignored = {name for name in held if row.reading.ignores(name) or row.reading.ignores(paths[name])}
    read = row.reading.arguments - ignored
    result = {name: encodable(each, paths[name]) for name, each in held.items() if name in read}
    row.read |= {paths[name]: result.get(name) for name in (*result, *ignored)}
    if isinstance(value, str):
        for name in held.keys() - result.keys() - ignored:
            known = ", ".join(sorted(row.reading.arguments))
            raise BadRow(
                f"{paths[name]} is {shown(held[name])}, which the chat template does not read (it reads {known}); "
                f"correct its name, or set ignore: [{paths[name]}]"
            )
        row.read[KEYWORDS] = value
    return result


def _typed(value: Any, name: str) -> Any:
    """Return a column's value. Raises BadRow for a text that may mean a number, true or false, a list or an object, as
    in a cell of CSV."""
    if isinstance(value, str) and _is_literal(value.strip()):
        word = value.strip().lower()
        raise BadRow(
            f"{name} is the text {shown(value)}, which may mean another value; write "
            f'{{"{name}": {word if word in ("true", "false") else "..."}}} into the column {KEYWORDS}'
        )
    return value


def _is_literal(text: str) -> bool:
    if text.lower() in ("true", "false", "null"):
        return True
    if text[:1] in ("[", "{"):
        return text[-1:] == {"[": "]", "{": "}"}[text[0]]
    try:
        return not isinstance(STRICT.decode(text), str)
    except (ValueError, RecursionError):
        return False
