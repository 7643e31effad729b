"""Rows become tokens: the loss mask is verified; dropped and truncated rows are counted."""

import gzip
import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
import yaml
from conftest import ROOT, served
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyarrow import parquet

from zerolora import bounded
from zerolora.config.settings import EvaluateRunSettings, PackSettings, PrepareSettings
from zerolora.data.encode import CONTEXT, Tokens
from zerolora.data.mask import Proof
from zerolora.data.pack import pack_rows
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import IGNORED, SPLITS, open_split
from zerolora.data.ragged import Ragged
from zerolora.data.reference import records
from zerolora.data.truncation import Limits, fitted
from zerolora.errors import UserError
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.evaluate.tasks import TASKS
from zerolora.evaluate.tasks.task import Judgement
from zerolora.train.feed import collate, packed_row
from zerolora.train.objectives import OBJECTIVES

ROWS = records("tens", 0)[:20]


class Folder:
    """A folder with the tiny model's tokenizer, data files, and what prepare makes of them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path, self.output = folder, folder / "out"
        self.manifest = folder / "model" / "manifest.json"
        self.manifest.parent.mkdir()
        for path in (*model.glob("*token*"), model / "config.json", model / "chat_template.jinja"):
            (self.manifest.parent / path.name).write_bytes(path.read_bytes())
        self.manifest.write_text("{}")

    def settings(self, **changed: Any) -> PrepareSettings:
        defaults = {"model": "tiny", "path": "rows.json", "split": {"validation": 4, "test": 4}, "max_length": 128}
        values = {**defaults, **changed}
        return PrepareSettings.model_validate(values | {"path": str(self.path / values["path"])})

    def prepare(self, rows: Any = None, workers: int = 1, **changed: Any) -> Path:
        if rows is not None:
            self.write("rows.json", rows)
        prepare(self.settings(**changed), self.manifest, self.output, workers)
        return self.output

    def write(self, name: str, rows: Any) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if ".jsonl" in name:
            text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
        else:
            text = json.dumps(rows, indent=0)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())

    def stats(self) -> dict[str, Any]:
        return json.loads((self.output / "stats.json").read_text())

    def all_rows(self) -> list[dict[str, Any]]:
        return [row for name in SPLITS for row in open_split(self.output, name)]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Folder:
    return Folder(tmp_path, tiny_model)


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def supervised_tokens(row: dict[str, Any]) -> list[int]:
    return [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]


def test_only_the_answer_and_its_stop_token_are_supervised(folder: Folder, tokenizer: Any) -> None:
    folder.prepare(ROWS)
    answers = {row["instruction"]: row["output"] for row in ROWS}
    for name in ("validation", "test"):
        for row in open_split(folder.output, name):
            assert tokenizer.decode(supervised_tokens(row)) == answers[row["question"]] + "<|im_end|>"
            prompt = tokenizer.decode(row["input_ids"][: row["prompt"]])
            assert prompt == f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
            assert row["prompt"] + len(supervised_tokens(row)) == row["length"] == len(row["input_ids"])
            assert row["supervised"] == len(supervised_tokens(row))
    everywhere = sorted(tokenizer.decode(supervised_tokens(row)) for row in folder.all_rows())
    assert everywhere == sorted(answer + "<|im_end|>" for answer in answers.values())
    assert [len(open_split(folder.output, name)) for name in SPLITS] == [12, 4, 4]


def test_a_share_of_the_rows_is_held_out_and_at_least_one(folder: Folder) -> None:
    folder.prepare(ROWS, split={"validation": 0.2, "test": 0.01})
    assert [len(open_split(folder.output, name)) for name in SPLITS] == [15, 4, 1]


NESTED: list[tuple[Any, str]] = [
    (
        {"train": ROWS[:9], "test": ROWS[9:12]},
        "is one object whose values are lists of rows (train, test); write each list as a file of its own, and path: "
        "FOLDER with sources: {train.json: {}, test.json: {split: test}}",
    ),
    (
        {"train": ROWS[:9], "train_1M": ROWS, "dev": ROWS[9:12]},
        "with sources: {train.json: {}, dev.json: {split: validation}}, left out: train_1M",
    ),
    ({"version": 1, "data": ROWS}, "is one object with the rows in its list 'data'; write that list alone"),
]


@pytest.mark.parametrize(("rows", "said"), NESTED)
@pytest.mark.parametrize("format", ["auto", "alpaca"])
@pytest.mark.parametrize("indent", [None, 1])
def test_object_around_lists_of_rows_is_refused(
    folder: Folder, rows: Any, said: str, format: str, indent: int | None
) -> None:
    (folder.path / "rows.json").write_text(json.dumps(rows, indent=indent))
    assert said.replace("FOLDER", str(folder.path)) in failure(folder, format=format, bad_row="drop")


def test_one_row_with_a_list_of_messages_is_a_row(folder: Folder) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for name, columns in (("messages", {}), ("chat", {"messages": "chat"})):
        folder.write("rows.json", {name: turns})
        folder.prepare(columns=columns, split={"validation": 0, "test": 0})
        assert folder.stats()["train_rows"] == 1


def test_there_may_be_no_test_rows(folder: Folder) -> None:
    folder.prepare(ROWS, split={"validation": 4, "test": 0})
    assert [len(open_split(folder.output, name)) for name in SPLITS] == [16, 4, 0]
    stats = folder.stats()
    assert stats["test_rows"] == stats["test_tokens"] == 0
    assert open_split(folder.output, "test").column_names == open_split(folder.output, "validation").column_names


MANY = [{"instruction": f"{number}=", "input": "", "output": str(number)} for number in range(3500)]


def test_workers_change_no_byte(folder: Folder) -> None:
    """Two processes on four chunks, then one process twice."""
    folder.write("rows.jsonl", MANY)
    outputs = []
    for workers in (2, 1, 1):
        folder.prepare(workers=workers, path="rows.jsonl")
        outputs.append({path.name: path.read_bytes() for path in folder.output.iterdir()})
    assert outputs[0] == outputs[1] == outputs[2]
    assert folder.stats()["read_rows"] == 3500


def test_failed_workers_leave_no_output(folder: Folder) -> None:
    folder.write("rows.jsonl", [{"instruction": "a", "output": ""}, *MANY])
    with pytest.raises(UserError, match="rows.jsonl:1: output is empty") as caught:
        folder.prepare(workers=2, path="rows.jsonl")
    assert multiprocessing.active_children() == [], caught  # the error's traceback keeps the pool alive
    assert {path.name for path in folder.path.iterdir()} == {"rows.jsonl", "model"}


FORMATS: list[tuple[str, dict[str, Any], str | None]] = [
    ("alpaca", {"instruction": "a", "input": "b", "output": "c"}, "c<|im_end|>"),
    ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}]}, "c<|im_end|>"),
    (
        "messages",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]},
        "c<|im_end|>",
    ),
    ("prompt", {"prompt": "a", "completion": "c"}, "c<|im_end|>"),
    # Without BOS, nothing predicts the first token.
    ("text", {"text": "some text"}, "ome text<|im_end|>"),
    ("tokens", {"input_ids": [1, 70, 71, 2], "labels": [-100, -100, 71, 2]}, None),
]


@pytest.mark.parametrize(("form", "row", "supervised"), FORMATS, ids=[form for form, *_ in FORMATS])
def test_forms_are_detected(
    folder: Folder, tokenizer: Any, form: str, row: dict[str, Any], supervised: str | None
) -> None:
    folder.write("rows.jsonl.gz", [row] * 12)
    folder.prepare(path="rows.jsonl.gz")
    assert f"read as {form}, " in (folder.output / "mask.html").read_text()
    for actual in folder.all_rows():
        assert tokenizer.decode(supervised_tokens(actual)) == (supervised or tokenizer.decode([71, 2]))
    assert folder.stats()["duplicate_rows"] == 11


def test_columns_are_mapped(folder: Folder) -> None:
    rows = [{"q": row["instruction"], "answer": {"text": row["output"]}} for row in ROWS]
    folder.prepare(rows, format="alpaca", columns={"instruction": "q", "output": "answer.text"})
    assert {row["question"] for row in open_split(folder.output, "test")} <= {row["q"] for row in rows}
    with pytest.raises(UserError, match=r"columns of rows\.json: no row has a value in contxt, for input"):
        folder.prepare(format="alpaca", columns={"instruction": "q", "output": "answer.text", "input": "contxt"})
    with pytest.raises(
        UserError, match=r"columns of rows\.json: messages is not a field of format alpaca; choose from"
    ):
        folder.prepare(format="alpaca", columns={"messages": "q"})


BAD: list[tuple[Any, str]] = [
    ('{"instruction": "5=", "input": ""}\n', "output"),
    ('{"instruction": 5, "input": "", "output": "x"}\n', "instruction"),
    ('{"instruction": "5=", "input": "", "output": " "}\n', "output"),
    ('"5="\n', "object"),
    ("{broken\n", "JSON"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "is of the form messages"),
    ('{"instruction": "5=", "input": "", "output": "<|im_end|>"}\n', r"special token <\|im_end\|>"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_bad_row_is_named_or_dropped_and_listed(folder: Folder, line: str, said: str) -> None:
    folder.write("rows.jsonl", [*ROWS[:6], line, *ROWS[6:]])
    with pytest.raises(UserError, match=rf"rows\.jsonl:7: .*{said}"):
        folder.prepare(path="rows.jsonl", format="alpaca")
    assert not folder.output.exists()
    folder.prepare(path="rows.jsonl", format="alpaca", bad_row="drop")
    assert folder.stats()["dropped_bad_rows"] == 1
    (dropped,) = (json.loads(text) for text in (folder.output / "dropped.jsonl").read_text().splitlines())
    assert dropped["place"].endswith("rows.jsonl:7")
    assert len(folder.all_rows()) == 20


@pytest.mark.parametrize(
    ("number", "row", "said"),
    [
        (6, {"image": "a.jpg"}, r"rows\.jsonl:7: image is 'a\.jpg', missing in \S*rows\.jsonl:6, and nothing reads it"),
        (3000, {"hint": "Add."}, r"rows\.jsonl:3001: hint is 'Add\.', missing in \S*rows\.jsonl:\d+, and nothing"),
        (
            3100,
            {"set": "test"},
            r"rows\.jsonl:3101: set is 'test', 'train' in \S*rows\.jsonl:\d+, and nothing reads it",
        ),
        (3499, {"set": None}, r"rows\.jsonl:\d+: set is 'train', missing in \S*rows\.jsonl:3500, and nothing reads it"),
    ],
)
def test_undecided_column_stops_whatever_the_policy_of_bad_rows(
    folder: Folder, number: int, row: dict[str, Any], said: str
) -> None:
    """In any chunk; one line names the row, the column, both values and what to write."""
    rows = [{**each, "set": "train"} if "set" in row else each for each in MANY]
    rows[number] = {**rows[number], **row}
    folder.write("rows.jsonl", rows)
    (column,) = row
    line = failure(folder, path="rows.jsonl", workers=2, bad_row="drop")
    assert re.search(rf"{said}.*; map it in columns, as in .*FIELD: {column}.*, or leave it out by ignore", line)
    assert line.endswith(f"ignore: [{column}]")
    folder.prepare(path="rows.jsonl", workers=2, ignore=[column])
    assert folder.stats()["train_rows"] == 3492


def test_undecided_columns_are_listed_at_once(folder: Folder) -> None:
    meta = [{"id": number, "meta": {"url": f"u{number}", "by": "web"}, "x y": number % 2} for number in range(20)]
    rows = [{**row, **more} for row, more in zip(ROWS, meta, strict=True)]
    with pytest.raises(UserError) as caught:
        folder.prepare(rows, ignore=["note"])
    *lines, last = str(caught.value).splitlines()
    assert [re.search(r"rows\.json:\d+: (.*) is ", line)[1] for line in lines] == ["id", "meta.url", "x y"]  # type: ignore[index]
    assert last == "3 columns or keys are undecided; to leave out all of them: ignore: [note, id, meta.url, x y]"
    folder.prepare(ignore=yaml.safe_load(last.partition("ignore: ")[2]))
    assert folder.stats()["names"]["constant_columns"] == {"meta.by": 20}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "deepest"), [("rows.jsonl", 1100), ("rows.json", 800)])
def test_deeply_nested_rows_are_dropped_like_any_other(folder: Folder, name: str, deepest: int, workers: int) -> None:
    """Up to the JSON decoder's limit, and in JSON lines beyond it."""
    bad = []
    for depth in (60, *range(300, deepest, 20)):
        nested = "[" * depth + "]" * depth
        bad += [f'{{"instruction": {nested}, "output": "x"}}', f'{{"messages": {nested}}}']
    rows = [*(json.dumps(row) for row in ROWS), *bad] * 12  # more than one chunk
    folder.write("rows.jsonl", [f"{row}\n" for row in rows])
    (folder.path / "rows.json").write_text(f"[{','.join(rows)}]")
    folder.prepare(workers=workers, path=name, bad_row="drop")
    listed = [json.loads(line) for line in (folder.output / "dropped.jsonl").read_text().splitlines()]
    assert len(listed) == 12 * len(bad) and len(folder.all_rows()) == 12 * 20
    assert listed[0]["row"]["output"] == "x" and all(row["reason"] for row in listed)


