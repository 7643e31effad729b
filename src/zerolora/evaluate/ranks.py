"""Several processes answer the rows of one evaluation, and an evaluation that was killed goes on from its answers.

Every rank loads the model, answers its share and appends each finished batch to a file of its own in the work
directory; rank 0, which is the evaluation itself, reads them all. The files are named by a fingerprint of everything
that decides an answer, so that those of other settings, weights, rows or code are never taken for these.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from zerolora import added_tokens, cpu_matmul, fingerprint
from zerolora.config.settings import EvaluateSettings
from zerolora.data.rows import open_split
from zerolora.errors import UserError
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.generation import generate
from zerolora.evaluate.models import EvaluatedModel, device_here, load, stops_of
from zerolora.evaluate.tasks import task_of
from zerolora.files import MANIFEST, canonical, read_json

SPEED_ALONE = ("batch", "ranks")
"""Settings that decide how fast answers are made, and no answer."""
Answers = dict[int, tuple[str, int]]
"""Text and number of tokens, by the row's place among those asked."""


def answer_on_ranks(
    settings: EvaluateSettings,
    data: Path,
    model: EvaluatedModel,
    loaded: Any,
    tokenizer: Any,
    asked: list[Any],
    stops: set[int],
    work: Path | None,
) -> tuple[list[str], int, float]:
    """Return the answers to the rows in `asked`, the number of their tokens, and tokens/s of what was generated now.

    `loaded` is the model, as rank 0 uses it. Raises UserError if a rank fails.
    """
    if work is None:
        with tempfile.TemporaryDirectory() as own:
            return answer_on_ranks(settings, data, model, loaded, tokenizer, asked, stops, Path(own))
    folder = work / _key(settings, data, model)
    for other in work.glob("*/"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)  # of other settings, weights or rows
    folder.mkdir(parents=True, exist_ok=True)
    kept = _kept(folder)
    left = [place for place in range(len(asked)) if place not in kept]
    # A rank takes every so-manieth of the rows by length: as much work as any other.
    left.sort(key=lambda place: (-asked[place]["prompt"], place))
    shares = [share for number in range(settings.ranks) if (share := left[number :: settings.ranks])]
    started = time.monotonic()
    others = [_start(folder, settings, data, model, share, rank) for rank, share in enumerate(shares) if rank]
    try:
        if shares:
            _limit_threads(len(shares))
            _answer(folder, settings, loaded, tokenizer, asked, stops, shares[0], 0, len(shares))
        for rank, process in enumerate(others, start=1):
            if process.wait():
                raise UserError(f"evaluate: rank {rank} ended with exit code {process.returncode}; the log tells why")
    finally:
        for process in others:
            process.kill()
            process.wait()
    seconds = time.monotonic() - started
    found = _kept(folder)
    if missing := sorted(set(range(len(asked))) - found.keys()):
        raise UserError(f"{folder}: holds no answer to row {missing[0]}; delete it and run `zerolora evaluate` again")
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # not empty: files of somebody else
        work.rmdir()
    now = sum(found[place][1] for place in left)
    return [found[place][0] for place in range(len(asked))], sum(tokens for _, tokens in found.values()), now / seconds


def held_out(settings: EvaluateSettings, data: Path) -> Any:
    """Return the rows that are evaluated, as a memory-mapped data set."""
    rows = open_split(data, settings.split)
    return rows.select(range(min(settings.rows or len(rows), len(rows))))


def run_rank(spec: dict[str, Any]) -> None:
    """Answer a share of the rows, as rank 0 wrote it down for this process."""
    settings = EvaluateSettings.model_validate(spec["settings"])
    data, rank = Path(spec["data"]), spec["rank"]
    model = EvaluatedModel(*(Path(path) if path else None for path in spec["model"]))  # type: ignore[arg-type]  # base is set
    device = device_here(rank)
    _limit_threads(spec["ranks"])
    if device.type == "cpu":
        cpu_matmul.choose()
    loaded, tokenizer = load(model.merged or model.base, device, added_tokens.of_data(data), model.loaded_adapter)
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    asked = [row for row in held_out(settings, data) if task.asks(row)]
    stops = stops_of(model, loaded, tokenizer, data)
    _answer(
        Path(spec["folder"]),
        settings,
        loaded,
        tokenizer,
        asked,
        stops,
        spec["share"],
        rank,
        spec["ranks"],
        os.getppid(),
    )


def _answer(
    folder: Path,
    settings: EvaluateSettings,
    loaded: Any,
    tokenizer: Any,
    asked: list[Any],
    stops: set[int],
    share: list[int],
    rank: int,
    ranks: int,
    parent: int | None = None,
) -> None:
    """Answer a share of the rows and append each batch to the rank's file; end when `parent` has ended."""
    others = set(range(len(asked))) - set(share)
    with (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
        # What a kill left of a line must not become the beginning of the next.
        file.write("\n")

        def keep(finished: Answers) -> None:
            for place, (text, tokens) in finished.items():
                file.write(json.dumps([place, text, tokens], ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if parent is not None and os.getppid() != parent:
                sys.exit(1)

        generate(loaded, tokenizer, asked, stops, settings, keep, others, PromptBatches(loaded, settings, ranks))


def _start(
    folder: Path, settings: EvaluateSettings, data: Path, model: EvaluatedModel, share: list[int], rank: int
) -> "subprocess.Popen[bytes]":
    spec = {
        "settings": settings.model_dump(mode="json"),
        "data": str(data),
        "model": [str(path) if path else None for path in (model.base, model.adapter, model.merged)],
        "folder": str(folder),
        "share": share,
        "rank": rank,
        "ranks": settings.ranks,
    }
    path = folder / f"rank{rank}.json"
    path.write_text(canonical(spec), encoding="utf-8")
    return subprocess.Popen([sys.executable, "-m", "zerolora.evaluate.rank", str(path)], stdin=subprocess.DEVNULL)


def _limit_threads(ranks: int) -> None:
    """Divide this process's share of the processors among the ranks."""
    if ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


def _kept(folder: Path) -> Answers:
    """Return the answers in the files of all ranks; a line that a kill cut off is none."""
    found: Answers = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        # Not splitlines(), which divides at U+2028 and others too; answers may hold them.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                place, text, tokens = json.loads(line)
            except ValueError:
                continue
            found[place] = text, tokens
    return found


def _key(settings: EvaluateSettings, data: Path, model: EvaluatedModel) -> str:
    """Return a fingerprint of what decides the answers: settings, rows, weights and code."""
    decides = {
        "settings": {key: value for key, value in settings.model_dump(mode="json").items() if key not in SPEED_ALONE},
        "rows": read_json(data / MANIFEST, "zerolora prepare"),
        "weights": [_files(path) for path in (model.base, model.adapter, model.merged) if path],
        "code": fingerprint.of_stage("evaluate"),
        "device": str(device_here()).split(":")[0],
    }
    return hashlib.sha256(canonical(decides).encode()).hexdigest()[:16]


def _files(directory: Path) -> Any:
    """Return a directory's manifest; without one, name, size and time of its files."""
    if (directory / MANIFEST).is_file():
        return read_json(directory / MANIFEST, "zerolora train")
    stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    return [str(directory), {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}]
