"""The forms that rows may have, one file each.

To add a form, write a file here that defines `FORM` (form.py). The config's `format` and `columns`, their JSON Schema
and `format: auto` find it by its file. Nothing here imports torch or transformers.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from zerolora.data.example import SAMPLED, BadRow, Example
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.leaves import Unread
from zerolora.data.formats.mappings import mapping_text
from zerolora.data.formats.reading import Reading, Seen, Where
from zerolora.data.formats.row_values import is_blank
from zerolora.data.formats.template_arguments import arguments_of
from zerolora.registries import Registry, registered
from zerolora.train.objectives import reading
from zerolora.types import RowKind
from zerolora.yaml_file import written

_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
FORMS: Registry[Form] = registered("formats", Form, [module.FORM for module in _modules if hasattr(module, "FORM")])
"""All forms by name."""

HOLDS: dict[RowKind, str] = {"texts": "texts to learn", "pairs": "pairs of answers", "labelled": "labelled answers"}
"""What the rows of a kind are."""
COLUMNS: dict[RowKind, str] = {
    "texts": "{instruction: question, output: answer}",
    "pairs": "{prompt: question, chosen: better, rejected: worse}",
    "labelled": "{prompt: question, completion: answer, label: good}",
}
"""An example of `columns` for a form of each kind."""


def fitting(value: dict[str, Any], reading: Reading, rows: RowKind = "texts") -> list[str]:
    """Return the names of the forms whose fields a row has, among those of a kind of rows. Raises BadRow if there is
    none."""
    row = Row(value, reading)
    forms = [name for name, form in FORMS.items() if form.rows == rows and form.detected(row)]
    if forms:
        return forms
    others = [name for name, form in FORMS.items() if form.rows != rows and form.detected(row)]
    if others:
        other = min(others, key=lambda name: FORMS[name].rows == "texts")
        raise BadRow(other_kind(other, rows, f"its fields ({row}) are of the form {other}"))
    known = [name for name, form in FORMS.items() if form.rows == rows]
    raise BadRow(
        f"its fields ({row}) fit none of the formats {', '.join(known)}; say which columns hold what, as in columns: "
        f"{mapping_text(value) or COLUMNS[rows]}"
    )


def detect(value: dict[str, Any], reading: Reading, rows: RowKind = "texts") -> str:
    """Return the name of the only form whose fields a row has. Raises BadRow without any, and for more than one."""
    forms = fitting(value, reading, rows)
    if len(forms) > 1:
        raise BadRow(several(value, reading, forms))
    return forms[0]


def several(value: dict[str, Any], reading: Reading, forms: Sequence[str], ignored: Sequence[str] = ()) -> str:
    """Return the error of a row that has the fields of several forms. ignored: what the first of them leaves unread."""
    names = " and ".join(sorted({*forms}))
    said = f"its fields ({Row(value, reading)}) fit {names}; choose one, as in format: {forms[0]}"
    if not ignored:
        return said
    columns = ", ".join(written(name) for name in [*sorted(reading.ignored), *ignored])
    return f"{said}, and leave the rest out by ignore: [{columns}]"


def other_kind(format: str, rows: RowKind, what: str) -> str:
    """Return the error of rows of a form that the objective does not read, with the remedy."""
    own = FORMS[format].rows
    objective = reading(own)[0]
    if rows != "texts":
        remedy = f"set train.objective: {objective}, or name the columns, as in columns: {COLUMNS[rows]}"
    elif own == "pairs":
        remedy = (
            f"set train.objective: {objective}, or format: prompt, columns: {{completion: chosen}} and ignore: "
            "[rejected] to learn the chosen answers (of conversations format: messages and columns: {messages: chosen})"
        )
    else:
        remedy = f"set train.objective: {objective}, or format: prompt and ignore: [label], with the good answers alone"
    return f"{what}, which has {_holds(own)}, but the runs of this data set read {_holds(rows)}; {remedy}"


def _holds(rows: RowKind) -> str:
    """Return what the rows of a kind are, and the objectives that read them."""
    *others, last = reading(rows)
    names = f"{', '.join(others)} or {last}" if others else last
    return f"{HOLDS[rows]}, for train.objective: {names}"


def parse(
    value: dict[str, Any],
    format: str,
    reading: Reading,
    seen: Seen | None = None,
    unread: Unread | None = None,
    place: str = "",
) -> Example:
    """Return a row of this form as an Example, count the use of its columns and keys in `seen`, and check in `unread`
    those that the form does not read.

    Raises BadRow, naming the column, its value and what to use instead.
    """
    row = Row(value, reading)
    try:
        example = FORMS[format].convert(row)
        if example.messages is not None and (arguments := arguments_of(row, FORMS[format].fields)):
            example = example._replace(arguments=arguments)
    except RecursionError:
        raise BadRow("is nested too deep; flatten it") from None
    if SAMPLED in value:
        row.read[SAMPLED] = value[SAMPLED]
    if seen is not None:
        _count(row, "column", seen)
        for turn in row.turns:
            _count(turn, "key", seen)
        keys, number = row.plain
        for key in keys if number else ():
            seen["read", "key", key] += number
    if unread is not None:
        unread.add(row, example, place, seen)
    return example


def _count(row: Row, where: Where, seen: Seen) -> None:
    """Count the columns of a row, or the keys of a message, that were read with a value."""
    for name, held in row.read.items():
        if (type(held) is str and held[:1].isalnum()) or not is_blank(held):  # is_blank begins with the same
            seen["read", where, name] += 1