def test_deeply_nested_tool_calls_are_a_bad_row(folder: Folder) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": []}]
    rows = [json.dumps(row) + "\n" for row in CHATS]
    for depth in (500, 700, 800, 850, 880):
        call = f'{{"type": "function", "function": {{"name": "f", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}}}'
        rows.append(json.dumps({"messages": turns}).replace('"tool_calls": []', f'"tool_calls": [{call}]') + "\n")
    folder.write("rows.jsonl", rows)
    folder.prepare(path="rows.jsonl", bad_row="drop", too_long="drop")
    assert len((folder.output / "dropped.jsonl").read_text().splitlines()) <= 5


@pytest.mark.parametrize(("policy", "counted"), [("drop", "too_long"), ("truncate_left", "bad")])
def test_huge_row_is_dropped_before_tokenizing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, policy: str, counted: str
) -> None:
    monkeypatch.setattr("zerolora.data.tokenize.LONGEST_TEXT", 5000)
    folder.prepare([*ROWS, {"instruction": "y" * 5001, "input": "", "output": "z"}], too_long=policy, bad_row="drop")
    assert folder.stats()[f"dropped_{counted}_rows"] == 1
    assert "characters, more than the 5,000 that are read at once; split it up" in (
        folder.output / "dropped.jsonl"
    ).read_text(encoding="utf-8")


