"""What is kept of sampled answers: the sections of `selections` in the config."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolora.config.section import Fault, Positive, Section, Text
from zerolora.config.values import JUDGE, Name, SelectionCheck

Kept = Literal["right", "best", "pairs", "labelled", "all"]
BY_VERDICT: tuple[Kept, ...] = ("right", "labelled")
"""Kinds of selections that need to know whether an answer is right."""


class SelectionSection(Section):
    """Rows to train on, selected from sampled answers, as far as the stage select reads the section."""

    check_settings: dict[str, Any] = {}
    """Settings of the check, as in prepare."""
    score: Text | None = None
    """Score of the check by which answers are ordered, e.g. rougeL of rouge. Default: 1 for a right answer, 0 for a
    wrong one; of judge, its rating from 1 to 10."""
    least: float | None = None
    """An answer is right if its score is this or more. Default: as the check says; judge needs it for right answers."""
    keep: Kept = "right"
    """What becomes a row: right = a right answer; best = the answer with the highest score; pairs = a better and a
    worse answer to the same prompt, of which every answer is used once; labelled = an answer, and whether it is right;
    all = any answer."""
    most: Positive | None = None
    """Most rows of a prompt; of labelled ones, most right and most wrong answers. Default: 1 for best and pairs,
    otherwise all."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """A pair's scores must differ by more than this. Only with `score`, or with check: judge."""
    mixed: bool = False
    """Keep only prompts that have right and wrong answers; false = also those that are always or never right."""
    max_answer_length: Positive | None = None
    """Longest answer to keep, in tokens. Default: no limit."""


class Selection(SelectionSection):
    """Rows to train on, selected from sampled answers."""

    samples: Name
    """The answers to select from, a name in `samples`."""
    check: SelectionCheck | None = None
    """Task that decides whether an answer is right (docs/tasks.md), your own file, e.g. config/tasks/mine.py, or judge:
    the model of the section `judge` rates each answer. Default: that of the data set, with its settings."""

    def faults(self) -> Iterator[Fault]:
        """Yield keys that need others, or that nothing reads."""
        judged = self.check == JUDGE
        if self.check is None and self.check_settings:
            yield ("check_settings",), "is for a check of this section; set check too, or remove it"
        if judged and self.check_settings:
            yield ("check_settings",), "are not read with check: judge; remove them"
        if judged and self.score is not None:
            yield ("score",), "is not read with check: judge, whose score is its rating; remove it"
        if self.least is not None and not (judged or self.score):
            yield ("least",), "needs a score; set score to one of the check's, or check: judge"
        if judged and self.least is None and (self.keep in BY_VERDICT or self.mixed):
            key = f"keep: {self.keep}" if self.keep in BY_VERDICT else "mixed: true"
            yield ("least",), f"is not set, and {key} needs the rating, from 1 to 10, of a right answer; set least: 8"
        if self.keep == "best" and not (judged or self.score):
            text = "best, but right answers are equally good without a score"
            yield ("keep",), f"{text}; set score, check: judge, or keep: right and most: 1"
        if self.margin and self.keep != "pairs":
            yield ("margin",), f"{self.margin:g} with keep: {self.keep}, which makes no pairs; remove it"
        elif self.margin and not (judged or self.score):
            yield ("margin",), f"{self.margin:g}, but right and wrong have no score; set score, or remove it"
