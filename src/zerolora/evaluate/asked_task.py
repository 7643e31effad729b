"""Stages task and task_base: evaluate a model on the rows of a task, and write metrics with 95 % intervals.

zerolora stage task RUN TASK
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerolora.config.settings import AskedTaskSettings, EvaluateSettings
from zerolora.data.task_prompts import (
    BEFORE_CHOICE,
    encoded,
    first_token,
    longest_input,
    prompts_of,
    rows_in,
    tokens_of,
)
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, load_tokenizer, stops_of
from zerolora.evaluate.generation import generate, shared_prefix
from zerolora.evaluate.intervals import bootstrap, bootstrap_mean, wilson
from zerolora.evaluate.task_leaks import LEAKED, NEAR, leaks
from zerolora.evaluate.tasks import task_of
from zerolora.evaluate.tasks.task import Judgement, Likelihood, Task
from zerolora.files import MANIFEST, write_json
from zerolora.log import result
from zerolora.machine import cpu_matmul
from zerolora.model import added_tokens, foreign
from zerolora.progress import Progress
from zerolora.units import counted


def ask(
    settings: AskedTaskSettings, file: Path, weights: EvaluatedModel, data: Path | None, output: Path, answers: Path
) -> None:
    """Evaluate a model on the rows of `file`; write metrics to `output` and each answer to `answers`.

    A base model gets the tokens, chat template and stop tokens of the prepared `data`, whose training rows are searched
    for the task's prompts (task_leaks.py). Raises UserError if a file is missing or broken, or a row does not fit into
    the model.
    """
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    rows = rows_in(file)
    if task.ask == "choices" and any(not row["choices"] for row in rows):
        raise UserError(f"{settings.check}: its rows have no choices; set prompt, choices and answer")
    if task.ask == "generate":
        rows = [row for row in rows if task.asks(row)]
    if not rows:
        raise UserError(f"{file}: has no row for {settings.check}; choose another check")
    # Before the model is loaded, since a template may refuse a row.
    prompts = [row["prompt"] for row in rows] if task.ask == "loss" else _prompts(settings, rows, weights, data)
    model, tokenizer, stops = loaded(weights, data)
    if task.ask == "generate":
        replies: list[Any] = _generated(settings, rows, prompts, model, tokenizer, stops)
    elif task.ask == "choices":
        replies = _choices(settings, rows, prompts, model, tokenizer)
    else:
        replies = of_texts(model, tokenizer, prompts, settings.batch)
    judged = [task.judge(row, reply) for row, reply in zip(rows, replies, strict=True)]
    metrics = {"rows": len(rows), **with_intervals(task, judged, settings.seed)}
    if data and weights.adapter is None:
        bare = _prompts(settings, [_alone(row) for row in rows], weights, data)
        metrics |= leaks(data, tokenizer, [row["question"] for row in rows], bare, file.stem)
    write_json(answers, [_entry(*each) for each in zip(rows, replies, judged, strict=True)])
    write_json(output, metrics)
    hidden = ("_low", "_high", "rows", LEAKED, NEAR)
    shown = [f"{name} {value:.3g}" for name, value in metrics.items() if not name.endswith(hidden)]
    result(f"{', '.join(shown)} on {counted(len(rows), 'row')}")


def loaded(model: EvaluatedModel, data: Path | None) -> tuple[Any, Any, set[int]]:
    """Return a model, its tokenizer and its stop tokens. A base model gets the tokens, chat template and stop tokens of
    the prepared `data`; a tuned model has its own."""
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
    elif model.adapter is None and data:
        prepared = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "chat_template")
        tokenizer.chat_template = prepared["chat_template"] or tokenizer.chat_template


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
            continue  # a corpus metric has its own interval
        metrics |= {f"{name}_low": low, f"{name}_high": high}
    return metrics


def _of_corpus(corpus: Callable[[Sequence[Any]], Mapping[str, float]], name: str, rows: list[Any]) -> float:
    return corpus(rows)[name]


def _alone(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without few-shot examples."""
    messages = [turn for turn in row["messages"][:-1] if turn["role"] == "system"] + row["messages"][-1:]
    return {**row, "prompt": row["question"], "messages": messages}


def _prompts(
    settings: AskedTaskSettings, rows: list[dict[str, Any]], model: EvaluatedModel, data: Path | None
) -> list[str]:
    """Return the prompt of each row. Raises UserError, naming the row, if the chat template rejects it."""
    if not settings.chat_template:
        return prompts_of(rows, None)
    tokens = added_tokens.of_data(data) if data else []
    tokenizer, _ = load_tokenizer(model.merged or model.base, tokens, model.loaded_adapter)
    _set_template(model, data, tokenizer)
    return prompts_of(rows, tokenizer)