def test_dropped_row_may_contain_what_json_cannot(folder: Folder) -> None:
    good = [{"instruction": row["instruction"], "output": row["output"], "at": b"\xff"} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist([*good, {**good[0], "output": None}]), folder.path / "rows.parquet")
    folder.prepare(path="rows.parquet", bad_row="drop", ignore=["at"])
    (line,) = (folder.output / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line)["row"].startswith("{'instruction': ")
    half = '{"instruction": "\\ud800", "output": null}\n'
    folder.write("rows.jsonl", [*ROWS, half])
    folder.prepare(path="rows.jsonl", bad_row="drop")
    (line,) = (folder.output / "dropped.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["row"] == json.loads(half)


@pytest.mark.parametrize("token", [100_000, 2**31, 10**30])
def test_unknown_token_is_a_bad_row(folder: Folder, token: int) -> None:
    good = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    folder.prepare([good, {"input_ids": [4, token]}, *[good] * 20], bad_row="drop")
    (line,) = (folder.output / "dropped.jsonl").read_text().splitlines()
    assert f"input_ids holds {token}, but the model knows" in line
    assert all((row["input_ids"], row["labels"]) == ([1, 2, 3], [-100, 2, 3]) for row in folder.all_rows())


def test_first_bad_rows_are_listed_at_once(folder: Folder) -> None:
    folder.write("rows.jsonl", [*ROWS, *(["{}\n"] * 9)])
    with pytest.raises(UserError) as caught:
        folder.prepare(path="rows.jsonl")
    lines = str(caught.value).splitlines()
    assert [f"rows.jsonl:{number}" in line for number, line in enumerate(lines[:5], 21)] == [True] * 5
    assert "and 4 more" in lines[5]


LIST = "out.dropped.jsonl"


def failure(folder: Folder, **changed: Any) -> str:
    """Return the one line of an error, which may leave only the list of dropped rows."""
    existed = folder.output.exists()
    with pytest.raises(UserError) as caught:
        folder.prepare(**changed)
    assert folder.output.exists() == existed
    assert not list(folder.path.glob(".*"))
    (line,) = str(caught.value).splitlines()
    return line


ONE_EACH = {"validation": 1, "test": 1}


def test_set_emptied_by_long_rows_says_why(folder: Folder, tokenizer: Any) -> None:
    """`truncate_right` removes the answers of all 50 rows; the remedy does not repeat that setting."""
    rows = [{"instruction": f"{number}" + "y" * 200, "input": "", "output": "z"} for number in range(50)]
    folder.write("rows.jsonl", rows)
    line = failure(folder, path="rows.jsonl", too_long="truncate_right", split={"validation": 5, "test": 5})
    start = len(tokenizer(f"<|im_start|>user\n0{'y' * 200}<|im_end|>\n<|im_start|>assistant\n").input_ids) + 1
    assert "has 0 rows, and split takes 10; 50 of 50 rows that were read are dropped (50 as too_long" in line
    assert re.search(
        rf"the first \S*rows\.jsonl:1: has {start + 1} tokens, max_length is 128, and truncate_right", line
    )
    assert f"begin at token {start}; raise max_length to {start} or more, or set too_long: truncate_left or" in line
    assert line.endswith("; correct the dropped rows, or add rows")
    listed = [json.loads(each) for each in (folder.path / LIST).read_text().splitlines()]
    assert f"all listed in {folder.path / LIST}" in line
    assert [entry["row"] for entry in listed] == rows
    assert {entry["kind"] for entry in listed} == {"too_long"}
    folder.prepare(path="rows.jsonl", too_long="truncate_right", max_length=start + 1)
    assert not (folder.path / LIST).exists()


def test_set_emptied_by_bad_lines_says_why(folder: Folder) -> None:
    rows = [json.dumps(row) for row in ROWS[:10]]
    folder.write("rows.jsonl", [row + ",\n" * (number < 9) for number, row in enumerate(rows)])
    line = failure(folder, path="rows.jsonl", bad_row="drop", split=ONE_EACH)
    assert "has 1 row, and split takes 2; 9 of 10 rows that were read are dropped (9 as bad_row" in line
    assert re.search(r"the first \S*rows\.jsonl:1: ", line)
    assert "; correct the dropped rows, or lower split" in line
    assert len((folder.path / LIST).read_text().splitlines()) == 9


@pytest.mark.parametrize("labels", [[IGNORED, 6, 7], [IGNORED, 6, 7, *[IGNORED] * 40, 48]])
@pytest.mark.parametrize("bos", [True, False])
def test_row_emptied_by_truncate_left_says_what_length_suffices(
    folder: Folder, tokenizer: Any, labels: list[int], bos: bool
) -> None:
    ids = [tokenizer.bos_token_id if bos else 5, *range(6, 65)]
    rows = [
        {"input_ids": [*ids, 100 + number], "labels": labels + [IGNORED] * (61 - len(labels))} for number in range(9)
    ]
    folder.write("rows.jsonl", rows)
    line = failure(folder, path="rows.jsonl", max_length=8, too_long="truncate_left", split=ONE_EACH)
    end = len(labels)
    assert f"and truncate_left leaves none of its supervised tokens, which end at token {end}; raise" in line
    needed = int(re.search(r"raise max_length to (\d+) or more, or set too_long: truncate_right or split", line)[1])  # type: ignore[index]
    failure(folder, path="rows.jsonl", max_length=needed - 1, too_long="truncate_left", split=ONE_EACH)
    folder.prepare(path="rows.jsonl", max_length=needed, too_long="truncate_left", split=ONE_EACH)


def test_rows_with_other_supervised_turns_are_not_duplicates(folder: Folder) -> None:
    said = {"role": "assistant", "content": "x"}

    def row(number: int, weight: int) -> dict[str, Any]:
        asked = [{"role": "user", "content": content} for content in (f"Hi {number}", "Again")]
        return {"messages": [asked[0], {**said, "weight": weight}, asked[1], said]}

    def parted(number: int, end: int) -> dict[str, Any]:
        messages = row(number, 1)["messages"]
        return {"prompt": messages[:end], "completion": messages[end:]}

    for make, several in ((row, (0, 1)), (parted, (1, 3))):
        rows = [make(number, how) for number in range(10) for how in several]
        folder.write("rows.jsonl", [*rows, *rows[:4]])
        folder.prepare(path="rows.jsonl", duplicates="drop")
        assert folder.stats()["duplicate_rows"] == 4
        assert len(folder.all_rows()) == 20


def test_set_emptied_by_duplicates_or_leaks_says_why(folder: Folder) -> None:
    folder.write("rows.jsonl", [ROWS[0]] * 12)
    line = failure(folder, path="rows.jsonl", duplicates="drop")
    assert "has 1 row, and split takes 8; 11 duplicates are dropped by duplicates: drop; lower" in line
    line = failure(folder, path="rows.jsonl", leakage="drop", split=ONE_EACH)
    assert "no row is left for validation; 11 rows with a prompt of a later split are dropped by leakage: drop" in line


def test_dropped_rows_are_counted_by_reason(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    bad = [{"instruction": "x", "output": number} for number in range(5)]
    folder.write("rows.jsonl", [*ROWS, *bad, LONG, {"instruction": "x", "output": ""}])
    folder.prepare(path="rows.jsonl", bad_row="drop", too_long="drop")
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "7 of 27 rows that were read are dropped (5 as bad_row, the first " in line
    assert re.search(r"rows\.jsonl:21: output is 0; use a text; 1 as too_long, the first \S*rows\.jsonl:26: has", line)
    assert re.search(r"max_length is 128; shorten it, raise max_length, or set too_long: truncate_left", line)
    assert re.search(r"1 as bad_row, the first \S*rows\.jsonl:27: output is empty", line)
    assert f"listed in {folder.output / 'dropped.jsonl'}" in line


def test_source_without_usable_rows_is_refused(folder: Folder) -> None:
    """Even with `bad_row: drop`, meant for single rows."""
    folder.write("mix/a.jsonl", ROWS)
    folder.write("mix/b.jsonl", [{"instruction": "x", "output": ""}] * 3)
    line = failure(folder, path="mix", bad_row="drop")
    assert re.search(r"mix/b\.jsonl: none of its 3 rows can be used, the first is \S*b\.jsonl:1: output is empty", line)
    line = failure(folder, path="mix", bad_row="drop", sources={"b.jsonl": {}, "a.jsonl": {}})
    assert re.search(r"mix/b\.jsonl: none of its 3 rows can be used", line)
    folder.write("mix/b.jsonl", [LONG] * 3)
    sources: dict[str, Any] = {"a.jsonl": {}, "b.jsonl": {}}
    line = failure(folder, path="mix", too_long="drop", sources=sources)
    assert re.search(r"mix/b\.jsonl: none of its 3 rows is left; 3 of 23 rows that were read are dropped", line)
    folder.write("mix/b.jsonl", ["\n"])
    assert failure(folder, path="mix", sources=sources).endswith(
        "mix/b.jsonl: contains no rows; take it out of sources"
    )


def test_weighted_source_without_training_rows_is_refused(folder: Folder) -> None:
    folder.write("mix/a.jsonl", MANY[:20])
    folder.write("mix/b.jsonl", MANY[:5])  # the same rows
    sources = {"a.jsonl": {"weight": 1.0}, "b.jsonl": {"weight": 1.0}}
    line = failure(folder, path="mix", sources=sources, duplicates="drop")
    assert "no row of b.jsonl is left to train on, which has weight in sources; 5 duplicates are dropped" in line


LONG = {"instruction": "long?", "input": "", "output": "x" * 200}


@pytest.mark.parametrize("policy", ["fail", "drop", "truncate_left", "truncate_right", "split"])
def test_long_row_is_refused_dropped_truncated_or_split(folder: Folder, policy: str, tokenizer: Any) -> None:
    folder.write("rows.jsonl", [*ROWS, LONG])
    if policy == "fail":
        with pytest.raises(UserError, match=r"rows\.jsonl:21: has .* tokens, max_length is 128; shorten it"):
            folder.prepare(path="rows.jsonl")
        return
    folder.prepare(path="rows.jsonl", too_long=policy)
    stats = folder.stats()
    kept = [tokenizer.decode(supervised_tokens(row)) for row in folder.all_rows()]
    kept = [text for text in kept if text.startswith("x")]
    assert stats["longest_row"] <= 128
    assert all(row["labels"][0] == IGNORED for row in folder.all_rows())
    if policy == "drop":
        assert (kept, stats["dropped_too_long_rows"]) == ([], 1)
    elif policy == "truncate_right":
        assert kept == [
            "x" * (128 - len(tokenizer("<|im_start|>user\nlong?<|im_end|>\n<|im_start|>assistant\n").input_ids))
        ]
        assert stats["truncated_rows"] == 1
    elif policy == "truncate_left":
        assert kept == ["x" * 126 + "<|im_end|>"]
        assert stats["truncated_rows"] == 1
    else:
        # The first token of the second part is context.
        assert "".join(kept).count("x") == 199
        assert stats["split_rows"] == 1


def test_split_text_is_complete(folder: Folder, tokenizer: Any) -> None:
    folder.write("rows.jsonl", [{"text": "".join(chr(97 + index % 26) for index in range(1000))}] * 3)
    folder.prepare(path="rows.jsonl", too_long="split", split={"validation": 0, "test": 0}, duplicates="drop")
    text = "".join(tokenizer.decode(row["input_ids"]) for row in folder.all_rows())
    assert len(text.replace("<|im_start|>", "").replace("<|im_end|>", "")) == 1000
    assert folder.stats()["split_rows"] == 3


def test_short_rows_are_excluded_and_system_prompts_left_out(folder: Folder, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    long = [turns[0], {"role": "assistant", "content": "b " * 40}]
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, *each]} for each in (turns, long)]
    folder.write("rows.jsonl", rows)
    given: dict[str, Any] = {"path": "rows.jsonl", "split": {"validation": 0, "test": 0}, "drop_system": True}
    folder.prepare(**given | {"min_length": 60, "append_token": "<|im_start|>"})
    (row,) = folder.all_rows()
    text = tokenizer.decode(row["input_ids"])
    assert (
        "Be brief." not in text and text.startswith("<|im_start|>user\na?") and text.endswith("<|im_end|><|im_start|>")
    )
    assert row["labels"][-1] == row["input_ids"][-1] and folder.stats()["excluded_rows"] == 1


