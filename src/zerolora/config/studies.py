"""The trials of searches: config/searches/<search>.json, which `zerolora search` writes and both engines read.

The file is in git, as a lock file is. Each trial that has not failed is a run, named <search>-<number>. What came out
of it is in its results alone, so that nothing that reads this file is out of date when a trial ends.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from zerolora.config.section import Positive, Section
from zerolora.errors import UserError
from zerolora.files import write_json

FOLDER = Path("config/searches")


class StopAbove(Section):
    """A bar for the validation loss."""

    step: Positive
    """Optimizer steps made."""
    loss: float
    """Loss that a validation up to that step has to reach."""


class Trial(Section):
    """One trial."""

    values: dict[str, Any]
    """The values of the search's keys, by their dotted path."""
    stop_above: list[StopAbove] = Field(default_factory=list)
    """Bars of the earlier trials (train.stop_above)."""
    failed: str = ""
    """Why it failed; empty if it did not. What failed is a run no longer."""


class Study(Section):
    """The trials of a search, in the order in which they were asked for; a trial's number is its place."""

    trials: list[Trial] = Field(default_factory=list)


def path_of(search: str) -> Path:
    """Return the file of a search's trials."""
    return FOLDER / f"{search}.json"


def run_of(search: str, number: int) -> str:
    """Return the name of a trial's run."""
    return f"{search}-{number}"


def read_study(search: str) -> Study:
    """Return the trials of a search, none if it has no file. Raises UserError if the file is broken."""
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
