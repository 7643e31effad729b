"""The answers of an unfinished evaluation on disk, and the processes that write them.

Every process appends to its own file, and a killed evaluation resumes from these. The directory's name is a fingerprint
of everything that decides an answer, so answers of other settings, weights, rows or code are never reused.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config import fingerprint
from zerolora.config.code import chosen_by_check
from zerolora.config.compared import compared
from zerolora.config.settings import EvaluateSettings
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.files import MANIFEST, canonical, read_json, stamp
from zerolora.progress import Progress

NO_ANSWER = ("batch", "ranks", "unmerged")
"""Settings of speed, or of the models that answer, which change no answer."""
POLL_SECONDS = 0.1


class Answer(NamedTuple):
    """An answer on disk."""

    answer: str | list[int]
    """A text, or its tokens if it is not decoded yet."""
    tokens: int
    loss: float | None = None
    """The summed cross-entropy of the data's answer, if the process that answered has computed it."""


class KeptAnswers:
    """The answers to the rows of one evaluation."""

    def __init__(self, work: Path, key: str, rows: int) -> None:
        """Remove the answers of other evaluations from `work`."""
        self.work, self.folder, self.rows = work, work / key, rows
        for other in work.glob("*/"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.left():
            for path in self.folder.glob("figures*.json"):
                path.unlink()  # of a process that ended before the evaluation was killed

    def left(self) -> list[int]:
        """Return the indices of the rows without an answer."""
        result = kept_in(self.folder)
        return [index for index in range(self.rows) if index not in result]

    def all(self) -> list[Answer]:
        """Return the answers to all rows. Raises UserError if one is missing."""
        result = kept_in(self.folder)
        if missing := sorted(set(range(self.rows)) - result.keys()):
            raise UserError(
                f"{self.folder}: has no answer to row {missing[0]}; delete it and run `zerolora stage evaluate` again"
            )
        return [result[index] for index in range(self.rows)]

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):  # not empty: other files
            self.work.rmdir()


@dataclass(frozen=True)
class Answerer:
    """A process that answers."""

    name: str
    """In error messages."""
    process: "subprocess.Popen[bytes]"
    end: Callable[[], None]
    """Kills it and its children."""
    why: Callable[[], str]
    """Returns why it failed."""


def wait_for(answerers: Sequence[Answerer], folder: Path, answers: int, stage: str = "evaluate") -> None:
    """Wait until all processes of a stage have ended, with one bar for all `answers`, which they write to `folder`.

    Raises UserError as soon as one fails, and ends the others.
    """
    read: dict[Path, int] = {}  # bytes of each file
    with Progress("answer", answers, _new_answers(folder, read)) as bar:
        try:
            while True:
                codes = [each.process.poll() for each in answerers]
                if new := _new_answers(folder, read):
                    bar.update(new, f"{bar.rate(new):.1f} rows/s")
                for each, code in zip(answerers, codes, strict=True):
                    if code:
                        raise UserError(f"{stage}: {each.name} ended with exit code {code}; {each.why()}")
                if None not in codes:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for each in answerers:
                each.end()
                each.process.wait()


def _new_answers(folder: Path, read: dict[Path, int]) -> int:
    """Return the number of complete answers in a folder after the bytes in `read`, which is updated."""
    result = 0
    for path in folder.glob("rank*.jsonl"):
        with path.open("rb") as file:
            file.seek(read.get(path, 0))
            lines = file.read().rpartition(b"\n")[0]
        read[path] = read.get(path, 0) + len(lines)
        result += sum(line.endswith(b"]") for line in lines.split(b"\n"))
    return result


def kept_in(folder: Path) -> dict[int, Answer]:
    """Return the answers in the files of a folder, by index of the row, without incomplete lines."""
    result: dict[int, Answer] = {}
    for index, *answer in lines_in(folder):
        with contextlib.suppress(TypeError):
            result[index] = Answer(*answer)
    return result


def lines_in(folder: Path) -> Iterator[list[Any]]:
    """Yield the lists in the files of a folder, without incomplete lines."""
    for path in sorted(folder.glob("rank*.jsonl")):
        # splitlines() also splits at U+2028 and others, which answers may contain.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), list) and value:
                    yield value


def figures_in(folder: Path) -> list[dict[str, Any]]:
    """Return tokens, seconds and memory peaks of each process of this start."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("figures*.json"))]


def key_of(settings: EvaluateSettings, data: Path, model: EvaluatedModel, engine: str) -> str:
    """Return a fingerprint of the settings, rows, weights, engine and code that decide the answers."""
    decides = {
        "settings": {key: value for key, value in compared(settings).items() if key not in NO_ANSWER},
        "rows": read_json(data / MANIFEST, "zerolora stage prepare"),
        "weights": [files_of(path) for path in (model.base, model.adapter, model.merged) if path],
        "engine": engine,
        "code": fingerprint.of_stage("evaluate", chosen_by_check(settings)),
        "device": model.device,
    }
    return hashlib.sha256(canonical(decides).encode()).hexdigest()[:16]


def files_of(directory: Path) -> Any:
    """Return a directory's manifest, or the name and stamp of its files."""
    if (directory / MANIFEST).is_file():
        return read_json(directory / MANIFEST, "zerolora stage train")
    return [str(directory), {path.name: stamp(path) for path in sorted(directory.iterdir()) if path.is_file()}]