def test_split_texts_are_whole_where_they_are_concatenated(folder: Folder) -> None:
    folder.write("rows.jsonl", [{"text": "".join(chr(97 + index % 26) for index in range(1000))}] * 3)
    given: dict[str, Any] = {"path": "rows.jsonl", "split": {"validation": 0, "test": 0}, "duplicates": "drop"}
    folder.prepare(**given, too_long="truncate_right", max_length=2000)
    (whole,) = folder.all_rows()
    folder.prepare(**given, too_long="split", max_length=100, concatenate="in_order")
    rows = folder.all_rows()
    # The last row would be a single token, which nothing predicts.
    assert [token for row in rows for token in row["input_ids"]] == whole["input_ids"][:-1]
    supervised = [label for row in rows for label in row["labels"][1:]]
    assert IGNORED not in supervised and max(row["length"] for row in rows) == 100


@pytest.mark.parametrize("order", ["shuffled", "in_order"])
def test_concatenated_rows_have_all_tokens_of_each_source(folder: Folder, order: str) -> None:
    long = [{"instruction": f"{number}?", "input": "", "output": "abc " * 9} for number in range(30)]
    folder.write("one.jsonl", ROWS)
    folder.write("two.jsonl", long)
    given: dict[str, Any] = {
        "path": ".",
        "sources": {"one.jsonl": {}, "two.jsonl": {}},
        "split": {"validation": 0, "test": 0},
        "max_length": 64,
        "too_long": "truncate_right",
    }
    folder.prepare(**given)
    before = list(open_split(folder.output, "train"))
    folder.prepare(**given, concatenate=order)
    after, stats = list(open_split(folder.output, "train")), folder.stats()
    for source in (0, 1):
        rows, texts = ([row for row in split if row["source"] == source] for split in (after, before))
        assert {row["length"] for row in rows[:-1]} == {64} and len(rows) < len(texts)
        tokens = [token for row in rows for token in row["input_ids"]]
        if order == "in_order":
            assert tokens == [token for row in texts for token in row["input_ids"]]
        assert sorted(tokens) == sorted(token for row in texts for token in row["input_ids"])
        supervised = sum(label != IGNORED for row in texts for label in row["labels"])
        assert supervised - len(rows) <= sum(row["supervised"] for row in rows) <= supervised
    for row in after:
        assert row["labels"][0] == IGNORED and len(row["input_ids"]) == row["length"]
        assert row["supervised"] == sum(label != IGNORED for label in row["labels"]) > 0
        assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert (stats["train_rows"], stats["longest_row"]) == (len(after), 64)


DOCUMENTS = [[f"w{number:02}x{word:03}" for word in range(250)] for number in range(40)]
LONG_FORMS: dict[str, Any] = {
    "text": lambda words: {"text": " ".join(words)},
    "alpaca": lambda words: {"instruction": f"Write {words[0]}", "output": " ".join(words)},
    "messages": lambda words: {
        "messages": [
            {"role": role, "content": " ".join(words[start : start + 50])}
            for start in range(0, 200, 100)
            for role in ("user", "assistant")
        ]
    },
    "tokens": lambda words: {"input_ids": [3 + ord(each) % 90 for each in "".join(words)]},
}


@pytest.mark.parametrize("form", LONG_FORMS)
def test_parts_of_a_row_are_in_one_split(folder: Folder, tokenizer: Any, form: str) -> None:
    folder.write("rows.jsonl", [LONG_FORMS[form](words) for words in DOCUMENTS])
    folder.prepare(path="rows.jsonl", too_long="split", leakage="drop", duplicates="drop")
    documents = {}
    for name in SPLITS:
        rows = [*open_split(folder.output, name)]
        written = [tokenizer.decode(row["input_ids"]) for row in rows]
        if form == "tokens":
            documents[name] = {tuple(row["input_ids"][:20]) for row in rows}
            continue
        documents[name] = {number for text in written for number in re.findall(r"w(\d\d)x", text)}
        for row in rows if name != "train" else ():
            # Only their loss is measured.
            assert (row["prompt"], row["question"], row["expected"]) == (0, "", "")
    if form != "tokens":
        assert not documents["train"] & (documents["validation"] | documents["test"])
        assert not documents["validation"] & documents["test"]
        assert [len(documents[name]) for name in SPLITS] == [32, 4, 4]
    stats = folder.stats()
    assert stats["split_rows"] == 40 and stats["duplicate_rows"] == 0
    assert stats["test_rows"] > 4 and stats["longest_row"] <= 128


def test_leaked_long_rows_are_dropped_with_all_their_parts(folder: Folder, tokenizer: Any) -> None:
    words = " ".join(DOCUMENTS[0])
    rows = [{"instruction": f"Write {number // 2}", "output": f"{number} {words}"} for number in range(20)]
    folder.write("rows.jsonl", rows)
    folder.prepare(path="rows.jsonl", too_long="split", leakage="drop", split={"validation": 0, "test": 4})
    asked = {
        name: {number for row in open_split(folder.output, name)
               for number in re.findall(r"Write (\d+)", tokenizer.decode(row["input_ids"]))}
        for name in ("train", "test")
    }  # fmt: skip
    assert not asked["train"] & asked["test"]
    assert len(asked["train"]) + len(asked["test"]) == 10 and folder.stats()["leaked_prompts"] > 0


