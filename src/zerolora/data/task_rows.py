"""Stage task_rows: the rows of an evaluation task as prompts with few-shot examples. Text, for any model.

    zerolora stage task_rows TASK

One line of JSON for each row: place, question (without examples), prompt, messages, choices, expected.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.bounded import bounded, within_bounds
from zerolora.config.settings import TaskRowsSettings
from zerolora.data.example import BadRow
from zerolora.data.formats import detect, parse
from zerolora.data.formats.leaves import Unread, undecided_lines
from zerolora.data.formats.reading import reading_of
from zerolora.data.published import published, variant_of
from zerolora.data.readers import chunks, files_of
from zerolora.errors import UserError, shown
from zerolora.files import write_text
from zerolora.log import result
from zerolora.units import counted

SHOWN = 5  # mistakes reported at a time
BETWEEN = "\n\n"
"""The separator of examples in plain text, as in lm-evaluation-harness."""


class Question(NamedTuple):
    """A row without few-shot examples."""

    place: str
    messages: list[dict[str, str]]
    """The conversation up to the answer; empty for a plain text."""
    text: str
    """The same as plain text, or the plain text itself."""
    choices: list[str]
    expected: Any
    """The right answer, or the index of the right choice."""

    @property
    def solution(self) -> str:
        """The right answer as text."""
        return self.choices[self.expected] if self.choices else str(self.expected)


def task_rows(settings: TaskRowsSettings, output: Path) -> None:
    """Write the rows of a task. Raises UserError, naming file and line, for an unsuitable row."""
    path = Path(settings.path)
    questions = _questions(settings, path / settings.file if settings.file else path)
    if not questions:
        raise UserError(f"{path}: has no row; give the path of a file that has some")
    pool = _questions(settings, path / settings.few_shot_file) if settings.few_shot_file else questions
    others = len(pool) - (not settings.few_shot_file)
    if settings.few_shot > others:
        raise UserError(f"{path}: has {others} rows for few-shot examples; set few_shot: {others} or less")
    lines = [
        _line(question, _examples(settings, number, pool, own=not settings.few_shot_file))
        for number, question in enumerate(questions[: settings.limit or len(questions)])
    ]
    write_text(output, "".join(lines))
    result(counted(len(lines), "row"))


def _examples(settings: TaskRowsSettings, number: int, pool: list[Question], own: bool) -> list[Question]:
    """Draw the few-shot examples of a row, independently of other rows. own: the pool contains the row itself."""
    drawn = random.Random(f"{settings.seed} {number}").sample(  # noqa: S311 - no secret
        range(len(pool) - own), settings.few_shot
    )
    return [pool[index + (own and index >= number)] for index in drawn]


def _line(question: Question, examples: list[Question]) -> str:
    turns = [
        turn
        for each in examples
        for turn in (each.messages[-1], {"role": "assistant", "content": each.solution})
        if each.messages
    ]
    row = {
        "place": question.place,
        "question": question.text,
        "prompt": BETWEEN.join([*(f"{each.text} {each.solution}" for each in examples), question.text]),
        "messages": question.messages[:-1] + turns + question.messages[-1:],
        "choices": question.choices,
        "expected": question.expected,
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def _questions(settings: TaskRowsSettings, path: Path) -> list[Question]:
    unread = Unread()
    read = _by_template(settings) if settings.prompt is not None else partial(_by_form, settings, unread)
    questions = []
    for kind, place, value in _rows(path):
        try:
            if isinstance(value, BadRow):
                raise value
            questions.append(read(kind, place, value))
        except BadRow as error:
            raise UserError(f"{place}: {error}") from None
    if unread.end().undecided:
        raise UserError("\n".join(undecided_lines(unread, reading_of(settings, ""), SHOWN)))
    return questions


def _rows(path: Path) -> Iterator[tuple[str, str, Any]]:
    files = files_of(path)
    found = published(path, files)
    splits = found.splits
    named = {variant_of(found.names[file]): found.names[file] for file in files if splits[file]}
    names = sorted({*splits.values()} - {""})
    if len(names) == 1 and len(named) > 1:
        names = sorted(named.values())
    if path.is_dir() and len(names) > 1:
        first = min(files, key=lambda file: (splits[file] != "test", splits[file] != "validation"))
        raise UserError(
            f"{path}: contains the published splits {', '.join(names)}, which would be pooled; set file: "
            f"{first.relative_to(path)}, or the path of one split"
        )
    for file in files:
        for chunk in chunks(file):
            for place, value in chunk.records():
                yield chunk.kind, place, value


Read = Callable[[str, str, dict[str, Any]], Question]
"""Converts a row to a question, from the kind of its file, its place and its value."""


def _by_form(settings: TaskRowsSettings, unread: Unread, kind: str, place: str, value: dict[str, Any]) -> Question:
    reading = reading_of(settings, kind)
    format = detect(value, reading) if settings.format == "auto" else settings.format
    example = parse(value, format, reading, unread=unread, place=place)
    if example.text is not None:
        return Question(place, [], example.text, [], "")
    if example.messages is None or any(not isinstance(turn.get("content"), str) for turn in example.messages):
        raise BadRow("is neither a text nor a conversation of texts, which can be evaluated; set prompt and answer")
    if any("tool_calls" in turn for turn in example.messages):
        raise BadRow("calls tools, which a task cannot evaluate; set prompt and answer, or remove it")
    if example.tools or example.thoughts:
        name = "tools" if example.tools else example.thoughts
        raise BadRow(f"has {name}, which a task does not pass on; name their column in ignore to ask without them")
    turns = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in example.messages]
    if settings.whole:
        return Question(place, [], BETWEEN.join(turn["content"] for turn in turns), [], "")
    if turns[-1]["role"] != "assistant":
        raise BadRow("ends with no answer of the assistant; add it, or set prompt and answer")
    if example.supervised and example.supervised[-1] is False:
        raise BadRow(
            "its last answer has weight 0, so it is not the right one; remove the row, or set ignore: [weight]"
        )
    *prompt, answer = turns
    return Question(place, prompt, BETWEEN.join(turn["content"] for turn in prompt), [], answer["content"])


def _by_template(settings: TaskRowsSettings) -> Read:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    fixed = settings.choices
    with bounded("tasks.rows.NAME.prompt"):  # jinja2 evaluates constants when it compiles
        prompt = environment.from_string(settings.prompt or "")
        answer = environment.from_string(settings.answer or "")
        choices = (
            environment.compile_expression(fixed, undefined_to_none=False)
            if isinstance(fixed, str)
            else lambda row: list(fixed or [])
        )

    def read(kind: str, place: str, value: dict[str, Any]) -> Question:
        names = {str(name): each for name, each in value.items()}
        text = _rendered("prompt", lambda: prompt.render(names))
        right = _rendered("answer", lambda: answer.render(names))
        result = _rendered("choices", lambda: choices(names))
        if not isinstance(result, list) or not all(isinstance(each, str) for each in result):
            raise BadRow(f"choices: is {shown(result)}; use an expression that gives a list of texts")
        if not text:
            raise BadRow("prompt: is empty for this row; use a template that is not")
        if settings.choices is None:
            return Question(place, [{"role": "user", "content": text}], text, [], right)
        if len(result) < 2 or "" in result:
            raise BadRow(f"choices: are {shown(result)}; use an expression that gives two texts or more")
        return Question(place, [{"role": "user", "content": text}], text, result, _number(right, result))

    return read


def _rendered(key: str, render: Callable[[], Any]) -> Any:
    try:
        return within_bounds(f"tasks.rows.NAME.{key}", render)
    except UserError:
        raise
    except Exception as error:  # the user's expression may raise any
        raise BadRow(f"{key}: {' '.join(str(error).split())}; correct tasks.rows.NAME.{key}") from None


def _number(right: str, choices: list[str]) -> int:
    if choices.count(right) == 1:
        return choices.index(right)
    if right.isdecimal() and int(right) < len(choices):
        return int(right)
    raise BadRow(f"answer: {shown(right)} is none of the choices {shown(choices)}; use one, or its number from 0")
