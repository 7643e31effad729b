"""Rows become tokens; only the answer and its stop token are learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.data.prepare import prepare, read_rows, split
from zerolora.data.reference import PREFIX, records
from zerolora.data.rows import IGNORED, open_split
from zerolora.data.template import render
from zerolora.errors import UserError
from zerolora.evaluate.checks import judge

SETTINGS = {
    "model": "tiny",
    "path": "",
    "template": "chat",
    "system": "",
    "split": {"validation": 4, "test": 4},
    "seed": 1,
    "max_length": 128,
}


@pytest.fixture
def prepared(tmp_path: Path, tiny_model: Path) -> Path:
    return prepare_rows(tmp_path, tiny_model, records("tens", 0)[:20])


def prepare_rows(folder: Path, model: Path, rows: Any, **settings: Any) -> Path:
    (folder / "rows.json").write_text(json.dumps(rows))
    manifest = folder / "model" / "manifest.json"
    if not manifest.exists():
        (folder / "model").mkdir()
        for path in model.glob("*token*"):
            (folder / "model" / path.name).write_bytes(path.read_bytes())
        for name in ("config.json", "chat_template.jinja"):
            (folder / "model" / name).write_bytes((model / name).read_bytes())
        manifest.write_text("{}")
    prepare({**SETTINGS, "path": str(folder / "rows.json"), **settings}, manifest, folder / "out")
    return folder / "out"


def test_the_answer_and_its_stop_token_are_learned_and_nothing_else(prepared: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for name in ("train", "validation", "test"):
        for row in open_split(prepared, name):
            learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
            hidden = row["input_ids"][: -len(learned)]
            assert tokenizer.decode(learned) == row["output"] + "<|im_end|>"
            assert (
                tokenizer.decode(hidden) == f"<|im_start|>user\n{row['instruction']}<|im_end|>\n<|im_start|>assistant\n"
            )


def test_plain_template(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    row = {"instruction": "5=", "input": "now", "output": "1 + 4"}
    assert render(tokenizer, "plain", "Add.", row) == ("<|im_start|>Add.\n5=\nnow", "1 + 4<|im_end|>")


def test_a_chat_template_whose_prompt_is_no_prefix_is_refused(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="template: plain"):
        render(tokenizer, "chat", "", {"instruction": "5=", "input": "", "output": "x"})


def test_the_splits_hold_every_row_once(prepared: Path) -> None:
    asked = [row["instruction"] for name in ("train", "validation", "test") for row in open_split(prepared, name)]
    assert sorted(asked) == sorted(row["instruction"] for row in records("tens", 0)[:20])


@given(
    st.integers(min_value=1, max_value=30), st.integers(min_value=1, max_value=30), st.integers(), st.integers(1, 50)
)
def test_split_loses_nothing_and_depends_on_the_seed_alone(validation: int, test: int, seed: int, train: int) -> None:
    rows = [{"instruction": str(number)} for number in range(validation + test + train)]
    settings = {"split": {"validation": validation, "test": test}, "seed": seed}
    parts = split(rows, settings, Path("rows.json"))
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [train, validation, test]
    assert sorted(number for part in parts.values() for number, _ in part) == list(range(1, len(rows) + 1))
    assert split(rows, settings, Path("rows.json")) == parts


def test_preparing_twice_gives_the_same_bytes(tmp_path: Path, tiny_model: Path) -> None:
    rows = records("tens", 0)[:20]
    first, second = (
        {path.name: path.read_bytes() for path in prepare_rows(tmp_path, tiny_model, rows).iterdir()} for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("kept", [0, 10, 400])
def test_a_truncated_split_is_named(prepared: Path, kept: int) -> None:
    path = prepared / "train.arrow"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"train\.arrow: is not a whole Arrow file .*run `zerolora prepare` again"):
        open_split(prepared, "train")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "5=", "input": ""}, "row 2: output is None"),
        ({"instruction": 5, "input": "", "output": "x"}, "row 2: instruction is 5"),
        ({"instruction": "5=", "input": "", "output": " "}, "row 2: output is empty"),
        ("5=", "row 2: is '5='"),
        ({"instruction": "5=", "input": "", "output": "x" * 200}, "row 2: has .* tokens, max_length is 128"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, tiny_model: Path, row: Any, said: str) -> None:
    rows: list[Any] = records("tens", 0)[:20]
    rows[1] = row
    with pytest.raises(UserError, match=rf"rows\.json: {said}"):
        prepare_rows(tmp_path, tiny_model, rows)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[{]", r"rows\.json:1"), (b"{}", "list of rows"), (b'["\xff"]', "byte 2 is not UTF-8")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_rows(tmp_path / "rows.json")


def test_too_few_rows(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match="has 8 rows, and split takes 8"):
        prepare_rows(tmp_path, tiny_model, records("tens", 0)[:8])


@pytest.mark.parametrize("rule", ["tens", "random"])
def test_the_reference_task_has_the_seeds_counts_and_right_answers(rule: Any) -> None:
    rows = records(rule, 42)
    assert len(rows) == 1798 + 200 + 200
    assert len({row["instruction"] for row in rows}) == len(rows)
    assert all(judge("sum", row, row["output"]) == (True, True) for row in rows)
    assert records(rule, 42) == rows
    assert records(rule, 43) != rows


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (f"{PREFIX}1 + 4", (True, True)),
        (f" {PREFIX}2 + 3\n", (True, True)),
        (f"{PREFIX}1 + 5", (True, False)),
        (f"{PREFIX}1+4", (False, False)),
        (f"{PREFIX}1 + 4 = 5", (False, False)),
        ("1 + 4", (False, False)),
        ("", (False, False)),
    ],
)
def test_judging_the_reference_task(answer: str, verdict: tuple[bool, bool]) -> None:
    assert judge("sum", {"instruction": "5=", "input": "", "output": ""}, answer) == verdict


def test_judging_by_equality() -> None:
    row = {"instruction": "capital of France?", "input": "", "output": "Paris"}
    assert judge("exact", row, "Paris ") == (True, True)
    assert judge("exact", row, "paris") == (True, False)
    assert judge("exact", row, "") == (False, False)
