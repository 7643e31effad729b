"""The forms that rows may have, one file each.

To add a form, write a file here that defines `FORM` (base.py). The config's `format` and `columns`, their JSON Schema
and `format: auto` find it by its file. Nothing here imports torch or transformers.
"""

import importlib
import pkgutil
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.base import Form, Row
from zerolora.data.formats.values import MEDIA, media_of


def _registered() -> dict[str, Form]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    forms = [module.FORM for module in modules if hasattr(module, "FORM")]
    return {form.name: form for form in sorted(forms, key=lambda form: str(form.name))}


FORMS = _registered()
"""All forms by name."""
FIELDS = tuple(dict.fromkeys(field for form in FORMS.values() for field in form.fields))
"""The fields of all forms, which `columns` may map."""


def detect(value: dict[str, Any], columns: dict[str, str]) -> str:
    """Detect a row's form by its fields and return its name. `columns` maps a field to its column; "a.b" is b inside a.

    Raises BadRow if no form matches, or more than one.
    """
    row = Row(value, columns)
    _check_media(row)
    fitting = [name for name, form in FORMS.items() if form.detected(row)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadRow(
            f"its fields ({row}) fit {' and '.join(fitting)}; "
            f"write {' or '.join(f'format: {name}' for name in fitting)}"
        )
    raise BadRow(
        f"its fields ({row}) fit none of the formats {', '.join(FORMS)}; say which columns hold what, "
        "as in columns: {instruction: question, output: answer}"
    )


def parse(value: dict[str, Any], format: str, columns: dict[str, str]) -> Example:
    """Return a row of this form as an Example; `columns` as for `detect`.

    Raises BadRow, naming the column, its value and what to write instead.
    """
    row = Row(value, columns)
    _check_media(row)
    try:
        return FORMS[format].convert(row)
    except RecursionError:
        raise BadRow("is nested too deep; flatten it") from None


def _check_media(row: Row) -> None:
    """Raise BadRow for a column of images, videos or audio, which would be ignored, unless it is mapped to a field."""
    for column in sorted(MEDIA.keys() & row.value.keys()):
        if row.value[column] not in (None, "", [], "[]") and column not in row.columns.values():
            raise media_of(column, column)
