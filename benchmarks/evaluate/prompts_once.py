"""Compare evaluations that compute each prompt once with ones that compute it for its answer and again for its loss.

    .venv/bin/python benchmarks/evaluate/prompts_once.py

Needs a finished run: run `make run` first. Held-out rows are answered and their losses computed, as by `zerolora
evaluate`, in one process with one thread, in turn:

- whole rows: every prompt is computed for its answer, and each row from its first token for its loss;
- prefix once: the common prefix of all prompts is computed once for all answers, and once for all losses;
- prompts once: as `zerolora stage evaluate` does, the loss is computed from the keys and values of the prompt's answer.

The rows are those of the reference task, by the base model and by the trained one (--tuned), and a chat set whose
conversations begin with a system prompt of --system words, by the base model. Losses are compared. Writes
benchmarks/results/evaluate_prompts.json, and its table into docs/evaluation.md.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
import torch
from contest import MODEL, ROOT, about, chat_task, reference_task
from measuring import RESULTS, by_round, medians, parser_of, put, table, turns

from zerolora.config.settings import EvaluateSettings
from zerolora.data.prepared_rows import open_split
from zerolora.evaluate import generation, row_losses
from zerolora.evaluate.answer_loss import answer_losses
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, stops_of
from zerolora.files import write_json
from zerolora.machine import cpu_matmul

RESULT = RESULTS / "evaluate_prompts.json"
TUNED = ROOT / "work/merged/default"
WHOLE, PREFIX, ONCE = "whole rows", "prefix once", "prompts once"
LONGEST, CAPACITY = 120, 1024
"""Words of a conversation beside its system prompt, and tokens of a row."""


def main() -> None:
    """Take turns, compare, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a directory with weights")
    parser.add_argument("--tuned", type=Path, default=TUNED, help="the merged model of the reference task")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row of the reference task")
    parser.add_argument("--system", type=int, default=100, help="words of the system prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpu_matmul.choose()
    result = about("cpu") | {
        "model": options.model.name, "rows": options.rows, "max_new_tokens": options.max_new_tokens,
        "system_words": options.system, "rounds": options.rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reference").mkdir()
        reference = reference_task(folder / "reference", options.model.resolve(), options)
        counts = {"train": 8, "validation": 8, "test": options.rows}
        model, words = options.model.resolve(), options.system
        chat = chat_task(folder / "chat", model, "cpu", counts, CAPACITY, longest=LONGEST, system=words)
        result["evaluations"] = {
            "reference task, base": figures(options.model, reference.data, options),
            "reference task, tuned": figures(options.tuned, reference.data, options),
            "system prompt, base": figures(options.model, chat.data, options),
        }
    write_json(RESULT, result)
    put("evaluation.md", "prompts once", section(result))


def figures(model: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return CPU seconds of each way, medians of the rounds, their ratios, and the losses."""
    evaluated = EvaluatedModel(model.resolve())
    loaded, tokenizer = load(evaluated.base, evaluated.torch_device, [])
    stops = stops_of(evaluated, loaded, tokenizer, data)
    rows = open_split(data, "test").select(range(options.rows))
    settings = EvaluateSettings(check="sum", max_new_tokens=options.max_new_tokens)
    done: dict[str, list[dict[str, float]]] = {name: [] for name in (WHOLE, PREFIX, ONCE)}
    for name in turns(done, options.rounds):
        with ways(name):
            done[name].append(evaluation(loaded, tokenizer, rows, stops, settings, once=name == ONCE))
        print(f"{name}: {done[name][-1]}", flush=True)
    return {
        "ways": {name: medians(rounds) for name, rounds in done.items()},
        "ratio": {name: over(done[name], done[ONCE], "cpu_seconds") for name in (WHOLE, PREFIX)},
        "loss_ratio": {name: over(done[name], done[ONCE], "loss_cpu_seconds") for name in (WHOLE, PREFIX)},
        "rounds": done,
    }


def over(others: list[dict[str, float]], ours: list[dict[str, float]], figure: str) -> dict[str, Any]:
    """Return a figure of `others` over that of `ours`, by round, and the median."""
    return by_round([other[figure] / our[figure] for other, our in zip(others, ours, strict=True)])


@contextlib.contextmanager
def ways(name: str) -> Iterator[None]:
    """Use no common prefix inside the block if `name` is WHOLE."""
    with contextlib.ExitStack() as stack:
        if name == WHOLE:
            for module in (generation, row_losses):
                stack.enter_context(patch.object(module, "shared_prefix", lambda *_: generation.SharedPrefix()))
        yield


def evaluation(
    model: Any, tokenizer: Any, rows: Any, stops: set[int], settings: EvaluateSettings, *, once: bool
) -> dict[str, float]:
    """Answer the rows and compute their loss; return CPU seconds of both, those of the loss, the loss, and the rows
    whose loss was computed with their answers."""
    known: dict[int, float] = {}
    of_loss = 0.0

    def keep(answers: dict[int, Any]) -> None:
        known.update({index: answer.loss for index, answer in answers.items() if answer.loss is not None})

    def scored(*arguments: Any) -> list[float | None]:
        nonlocal of_loss
        before = time.process_time()
        result = answer_losses(*arguments)
        of_loss += time.process_time() - before
        return result

    started = time.process_time()
    with patch.object(generation, "answer_losses", scored):
        generation.generate(model, tokenizer, rows, stops, settings, keep, losses=once, silent=True)
    answered = time.process_time()
    loss = row_losses.loss(model, rows, known)
    ended = time.process_time()
    return {
        "cpu_seconds": ended - started,
        "loss_cpu_seconds": of_loss + ended - answered,
        "loss": loss,
        "rows_with_cached_prompt": len(known),
    }


def section(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    rows = []
    for name, each in result["evaluations"].items():
        cached = f"{each['ways'][ONCE]['rows_with_cached_prompt']:.0f} of {result['rows']}"
        for kind, key, ratio in (("", "cpu_seconds", "ratio"), (", losses alone", "loss_cpu_seconds", "loss_ratio")):
            seconds = [f"{each['ways'][way][key]:.1f}" for way in (WHOLE, PREFIX, ONCE)]
            ratios = [f"{each[ratio][way]['median']:.2f}" for way in (WHOLE, PREFIX)]
            rows.append((f"{name}{kind}", cached, *seconds, *ratios))
    header = ("CPU seconds", "rows from the cache", WHOLE, PREFIX, ONCE, f"{WHOLE} over it", f"{PREFIX} over it")
    return table(header, rows, right=6)


if __name__ == "__main__":
    main()
