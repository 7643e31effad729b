"""The interface of an evaluation task: its rows, the form of answers, their judgement, and its metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from pydantic import ValidationError

from zerolora.config.section import Section

Row = Mapping[str, Any]
"""A row: `question` and `expected` as text, and `prompt`, empty or 0 for a plain text. With `choices`, a list of texts,
`expected` is the index of the right one."""


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a text after a prompt."""

    text: str
    logarithm: float
    """Natural logarithm of the text's probability: the sum over its tokens."""
    tokens: int


@dataclass(frozen=True)
class Judgement:
    """The verdict on one answer."""

    format: bool
    """Whether the answer has the task's form."""
    right: bool
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further scores by name; the mean of each becomes a metric."""
    material: Any = None
    """Input of `Task.corpus`."""


@dataclass(frozen=True)
class TaskExample:
    """A row with a right and a wrong answer, on which tests/unit/test_tasks.py runs the task."""

    question: str
    expected: Any
    right: Any
    """A right answer."""
    wrong: Any
    """A wrong answer."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The task's settings."""


def has_prompt(row: Row) -> bool:
    """Return whether a row has a prompt; plain texts do not."""
    return bool(row["prompt"])


@dataclass(frozen=True)
class Task:
    """An evaluation task. With the default `ask`, the model answers the prompts of the selected rows greedily, up to a
    stop token."""

    name: str
    """The task's name in the config."""
    rule: str
    """When an answer is right, in a few words, as in "it equals the row's output"."""
    judge: Callable[..., Judgement]
    """Judges an answer: judge(row, answer), with the argument `settings` for a task with settings. Generated answers
    have no surrounding white space."""
    example: TaskExample
    asks: Callable[[Row], bool] = has_prompt
    """Returns whether to evaluate a row. The loss is computed on all rows."""
    ask: Literal["generate", "choices", "loss"] = "generate"
    """The form of answers: a generated text, the Likelihood of each choice, or the Likelihood of the whole row."""
    settings: type[Section] | None = None
    """The class of its settings, `check_settings` in the config, if any."""
    corpus: Callable[[Sequence[Any]], Mapping[str, float]] | None = None
    """Returns metrics of all answers together, from the `material` of each; there is at least one."""

    def configured(self, values: Mapping[str, Any]) -> "Task":
        """Return the task with its settings. Raises ValueError, naming the key, if they are invalid."""
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
        """Return the metrics over all answers, empty without answers: format_rate (of generated answers), accuracy
        (unless `ask` is loss), the mean of each further score, and the metrics of `corpus`."""
        if not judgements:
            return {}
        metrics = {name: sum(values) / len(values) for name, values in self.columns(judgements).items()}
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