def lengths_there(source_len: int, target_len: int, cutoff_len: int) -> tuple[int, int]:
    """LLaMA-Factory's infer_seqlen (src/llamafactory/data/processor/processor_utils.py, Apache-2.0)."""
    if target_len * 2 < cutoff_len:
        max_target_len = cutoff_len
    elif source_len * 2 < cutoff_len:
        max_target_len = cutoff_len - source_len
    else:
        max_target_len = int(cutoff_len * (target_len / (source_len + target_len)))
    new_target_len = min(max_target_len, target_len)
    max_source_len = max(cutoff_len - new_target_len, 0)
    return min(max_source_len, source_len), new_target_len


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5), st.integers(1, 30))
def test_turns_are_shortened_as_by_llama_factory(turns: list[tuple[int, int]], longest: int) -> None:
    """turns: tokens before each answer and of it."""
    total = sum(map(sum, turns))
    roles = [number for source, target in turns for number in [CONTEXT] * source + [0] * target]
    ids = Ragged(np.arange(total), np.array([0, total]))
    tokens = Tokens(ids, np.array(roles), np.array([0]), ["assistant"], {})
    expected: list[int] = []
    start = 0
    for source, target in turns if total > longest else ():
        if len(expected) >= longest:
            break
        before, after = lengths_there(source, target, longest - len(expected))
        expected += [*range(start, start + before), *range(start + source, start + source + after)]
        start += source + target
    expected = expected or list(range(total))
    parts = fitted(tokens, longest, "truncate_turns", None)
    supervised = any(roles[number] != CONTEXT for number in expected[1:])
    assert [list(parts.tokens.ids[row]) for row in range(len(parts.tokens.ids))] == ([expected] if supervised else [])


@pytest.mark.parametrize("bos", [0, None])
@pytest.mark.parametrize("policy", ["drop", "truncate_left", "truncate_right"])
@given(
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    prompt=st.none() | st.integers(1, 7),
    answer=st.none() | st.integers(1, 7),
    longest=st.integers(3, 12),
)
def test_prompts_and_answers_have_limits_of_their_own(
    policy: str, bos: int | None, parts: list[tuple[int, int]], prompt: int | None, answer: int | None, longest: int
) -> None:
    rows = [(list(range(before)), list(range(100, 100 + after))) for before, after in parts]
    roles = np.array([role for one, other in rows for role in [CONTEXT] * len(one) + [0] * len(other)], np.int8)
    ids = Ragged.of([one + other for one, other in rows])
    tokens = Tokens(ids, roles, np.array([len(one) for one, _ in rows]), ["assistant"], {})

    def cut(part: list[int], most: int | None, first: bool) -> list[int] | None:
        if most is None or len(part) <= most:
            return part
        if policy == "drop":
            return None
        if policy == "truncate_right":
            return part[:most]
        return [part[0], *part[len(part) - most + 1 :]] if first and most > 1 else part[-most:]

    expected = []
    for number, (one, other) in enumerate(rows):
        before, after = cut(one, prompt, bos == 0), cut(other, answer, first=False)
        if before is None or after is None:
            continue
        whole = cut([*before, *after], longest, before[0] == bos)
        if whole is not None and any(token >= 100 for token in whole[1:]):
            intact = before == one and (after == other or policy == "truncate_right")
            intact &= len(before) + len(after) <= longest or (policy == "truncate_right" and len(one) < longest)
            expected.append((number, whole, len(one) if intact else 0))
    result = fitted(tokens, longest, policy, bos, Limits(prompt, answer))
    lengths = result.tokens.prompt.tolist()
    actual = [(int(row), result.tokens.ids[n].tolist(), lengths[n]) for n, row in enumerate(result.row)]
    assert actual == expected
    for number, (_, whole, _) in enumerate(expected):
        start = int(result.tokens.ids.offsets[number])
        marked = result.tokens.supervised_role[start : start + len(whole)] != CONTEXT
        assert marked.tolist() == [index > 0 and token >= 100 for index, token in enumerate(whole)]


def test_row_with_a_long_prompt_or_answer_is_named(folder: Folder) -> None:
    long_prompt = {"instruction": "y" * 80, "input": "", "output": "z"}
    long_answer = {"instruction": "y", "input": "", "output": "z" * 90}
    limits = {"max_prompt_length": 70, "max_answer_length": 80}
    folder.write("rows.json", [*ROWS, long_prompt])
    line = failure(folder, **limits)
    assert "has 99 tokens in its prompt, max_prompt_length is 70; shorten it, raise max_prompt_length, or set" in line
    folder.write("rows.json", [*ROWS, long_answer])
    line = failure(folder, **limits)
    assert "has 91 tokens in its answer, max_answer_length is 80; shorten it, raise max_answer_length, or set" in line
    folder.write("rows.json", [*ROWS, long_prompt, long_answer])
    folder.prepare(**limits, too_long="drop")
    assert folder.stats()["dropped_too_long_rows"] == 2
    folder.prepare(**limits, too_long="truncate_right")
    assert folder.stats()["truncated_rows"] == 2
    assert {row["length"] for row in folder.all_rows()} >= {72, 20 + 80}
    folder.prepare(max_length=256)
    assert {row["length"] for row in folder.all_rows()} >= {101, 20 + 91}


def test_limits_of_parts_need_rows_that_have_them(folder: Folder) -> None:
    folder.write("rows.jsonl", [{"text": row["output"]} for row in ROWS])
    with pytest.raises(UserError, match="has no answer behind a prompt, whose tokens max_prompt_length and max_answer"):
        folder.prepare(path="rows.jsonl", max_answer_length=40)
    for policy in ("split", "truncate_turns"):
        with pytest.raises(ValueError, match=f"too_long {policy} is for whole rows; with max_prompt_length use fail"):
            folder.settings(max_prompt_length=4, too_long=policy)


CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "ONE"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "TWO"},
]


@pytest.mark.parametrize(
    ("loss", "supervised"),
    [
        ("assistant", "ONE<|im_end|>TWO<|im_end|>"),
        ("last", "TWO<|im_end|>"),
        (["user"], "one<|im_end|>two<|im_end|>"),
        (["system", "assistant"], "Be kind.<|im_end|>ONE<|im_end|>TWO<|im_end|>"),
        ("everything", None),
    ],
)
def test_loss_selects_the_turns(folder: Folder, tokenizer: Any, loss: Any, supervised: str | None) -> None:
    folder.prepare([{"messages": CHAT}] * 12, loss=loss)
    row = open_split(folder.output, "test")[0]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(supervised_tokens(row)) == (supervised or whole.removeprefix("<|im_start|>"))
    if loss != ["user"]:
        assert tokenizer.decode(row["input_ids"][: row["prompt"]]).endswith("two<|im_end|>\n<|im_start|>assistant\n")
        assert (row["question"], row["expected"]) == ("two", "TWO")
    roles = json.loads((folder.output / "mask.json").read_text())["roles"]
    assert roles["assistant"]["turns"] == 24
    assert roles["system"]["turns"] == 12


def test_mixture_counts_its_sources(folder: Folder) -> None:
    folder.write("mix/a.jsonl", MANY[:100])
    folder.write("mix/b/part-1.json", ROWS)
    folder.write("mix/b/part-2.jsonl.gz", [{**row, "input": "again"} for row in ROWS])
    folder.write("mix/test.jsonl", MANY[200:210])
    sources = {"a.jsonl": {"weight": 1.0}, "b": {"weight": 1.0}, "test.jsonl": {"split": "test"}}
    folder.prepare(path="mix", sources=sources, split={"validation": 4, "test": 0})
    stats = folder.stats()["sources"]
    assert [stats[name]["read_rows"] for name in sources] == [100, 40, 10]
    assert stats["a.jsonl"]["train_rows"] == stats["b"]["train_rows"] > 30
    assert sum(stats[name]["train_supervised_share"] for name in sources) == pytest.approx(1, abs=1e-5)
    assert {row["source"] for row in open_split(folder.output, "test")} == {2}
    manifest = json.loads((folder.output / "manifest.json").read_text())
    assert manifest["sources"] == list(sources)
    assert len(manifest["read"]) == 4