def _generated(
    settings: AskedTaskSettings,
    rows: list[dict[str, Any]],
    prompts: list[str],
    model: Any,
    tokenizer: Any,
    stops: set[int],
) -> list[str]:
    limit = longest_input(model.config) - settings.max_new_tokens
    asked = []
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = tokenizer.encode(prompt, add_special_tokens=prompt == row["prompt"])
        if len(tokens) > limit:
            raise UserError(
                f"{row['place']}: the prompt has {len(tokens):,} tokens, and the model takes {limit:,} before an "
                f"answer of {settings.max_new_tokens}; shorten it, or lower few_shot or max_new_tokens"
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
    space = "" if settings.chat_template else BEFORE_CHOICE
    continuations = [
        (prompt, f"{space}{choice}", choice)
        for row, prompt in zip(rows, prompts, strict=True)
        for choice in row["choices"]
    ]
    result = iter(of_continuations(model, tokenizer, continuations, settings.batch))
    return [[next(result) for _ in row["choices"]] for row in rows]


def _entry(row: dict[str, Any], answer: Any, verdict: Judgement) -> dict[str, Any]:
    """Return an entry of the file of answers."""
    if isinstance(answer, Likelihood):
        answer = {"logarithm": answer.logarithm, "tokens": answer.tokens}
    elif not isinstance(answer, str):
        answer = [each.logarithm for each in answer]
    own = {key: row[key] for key in ("place", "question", "choices", "expected") if row[key] != []}
    return {**own, "answer": answer, "format": verdict.format, "right": verdict.right, **verdict.scores}


# Likelihoods, as in lm-evaluation-harness 0.4.13


def of_continuations(model: Any, tokenizer: Any, asked: Sequence[tuple[str, str, str]], batch: int) -> list[Likelihood]:
    """Return the likelihood of each continuation after its prompt.

    asked: (prompt, continuation, text), where `text` is the continuation without leading white space. Prompts that
    begin with the BOS token get no other (HFLM.tok_encode).
    """
    pairs = [encoded(tokenizer, prompt, continuation) for prompt, continuation, _ in asked]
    sums = _sums(model, pairs, batch)
    return [
        Likelihood(text, total, len(tokens))
        for (_, _, text), (_, tokens), total in zip(asked, pairs, sums, strict=True)
    ]


def of_texts(model: Any, tokenizer: Any, texts: Sequence[str], batch: int) -> list[Likelihood]:
    """Return the likelihood of each whole text, in windows of the model's length without overlap
    (HFLM.loglikelihood_rolling)."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    first, longest = first_token(tokenizer), longest_input(model.config)
    tokenized = [tokens_of(tokenizer, text) for text in texts]
    windows = [
        (number, *make_disjoint_window(pair))
        for number, tokens in enumerate(tokenized)
        for pair in get_rolling_token_windows(tokens, first, longest, 1)
    ]
    totals = [0.0] * len(texts)
    for (number, _, _), value in zip(windows, _sums(model, [(a, b) for _, a, b in windows], batch), strict=True):
        totals[number] += value
    return [Likelihood(*each) for each in zip(texts, totals, map(len, tokenized), strict=True)]


def _sums(model: Any, pairs: Sequence[tuple[list[int], list[int]]], batch: int) -> list[float]:
    """Return the summed log-probability of the second tokens of each pair, after the first.

    Pairs that differ only in their last token, such as the letters of a choice, share a forward pass. What all begin
    with, such as solved rows, is computed once.
    """
    longest = longest_input(model.config)
    places: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, (before, tokens) in enumerate(pairs):
        taken = tuple((before + tokens)[-(longest + 1) :][:-1])
        places.setdefault((taken, len(tokens)), []).append(number)
    order = sorted(places, key=lambda key: (-len(key[0]), key))
    sums = [0.0] * len(pairs)
    prefix = shared_prefix(model, [list(taken[: len(taken) - count + 1]) for taken, count in order])
    with Progress("rate", len(order)) as bar:
        while order:
            width = len(order[0][0])
            # Rows less than half as long as the longest go to a batch with less padding.
            members = [key for key in order[:batch] if 2 * len(key[0]) >= width]
            order = order[len(members) :]
            ids = torch.zeros(len(members), width, dtype=torch.long)
            for row, (taken, _) in enumerate(members):
                ids[row, : len(taken)] = torch.tensor(taken)
            kept = max(width - len(taken) + count for taken, count in members)
            # No mask: padding comes after the tokens, and attention is faster without one.
            with torch.inference_mode():
                logits = model(
                    input_ids=ids[:, prefix.length :].to(model.device),
                    logits_to_keep=kept,
                    **prefix.inputs(model, len(members), width),
                ).logits[:, -kept:]  # some classes make all
            for row, key in enumerate(members):
                taken, count = key
                end = len(taken) - (width - kept)
                chances = torch.log_softmax(logits[row, max(0, end - count) : end].float(), -1)
                for number in places[key]:
                    wanted = torch.tensor(pairs[number][1][-len(chances) :], device=chances.device)
                    sums[number] = float(chances.gather(1, wanted[:, None]).sum())
            bar.update(len(members))
    return sums
