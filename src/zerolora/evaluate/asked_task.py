"""Stages task and task_base: ask a model the rows of a task, and write its metrics with 95 % intervals.

zerolora task --settings JSON --rows results/tasks/NAME.jsonl --weights resources/weights/MODEL.json
              --output results/base/DATASET/tasks/NAME.json --answers results/base/DATASET/tasks/NAME.answers.json
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zerolora.config.settings import AskedTaskSettings, EvaluateSettings
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, load_tokenizer, stops_of
from zerolora.evaluate.generation import generate
from zerolora.evaluate.intervals import bootstrap, bootstrap_mean, wilson
from zerolora.evaluate.likelihood import longest_input, of_continuations, of_texts
from zerolora.evaluate.tasks import task_of
from zerolora.evaluate.tasks.task import Judgement, Likelihood, Task
from zerolora.files import MANIFEST, write_json
from zerolora.log import result
from zerolora.machine import cpu_matmul
from zerolora.model import added_tokens, foreign
from zerolora.units import counted

DATE = "26 Jul 2024"  # today's date for chat templates, so that prompts do not change from day to day


def ask(
    settings: AskedTaskSettings, file: Path, weights: EvaluatedModel, data: Path | None, output: Path, answers: Path
) -> None:
    """Ask a model the rows of `file`; write metrics to `output` and each answer to `answers`.

    A base model gets what the prepared `data` adds to it: tokens, chat template, stop tokens. Raises UserError if a
    file is missing or broken, or a row does not fit into the model.
    """
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    with file.open(encoding="utf-8") as lines:  # not splitlines(), which divides at U+2028 and others too
        rows = [json.loads(line) for line in lines]
    if task.ask == "choices" and any(not row["choices"] for row in rows):
        raise UserError(f"{settings.check}: its rows have no choices; write prompt, choices and answer")
    if task.ask == "generate":
        rows = [row for row in rows if task.asks(row)]
    if not rows:
        raise UserError(f"{file}: {settings.check} uses none of its rows; write another check")
    # A template may refuse a row: before the model is loaded.
    prompts = [row["prompt"] for row in rows] if task.ask == "loss" else _prompts(settings, rows, weights, data)
    model, tokenizer, stops = loaded(weights, data)
    if task.ask == "generate":
        given: list[Any] = _generated(settings, rows, prompts, model, tokenizer, stops)
    elif task.ask == "choices":
        given = _choices(settings, rows, prompts, model, tokenizer)
    else:
        given = of_texts(model, tokenizer, prompts, settings.batch)
    judged = [task.judge(row, answer) for row, answer in zip(rows, given, strict=True)]
    metrics = {"rows": len(rows), **with_intervals(task, judged, settings.seed)}
    write_json(answers, [_told(*each) for each in zip(rows, given, judged, strict=True)])
    write_json(output, metrics)
    told = [f"{name} {value:.3g}" for name, value in metrics.items() if not name.endswith(("_low", "_high", "rows"))]
    result(f"{', '.join(told)} on {counted(len(rows), 'row')}")


def loaded(model: EvaluatedModel, data: Path | None) -> tuple[Any, Any, set[int]]:
    """Return a model, its tokenizer and its stop tokens. A base model gets what prepared `data` adds to it: tokens,
    chat template, stop tokens; a tuned one has its own."""
    if model.device == "cpu":
        cpu_matmul.choose()
    tokens = added_tokens.of_data(data) if data else []
    result, tokenizer = load(model.merged or model.base, model.torch_device, tokens, model.loaded_adapter)
    _set_template(model, data, tokenizer)
    if data:
        return result, tokenizer, stops_of(model, result, tokenizer, data)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return result, tokenizer, {tokenizer.eos_token_id} - {None}


def _set_template(model: EvaluatedModel, data: Path | None, tokenizer: Any) -> None:
    template = model.directory / "chat_template.jinja"
    if model.adapter is not None and template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    elif (
        model.adapter is None
        and data
        and (own := foreign.manifest(data / MANIFEST, "zerolora prepare", "chat_template")["chat_template"])
    ):
        tokenizer.chat_template = own


def with_intervals(task: Task, judged: Sequence[Judgement], seed: int) -> dict[str, float]:
    """Return the task's metrics, each as NAME, NAME_low and NAME_high."""
    metrics: dict[str, float] = {}
    columns = task.columns(judged)
    for name, value in task.metrics(judged).items():
        metrics[name] = value
        if name in columns:
            values = columns[name]
            share = set(values) <= {0.0, 1.0}
            low, high = wilson(int(sum(values)), len(values)) if share else bootstrap_mean(values, seed)
        elif task.ask == "loss" and task.corpus:
            low, high = bootstrap([each.material for each in judged], partial(_of_corpus, task.corpus, name), seed)
        else:
            continue  # the metric of all answers together has its own
        metrics |= {f"{name}_low": low, f"{name}_high": high}
    return metrics


