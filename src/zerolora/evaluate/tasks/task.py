"""The interface of an evaluation task: which rows it asks, and how, how it judges an answer, and its metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from pydantic import ValidationError

from zerolora.config.section import Section

Row = Mapping[str, Any]
"""A row: `question` and `expected` as text, and `prompt`, which is empty or 0 for a plain text. With choices, `choices`
are their texts and `expected` the number of the right one."""


@dataclass(frozen=True)
class Likelihood:
    """How likely a model holds a text after a prompt."""

    text: str
    logarithm: float
    """Natural logarithm of the text's probability: the sum over its tokens."""
    tokens: int


@dataclass(frozen=True)
class Judgement:
    """The verdict on one answer."""

    format: bool
    """Whether the answer has the form that the task asks for."""
    right: bool
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further scores of this answer by name; the mean of each becomes a metric."""
    material: Any = None
    """What `Task.corpus` needs of this answer."""


@dataclass(frozen=True)
class TaskExample:
    """A row with a right and a wrong answer, on which tests/unit/test_tasks.py runs the task."""

    question: str
    expected: Any
    right: Any
    """An answer that is right."""
    wrong: Any
    """An answer that is wrong."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings it is asked with."""


def has_prompt(row: Row) -> bool:
    """Return whether a row has a prompt; plain texts do not."""
    return bool(row["prompt"])


@dataclass(frozen=True)
class Task:
    """An evaluation task. The model answers the prompts of the selected rows greedily, up to a stop token, unless `ask`
    says otherwise."""

    name: str
    """The task's name in the config."""
    rule: str
    """When an answer is right, in a few words, as in "it equals the row's output"."""
    judge: Callable[..., Judgement]
    """Judges the answer to a row. An answer is a text, stripped of surrounding white space; of a task with settings,
    `judge` gets them as its argument `settings`."""
    example: TaskExample
    asks: Callable[[Row], bool] = has_prompt
    """Returns whether a row is asked. The loss is computed on all rows."""
    ask: Literal["generate", "choices", "loss"] = "generate"
    """What an answer is: a generated text, the Likelihood of each choice, or the Likelihood of the whole row."""
    settings: type[Section] | None = None
    """The class of its settings, `check_settings` in the config; None if it has none."""
    corpus: Callable[[Sequence[Any]], Mapping[str, float]] | None = None
    """Returns metrics of all answers together, from the `material` of each. Called with one or more."""

    def configured(self, values: Mapping[str, Any]) -> "Task":
        """Return the task with its settings. Raises ValueError, which names the key, if they are not its settings."""
        if self.settings is None:
            if values:
                raise ValueError(f"{self.name} has no settings; remove {', '.join(values)}")
            return self
        try:
            settings = self.settings.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "its settings"
            known = ", ".join(self.settings.model_fields)
            message = str(first["msg"]).removeprefix("Value error, ")
            raise ValueError(f"{key}: {message}; {self.name} has the settings {known}") from None
        return replace(self, judge=partial(self.judge, settings=settings), settings=None)

    def metrics(self, judgements: Sequence[Judgement]) -> dict[str, float]:
        """Return the metrics over all answers: format_rate, accuracy, the mean of each further score, and those of the
        answers together.

        Without format_rate if nothing is generated, and without accuracy if no answer can be right. Empty if there are
        no answers.
        """
        if not judgements:
            return {}
        metrics = {name: _mean(values) for name, values in self.columns(judgements).items()}
        if self.corpus:
            metrics |= self.corpus([judgement.material for judgement in judgements])
        return metrics

    def columns(self, judgements: Sequence[Judgement]) -> dict[str, list[float]]:
        """Return the values of each metric that is a mean over answers."""
        columns: dict[str, list[float]] = {}
        if self.ask == "generate":
            columns["format_rate"] = [float(each.format) for each in judgements]
        if self.ask != "loss":
            columns["accuracy"] = [float(each.right) for each in judgements]
        for name in judgements[0].scores if judgements else ():
            columns[name] = [float(each.scores[name]) for each in judgements]
        return columns


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
