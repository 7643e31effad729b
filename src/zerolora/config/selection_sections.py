"""What is kept of sampled answers: sections of `selections` in the config."""

from typing import Annotated, Any, Literal

from pydantic import Field

from zerolora.config.section import Positive, Section
from zerolora.config.values import Check, Name


class Selection(Section):
    """Rows to train on, selected from sampled answers."""

    samples: Name
    """The answers to select from, a name in `samples`."""
    check: Check = "exact"
    """Task that decides whether an answer is right (docs/tasks.md), or your own file, e.g. config/tasks/mine.py."""
    check_settings: dict[str, Any] = {}
    """Settings of the task, as in prepare."""
    keep: Literal["right", "best", "pairs", "labelled", "all"] = "right"
    """Answers to keep: right = right ones; best = the one with the highest score; pairs = a better with a worse one;
    labelled = all, each with whether it is right; all = all."""
    most: Positive | None = None
    """Answers of a prompt to keep at most, of right ones. Default: all."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Difference of the scores of a pair that must be exceeded."""
