"""The interface of an evaluation task: which rows it asks, how it judges an answer, and its metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""A prepared row (data/rows.py): `question` and `expected` as text, `input_ids`, and `prompt`, the tokens asked."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one answer."""

    format: bool
    """Whether the answer has the form that the task asks for."""
    right: bool
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further scores of this answer by name; the mean of each becomes a metric."""


@dataclass(frozen=True)
class TaskExample:
    """A row with a right and a wrong answer, on which tests/unit/test_tasks.py runs the task."""

    question: str
    expected: str
    right: str
    """An answer that is right."""
    wrong: str
    """An answer that is wrong."""


def has_prompt(row: Row) -> bool:
    """Return whether a row has a prompt; plain texts do not."""
    return bool(row["prompt"])


@dataclass(frozen=True)
class Task:
    """An evaluation task. The model answers the prompts of the selected rows greedily, up to a stop token."""

    name: str
    """The task's name in the config."""
    rule: str
    """When an answer is right, in a few words, as in "it equals the row's output"."""
    judge: Callable[[Row, str], Judgement]
    """Judges the answer to a row. The answer has been stripped of surrounding white space."""
    example: TaskExample
    asks: Callable[[Row], bool] = has_prompt
    """Returns whether a row is asked. The loss is computed on all rows."""

    def metrics(self, judgements: Sequence[Judgement]) -> dict[str, float]:
        """Return the metrics over all answers: format_rate, accuracy, and the mean of each further score.

        Empty if there are no answers.
        """
        if not judgements:
            return {}
        names = judgements[0].scores
        return {
            "format_rate": _mean(judgement.format for judgement in judgements),
            "accuracy": _mean(judgement.right for judgement in judgements),
            **{name: _mean(judgement.scores[name] for judgement in judgements) for name in names},
        }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
