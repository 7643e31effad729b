"""The last stage of a run: accept it, or fail with the numbers that violate the gate in evaluate.fail_if.

zerolora stage accept RUN
"""

from pathlib import Path

from zerolora.config.settings import AcceptSettings
from zerolora.errors import UserError
from zerolora.fail_if import parse
from zerolora.files import read_json, write_json
from zerolora.log import result


def accept(settings: AcceptSettings, difference: Path, output: Path) -> str | None:
    """Write `output` if a run passes its gate; otherwise return the reason, in one line.

    Raises UserError if the run lacks a metric of the gate.
    """
    if settings.fail_if is None:
        write_json(output, {"accepted": True, "fail_if": None})
        result("no gate: evaluate.fail_if is not set")
        return None
    figures = read_json(difference, "zerolora stage report")
    try:
        failure = parse(settings.fail_if).failure(figures)
    except KeyError as error:
        known = ", ".join(name for name in figures if f"base_{name}" in figures)
        raise UserError(
            f"evaluate.fail_if: {settings.fail_if}: {difference} has no {error.args[0]}; use one of {known}"
        ) from None
    if failure:
        output.unlink(missing_ok=True)
        return f"evaluate.fail_if: {settings.fail_if}: {failure}"
    write_json(output, {"accepted": True, "fail_if": settings.fail_if})
    result(f"passed: not {settings.fail_if}")
    return None