def _of_corpus(corpus: Callable[[Sequence[Any]], Mapping[str, float]], name: str, rows: list[Any]) -> float:
    return corpus(rows)[name]


def _prompts(
    settings: AskedTaskSettings, rows: list[dict[str, Any]], model: EvaluatedModel, data: Path | None
) -> list[str]:
    """Return the prompt of each row. Raises UserError, naming the row, if the chat template refuses it."""
    if not settings.chat_template:
        return [str(row["prompt"]) for row in rows]
    tokens = added_tokens.of_data(data) if data else []
    tokenizer, _ = load_tokenizer(model.merged or model.base, tokens, model.loaded_adapter)
    _set_template(model, data, tokenizer)
    return [_prompt(row, tokenizer) for row in rows]


def _prompt(row: dict[str, Any], tokenizer: Any) -> str:
    if not row["messages"]:
        return str(row["prompt"])
    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template; write chat_template: false")
    try:
        text: str = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True, date_string=DATE
        )
    except UserError as error:
        raise UserError(f"{row['place']}: {error}; correct the row, or write chat_template: false") from None
    return text


def _generated(
    settings: AskedTaskSettings,
    rows: list[dict[str, Any]],
    prompts: list[str],
    model: Any,
    tokenizer: Any,
    stops: set[int],
) -> list[str]:
    limit = longest_input(model) - settings.max_new_tokens
    asked = []
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = tokenizer.encode(prompt, add_special_tokens=prompt == row["prompt"])
        if len(tokens) > limit:
            raise UserError(
                f"{row['place']}: the prompt has {len(tokens):,} tokens, and the model takes {limit:,} before an "
                f"answer of {settings.max_new_tokens}; shorten it, or write fewer few_shot or max_new_tokens"
            )
        asked.append({"input_ids": tokens, "prompt": len(tokens)})
    how = EvaluateSettings(check="exact", batch=settings.batch, max_new_tokens=settings.max_new_tokens)
    texts, _ = generate(model, tokenizer, asked, stops, how, until=settings.until)
    return [_cut(text, settings.until).strip() for text in texts]


def _cut(text: str, until: Sequence[str]) -> str:
    return text[: min((text.find(end) for end in until if end in text), default=len(text))]


def _choices(
    settings: AskedTaskSettings, rows: list[dict[str, Any]], prompts: list[str], model: Any, tokenizer: Any
) -> list[Any]:
    space = "" if settings.chat_template else " "
    asked = [
        (prompt, f"{space}{choice}", choice)
        for row, prompt in zip(rows, prompts, strict=True)
        for choice in row["choices"]
    ]
    result = iter(of_continuations(model, tokenizer, asked, settings.batch))
    return [[next(result) for _ in row["choices"]] for row in rows]


def _told(row: dict[str, Any], answer: Any, verdict: Judgement) -> dict[str, Any]:
    given: Any = answer
    if isinstance(answer, Likelihood):
        given = {"logarithm": answer.logarithm, "tokens": answer.tokens}
    elif not isinstance(answer, str):
        given = [each.logarithm for each in answer]
    told = {key: row[key] for key in ("place", "question", "choices", "expected") if row[key] != []}
    return {**told, "answer": given, "format": verdict.format, "right": verdict.right, **verdict.scores}
