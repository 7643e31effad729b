"""The mistakes that pydantic finds in values: where each is in them, and one line with the value and the remedy."""

from typing import Any, NamedTuple

from pydantic import ValidationError

from zerolora.config.known_keys import instead
from zerolora.config.values import SHARED_SECTIONS
from zerolora.errors import shown

Location = tuple[str, ...]


class Mistake(NamedTuple):
    """What is wrong at one place."""

    location: Location
    errors: list[Any]
    """Those of pydantic: one for each alternative of a union."""

    def text(self, origin: Location | None = None) -> str:
        """Return the value and the remedy; `origin` is where it was written, if not at its location.

        The first alternative is shown, further accepted words, and of numbers the kind that includes the other.
        """
        shown_one = next((each for each in self.errors if each["type"] == "float_type"), self.errors[0])
        words = [each["ctx"]["expected"] for each in self.errors[1:] if each["type"] == "literal_error"]
        return ", or ".join([remedy(shown_one, origin or self.location), *words])


def located(error: ValidationError, values: Any) -> list[Mistake]:
    """Return the mistakes in the values, each where its outermost alternative is."""
    found: dict[Location, Mistake] = {}
    for each in error.errors():
        location = _in_values(each, values)
        outer = next((location[:end] for end in range(len(location) + 1) if location[:end] in found), location)
        found.setdefault(outer, Mistake(outer, [])).errors.append(each)
    return list(found.values())


def _in_values(mistake: Any, values: Any) -> Location:
    """Return the location of a mistake without the parts that pydantic inserts for the alternatives of a union, and for
    keys: those that the values do not have."""
    location = []
    for number, part in enumerate(mistake["loc"], start=1):
        if (isinstance(values, dict) and part in values) or (isinstance(values, list) and isinstance(part, int)):
            values = values[part]
        elif not (number == len(mistake["loc"]) and mistake["type"] == "missing"):
            continue
        location.append(str(part))
    return tuple(location)


def remedy(mistake: Any, location: Location) -> str:
    """Return the value and the remedy for one of pydantic's errors, at its location in the config."""
    seen, kind, context = shown(mistake["input"]), mistake["type"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        parts = location
        if len(parts) == 3 and parts[0] in ("runs", "continued", "grids") and parts[2] in SHARED_SECTIONS:
            named = parts[2] in ("fetch", "prepare")
            where = "prepare and name it in the run’s dataset" if named else f"the {parts[2]} section"
            return f"{parts[2]} is shared by all runs and cannot be overridden; add another entry to {where}"
        return f"there is no such key (value {seen}); {instead(location)}"
    if kind == "missing":
        return f"is missing; add it (`zerolora keys {location[-1]}` explains it)"
    if kind == "literal_error":
        return f"{seen} is not valid; use {context['expected']}"
    if kind == "value_error":
        return f"{seen}: {context['error']}" if not isinstance(mistake["input"], dict) else str(context["error"])
    expected = {
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
    return f"{seen} is not valid; use {expected.get(kind, mistake['msg'])}"
