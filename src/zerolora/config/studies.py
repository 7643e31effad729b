"""The trials of searches: config/searches/<search>.json, written by `zerolora search` and read by both engines.

The file belongs in git, like a lock file. Each trial that has not failed is a run named <search>-<number>. Its results
are only in results/, so that a trial that ends changes no stage's input.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from zerolora.config.section import Positive, Section
from zerolora.errors import UserError
from zerolora.files import write_json

FOLDER = Path("config/searches")


class StopAbove(Section):
    """An upper bound of the validation loss."""

    step: Positive
    """Optimizer steps after which the bound applies."""
    loss: float
    """The lowest validation loss by then must not be above this."""


class Trial(Section):
    """One trial."""

    values: dict[str, Any]
    """Values by dotted key."""
    stop_above: list[StopAbove] = Field(default_factory=list)
    """Bounds from earlier trials (train.stop_above)."""
    failed: str = ""
    """Why it failed; empty if it did not. A failed trial is no longer a run."""


class Study(Section):
    """The trials of a search; a trial's number is its index."""

    trials: list[Trial] = Field(default_factory=list)


def path_of(search: str) -> Path:
    """Return the path of the file of a search."""
    return FOLDER / f"{search}.json"


def run_of(search: str, number: int) -> str:
    """Return the run name of a trial."""
    return f"{search}-{number}"


def read_study(search: str) -> Study:
    """Return the trials of a search, none if it has no file. Raises UserError if the file is invalid."""
    path = path_of(search)
    if not path.exists():
        return Study()
    try:
        return Study.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join([str(path), *([".".join(map(str, first["loc"]))] if first["loc"] else [])])
        remedy = "take the file from git; if you delete it, the search starts over"
        raise UserError(f"{where}: {first['msg']}; {remedy}") from None


def write_study(search: str, study: Study) -> None:
    """Write the trials of a search, whole or not at all."""
    write_json(path_of(search), study.model_dump(mode="json"))
