"""The answers of an evaluation, kept in a directory while others are generated, and the processes that write them.

Every process that answers appends to a file of its own. An evaluation that was killed goes on from what they hold. The
directory is named by a fingerprint of everything that decides an answer, so that those of other settings, weights, rows
or code are never taken for these.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.config import fingerprint
from zerolora.config.code import chosen_by_check
from zerolora.config.compared import compared
from zerolora.config.settings import EvaluateSettings
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.files import MANIFEST, canonical, read_json
from zerolora.progress import Progress

NO_ANSWER = ("batch", "ranks", "unmerged")
"""Settings that decide how fast answers are made, or which models are asked, and no answer."""
POLL_SECONDS = 0.1
Answer = tuple[str | list[int], int]
"""A text, or its tokens where it is not decoded yet, and their number."""


class KeptAnswers:
    """The answers to the rows of one evaluation."""

    def __init__(self, work: Path, key: str, rows: int) -> None:
        """Remove what `work` holds of other evaluations."""
        self.work, self.folder, self.rows = work, work / key, rows
        for other in work.glob("*/"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.left():
            for path in self.folder.glob("figures*.json"):
                path.unlink()  # of a process that had ended before the evaluation was killed

    def left(self) -> list[int]:
        """Return the places of the rows without an answer."""
        found = kept_in(self.folder)
        return [place for place in range(self.rows) if place not in found]

    def all(self) -> list[Answer]:
        """Return the answers to all rows. Raises UserError if one is missing."""
        found = kept_in(self.folder)
        if missing := sorted(set(range(self.rows)) - found.keys()):
            raise UserError(
                f"{self.folder}: holds no answer to row {missing[0]}; delete it and run `zerolora evaluate` again"
            )
        return [found[place] for place in range(self.rows)]

    def figures(self) -> list[dict[str, Any]]:
        """Return tokens, seconds and peaks of each process that answered last."""
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("figures*.json"))]

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):  # not empty: files of somebody else
            self.work.rmdir()


@dataclass(frozen=True)
class Answerer:
    """A process that answers."""

    name: str
    """As an error calls it."""
    process: "subprocess.Popen[bytes]"
    end: Callable[[], None]
    """Ends it, and what it has started, at once."""
    why: Callable[[], str]
    """Says why it failed."""


def wait_for(answerers: Sequence[Answerer], kept: KeptAnswers) -> None:
    """Wait until all processes have ended, with one bar for what they answer together.

    Raises UserError as soon as one fails. None runs any more when this returns.
    """
    counted = _Counted(kept.folder)
    with Progress("answer", kept.rows, counted.new()) as bar:

        def show() -> None:
            if new := counted.new():
                bar.update(new, f"{bar.rate(new):.1f} rows/s")

        try:
            while True:
                codes = [each.process.poll() for each in answerers]
                show()
                for each, code in zip(answerers, codes, strict=True):
                    if code:
                        raise UserError(f"evaluate: {each.name} ended with exit code {code}; {each.why()}")
                if None not in codes:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for each in answerers:
                each.end()
                each.process.wait()


class _Counted:
    """How many answers the files of a folder have got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: dict[Path, int] = {}

    def new(self) -> int:
        """Return how many whole lines with an answer were written since the last call."""
        found = 0
        for path in self.folder.glob("rank*.jsonl"):
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                lines = file.read().rpartition(b"\n")[0]
            self.read[path] = self.read.get(path, 0) + len(lines)
            found += sum(line.endswith(b"]") for line in lines.split(b"\n"))
        return found


def kept_in(folder: Path) -> dict[int, Answer]:
    """Return the answers in the files of a folder, by the row's place; a line that a kill cut off is none."""
    found: dict[int, Answer] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        # Not splitlines(), which divides at U+2028 and others too; answers may hold them.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                place, answer, tokens = json.loads(line)
            except ValueError:
                continue
            found[place] = answer, tokens
    return found


def key_of(settings: EvaluateSettings, data: Path, model: EvaluatedModel, engine: str) -> str:
    """Return a fingerprint of what decides the answers: settings, rows, weights, engine and code."""
    decides = {
        "settings": {key: value for key, value in compared(settings).items() if key not in NO_ANSWER},
        "rows": read_json(data / MANIFEST, "zerolora prepare"),
        "weights": [_files(path) for path in (model.base, model.adapter, model.merged) if path],
        "engine": engine,
        "code": fingerprint.of_stage("evaluate", chosen_by_check(settings)),
        "device": model.device,
    }
    return hashlib.sha256(canonical(decides).encode()).hexdigest()[:16]


def _files(directory: Path) -> Any:
    """Return a directory's manifest; without one, name, size and time of its files."""
    if (directory / MANIFEST).is_file():
        return read_json(directory / MANIFEST, "zerolora train")
    stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    return [str(directory), {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}]