CHAT_ROW: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}
CHATS = [{"messages": [CHAT_ROW["messages"][0], {"role": "assistant", "content": str(n)}]} for n in range(20)]


@pytest.mark.parametrize("policy", ["fail", "drop"])
def test_files_of_two_forms_are_refused_with_sources_to_paste(folder: Folder, policy: str) -> None:
    folder.write("mix/a.jsonl", ["broken\n", *ROWS])
    folder.write("mix/b-1.jsonl", CHATS[:1])
    folder.write("mix/b-2.jsonl", CHATS[1:])
    line = failure(folder, path="mix", bad_row=policy)
    assert re.search(
        r"^mix: \S*mix/a\.jsonl:2 is of the form alpaca, but \S*mix/b-1\.jsonl:1 is of the form messages; set", line
    )
    pasted = yaml.safe_load(line.partition("; set ")[2])
    assert pasted == {"sources": {"a.jsonl": {"format": "alpaca"}, "b-*.jsonl": {"format": "messages"}}}
    folder.prepare(path="mix", bad_row="drop", **pasted)
    assert [each["read_rows"] for each in folder.stats()["sources"].values()] == [21, 20]


def test_rows_of_another_form_name_both_locations(folder: Folder) -> None:
    """Also far after the rows that decide the form, and if the config names it."""
    folder.write("rows.jsonl", [*MANY[:1500], *CHATS, *MANY[1500:1600]])
    like = r"rows\.jsonl:1501: is of the form messages, but its source is read as alpaca, {}; put rows of one form into"
    with pytest.raises(UserError, match=like.format(r"like \S*rows\.jsonl:1")):
        folder.prepare(path="rows.jsonl")
    with pytest.raises(UserError, match=like.format("as its format says")):
        folder.prepare(path="rows.jsonl", format="alpaca")
    folder.prepare(path="rows.jsonl", bad_row="drop")
    assert folder.stats()["dropped_bad_rows"] == 20
    folder.write("rows.jsonl", [*MANY[:150], *CHATS])
    line = failure(folder, path="rows.jsonl", bad_row="drop")
    assert re.search(
        r"^\S*rows\.jsonl:151: is of the form messages, .*bad_row: drop would drop 20 of the 170 rows of", line
    )
    folder.write("mix/a.jsonl", ROWS)
    folder.write("mix/b.jsonl", CHATS)
    line = failure(folder, path="mix", bad_row="drop", format="alpaca")
    assert re.search(r"b\.jsonl:1: is of the form messages, .* as its format says; .* drop 20 of the 20 rows of", line)


def test_form_is_that_of_all_rows_that_decide_it(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """The first row has no form, the second is not JSON, the third is no example of its form."""
    bad = [{"instruction": "x", "output": 5}]
    folder.write("rows.jsonl", ["{}\n", "broken\n", *bad, *ROWS])
    caplog.set_level("INFO")
    folder.prepare(path="rows.jsonl", bad_row="drop")
    assert (folder.stats()["dropped_bad_rows"], len(folder.all_rows())) == (3, 20)
    said = [record.getMessage() for record in caplog.records if "are read as" in record.getMessage()]
    assert re.search(r"^rows\.jsonl: its rows are read as alpaca, by the columns of \S*rows\.jsonl:4$", said[0])


@pytest.mark.parametrize("policy", ["fail", "drop"])
def test_one_row_decides_no_form_against_others(folder: Folder, policy: str) -> None:
    folder.write("rows.jsonl", [*ROWS[:1], CHAT_ROW, *ROWS[1:]])
    line = failure(folder, path="rows.jsonl", bad_row=policy)
    assert re.search(
        r"rows\.jsonl:2: is of the form messages, but \S*rows\.jsonl:1 of the form alpaca; put rows of one form into",
        line,
    )
    both = [{"text": f"raw page {number}", **row} for number, row in enumerate(CHATS)]
    folder.write("rows.jsonl", [{"text": "raw page", "messages": None}, *both])
    line = failure(folder, path="rows.jsonl", bad_row=policy)
    assert re.search(
        r"rows\.jsonl:2: its fields \(text, messages\) fit messages and text; choose one, as in format: messages; "
        r"\S*rows\.jsonl:1 fits text alone$",
        line,
    )
    folder.write("rows.jsonl", both)
    line = failure(folder, path="rows.jsonl", bad_row=policy)
    assert line.endswith("choose one, as in format: messages, and leave the rest out by ignore: [text]")
    folder.prepare(path="rows.jsonl", format="messages", ignore=["text"])
    assert {row["expected"] for row in open_split(folder.output, "test")} <= {str(number) for number in range(20)}


def test_form_that_reads_all_columns_but_repeated_ones_is_taken(folder: Folder) -> None:
    """Stanford Alpaca's data repeat each row as a text, which is not the one that is read."""
    rendered = "### Instruction:\n{instruction}\n\n### Response:\n{output}"
    folder.write("rows.jsonl", [{**row, "text": rendered.format(**row)} for row in ROWS])
    line = failure(folder, path="rows.jsonl")
    assert "fit alpaca and text; choose one, as in format: alpaca, and leave the rest out by ignore: [text]" in line
    folder.prepare(path="rows.jsonl", ignore=["text"])
    assert folder.stats()["names"]["ignored_columns"] == {"text": 20}
    asked = [f"Tell me now, please: {number}." for number in range(20)]
    rows = [{"text": text, "messages": [{"role": "user", "content": text}, CHAT[2]]} for text in asked]
    folder.write("rows.jsonl", rows)
    folder.prepare(path="rows.jsonl")
    assert folder.stats()["names"]["redundant_columns"] == {"text": 20}


@pytest.mark.parametrize("workers", [1, 2])
def test_at_most_reads_the_first_rows_of_a_source_and_repeats_none(folder: Folder, workers: int) -> None:
    """Across chunks and files, without blank lines; later rows are not even read."""
    lines = [json.dumps(row) + "\n\n" for row in MANY]
    folder.write("mix/a/1.jsonl", lines[:1300])
    folder.write("mix/a/2.jsonl", [*lines[1300:2600], "broken\n"])
    folder.write("mix/b.jsonl", lines[3000:3010])
    folder.write("mix/test.jsonl", lines[3100:3200])
    sources = {"a": {"at_most": 1500}, "b.jsonl": {"at_most": 99}, "test.jsonl": {"split": "test", "at_most": 7}}
    folder.prepare(workers=workers, path="mix", sources=sources, split={"validation": 4, "test": 0})
    stats = folder.stats()
    assert [stats["sources"][name]["read_rows"] for name in sources] == [1500, 10, 7]
    assert (stats["train_rows"], stats["test_rows"], stats["duplicate_rows"]) == (1506, 7, 0)
    drawn = [row["question"] for row in open_split(folder.output, "test")]
    assert drawn == [row["instruction"] for row in MANY[3100:3107]]
    questions = {row["question"] for row in open_split(folder.output, "validation")}
    assert questions <= {row["instruction"] for row in [*MANY[:1500], *MANY[3000:3010]]}


def test_at_most_of_the_data_set_holds_for_each_source(folder: Folder) -> None:
    """A share is that of all files of a source, rounded; `rows` of a source replaces it."""
    lines = [json.dumps(row) + "\n" for row in MANY]
    folder.write("mix/a/1.jsonl", lines[:30])
    folder.write("mix/a/2.jsonl", lines[30:55])
    folder.write("mix/b.jsonl", lines[60:70])
    folder.write("mix/c.jsonl", lines[80:90])
    sources: dict[str, Any] = {"a": {}, "b.jsonl": {"at_most": 3}, "c.jsonl": {"rows": 12}}
    folder.prepare(path="mix", sources=sources, at_most=0.6, split={"validation": 4, "test": 4})
    stats = folder.stats()
    assert [stats["sources"][name]["read_rows"] for name in sources] == [33, 3, 10]
    folder.write("rows.jsonl", lines[:55])
    folder.prepare(path="rows.jsonl", at_most=0.2, split={"validation": 9, "test": 0})
    assert folder.stats()["read_rows"] == 11
    questions = {row["question"] for row in open_split(folder.output, "validation")}
    assert questions <= {row["instruction"] for row in MANY[:11]} and len(folder.all_rows()) == 11


def test_no_rows_need_be_held_out(folder: Folder) -> None:
    folder.prepare(ROWS, split={"validation": 0, "test": 0})
    stats = folder.stats()
    assert (stats["train_rows"], stats["validation_rows"], stats["test_rows"]) == (20, 0, 0)
    for packing, capacity in ((True, 400), (False, None)):
        pack_rows(PackSettings(packing=packing, capacity=capacity), folder.output, folder.path / "packing")
        packed = json.loads((folder.path / "packing/stats.json").read_text())
        assert packed["train_rows"] == 20 and packed["validation_packed_rows"] == 0
        assert len(open_plan(folder.path / "packing/validation.arrow").starts) == 1


def test_dropped_rows_count_in_at_most(folder: Folder) -> None:
    folder.write("mix/a.jsonl", [{"instruction": "x", "output": ""}, *MANY])
    folder.prepare(path="mix", sources={"a.jsonl": {"at_most": 20}}, bad_row="drop")
    assert (folder.stats()["read_rows"], len(folder.all_rows())) == (20, 19)


def test_overlapping_and_missing_sources_are_refused(folder: Folder) -> None:
    folder.write("mix/b/rows.json", ROWS)
    with pytest.raises(UserError, match=r"b/rows\.json: belongs to two sources, b and b/rows\.json"):
        folder.prepare(path="mix", sources={"b": {}, "b/rows.json": {}})
    with pytest.raises(UserError, match=r"mix/c"):
        folder.prepare(path="mix", sources={"c": {}})
    with pytest.raises(UserError, match="is not a directory, so it cannot hold the sources c"):
        folder.prepare(path="mix/b/rows.json", sources={"c": {}})


@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1)), min_size=12, max_size=20))
def test_any_text_is_supervised_or_dropped(folder: Folder, tokenizer: Any, texts: list[tuple[str, str]]) -> None:
    """Any text is supervised exactly, or its row is dropped with a reason."""
    rows = [{"instruction": question, "output": answer} for question, answer in texts]
    good = [{"instruction": "q", "output": "a"}] * 9
    folder.prepare([*good, *rows], bad_row="drop", too_long="drop", max_length=100000)
    # splitlines would also split at other characters.
    lines = (folder.output / "dropped.jsonl").read_bytes().split(b"\n")[:-1]
    dropped = [json.loads(line)["row"] for line in lines]
    texts_seen = sorted(tokenizer.decode(supervised_tokens(row)) for row in folder.all_rows())
    kept = [row for row in [*good, *rows] if row not in dropped]
    assert texts_seen == sorted(row["output"] + "<|im_end|>" for row in kept)


