"""Stage held_out: the questions that runs are evaluated with, of a data set's held-out rows or of a task.

    zerolora stage held_out data-NAME
    zerolora stage held_out task-NAME

Writes the different ones as JSON, one a line. `select` leaves out prompts that are equal to one but for case, white
space and punctuation (normal_form.py), or near one (near_prompts.py).
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from zerolora.config.settings import HarnessTaskSettings
from zerolora.data.near_prompts import near
from zerolora.data.normal_form import normal_form
from zerolora.data.prepared_rows import SPLITS, open_table
from zerolora.data.task_prompts import rows_in
from zerolora.errors import UserError
from zerolora.evaluate import harness_tasks
from zerolora.files import write_text
from zerolora.log import result
from zerolora.model.manifest import check_intact
from zerolora.units import counted

BATCH = 1000  # texts
Texts = Sequence[Sequence[str]]
"""Of each prompt the texts that are compared."""


def held_out(
    output: Path, data: Path | None = None, rows: Path | None = None, harness: HarnessTaskSettings | None = None
) -> None:
    """Write the questions of the held-out rows of the prepared `data`, of a task's `rows`, or of tasks of the harness,
    to a file. Raises UserError if the data is damaged, or the harness cannot read its tasks."""
    of_harness = harness_tasks.questions(harness) if harness else ()
    texts = itertools.chain(_of_data(data) if data else (), _of_task(rows) if rows else (), of_harness)
    questions = [*dict.fromkeys(text for text in texts if text.strip())]
    write_text(output, "".join(f"{json.dumps(text)}\n" for text in questions))
    result(counted(len(questions), "question"))


def _of_data(data: Path) -> Iterator[str]:
    check_intact(data, "zerolora stage prepare")
    for split in SPLITS[1:]:
        yield from open_table(data, split)["question"].to_pylist()


def _of_task(rows: Path) -> Iterator[str]:
    """Yield the questions of a task's rows, and of conversations the last one by itself too."""
    for row in rows_in(rows):
        yield str(row["question"])
        if row["messages"]:
            yield str(row["messages"][-1]["content"])


def held_out_prompts(folder: Path, names: Sequence[str], prompts: Texts) -> Mapping[str, set[int]]:
    """Return by name the numbers of the prompts that are equal or near to a question in its file in `folder`. Raises
    UserError if a file is missing."""
    found = {}
    for name in names:
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            raise UserError(f"{path}: there is no such file; `zerolora stage held_out {name}` writes it")
        with path.open(encoding="utf-8") as lines:
            found[name] = _like([json.loads(line) for line in lines], prompts)
    return found


def _like(questions: list[str], prompts: Texts) -> set[int]:
    owners = np.repeat(np.arange(len(prompts)), [len(each) for each in prompts])
    texts = [text for each in prompts for text in each]
    known = {normal_form(text) for text in questions}
    equal = [number for number, text in enumerate(texts) if normal_form(text) in known]
    every = [*texts, *questions]
    ranks = np.repeat(np.array([0, 2], np.int8), [len(texts), len(questions)])

    def of(wanted: np.ndarray) -> Iterator[tuple[np.ndarray, list[str]]]:
        for start in range(0, len(wanted), BATCH):
            part = wanted[start : start + BATCH]
            yield part, [every[number] for number in part.tolist()]

    nearly, _ = near(np.arange(len(every)), ranks, of)
    return {int(owners[number]) for number in [*equal, *nearly.tolist()]}
