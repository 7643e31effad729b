"""Evaluate a model on held-out rows: generate answers in batches, judge them, and compute the loss.

    zerolora stage evaluate RUN

Writes evaluate.json (rates, loss, the logits of a merged model against base and adapter), evaluate_resources.json
(speed, memory) and every answer. Rows without a prompt, such as plain texts, get only a loss. Of preference data, the
chosen or desirable answers have the loss, and evaluate.json compares the likelihoods of both (held_out_preference.py).
"""

import contextlib
import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolora.config.settings import EvaluateRunSettings, EvaluateSettings
from zerolora.data.prepared_rows import FIELDS
from zerolora.evaluate import held_out_preference, vllm_engine
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.difference import UNMERGED
from zerolora.evaluate.evaluated_models import EvaluatedModel, load_tokenizer, stops_of
from zerolora.evaluate.free_form import BITS, FREE_FORM, bits_per_byte, is_free_form, supervised_bytes
from zerolora.evaluate.kept import KeptAnswers, figures_in, key_of
from zerolora.evaluate.merged_logits import next_tokens, of_base, of_merged
from zerolora.evaluate.ranks import answer, answer_on_ranks, asked_rows, held_out, load_for, longest_of, room_beside
from zerolora.evaluate.row_losses import summed_losses, supervised_tokens
from zerolora.evaluate.tasks import task_of
from zerolora.evaluate.tasks.task import Judgement
from zerolora.files import MANIFEST, write_json
from zerolora.log import result
from zerolora.machine import cpu_matmul
from zerolora.machine.peak_memory import PeakMemory
from zerolora.methods.quantized_base import was_quantized
from zerolora.model import added_tokens, foreign
from zerolora.model.answer_text import AnswerTexts
from zerolora.units import counted

__all__ = ["EvaluatedModel", "evaluate"]

REJECTED = {"rejected_input_ids": "input_ids", "rejected_labels": "labels"}
"""Columns of a pair's rejected answer, by the names of those of other rows."""


def evaluate(
    settings: EvaluateRunSettings,
    data: Path,
    model: EvaluatedModel,
    output: Path,
    answers_file: Path,
    work: Path | None = None,
) -> None:
    """Evaluate a model on a split of `data`; write metrics to directory `output` and answers to `answers_file`.

    With settings.unmerged, base and adapter answer as well as the merged model. A killed evaluation resumes from the
    answers in directory `work`, and in WORK.unmerged. Raises UserError if an earlier stage's file is missing, or no
    labelled row is desirable.
    """
    models = [model]
    if settings.unmerged and model.merged and model.adapter:
        models.append(replace(model, merged=None))
    if settings.engine == "vllm":
        (engine,) = {vllm_engine.check(settings, data, each) for each in models}
    else:
        engine = f"transformers {version('transformers')}"
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    if model.device == "cpu":
        cpu_matmul.choose()
    rows = held_out(settings, data)
    numbers = asked_rows(task, rows)
    asked = [rows[number] for number in numbers]
    with contextlib.ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory()), "kept")
        # One folder for each model, cleared of other evaluations; kept until all have answered.
        folders = (folder, folder.with_name(f"{folder.name}.unmerged"))
        kept = [
            KeptAnswers(each, key_of(settings, data, answering, engine), len(asked))
            for answering, each in zip(models, folders, strict=False)
        ]
        texts, loaded = _answers(settings, data, model, asked, kept[0])
        answered = [texts]
        resources = {"engine": engine, **resources_of(kept[0].folder, sum(each.tokens for each in kept[0].all()))}
        scored = [_scored(loaded, rows, _of_rows(numbers, kept[0]))]
        figures = {"loss": scored[0].loss, **_of_texts(settings, model, data, rows, asked, scored[0])}
        if model.merged and model.adapter:
            merged = next_tokens(loaded, rows)
            # Free the memory before base and adapter are loaded.
            del loaded
            gc.collect()
            torch.cuda.empty_cache()
            base, tuned, adapted = of_base(model, data, rows, room_beside(settings, model.base, asked))
            if was_quantized(model.adapter) or settings.ranks > 1 or settings.engine == "vllm":
                adapted = None  # another model is loaded, here or by the processes that answer
            figures |= of_merged(merged, base, tuned, model, data, rows)
        for each, answers in zip(models[1:], kept[1:], strict=True):
            texts, loaded = _answers(settings, data, each, asked, answers, adapted)
            answered.append(texts)
            scored.append(_scored(loaded, rows, _of_rows(numbers, answers)))
            figures["unmerged_loss"] = scored[-1].loss
        for answers, of_model in zip(kept, scored, strict=True):
            of_model.count_tokens(numbers, answers)
            answers.remove()
    judged = [[task.judge(row, text.strip()) for row, text in zip(asked, texts, strict=True)] for texts in answered]
    rates = task.metrics(judged[0])
    selected = [number for number, row in enumerate(rows) if task.asks(row)]
    of_models = [
        task.metrics(verdicts) | held_out_preference.figures([each.rows[number] for number in selected])
        for verdicts, each in zip(judged, scored, strict=True)
    ]
    figures = {"rows": len(rows), **of_models[0], **figures}
    for others in of_models[1:]:
        figures |= {
            f"unmerged_{name}": value for name, value in others.items() if name not in held_out_preference.OF_DATA
        }
    write_json(output / "evaluate.json", figures)
    write_json(output / "evaluate_resources.json", resources)
    write_json(answers_file, _entries(data, asked, answered, judged, [scored[0].rows[number] for number in numbers]))
    result(f"{', '.join(_shown(rates, figures))} on {counted(len(rows), 'row')}")