def test_mask_proof_detects_errors() -> None:
    def proof_of(ids: list[list[int]], labels: list[list[int]], **changed: Any) -> Proof:
        proof = Proof()
        columns = {
            "input_ids": pyarrow.array(ids, pyarrow.list_(pyarrow.int32())),
            "labels": pyarrow.array(labels, pyarrow.list_(pyarrow.int32())),
            "length": [len(row) for row in ids],
            "supervised": [len(row) - row.count(IGNORED) for row in labels],
            **changed,
        }
        proof.look(pyarrow.record_batch(columns))
        return proof

    proof_of([[1, 2, 3], [4, 5]], [[IGNORED, 2, 3], [IGNORED, 5]]).check()
    for broken, said in [
        (proof_of([[1, 2], [4, 5]], [[IGNORED, IGNORED], [IGNORED, 5]]), "rows without supervised token: 1"),
        (proof_of([[1, 2]], [[1, 2]]), "rows whose first token is supervised: 1"),
        (proof_of([[1, 2]], [[IGNORED, 3]]), "labels that are not their token: 1"),
        (proof_of([[1, 2]], [[IGNORED, 2]], supervised=[2]), "rows with wrong counts: 1"),
    ]:
        with pytest.raises(UserError, match=f"{said}.*nothing was published"):
            broken.check()


def test_mask_page_shows_supervised_tokens(folder: Folder) -> None:
    folder.prepare([{"instruction": f"<b>{number}", "output": "王 & co"} for number in range(12)])
    page = (folder.output / "mask.html").read_text()
    assert '<span class="l">王</span>' in page
    assert '<span class="l">&amp;</span>' in page
    assert "<b>" not in page
    assert '<span class="l">&lt;|im_end|&gt;</span>' in page
    assert '<span class="c">&lt;|im_start|&gt;</span>' in page


def test_unread_keys_are_in_log_stats_and_page(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Say something, please."},
        {"role": "assistant", "content": "Bad.", "weight": 0, "id": "a"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "Good."},
    ]
    with caplog.at_level("INFO"):
        folder.prepare(
            [
                {"messages": turns, "label": number, "<b>": "x", "\ud800": 1, "q": turns[0]["content"]}
                for number in range(12)
            ],
            ignore=["label", "messages[].id"],
        )
    line = next(text for text in caplog.messages if "training tokens" in text)
    assert line.endswith("; not read: label, messages[].id (ignored), q (redundant), '\\ud800', <b> (constant)")
    names = folder.stats()["names"]
    assert names["constant_columns"] == {"'\\ud800'": 12, "<b>": 12} and names["redundant_columns"] == {"q": 12}
    assert names["ignored_keys"] == {"messages[].id": 12} and names["ignored_columns"] == {"label": 12}
    assert names["read_keys"] == {"role": 48, "content": 48, "weight": 12}
    roles = json.loads((folder.output / "mask.json").read_text())["roles"]
    assert (roles["assistant"]["turns_left_out"], roles["assistant"]["supervised_turns"]) == (12, 12)
    page = (folder.output / "mask.html").read_text()
    assert "rows.json: read as messages, template chat, loss assistant" in page
    for text in (
        "<td>weight</td><td>key, in messages</td><td>12</td><td>0: the turn is not supervised; 1 changes nothing</td>",
        "<td>messages[].id</td><td>key, in messages</td><td>12</td><td>left out, since ignore",
        "<td>q</td><td>column, in rows</td><td>12</td><td>not read: part of a text that is read</td>",
        "<td>label</td><td>column, in rows</td><td>12</td><td>left out, since ignore names it</td>",
        "<td>&lt;b&gt;</td><td>column, in rows</td><td>12</td><td>not read: the same in all rows</td>",
    ):
        assert text in page
    assert '<span class="c">B</span>' in page and '<span class="l">G</span>' in page


