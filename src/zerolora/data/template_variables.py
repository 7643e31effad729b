"""The variables that a chat template reads, and templates with values for some of them."""

import json
from collections.abc import Mapping
from typing import Any

DOCUMENTS = "documents"
"""The variable that transformers always sets, to none where there are no documents."""


def variables_of(environment: Any, source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads and does not set itself; without those of its
    environment (jinja2.Environment)."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(environment.parse(source)))


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """Return a template in which variables have these JSON values, unless they are passed to it."""
    return "".join(f"{_beginning(name)}{literal(value)} %}}\n" for name, value in values.items()) + source


def has_value(source: Any, name: str) -> bool:
    """Return whether `with_values` gave a variable of a template a value."""
    return isinstance(source, str) and _beginning(name) in source


def by_tools(without: str, with_tools: str) -> str:
    """Return one template that writes conversations without tools as one template does, and those with tools as
    another one."""
    if without == with_tools:
        return without
    # The environment of transformers drops the line break after a block, and a template's last one.
    parts = [source.removesuffix("\n") for source in (without, with_tools)]
    return f"{{% if not tools is defined or tools is none %}}\n{parts[0]}{{%+ else %}}\n{parts[1]}{{%+ endif %}}"


def literal(value: Any) -> str:
    """Return a JSON value as a Jinja expression."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(held)}" for key, held in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _beginning(name: str) -> str:
    passed = f"{name} is defined and {name} is not none" if name == DOCUMENTS else f"{name} is defined"
    return f"{{% set {name} = {name} if {passed} else "
