"""The arguments of other tools, one JSON file a tool, which benchmarks/import_arguments.py writes from its classes."""

import json
from pathlib import Path
from typing import Any, Final


class Unknown:
    """The default of an argument whose default is not known."""


UNKNOWN: Final = Unknown()


def arguments(tool: str, *classes: str) -> dict[str, Any]:
    """Return the arguments of a tool's classes with their defaults by dotted key; UNKNOWN for one that is not known.

    Of two classes with the same argument, the default is that of the last. Without classes, it is those of all.
    """
    known = json.loads((Path(__file__).parent / f"{tool}.json").read_text(encoding="utf-8"))["classes"]
    fields: dict[str, Any] = {}
    for each in classes or known:
        fields |= {key: entry.get("default", UNKNOWN) for key, entry in known[each].items()}
    return fields


def version(tool: str) -> str:
    """Return the version of a tool that its arguments are from."""
    known = json.loads((Path(__file__).parent / f"{tool}.json").read_text(encoding="utf-8"))
    return str(known["version"])
