"""Stage prepare: rows to tokens, prompts masked, three splits, Arrow on disk.

    zerolora prepare --settings JSON --model resources/models/MODEL/manifest.json --output results/data/NAME

Each split is an Arrow stream of: input_ids (prompt and answer tokens), labels (the same, -100 on the prompt),
and the row's own instruction, input and output. stats.json counts them; manifest.json says what they are made of.
"""

import json
import random
from pathlib import Path
from typing import Any

from zerolora.data.rows import FIELDS, IGNORED
from zerolora.data.template import render
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, sha256, staged_directory, write_json


def prepare(settings: dict[str, Any], model: Path, output: Path) -> None:
    """Write the splits of one data set, tokenized for the model of manifest `model`.

    Raises UserError, naming file and row, for rows that are not instruction/input/output texts, have an empty
    answer or are longer than max_length tokens, and if there are fewer rows than the splits need.
    """
    from transformers import AutoTokenizer

    source = Path(settings["path"])
    rows = read_rows(source)
    splits = split(rows, settings, source)
    tokenizer = AutoTokenizer.from_pretrained(model.parent, local_files_only=True)
    stats: dict[str, int | float] = {}
    with staged_directory(output) as staged:
        for name, members in splits.items():
            encoded = [encode(tokenizer, settings, row, source, number) for number, row in members]
            _write_arrow(staged / f"{name}.arrow", encoded)
            stats.update({f"{name}_{key}": value for key, value in _count(encoded).items()})
        stats["longest_row"] = max(stats[f"{name}_longest_row"] for name in splits)
        write_json(staged / "stats.json", stats)
        write_json(
            staged / MANIFEST,
            {
                "source": {"path": settings["path"], "sha256": sha256(source)},
                "model": {"name": settings["model"], "manifest_sha256": sha256(model)},
                "files": describe(staged),
            },
        )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSON list of instruction/input/output objects. Raises UserError for anything else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; correct prepare's path") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}; the file must be one JSON list") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    if not isinstance(rows, list):
        raise UserError(f"{path}: holds a {type(rows).__name__} where a list of rows is expected")
    for number, row in enumerate(rows, 1):
        _check_row(path, number, row)
    return rows


def _check_row(path: Path, number: int, row: Any) -> None:
    where = f"{path}: row {number}"
    if not isinstance(row, dict):
        raise UserError(f'{where}: is {row!r:.60}; write an object {{"instruction", "input", "output"}}')
    for field in FIELDS:
        if not isinstance(row.get(field), str):
            raise UserError(f"{where}: {field} is {row.get(field)!r:.60}; write a text")
    for field in ("instruction", "output"):
        if not row[field].strip():
            raise UserError(f"{where}: {field} is empty; fill it in or remove the row")


def split(
    rows: list[dict[str, str]], settings: dict[str, Any], source: Path
) -> dict[str, list[tuple[int, dict[str, str]]]]:
    """Return train, validation and test as (row number, row), drawn by the seed.

    Raises UserError if nothing would be left to train on.
    """
    sizes = settings["split"]
    held_out = sizes["validation"] + sizes["test"]
    if len(rows) <= held_out:
        raise UserError(f"{source}: has {len(rows)} rows, and split takes {held_out} of them; lower it")
    order = list(enumerate(rows, 1))
    random.Random(settings["seed"]).shuffle(order)  # noqa: S311 - data, not secrets
    train = len(rows) - held_out
    return {
        "train": order[:train],
        "validation": order[train : train + sizes["validation"]],
        "test": order[train + sizes["validation"] :],
    }


def encode(tokenizer: Any, settings: dict[str, Any], row: dict[str, str], source: Path, number: int) -> dict[str, Any]:
    """Return a row's tokens and labels. Raises UserError if it is longer than max_length."""
    prompt, answer = render(tokenizer, settings["template"], settings["system"], row)
    # Apart, so that the prompt has the very tokens it will have when the model is asked.
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    length = len(prompt_ids) + len(answer_ids)
    if length > settings["max_length"]:
        raise UserError(
            f"{source}: row {number}: has {length} tokens, max_length is {settings['max_length']}; "
            "shorten the row or raise max_length"
        )
    return {
        "input_ids": prompt_ids + answer_ids,
        "labels": [IGNORED] * len(prompt_ids) + answer_ids,
        **{field: row[field] for field in FIELDS},
    }


def _write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema(
        [("input_ids", tokens), ("labels", tokens), *((field, pyarrow.string()) for field in FIELDS)]
    )
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        writer.write_table(table)


def _count(rows: list[dict[str, Any]]) -> dict[str, int]:
    lengths = [len(row["input_ids"]) for row in rows]
    return {
        "rows": len(rows),
        "tokens": sum(lengths),
        "supervised_tokens": sum(label != IGNORED for row in rows for label in row["labels"]),
        "longest_row": max(lengths),
    }
