"""Stage evaluate: base and merged model on the same held-out rows."""

from pathlib import Path

from zerolora.files import write_json
from zerolora.log import result


def write_skipped(output: Path, answers: Path) -> None:
    """Write the outputs of an evaluation with evaluate.enabled: false, or without held-out rows."""
    for name in ("evaluate.json", "evaluate_resources.json"):
        write_json(output / name, {"enabled": False})
    write_json(answers, [])
    result("nothing evaluated: evaluate.enabled is false, or no row is held out")
