"""Evaluate a model on held-out rows: generate answers in batches, judge them, and compute the loss.

    zerolora evaluate --settings JSON --data results/data/NAME --weights resources/weights/MODEL.json
                      --output results/base/NAME --answers results/base/NAME/answers.json

Writes evaluate.json (rates, loss), evaluate_resources.json (speed, memory) and every answer. Rows without a prompt,
such as plain texts, only have a loss.
"""

from pathlib import Path
from typing import Any

import torch

from zerolora import added_tokens, cpu_matmul
from zerolora.config.settings import EvaluateSettings
from zerolora.data.rows import FIELDS, IGNORED
from zerolora.evaluate.generation import generate
from zerolora.evaluate.models import EvaluatedModel, device_here, load, stops_of
from zerolora.evaluate.ranks import answer_on_ranks, held_out
from zerolora.evaluate.tasks import task_of
from zerolora.files import MANIFEST, read_json, write_json
from zerolora.log import result
from zerolora.logit_chunks import EVALUATION_TOKENS
from zerolora.peak_memory import PeakMemory

__all__ = ["EvaluatedModel", "evaluate", "generate", "load", "loss"]


def evaluate(
    settings: EvaluateSettings,
    data: Path,
    model: EvaluatedModel,
    output: Path,
    answers_file: Path,
    work: Path | None = None,
) -> None:
    """Evaluate a model on a split of `data`.

    Writes metrics to directory `output` and answers to `answers_file`. With `work`, a directory, answers are kept there
    while others are generated, and an evaluation that was killed goes on from them. Raises UserError if an earlier
    stage's file is missing.
    """
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    device = device_here()
    if device.type == "cpu":
        cpu_matmul.choose()
    rows = held_out(settings, data)
    memory = PeakMemory(device)
    loaded, tokenizer = load(model.merged or model.base, device, added_tokens.of_data(data), model.loaded_adapter)
    loading = {"host": memory.host(), "gpu": memory.gpu()}
    memory.restart()
    stops = stops_of(model, loaded, tokenizer, data)
    asked = [row for row in rows if task.asks(row)]
    answers, generated, speed = answer_on_ranks(settings, data, model, loaded, tokenizer, asked, stops, work)
    judged = [task.judge(row, answer.strip()) for row, answer in zip(asked, answers, strict=True)]
    rates = task.metrics(judged)
    figures = {"rows": len(rows), **rates, "loss": loss(loaded, rows)}
    write_json(output / "evaluate.json", figures)
    write_json(
        output / "evaluate_resources.json",
        {
            "generated_tokens": generated,
            "generated_tokens_per_second": speed,
            "peak_host_bytes_loading": loading["host"],
            "peak_host_bytes_generating": memory.host(),
            "peak_gpu_bytes_loading": loading["gpu"],
            "peak_gpu_bytes_generating": memory.gpu(),
        },
    )
    sources = read_json(data / MANIFEST, "zerolora prepare").get("sources", [])
    write_json(
        answers_file,
        [
            {
                **{field: row[field] for field in FIELDS},
                **({"category": sources[row["source"]]} if len(sources) > 1 else {}),
                "prompt_tokens": row["prompt"],
                "answer": answer,
                "format": verdict.format,
                "right": verdict.right,
                **verdict.scores,
            }
            for row, answer, verdict in zip(asked, answers, judged, strict=True)
        ],
    )
    shown = [f"{name.removesuffix('_rate')} {rate:.3f}" for name, rate in rates.items()]
    result(", ".join([*shown, f"loss {figures['loss']:.3g}"]) + f" on {len(rows):,} rows")


def loss(model: Any, rows: Any) -> float:
    """Return the mean cross-entropy per supervised token of the rows."""
    lengths = list(rows["length"])
    order = sorted(range(len(rows)), key=lambda index: (lengths[index], index))
    total, tokens = 0.0, 0
    while order:
        # Rows of similar length, up to EVALUATION_TOKENS tokens with their padding, but at least one row.
        longest = lengths[order[-1]]
        members = [rows[order.pop()] for _ in range(max(1, min(len(order), EVALUATION_TOKENS // longest)))]
        ids, labels, mask = torch.zeros(3, len(members), longest, dtype=torch.long)
        labels[:] = IGNORED
        for place, row in enumerate(members):
            ids[place, : row["length"]] = torch.tensor(row["input_ids"])
            labels[place, : row["length"]] = torch.tensor(row["labels"])
            mask[place, : row["length"]] = 1
        # Logits start at the position before the first supervised token, so none are computed for prompts.
        kept = longest - 1 - int((labels[:, 1:] != IGNORED).any(0).float().argmax())
        with torch.no_grad():
            output = model(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                use_cache=False,
                logits_to_keep=kept + 1,
            )
        targets = labels[:, -kept:].to(model.device)
        total += torch.nn.functional.cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
        tokens += int((targets != IGNORED).sum())
    return total / tokens