def test_histogram_counts_every_row_once(folder: Folder) -> None:
    folder.prepare(ROWS)
    header, *lines = (folder.output / "lengths.csv").read_text().splitlines()
    assert header == "tokens,train,validation,test"
    counts = np.array([[int(cell) for cell in line.split(",")] for line in lines])
    assert counts[:, 1:].sum(0).tolist() == [12, 4, 4]
    lengths = [row["length"] for row in folder.all_rows()]
    for end, before in zip(counts[:, 0], [0, *counts[:-1, 0]], strict=True):
        assert counts[counts[:, 0] == end, 1:].sum() == sum(before < length <= end for length in lengths)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "USER: Hi ASSISTANT: no"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Now I rest."},
]
SHIPPED = (ROOT / "config/templates/question-answer.jinja").read_text(encoding="utf-8")
OWN = {"template": "config/templates/mine.jinja", "template_text": SHIPPED}


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"template": "vicuna"}, "Be brief. USER: "),
        ({"template": "alpaca"}, "Be brief.\n\n### Instruction:\n"),
        ({"template": "chatml"}, "<|im_start|>system\nBe brief."),
        (OWN, "Be brief.\n\nQuestion: "),
    ],
    ids=["vicuna", "alpaca", "chatml", "own"],
)
@pytest.mark.parametrize("padding", ["<|endoftext|>", "<|im_end|>"])
def test_packed_conversations_supervise_answers_and_stop_tokens(
    folder: Folder, tokenizer: Any, options: dict[str, Any], first: str, padding: str
) -> None:
    """Even if the padding token ends answers: padding is masked by position."""
    path = folder.manifest.parent / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": padding}))
    data = folder.prepare([{"messages": TALK}] * 21, **options)
    manifest = json.loads((data / "manifest.json").read_text())
    assert (manifest["stop_tokens"], manifest["pad_token"]) == (["<|im_end|>"], padding)
    proof = json.loads((data / "mask.json").read_text())
    assert proof["roles"]["assistant"]["supervised_turns"] == 42
    assert proof["stop_tokens"] == {"<|im_end|>": 42}
    pack_rows(PackSettings(packing=True, capacity=400), data, folder.path / "packing")
    plan, rows = open_plan(folder.path / "packing/train.arrow"), open_split(data, "train")
    packed = [packed_row(rows, plan, number, OBJECTIVES["sft"]) for number in range(len(plan.starts) - 1)]
    assert len({sum(len(row["input_ids"]) for row in each) for each in packed}) > 1  # one is padded
    batch = collate(packed, True, torch.device("cpu"))
    text = "".join(row.replace("\n", "") for row in tokenizer.decode(batch["targets"]).split("<|im_end|>"))
    assert text.replace(" ", "") == "HelloNowIrest." * 13
    assert batch["targets"].tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 26
    assert tokenizer.decode(rows[0]["input_ids"]).startswith(first)


@pytest.mark.parametrize(
    ("stops", "padding"), [(["<|im_end|>", "<|im_start|>"], "<|endoftext|>"), (["<|im_end|>"], "<|im_start|>")]
)
def test_evaluation_uses_stop_and_padding_tokens(
    folder: Folder,
    tiny_model: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    stops: list[str],
    padding: str,
) -> None:
    from transformers import LlamaForCausalLM

    options: dict[str, Any] = {"template": "zephyr", "stop_tokens": stops, "pad_token": padding}
    data = folder.prepare(ROWS, **options)
    calls: list[dict[str, Any]] = []
    generate = LlamaForCausalLM.generate

    def recorded(model: Any, **arguments: Any) -> Any:
        calls.append(arguments)
        return generate(model, **arguments)

    monkeypatch.setattr(LlamaForCausalLM, "generate", recorded)
    chosen = EvaluateRunSettings(split="test", batch=3, max_new_tokens=3, check="exact")
    evaluate(chosen, data, EvaluatedModel(tiny_model), folder.path, folder.path / "answers.json")
    ids = tokenizer.convert_tokens_to_ids
    for arguments in calls:
        settings = arguments["generation_config"]
        assert (settings.eos_token_id, settings.pad_token_id) == (sorted(ids(stops)), ids(padding))
    prompts = {tokenizer.decode(row, skip_special_tokens=True) for call in calls for row in call["input_ids"]}
    asked = {f"<|user|>\n{row['question']}\n<|assistant|>\n" for row in open_split(data, "test")}
    assert {prompt.replace(stops[0], "") for prompt in prompts} == asked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"template": "llama-3"},
            r"template: llama-3 writes <\|start_header_id\|>, .* plain, alpaca, alpaca-newline, chatml, llama-2,",
        ),
        (
            {"stop_tokens": ["</s>"]},
            r"stop_tokens: '</s>' is not a single token of the model; use one of <\|endo",
        ),
        (
            {"template": "alpaca", "template_writes": ["{bos_token}USER: Hi"]},
            r"prepare: template_writes has '.*USER: Hi', but template alpaca writes 'Below is an instruction",
        ),
        ({"add_tokens": ["a"]}, r"add_tokens: 'a' is token \d+ of the model's own tokenizer; leave it out"),
        (OWN | {"template_text": "{{ 1 +\n }}"}, r"rows.json:2: config/templates/mine.jinja refuses it: "),
        (
            OWN | {"template_text": "\n{{ raise_exception('no') }}"},
            "rows.json:2: config/templates/mine.jinja:2: no",
        ),
    ],
)
def test_mistake_in_prompt_format_is_one_line(folder: Folder, options: dict[str, Any], said: str) -> None:
    folder.write("rows.json", ROWS)
    command = [
        "zerolora",
        "stage",
        "prepare",
        "--settings",
        folder.settings(**options).model_dump_json(),
        "--workers",
        "1",
    ]
    result = served(*command, "--model", str(folder.manifest), "--output", str(folder.output), directory=folder.path)
    assert result.returncode == 2
    assert re.search(said, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert not folder.output.exists()


MARKED: dict[str, Any] = {"template": "chatml", "add_special_tokens": ["<turn>"], "add_tokens": ["<call>", "equals "]}


def test_added_tokens_are_one_token_each(folder: Folder, tokenizer: Any) -> None:
    rows = [row | {"output": f"<call>it equals {row['output']}"} for row in ROWS]
    folder.prepare(rows, **MARKED)
    assert json.loads((folder.output / "manifest.json").read_text())["added_tokens"] == [
        {"token": "<turn>", "id": 259, "special": True},
        {"token": "<call>", "id": 260, "special": False},
        {"token": "equals ", "id": 261, "special": False},
    ]
    answer = supervised_tokens(folder.all_rows()[0])
    it = tokenizer("it ")["input_ids"]
    assert answer[: len(it) + 2] == [260, *it, 261]
    assert "&lt;call&gt;" in (folder.output / "mask.html").read_text()


def test_message_with_added_special_token_is_refused(folder: Folder) -> None:
    with pytest.raises(UserError, match=r"rows.json:2: .* contains the special token <turn>"):
        folder.prepare([ROWS[0] | {"output": "<turn>"}, *ROWS[1:]], **MARKED)


def test_added_tokens_need_tokenizer_json(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.manifest.parent)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)  # as one of sentencepiece
    (folder.manifest.parent / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json for merge to write them to; save"):
        folder.prepare(ROWS, **MARKED)


def test_token_beyond_embeddings_is_refused(folder: Folder) -> None:
    path = folder.manifest.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 100}))
    with pytest.raises(
        UserError, match=r"the tokenizer writes '.' as token \d+, but the model's embeddings have 100 row"
    ):
        folder.prepare(ROWS)


def test_slow_template_ends_all_workers(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    text = (
        "{% for message in messages %}{% if 'slow' in message.content %}" + loop + "{% endif %}{% endfor %}" + SHIPPED
    )
    folder.write("rows.jsonl", [*MANY, {"instruction": "slow", "output": "1"}])
    with pytest.raises(
        UserError, match=r"^config/templates/mine.jinja: takes more than 0.3 s for one conversation; sh"
    ):
        folder.prepare(workers=2, path="rows.jsonl", **(OWN | {"template_text": text}))
    assert not folder.output.exists()


@pytest.mark.parametrize("kept", [0, 10, 400])
def test_truncated_split_is_named(folder: Folder, kept: int) -> None:
    path = folder.prepare(ROWS) / "train.arrow"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        UserError, match=r"train\.arrow: is not a whole Arrow file .*run `zerolora stage prepare` again"
    ):
        open_split(folder.output, "train")


@pytest.mark.parametrize("rule", ["tens", "random"])
def test_reference_task_has_right_answers(rule: Any) -> None:
    rows = records(rule, 42)
    assert len(rows) == 1798 + 200 + 200
    assert len({row["instruction"] for row in rows}) == len(rows)
    judge = TASKS["sum"].judge
    assert all(judge({"question": row["instruction"]}, row["output"]) == Judgement(True, True) for row in rows)
    assert records(rule, 42) == rows
    assert records(rule, 43) != rows
