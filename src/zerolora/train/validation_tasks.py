"""Tasks at validation: the most likely choice of each row, or a greedy answer, by the engine's forward passes.

Prompts and choices are those that the stage task evaluates (evaluate/asked_task.py), with the same tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerolora.config.settings import TrainSettings, ValidationTask
from zerolora.data.prepared_rows import IGNORED
from zerolora.data.task_prompts import BEFORE_CHOICE, encoded, longest_input, prompts_of, rows_in
from zerolora.errors import UserError
from zerolora.files import MANIFEST
from zerolora.model import added_tokens, foreign
from zerolora.model.added_tokens import AddedToken
from zerolora.model.architecture import config_of, tokenizer_of
from zerolora.train.objectives.objective import Sequence


class Choices(NamedTuple):
    """The choices of a task's rows, the longest first."""

    name: str
    sequences: list[Sequence]
    """A prompt and a choice; only the choice is supervised."""
    rows: list[int]
    """The row of each."""
    numbers: list[int]
    """The number of each in its row."""
    expected: list[int]
    """The number of the right choice of each row."""

    def accuracy(self, logarithms: torch.Tensor) -> float:
        """Return the share of rows whose right choice has the highest log-probability: [choices]. The first of equal
        ones counts, as in evaluation."""
        best: dict[int, tuple[float, int]] = {}
        for row, number, value in zip(self.rows, self.numbers, logarithms.tolist(), strict=True):
            best[row] = max(best.get(row, (value, -number)), (value, -number))
        right = sum(-best[row][1] == number for row, number in enumerate(self.expected))
        return right / len(self.expected)


class Questions(NamedTuple):
    """The prompts of a task's rows, the longest first, whose answers are generated."""

    name: str
    prompts: list[list[int]]
    stops: frozenset[int]
    """The tokens that end an answer."""
    most: int
    """The most tokens of an answer."""
    is_right: Callable[[int, list[int]], bool]
    """Whether the tokens of the answer to a prompt, by its number, are right."""


ValidationTasks = list[Choices | Questions]


def files_of(settings: TrainSettings, folder: Path) -> dict[str, Path]:
    """Return the file of each task's rows in `folder`."""
    return {task.name: folder / f"{task.name}.jsonl" for task in settings.validation_tasks}


def tasks_of(settings: TrainSettings, files: Mapping[str, Path], data: Path, weights: Path) -> ValidationTasks:
    """Return each task in `files` for a base model and its prepared `data`. Raises UserError, naming the row, for one
    that does not fit into the model."""
    if not files:
        return []
    tokenizer = _tokenizer(data, weights, added_tokens.of_data(data))
    longest = longest_input(config_of(weights))
    prepared = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "stop_tokens")["stop_tokens"]
    stops = frozenset({*tokenizer.convert_tokens_to_ids(prepared), tokenizer.eos_token_id} - {None})
    return [
        _questions(task, files[task.name], tokenizer, longest, stops)
        if task.max_new_tokens
        else _choices(task, files[task.name], tokenizer, longest)
        for task in settings.validation_tasks
    ]


def _tokenizer(data: Path, weights: Path, tokens: list[AddedToken]) -> Any:
    """Return the tokenizer that the merged model will have."""
    tokenizer = tokenizer_of(weights)
    added_tokens.extend_again(tokenizer, tokens)
    prepared = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "chat_template")
    tokenizer.chat_template = prepared["chat_template"] or tokenizer.chat_template
    return tokenizer


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        return rows_in(file)
    except OSError:
        raise UserError(f"{file}: is missing; run `zerolora stage task_rows`") from None


def _questions(task: ValidationTask, file: Path, tokenizer: Any, longest: int, stops: frozenset[int]) -> Questions:
    from zerolora.evaluate.tasks import task_of
    from zerolora.model.answer_text import AnswerTexts

    check = task_of(task.check, task.check_settings, task.check_source)
    if check.ask != "generate":
        raise UserError(f"{task.check}: asks for no generated answer; remove {task.name} from train.validation_tasks")
    rows = [row for row in _rows(file) if check.asks(row)]
    if not rows:
        raise UserError(f"{file}: has no row for {task.check}; remove {task.name} from train.validation_tasks")
    asked = []
    for row, prompt in zip(rows, prompts_of(rows, tokenizer if task.chat_template else None), strict=True):
        tokens = tokenizer.encode(prompt, add_special_tokens=prompt == row["prompt"])
        if len(tokens) > (limit := longest - task.max_new_tokens):
            raise UserError(
                f"{row['place']}: the prompt has {len(tokens):,} tokens, and the model takes {limit:,} before an "
                f"answer of {task.max_new_tokens}; shorten it, or remove {task.name} from train.validation_tasks"
            )
        asked.append((tokens, row))
    asked.sort(key=lambda each: -len(each[0]))

    texts = AnswerTexts(tokenizer, stops)

    def is_right(number: int, answer: list[int]) -> bool:
        text = texts.text(answer)
        end = min((text.find(each) for each in task.until if each in text), default=len(text))
        return bool(check.judge(asked[number][1], text[:end].strip()).right)

    return Questions(task.name, [tokens for tokens, _ in asked], stops, task.max_new_tokens, is_right)


def _choices(task: ValidationTask, file: Path, tokenizer: Any, longest: int) -> Choices:
    rows = _rows(file)
    prompts = prompts_of(rows, tokenizer if task.chat_template else None)
    space = "" if task.chat_template else BEFORE_CHOICE
    choices: list[tuple[Sequence, int, int]] = []
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        for index, choice in enumerate(row["choices"]):
            before, tokens = encoded(tokenizer, prompt, f"{space}{choice}")
            if len(before) + len(tokens) > longest:
                raise UserError(
                    f"{row['place']}: prompt and choice have {len(before) + len(tokens):,} tokens, and the model takes "
                    f"{longest:,}; shorten the row, lower few_shot, or remove {task.name} from "
                    "train.validation_tasks"
                )
            sequence = {"input_ids": before + tokens, "labels": [IGNORED] * len(before) + tokens, "source": 0}
            choices.append((sequence, number, index))
    choices.sort(key=lambda each: -len(each[0]["input_ids"]))
    sequences, of_rows, numbers = map(list, zip(*choices, strict=True))
    return Choices(task.name, sequences, of_rows, numbers, [row["expected"] for row in rows])
