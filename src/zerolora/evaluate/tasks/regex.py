"""regex: the answer matches a pattern of the settings, or the pattern's group in it equals the row's output."""

import re
from typing import Annotated

from pydantic import AfterValidator

from zerolora.config.section import Section
from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a valid regular expression: {error}; correct it") from None
    return pattern


class RegexSettings(Section):
    """Settings of regex."""

    pattern: Annotated[str, AfterValidator(_compiled)]
    """A Python regular expression. With a group, the group's text must equal the row's output; without one, a matching
    answer is right."""
    whole: bool = False
    """The whole answer must match, not a part of it."""


def _judge(row: Row, answer: str, settings: RegexSettings) -> Judgement:
    pattern = re.compile(settings.pattern)
    result = pattern.fullmatch(answer) if settings.whole else pattern.search(answer)
    right = result is not None and (not pattern.groups or result[1] == row["expected"].strip())
    return Judgement(format=result is not None, right=right)


TASK = Task(
    name="regex",
    rule="it matches `pattern`; where that has a group, the group finds the row's output",
    judge=_judge,
    settings=RegexSettings,
    example=TaskExample(
        question="3 + 4?",
        expected="7",
        right="The answer is 7.",
        wrong="The answer is 8.",
        settings={"pattern": r"answer is (\d+)"},
    ),
)
