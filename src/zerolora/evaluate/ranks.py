"""Answers the rows of an evaluation with transformers, in this process or by several ranks.

Each rank is a process, python -m zerolora.evaluate.ranks FILE, that loads the model and answers its share. The parent
waits for them (kept.py) without a model.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerolora.compat.left_out import leave_out
from zerolora.compat.transformers_import import import_quickly
from zerolora.config.settings import EvaluateRunSettings, EvaluateSettings
from zerolora.data.prepared_rows import open_split
from zerolora.errors import EXPECTED, UserError, message_of
from zerolora.evaluate.batches import Answering, PromptBatches, least_bytes
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, stops_of
from zerolora.evaluate.generation import generate
from zerolora.evaluate.kept import Answer, Answerer, KeptAnswers, wait_for
from zerolora.evaluate.tasks import task_of
from zerolora.evaluate.tasks.task import Task
from zerolora.files import canonical, read_json, write_json
from zerolora.log import set_up
from zerolora.machine import cpu_matmul, devices, parents
from zerolora.machine.peak_memory import PeakMemory
from zerolora.model import added_tokens
from zerolora.units import counted


def held_out(settings: EvaluateSettings, data: Path) -> Any:
    """Return the rows to evaluate, as a memory-mapped data set. Raises UserError if no labelled row is desirable."""
    rows = open_split(data, settings.split)
    rows = rows.select(range(min(settings.rows or len(rows), len(rows))))
    if "desirable" in rows.column_names and not any(rows["desirable"]):
        raise UserError(
            f"{data}: no desirable answer among {counted(len(rows), f'evaluated {settings.split} row')}; hold out more "
            f"rows (split), or evaluate more (evaluate.rows)"
        )
    return rows


def asked_rows(task: Task, rows: Any) -> list[int]:
    """Return the numbers of the rows to answer: those that the task selects. An undesirable answer is none to expect,
    so its row is not among them."""
    return [number for number, row in enumerate(rows) if task.asks(row) and row.get("desirable", 1)]


def load_for(settings: Answering, data: Path, model: EvaluatedModel, longest: int) -> tuple[Any, Any]:
    """Return the model, placed with room for the answer to a prompt of `longest` tokens, and its tokenizer."""
    weights = model.merged or model.base
    beside = least_bytes(weights, settings, longest)
    return load(weights, model.torch_device, added_tokens.of_data(data), model.loaded_adapter, beside)


def longest_of(asked: list[Any]) -> int:
    """Return the tokens of the longest prompt; 1 without prompts."""
    return max((row["prompt"] for row in asked), default=1)


def room_beside(settings: EvaluateSettings, weights: Path, asked: list[Any]) -> int:
    """Return the bytes that answers to `asked` take at least beside the weights."""
    return least_bytes(weights, settings, longest_of(asked))


def answer_on_ranks(
    settings: EvaluateSettings, data: Path, model: EvaluatedModel, asked: list[Any], kept: KeptAnswers
) -> None:
    """Answer the missing rows of `asked` on several ranks. Raises UserError as soon as a rank fails."""
    left = kept.left()
    # Rows sorted by length are assigned to the ranks in turn, for equal work.
    left.sort(key=lambda index: (-asked[index]["prompt"], index))
    shares = [share for number in range(settings.ranks) if (share := left[number :: settings.ranks])]
    ranks = start_ranks("zerolora.evaluate.ranks", settings.model_dump(mode="json"), data, model, kept.folder, shares)
    wait_for(ranks, kept.folder, kept.rows)


def start_ranks(
    module: str, settings: dict[str, Any], data: Path, model: EvaluatedModel, folder: Path, shares: list[Any]
) -> list[Answerer]:
    """Start a process of a module for each share of the work, with GPUs of its own, which writes to `folder`."""
    count = torch.cuda.device_count() if model.device == "cuda" else 0
    gpus = (devices.visible_names() or [str(number) for number in range(count)])[:count]
    specs: list[dict[str, Any]] = [
        {
            "settings": settings,
            "data": str(data),
            "model": [str(path) if path else None for path in (model.base, model.adapter, model.merged)],
            "device": model.device,
            "folder": str(folder),
            "share": share,
            "rank": rank,
            "ranks": len(shares),
            "parent": os.getpid(),
        }
        for rank, share in enumerate(shares)
    ]
    return [_start(module, folder, spec, gpus_of(spec["rank"], len(shares), gpus)) for spec in specs]


def gpus_of(rank: int, ranks: int, gpus: list[str]) -> list[str]:
    """Return the GPUs of a rank: the same number for each, or a shared one if there are too few."""
    each = max(1, len(gpus) // ranks)
    return [gpus[number % len(gpus)] for number in range(rank * each, (rank + 1) * each)] if gpus else []


def _start(module: str, folder: Path, spec: dict[str, Any], gpus: list[str]) -> Answerer:
    path = folder / f"rank{spec['rank']}.json"
    path.write_text(canonical(spec), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(path)],
        stdin=subprocess.DEVNULL,
        env=os.environ | ({devices.VISIBLE: ",".join(gpus)} if gpus else {}),
    )
    return Answerer(f"rank {spec['rank']}", process, process.kill, lambda: "see its log")


def run_rank(spec: dict[str, Any]) -> None:
    """Answer the share of the rows in `spec`, from the file that the parent wrote."""
    settings = EvaluateRunSettings.model_validate(spec["settings"])
    data, parent = Path(spec["data"]), int(spec["parent"])
    model, memory = begin_rank(spec)
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    rows = held_out(settings, data)
    asked = [rows[number] for number in asked_rows(task, rows)]
    loaded, tokenizer = load_for(settings, data, model, longest_of(asked))
    stops = stops_of(model, loaded, tokenizer, data)
    batches = PromptBatches(loaded, settings, spec["ranks"])
    folder, rank = Path(spec["folder"]), spec["rank"]
    answer(folder, rank, settings, (loaded, tokenizer, stops), asked, spec["share"], memory, batches, parent)


def begin_rank(spec: dict[str, Any]) -> tuple[EvaluatedModel, PeakMemory]:
    """Bind this process to its parent, its GPUs and its share of the cores; return the model in `spec`, and the meter
    of what loading it takes."""
    parents.end_at_parents_death(spec["parent"])
    base, adapter, merged = (Path(path) if path else None for path in spec["model"])
    assert base is not None
    model = EvaluatedModel(base, adapter, merged, spec["device"])
    devices.obey(model.device)
    torch.set_num_threads(max(1, torch.get_num_threads() // spec["ranks"]))
    if model.device == "cpu":
        cpu_matmul.choose()
    return model, PeakMemory(model.torch_device)


def answer(
    folder: Path,
    rank: int,
    settings: EvaluateSettings,
    model: tuple[Any, Any, set[int]],
    asked: list[Any],
    share: list[int],
    memory: PeakMemory,
    batches: PromptBatches,
    parent: int | None = None,
) -> None:
    """Answer a share of the rows and append each batch to the rank's file; exit when `parent` has ended.

    model: the loaded model, its tokenizer and its stop tokens. memory: started before the model was loaded. A rank with
    a parent shows no bar.
    """
    others = set(range(len(asked))) - set(share)
    loaded, tokenizer, stops = model

    def answered(keep: Callable[[list[list[Any]]], None]) -> int:
        def keep_answers(finished: dict[int, Answer]) -> None:
            keep([[index, *each] for index, each in finished.items()])

        silent = parent is not None
        _, tokens = generate(
            loaded, tokenizer, asked, stops, settings, keep_answers, others, batches, silent=silent, losses=True
        )
        return tokens

    write_answers(folder, rank, memory, answered, parent)


def write_answers(
    folder: Path,
    rank: int,
    memory: PeakMemory,
    answered: Callable[[Callable[[list[list[Any]]], None]], int],
    parent: int | None,
) -> None:
    """Append what `answered` keeps, a list a line, to the rank's file, and write the rank's figures: `answered` calls
    its argument with some lists at a time, and returns the number of generated tokens."""
    loading = {"host": memory.host(), "gpu": memory.gpu()}
    memory.restart()
    started = time.monotonic()
    with (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
        # Ends a line that a kill may have cut off.
        file.write("\n")

        def keep(lines: list[list[Any]]) -> None:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if parent is not None and os.getppid() != parent:
                sys.exit(1)

        tokens = answered(keep)
    generating = {"host": memory.host(), "gpu": memory.gpu()}
    seconds = time.monotonic() - started
    figures = {"tokens": tokens, "seconds": seconds, "loading": loading, "generating": generating}
    write_json(folder / f"figures{rank}.json", figures)


def main(run: Callable[[dict[str, Any]], None], stage: str) -> None:
    """Run this process's rank of a stage from the file in its argument."""
    set_up()
    leave_out("torchao")
    import_quickly()
    try:
        run(read_json(Path(sys.argv[1]), f"zerolora stage {stage}"))
    except EXPECTED as error:
        sys.exit(f"zerolora: {message_of(error)}")


if __name__ == "__main__":
    main(run_rank, "evaluate")
