"""Rewords pydantic's errors for users, with what to write instead."""

from typing import Any

from zerolora.config.values import SHARED_SECTIONS
from zerolora.errors import shown


def remedy(mistake: Any) -> str:
    """Return value seen and remedy for one of pydantic's errors."""
    seen, kind, context = shown(mistake["input"]), mistake["type"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        parts = mistake["loc"]
        if len(parts) == 3 and parts[0] in ("runs", "continued", "grids") and parts[2] in SHARED_SECTIONS:
            named = parts[2] in ("fetch", "prepare")
            where = "prepare and name it in the run’s dataset" if named else f"the {parts[2]} section"
            return f"{parts[2]} is shared by all runs and cannot be overridden; add another entry to {where}"
        return f"there is no such key (value {seen}); see config/README.md for those that are"
    if kind == "missing":
        return "is missing; add it (config/README.md says what it means)"
    if kind == "literal_error":
        return f"{seen} is not known; write {context['expected']}"
    if kind == "value_error":
        return f"{seen}: {context['error']}" if not isinstance(mistake["input"], dict) else str(context["error"])
    wanted = {
        "int_type": "a whole number, as in 8",
        "float_type": "a number, as in 2e-4",
        "bool_type": "true or false",
        "string_type": "text",
        "dict_type": "a section of key: value lines",
        "model_type": "a section of key: value lines",
        "list_type": "a list, as in [q_proj, v_proj]",
        "greater_than_equal": f"{context.get('ge')} or more",
        "greater_than": f"more than {context.get('gt')}",
        "less_than": f"less than {context.get('lt')}",
        "less_than_equal": f"{context.get('le')} or less",
        "string_pattern_mismatch": f"text that matches {context.get('pattern')}",
        "too_short": "at least one entry",
        "string_too_short": "text that is not empty",
        "finite_number": "a finite number, as in 2e-4",
    }
    return f"{seen} is not valid; write {wanted.get(kind, mistake['msg'])}"
