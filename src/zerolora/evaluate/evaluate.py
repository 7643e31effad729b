"""Evaluate a model on held-out rows: generate answers in batches, judge them, and compute the loss.

    zerolora evaluate --settings JSON --data results/data/NAME --weights resources/weights/MODEL.json
                      --output results/base/NAME --answers results/base/NAME/answers.json

Writes evaluate.json (rates, loss), evaluate_resources.json (speed, memory) and every answer. Rows without a prompt,
such as plain texts, only have a loss.
"""

import time
from pathlib import Path
from typing import Any

import torch

from zerolora import added_tokens, cpu_matmul
from zerolora.added_tokens import AddedToken
from zerolora.architecture import auto_class, config_of
from zerolora.config.settings import EvaluateSettings
from zerolora.data.rows import FIELDS, IGNORED, open_split
from zerolora.evaluate.tasks import task_of
from zerolora.files import MANIFEST, read_json, write_json
from zerolora.log import result
from zerolora.logit_chunks import EVALUATION_TOKENS
from zerolora.peak_memory import PeakMemory
from zerolora.progress import Progress


def evaluate(settings: EvaluateSettings, data: Path, weights: Path, output: Path, answers_file: Path) -> None:
    """Evaluate the model in directory `weights` on a split of `data`.

    Writes metrics to directory `output` and answers to `answers_file`. Raises UserError if an earlier stage's file is
    missing.
    """
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        cpu_matmul.choose()
    rows = open_split(data, settings.split)
    rows = rows.select(range(min(settings.rows or len(rows), len(rows))))
    memory = PeakMemory(device)
    model, tokenizer = load(weights, device, added_tokens.of_data(data))
    loading = {"host": memory.host(), "gpu": memory.gpu()}
    memory.restart()
    prepared = read_json(data / MANIFEST, "zerolora prepare")
    tokenizer.pad_token = prepared["pad_token"]
    stops = tokenizer.convert_tokens_to_ids(prepared["stop_tokens"])
    asked = [row for row in rows if task.asks(row)]
    started = time.monotonic()
    answers, generated = generate(model, tokenizer, asked, {*stops, tokenizer.eos_token_id} - {None}, settings)
    seconds = time.monotonic() - started
    judged = [task.judge(row, answer.strip()) for row, answer in zip(asked, answers, strict=True)]
    rates = task.metrics(judged)
    figures = {"rows": len(rows), **rates, "loss": loss(model, rows)}
    write_json(output / "evaluate.json", figures)
    write_json(
        output / "evaluate_resources.json",
        {
            "generated_tokens": generated,
            "generated_tokens_per_second": generated / seconds,
            "peak_host_bytes_loading": loading["host"],
            "peak_host_bytes_generating": memory.host(),
            "peak_gpu_bytes_loading": loading["gpu"],
            "peak_gpu_bytes_generating": memory.gpu(),
        },
    )
    write_json(
        answers_file,
        [
            {
                **{field: row[field] for field in FIELDS},
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


def load(weights: Path, device: torch.device, tokens: list[AddedToken]) -> tuple[Any, Any]:
    """Load model and tokenizer of a model directory, ready to generate.

    A base model gets the `tokens` that its data adds, with the rows that training starts with.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True, trust_remote_code=False)
    lacking = [each for each in tokens if each.token not in tokenizer.get_vocab()]
    added_tokens.extend_again(tokenizer, tokens)
    # On CPU fp32 is both faster and exact; on a GPU the weights keep their dtype.
    model = auto_class(config_of(weights)).from_pretrained(
        weights,
        dtype="auto" if device.type == "cuda" else torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    added_tokens.add_rows(model, lacking)
    return model.eval().to(device=device), tokenizer


def generate(
    model: Any, tokenizer: Any, rows: Any, stops: set[int], settings: EvaluateSettings
) -> tuple[list[str], int]:
    """Return the greedy answers to the rows' prompts, in their order, and the number of generated tokens.

    Generation stops at any token of `stops`, the stop tokens that training supervised.
    """
    prompts = [row["input_ids"][: row["prompt"]] for row in rows]
    answers = [""] * len(prompts)
    generated = 0
    # Prompts of similar length share a batch, which keeps padding low.
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    size = settings.batch
    with Progress("answer", len(order)) as bar:
        for start in range(0, len(order), size):
            members = order[start : start + size]
            inputs = [prompts[index] for index in members]
            tokens = _continue(model, tokenizer, inputs, stops, settings.max_new_tokens)
            for index, answer in zip(members, tokens, strict=True):
                ended = next((place + 1 for place, token in enumerate(answer) if token in stops), len(answer))
                generated += ended
                answers[index] = tokenizer.decode(answer[:ended], skip_special_tokens=True)
            bar.update(len(members))
    return answers, generated


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


def _continue(model: Any, tokenizer: Any, prompts: list[list[int]], stops: set[int], limit: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    padding = tokenizer.pad_token_id
    tokens = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        result = model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=limit,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=sorted(stops),
            pad_token_id=padding,
        )
    answers: list[list[int]] = result[:, longest:].tolist()
    return answers
