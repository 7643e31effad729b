"""The forms that rows may have, one file each.

To add a form, write a file here that defines `FORM` (form.py). The config's `format` and `columns`, their JSON Schema
and `format: auto` find it by its file. Nothing here imports torch or transformers.
"""

import importlib
import pkgutil
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.reading import Reading, Seen, Status, Where
from zerolora.data.formats.refused import WEIGHTS, Refusal, refusal_of
from zerolora.data.formats.row_values import factor_of, is_blank
from zerolora.data.formats.template_arguments import arguments_of
from zerolora.types import RowKind


def _registered() -> dict[str, Form]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    forms = [module.FORM for module in modules if hasattr(module, "FORM")]
    return {form.name: form for form in sorted(forms, key=lambda form: str(form.name))}


FORMS = _registered()
"""All forms by name."""
FIELDS = tuple(dict.fromkeys(field for form in FORMS.values() for field in (*form.fields, *form.keys)))
"""The fields of all forms and of their messages, which `columns` may map."""


HOLDS: dict[RowKind, str] = {
    "texts": "texts to learn, for train.objective: sft",
    "pairs": "pairs of answers, for train.objective: dpo, ipo, simpo or orpo",
    "labelled": "labelled answers, for train.objective: kto",
}
"""What the rows of a kind are, and the objectives that read them."""
COLUMNS: dict[RowKind, str] = {
    "texts": "{instruction: question, output: answer}",
    "pairs": "{prompt: question, chosen: better, rejected: worse}",
    "labelled": "{prompt: question, completion: answer, label: good}",
}
"""An example of `columns` for a form of each kind."""


def detect(value: dict[str, Any], reading: Reading, rows: RowKind = "texts") -> str:
    """Detect a row's form by its fields, among those of a kind of rows, and return its name.

    Raises BadRow if no form matches, or more than one.
    """
    row = Row(value, reading)
    forms = [name for name, form in FORMS.items() if form.rows == rows]
    fitting = [name for name in forms if FORMS[name].detected(row)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadRow(
            f"its fields ({row}) fit {' and '.join(fitting)}; "
            f"write {' or '.join(f'format: {name}' for name in fitting)}"
        )
    others = [name for name, form in FORMS.items() if form.rows != rows and form.detected(row)]
    other = min(others, key=lambda name: FORMS[name].rows == "texts", default="")
    if other and rows != "texts":
        raise BadRow(other_kind(other, rows, f"its fields ({row}) are of the form {other}"))
    format = "" if rows == "texts" else forms[0]
    known = (*reading.ignored, *reading.columns.values(), *(FORMS[format].fields if format else ()))
    for name, held in Row(value, reading).unread():
        refusal = refusal_of(name, held, "column", format)
        if refusal and not refusal.forms and name not in known:
            raise _refused(Row(value, reading), name, refusal, "column", format)
    if other:
        raise BadRow(other_kind(other, rows, f"its fields ({row}) are of the form {other}"))
    raise BadRow(
        f"its fields ({row}) fit none of the formats {', '.join(forms)}; say which columns hold what, "
        f"as in columns: {COLUMNS[rows]}"
    )


def other_kind(format: str, rows: RowKind, what: str) -> str:
    """Return the error of rows of a form that the objective does not read, with the remedy."""
    own = FORMS[format].rows
    if rows != "texts":
        objective = {"texts": "sft", "pairs": "dpo", "labelled": "kto"}[own]
        remedy = f"write train.objective: {objective}, or name the columns, as in columns: {COLUMNS[rows]}"
    elif own == "pairs":
        remedy = (
            "write train.objective: dpo, or format: prompt, columns: {completion: chosen} and ignore: [rejected] to "
            "learn the chosen answers (of conversations format: messages and columns: {messages: chosen})"
        )
    else:
        remedy = "write train.objective: kto, or format: prompt and ignore: [label], with the good answers alone"
    return f"{what}, which has {HOLDS[own]}, but the runs of this data set read {HOLDS[rows]}; {remedy}"


def parse(value: dict[str, Any], format: str, reading: Reading, seen: Seen | None = None) -> Example:
    """Return a row of this form as an Example, and count the use of its columns and keys in `seen`.

    Raises BadRow, naming the column, its value and what to write instead, also for an unread column or key that would
    change the supervision.
    """
    row = Row(value, reading)
    try:
        example = FORMS[format].convert(row)
        if example.messages is not None and (arguments := arguments_of(row, FORMS[format].fields)):
            example = example._replace(arguments=arguments)
    except RecursionError:
        raise BadRow("is nested too deep; flatten it") from None
    names = _names(row, "column", format)
    for turn in row.turns:
        names += _names(turn, "key", format)
    if seen is not None:
        for each in names:  # faster than Counter.update, which checks for a mapping first
            seen[each] += 1
        keys, number = row.plain
        for key in keys if number else ():
            seen["read", "key", key] += number
    return example


def _names(row: Row, where: Where, format: str) -> list[tuple[Status, Where, str]]:
    """Return the use of the columns of a row, or of the keys of a message. Raises BadRow as `parse` does."""
    names: list[tuple[Status, Where, str]] = [
        ("read", where, name)
        for name, held in row.read.items()
        if (type(held) is str and held[:1].isalnum()) or not is_blank(held)  # is_blank begins with the same
    ]
    if row.read.keys() >= row.value.keys() and not row.columns:
        return names
    # Columns that the config maps to fields of this form, or keys that it maps to those of messages.
    fields = FORMS[format].fields if where == "column" else FORMS[format].keys
    mapped = [column for field, column in row.columns.items() if field in fields]
    for name, held in row.unread():
        if name in row.reading.ignored:
            names.append(("ignored", where, name))
            continue
        refusal = refusal_of(name, held, where, format)
        if refusal and name not in mapped:
            raise _refused(row, name, refusal, where, format)
        names.append(("read" if where == "column" and name in WEIGHTS and factor_of(held) else "unread", where, name))
    return names


def _refused(row: Row, name: str, refusal: Refusal, where: Where, format: str) -> BadRow:
    """Return the error of an unread column or key that would change the supervision."""
    names = [other for other, held in row.unread() if refusal_of(other, held, where, format) == refusal]
    path = f"{row.path}.{name}" if row.path else name
    remedy = refusal.remedy.replace("NAME", name)
    return BadRow(
        f"{path} {refusal.what}; {remedy}, or write ignore: [{', '.join(names)}] to train without "
        f"{'it' if len(names) == 1 else 'them'}"
    )
