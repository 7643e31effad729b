"""Evaluate a model on held-out rows: generate answers in batches, judge them, and compute the loss.

    zerolora evaluate --settings JSON --data results/data/NAME --weights resources/weights/MODEL.json
                      --output results/base/NAME --answers results/base/NAME/answers.json

Writes evaluate.json (rates, loss, the logits of a merged model against base and adapter), evaluate_resources.json
(speed, memory) and every answer. Rows without a prompt, such as plain texts, get only a loss.
"""

import contextlib
import gc
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zerolora.config.settings import EvaluateRunSettings, EvaluateSettings
from zerolora.data.prepared_rows import FIELDS, IGNORED
from zerolora.evaluate import vllm_engine
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.difference import UNMERGED
from zerolora.evaluate.evaluated_models import EvaluatedModel, load_tokenizer, stops_of
from zerolora.evaluate.generation import shared_prefix
from zerolora.evaluate.kept import KeptAnswers, key_of
from zerolora.evaluate.merged_logits import next_tokens, of_base, of_merged
from zerolora.evaluate.ranks import answer, answer_on_ranks, held_out, load_for, room_beside
from zerolora.evaluate.tasks import task_of
from zerolora.files import MANIFEST, write_json
from zerolora.log import result
from zerolora.machine import cpu_matmul
from zerolora.machine.peak_memory import PeakMemory
from zerolora.methods.quantized_base import was_quantized
from zerolora.model import added_tokens, foreign
from zerolora.model.spec import EVALUATION_TOKENS
from zerolora.units import counted

__all__ = ["EvaluatedModel", "evaluate"]


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
    answers in directory `work`, and in WORK.unmerged. Raises UserError if an earlier stage's file is missing.
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
    numbers = [number for number, row in enumerate(rows) if task.asks(row)]
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
        resources = {"engine": engine, **_resources(kept[0])}
        figures = {"loss": loss(loaded, rows, _of_rows(numbers, kept[0]))}
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
            figures["unmerged_loss"] = loss(loaded, rows, _of_rows(numbers, answers))
        for answers in kept:
            answers.remove()
    judged = [[task.judge(row, text.strip()) for row, text in zip(asked, texts, strict=True)] for texts in answered]
    rates = task.metrics(judged[0])
    figures = {"rows": len(rows), **rates, **figures}
    for verdicts in judged[1:]:
        figures |= {f"unmerged_{name}": rate for name, rate in task.metrics(verdicts).items()}
    write_json(output / "evaluate.json", figures)
    write_json(output / "evaluate_resources.json", resources)
    sources = foreign.manifest(data / MANIFEST, "zerolora prepare").get("sources", [])
    entries = [
        [
            {"answer": text, "format": verdict.format, "right": verdict.right, **verdict.scores}
            for text, verdict in zip(texts, verdicts, strict=True)
        ]
        for texts, verdicts in zip(answered, judged, strict=True)
    ]
    write_json(
        answers_file,
        [
            {
                **{field: row[field] for field in FIELDS},
                **({"category": sources[row["source"]]} if len(sources) > 1 else {}),
                "prompt_tokens": row["prompt"],
                **first,
                **({UNMERGED: others[0]} if others else {}),
            }
            for row, first, *others in zip(asked, *entries, strict=True)
        ],
    )
    shown = [f"{name.removesuffix('_rate')} {rate:.3f}" for name, rate in rates.items()]
    result(", ".join([*shown, f"loss {figures['loss']:.3g}"]) + f" on {counted(len(rows), 'row')}")


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
        loaded, tokenizer = load_for(settings, data, model, asked)
    else:
        tokenizer, _ = load_tokenizer(model.base, added_tokens.of_data(data), model.loaded_adapter)
    if left := kept.left():
        stops = stops_of(model, loaded, tokenizer, data)
        ready = (loaded, tokenizer, stops)
        answer(kept.folder, 0, settings, ready, asked, left, memory, PromptBatches(loaded, settings))
    texts = [
        each if isinstance(each, str) else tokenizer.decode(each, skip_special_tokens=True) for each, *_ in kept.all()
    ]
    return texts, loaded


def _resources(kept: KeptAnswers) -> dict[str, float]:
    """Return the speed of the processes that answered, and their highest memory peaks; and the seconds that all answers
    took, unless an earlier start gave some."""
    tokens = sum(each.tokens for each in kept.all())
    figures = kept.figures()
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


def loss(model: Any, rows: Any, known: Mapping[int, float] = MappingProxyType({})) -> float:
    """Return the mean cross-entropy per supervised token of the rows; `known` are the sums of some rows, by number.

    The common prefix of the others, up to the first supervised token, is computed once.
    """
    lengths = list(rows["length"])
    order = sorted({*range(len(rows))} - known.keys(), key=lambda index: (lengths[index], index))
    prefix = shared_prefix(model, [_before_supervised(rows[index]) for index in order])
    total: float = sum(known.values())
    tokens = sum(1 for number in known for label in rows[number]["labels"][1:] if label != IGNORED)
    while order:
        # Rows of similar length, up to EVALUATION_TOKENS tokens with padding, but at least one row.
        longest = lengths[order[-1]]
        members = [rows[order.pop()] for _ in range(max(1, min(len(order), EVALUATION_TOKENS // longest)))]
        ids, labels, mask = torch.zeros(3, len(members), longest, dtype=torch.long)
        labels[:] = IGNORED
        for index, row in enumerate(members):
            ids[index, : row["length"]] = torch.tensor(row["input_ids"])
            labels[index, : row["length"]] = torch.tensor(row["labels"])
            mask[index, : row["length"]] = 1
        # Logits start at the position before the first supervised token, so none are computed for prompts.
        kept = longest - 1 - int((labels[:, 1:] != IGNORED).any(0).float().argmax())
        with torch.no_grad():
            output = model(
                input_ids=ids[:, prefix.length :].to(model.device),
                attention_mask=mask.to(model.device),
                logits_to_keep=kept + 1,
                **prefix.inputs(model, len(members), longest),
            )
        targets = labels[:, -kept:].to(output.logits.device)
        total += torch.nn.functional.cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
        tokens += int((targets != IGNORED).sum())
    return total / tokens


def _before_supervised(row: dict[str, Any]) -> list[int]:
    """Return a row's tokens before the first supervised one."""
    first = next((at for at in range(1, row["length"]) if row["labels"][at] != IGNORED), row["length"])
    tokens: list[int] = row["input_ids"][:first]
    return tokens