def _shown(rates: Mapping[str, float], figures: Mapping[str, Any]) -> list[str]:
    """Return what the stage prints: the rates, of free-form answers none, and the loss."""
    of_pairs = {name: figures[name] for name in (held_out_preference.ACCURACY,) if name in figures}
    shown = {} if FREE_FORM in figures else {**rates, **of_pairs}
    texts = [f"{name.removesuffix('_rate').replace('_', ' ')} {rate:.3f}" for name, rate in shown.items()]
    return [*texts, f"loss {figures['loss']:.3g}"]


def _entries(
    data: Path,
    asked: list[Any],
    answered: list[list[str]],
    judged: list[list[Judgement]],
    scored: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the content of answers.json: an entry for each row in `asked`, with the judged answer of each model."""
    judgements = [
        [
            {"answer": text, "format": verdict.format, "right": verdict.right, **verdict.scores}
            for text, verdict in zip(texts, verdicts, strict=True)
        ]
        for texts, verdicts in zip(answered, judged, strict=True)
    ]
    sources = foreign.manifest(data / MANIFEST, "zerolora stage prepare").get("sources", [])
    return [
        {
            **{field: row[field] for field in (*FIELDS, "rejected") if field in row},
            **({"category": sources[row["source"]]} if len(sources) > 1 else {}),
            "prompt_tokens": row["prompt"],
            **first,
            **figures,
            **({UNMERGED: others[0]} if others else {}),
        }
        for row, figures, first, *others in zip(asked, scored, *judgements, strict=True)
    ]


@dataclass(frozen=True)
class _Scored:
    """The held-out rows under one model."""

    loss: float
    """Mean cross-entropy per supervised token; of the chosen or desirable answers, of preference data."""
    nats: float
    """Summed cross-entropy of the supervised tokens of all rows."""
    rows: list[dict[str, Any]]
    """The figures of each row (held_out_preference.py); empty for other data."""

    def count_tokens(self, numbers: list[int], kept: KeptAnswers) -> None:
        """Add the tokens of the model's answers to the figures of preference data; `numbers` are those of the asked
        rows."""
        for number, each in zip(numbers, kept.all(), strict=True):
            if self.rows[number]:
                self.rows[number][held_out_preference.ANSWER_TOKENS] = each.tokens


def _scored(model: Any, rows: Any, known: Mapping[int, float]) -> _Scored:
    """Compute the losses of the rows' answers under a loaded model; `known` are the sums of some rows, by number."""
    losses, tokens = summed_losses(model, rows, known), supervised_tokens(rows)
    if "rejected_input_ids" in rows.column_names:
        rejected = rows.select_columns([*REJECTED]).rename_columns(REJECTED)
        counts = tokens.tolist(), supervised_tokens(rejected).tolist()
        values = held_out_preference.of_pairs(losses.tolist(), summed_losses(model, rejected).tolist(), counts)
    elif "desirable" in rows.column_names:
        desirable = np.array(rows["desirable"])
        values = held_out_preference.of_labelled(losses.tolist(), tokens.tolist(), desirable.tolist())
        losses, tokens = losses[desirable == 1], tokens[desirable == 1]
    else:
        values = [{} for _ in losses]
    return _Scored(float(losses.sum() / tokens.sum()), float(losses.sum()), values)


def _of_texts(
    settings: EvaluateSettings, model: EvaluatedModel, data: Path, rows: Any, asked: list[Any], scored: _Scored
) -> dict[str, Any]:
    """Return the bits per byte of the rows' supervised texts, nothing for preference data or without such a text; and
    whether the answers that are to be met exactly are free-form."""
    exact = [row["expected"] for row in asked] if settings.check == "exact" else []
    figures: dict[str, Any] = {FREE_FORM: True} if is_free_form(exact) else {}
    if any(scored.rows):
        return figures
    tokenizer, _ = load_tokenizer(model.base, added_tokens.of_data(data), model.loaded_adapter)
    size = supervised_bytes(tokenizer, rows)
    return figures | ({BITS: bits_per_byte(scored.nats, size)} if size else {})


def _answers(
    settings: EvaluateSettings,
    data: Path,
    model: EvaluatedModel,
    asked: list[Any],
    kept: KeptAnswers,
    loaded: Any = None,
) -> tuple[list[str], Any]:
    """Return a model's answers to the rows in `asked`, including those in `kept`, and the loaded model; `loaded` if it
    is already."""
    # Other processes answer before this one loads the model for the loss.
    if kept.left() and settings.engine == "vllm":
        vllm_engine.answer_with_vllm(settings, data, model, asked, kept)
    elif kept.left() and settings.ranks > 1:
        answer_on_ranks(settings, data, model, asked, kept)
    memory = PeakMemory(model.torch_device)
    if loaded is None:
        loaded, tokenizer = load_for(settings, data, model, longest_of(asked))
    else:
        tokenizer, _ = load_tokenizer(model.base, added_tokens.of_data(data), model.loaded_adapter)
    stops = stops_of(model, loaded, tokenizer, data)
    if left := kept.left():
        ready = (loaded, tokenizer, stops)
        answer(kept.folder, 0, settings, ready, asked, left, memory, PromptBatches(loaded, settings))
    texts = AnswerTexts(tokenizer, stops)
    return [each if isinstance(each, str) else texts.text(each) for each, *_ in kept.all()], loaded


def resources_of(folder: Path, tokens: int) -> dict[str, float]:
    """Return the speed of the processes that answered into a folder, and their highest memory peaks; and the seconds
    that all answers, of `tokens`, took, unless an earlier start gave some."""
    figures = figures_in(folder)
    seconds = max((each["seconds"] for each in figures), default=0.0)
    peaks = {
        f"peak_{where}_bytes_{when}": max((each[when][where] for each in figures), default=0)
        for where in ("host", "gpu")
        for when in ("loading", "generating")
    }
    generated = sum(each["tokens"] for each in figures)
    speed = generated / seconds if seconds else 0.0
    total = {"answering_seconds": seconds} if generated == tokens else {}
    return {"generated_tokens": tokens, "generated_tokens_per_second": speed, **total, **peaks}


def _of_rows(numbers: list[int], kept: KeptAnswers) -> dict[int, float]:
    """Return the losses that generation has computed, by number of the row; `numbers` are those of the asked rows."""
    return {number: each.loss for number, each in zip(numbers, kept.all(), strict=True) if each.loss is not None}
