"""What stands for an evaluation where evaluate.enabled is false: outputs that say so."""

from pathlib import Path

from zerolora.files import write_json
from zerolora.log import result

LEFT_OUT = {"enabled": False}
"""The content of evaluate.json and evaluate_resources.json."""


def leave_out(output: Path, answers: Path) -> None:
    """Write to `output` and `answers` that no model was asked."""
    write_json(output / "evaluate.json", LEFT_OUT)
    write_json(output / "evaluate_resources.json", LEFT_OUT)
    write_json(answers, [])
    result("no row asked: evaluate.enabled is false")
