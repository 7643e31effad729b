"""What the chat templates of other tools write, one JSON file a tool, which benchmarks/import_templates.py writes."""

import json
from pathlib import Path


def texts(tool: str) -> dict[str, list[str]]:
    """Return the texts that each template of a tool writes, by its name, for `prepare.template_writes`."""
    known = json.loads((Path(__file__).parent / f"{tool}.json").read_text(encoding="utf-8"))
    return {name: written for name, written in known["templates"].items() if written}
