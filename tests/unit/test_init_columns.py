"""What `zerolora init` makes of columns: mapped, ignored with a reason, or undecided in the config."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from conftest import refusal, served
from pyarrow import parquet

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.data.prepare import prepare
from zerolora.errors import UserError
from zerolora.files import MANIFEST, write_json
from zerolora.first_config.columns import RowLayout, layout_of

COUNT = 40


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    """Return rows whose columns are functions of the row's number."""
    return [{name: make(number) for name, make in columns.items()} for number in range(COUNT)]


def written_to(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def question(number: int) -> str:
    return f"How much is {number} and one{'!' * (number % 5)}?"


def answer(number: int) -> str:
    return str(number + 1)


def layout(tmp_path: Path, rows: list[dict[str, Any]], **columns: str) -> RowLayout:
    return layout_of([written_to(tmp_path / "rows.jsonl", rows)], columns, [], "rows.jsonl")


COMMON: list[tuple[str, dict[str, str]]] = [
    ("question answer", {"prompt": "question", "completion": "answer"}),
    ("query response", {"prompt": "query", "completion": "response"}),
    ("prompt response", {"prompt": "prompt", "completion": "response"}),
    ("problem solution", {"prompt": "problem", "completion": "solution"}),
    ("document summary", {"prompt": "document", "completion": "summary"}),
    ("dialogue summary", {"prompt": "dialogue", "completion": "summary"}),
    ("Question Answer", {"prompt": "Question", "completion": "Answer"}),
]


@pytest.mark.parametrize(("names", "columns"), COMMON)
def test_common_layouts_are_mapped(tmp_path: Path, names: str, columns: dict[str, str]) -> None:
    first, second = names.split()
    result = layout(tmp_path, rows_of(**{first: question, second: answer}))
    assert (result.form, result.columns, result.undecided, result.ignore) == ("prompt", columns, [], [])


def test_instructions_with_a_context_are_mapped(tmp_path: Path) -> None:
    result = layout(tmp_path, rows_of(instruction=question, context=lambda number: f"{number} + 1", response=answer))
    assert result.form == "alpaca" and not result.undecided
    assert result.columns == {"instruction": "instruction", "input": "context", "output": "response"}


def test_a_rendered_row_is_ignored(tmp_path: Path) -> None:
    """As in Stanford Alpaca's data, whose `text` contains the other columns."""
    rows = rows_of(instruction=question, input=lambda number: "" if number % 2 else f"note {number}", output=answer)
    for row in rows:
        row["text"] = (
            f"Below.\n\n### Instruction:\n{row['instruction']}\n\n{row['input']}\n\n### Response:\n{row['output']}"
        )
    result = layout(tmp_path, rows)
    assert result.settings() == {"format": "alpaca", "ignore": ["text"]}
    rows[7]["text"] = "Another text, which is not part of the row."
    assert layout(tmp_path, rows).undecided == ["text"]


def test_a_rendered_row_with_remarks_is_undecided(tmp_path: Path) -> None:
    rows = rows_of(instruction=question, output=answer)
    for number, row in enumerate(rows):
        row["text"] = f"{row['instruction']}\n{row['output']}\n{'That is quite wrong. ' * (number % 7)}"
    assert layout(tmp_path, rows).undecided == ["text"]


DESCRIBING: dict[str, Any] = {
    "id": lambda number: f"row-{number}",
    "url": lambda number: f"https://example.org/{number}",
    "date": lambda number: f"2024-01-{number % 28 + 1:02}",
    "index": lambda number: number,
    "length": lambda number: len(question(number)),
    "source": lambda number: ["A book", "The web", "Some mails", "A forum", "A wiki"][number % 5],
}
UNDECIDED: dict[str, Any] = {
    "id": lambda number: number % 7,
    "source": lambda number: "yes" if number % 2 else "maybe",
    "quality": lambda number: f"row-{number}",
    "category": lambda number: ["good", "fine", "poor"][number % 3],
    "language": lambda number: ["en", "de", "fr"][number % 3],
    "length": lambda number: number * number % 11,
    "topic": lambda number: f"a text of several words about {number}",
    "type": lambda number: ["question", "an answer", "others"][number % 3],
    "model": lambda number: None if number % 2 else "model-1",
    "url": lambda number: [f"https://example.org/{number}"],
    "set": lambda number: "test" if number % 10 == 0 else "train",
    "parent_id": lambda number: f"row-{max(0, number - 1)}",
    "rejected_id": lambda number: f"answer-{number}",
    "deleted_date": lambda number: f"2024-01-{number + 1:02}" if number < 28 else None,
    "link": lambda number: f"https://example.org/{number}.jpg?size=2",
    "source_file": lambda number: f"audio/{number}.wav",
    "code": lambda number: f"print({number})",
    "words": lambda number: ["red apple", "blue sky", "green tea", "old house", "new car"][number % 5],
}


@pytest.mark.parametrize("name", DESCRIBING)
def test_what_describes_a_row_by_name_and_value_is_ignored(tmp_path: Path, name: str) -> None:
    result = layout(tmp_path, rows_of(question=question, answer=answer, **{name: DESCRIBING[name]}))
    assert result.ignore == [name] and not result.undecided
    other = layout(tmp_path, rows_of(question=question, answer=answer, other=DESCRIBING[name]))
    assert other.undecided == ["other"], "a value alone proves nothing"


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_may_be_a_verdict_is_undecided(tmp_path: Path, name: str) -> None:
    columns = {"id": lambda number: f"row-{number}", name: UNDECIDED[name]}
    result = layout(tmp_path, rows_of(question=question, answer=answer, **columns))
    assert name in result.undecided


def test_a_text_beside_a_label_is_undecided(tmp_path: Path) -> None:
    result = layout(tmp_path, rows_of(text=question, label=lambda number: number % 3))
    assert (result.form, result.undecided) == ("text", ["label"])


def test_a_key_that_only_some_messages_have_is_undecided(tmp_path: Path) -> None:
    def messages(number: int) -> list[dict[str, Any]]:
        marked = {"rating": 1} if number == COUNT - 1 else {}
        return [{"role": "user", "content": question(number)}, {"role": "assistant", "content": "x", **marked}]

    assert layout(tmp_path, rows_of(messages=messages)).undecided == ["messages[].rating"]


def test_openais_preference_files_are_mapped(tmp_path: Path) -> None:
    rows = rows_of(
        input=lambda number: {"messages": [{"role": "user", "content": question(number)}], "tools": []},
        preferred_output=lambda number: [{"role": "assistant", "content": answer(number)}],
        non_preferred_output=lambda number: [{"role": "assistant", "content": "No."}],
    )
    result = layout(tmp_path, rows)
    assert (result.rows, result.form, result.undecided) == ("pairs", "preference", [])


def test_files_of_two_kinds_are_named(tmp_path: Path) -> None:
    texts = written_to(tmp_path / "a.jsonl", rows_of(prompt=question, completion=answer))
    pairs = written_to(tmp_path / "b.jsonl", rows_of(prompt=question, chosen=answer, rejected=lambda number: "No."))
    said = refusal(lambda: layout_of([texts, pairs], {}, [], "mine"))
    assert f"{texts} holds texts to learn and {pairs} holds pairs of answers" in said


def test_classes_of_a_table_have_their_names(tmp_path: Path) -> None:
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["bad", "good"], "_type": "ClassLabel"},
    }
    table = pyarrow.Table.from_pylist(rows_of(text=question, label=lambda number: number % 2))
    path = tmp_path / "rows.parquet"
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    assert layout_of([path], {}, [], "rows").undecided == ["label"]
    result = layout_of([path], {"prompt": "text", "completion": "label"}, [], "rows")
    assert result.settings() == {
        "columns": {"prompt": "text", "completion": "label"}, "classes": {"label": ["bad", "good"]},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "model").symlink_to(tiny_model)
    return tmp_path


def init(folder: Path, data: str, *options: str) -> Any:
    command = ("zerolora", "init", "--model", "model", "--data", data, "--output", "config.yaml", "--force", *options)
    return served(*command, directory=folder)


def test_undecided_columns_are_listed_and_nothing_is_prepared_until_they_are_decided(folder: Path) -> None:
    rows = rows_of(question=question, answer=answer, id=lambda number: f"row-{number}", score=lambda number: number % 5)
    written_to(folder / "2024.jsonl", rows)
    result = init(folder, "2024.jsonl")
    assert result.returncode == 0, result.stderr
    assert "column  question: mapped to prompt, as in 'How much is 0 and one?'\n" in result.stdout
    assert "column  id: ignored (unique), as in 'row-0'\n" in result.stdout
    assert "column  score: undecided (numbers), as in 0\n" in result.stdout
    assert "\nundecided: score; map each, " in result.stdout and "decide there what is undecided" in result.stderr
    text = (folder / "config.yaml").read_text()
    assert "    - score  # numbers, as in 0; map it in columns, keep rows by where, or ignore it\n" in text
    entry = yaml.safe_load(text)["prepare"]["2024"]
    assert entry["ignore"] == ["id"] and entry["undecided"] == ["score"] and entry["max_length"] == 64
    with pytest.raises(UserError, match=r"config.yaml:\d+: prepare.2024.*undecided has score"):
        load(folder / "config.yaml")
    assert init(folder, "2024.jsonl", "--ignore", "score").returncode == 0
    settings = resolve(load(folder / "config.yaml")).prepare["2024"]
    assert settings.ignore == ["score", "id"]
    write_json(folder / MANIFEST, {"files": {}})
    prepare(
        settings.model_copy(update={"path": str(folder / "2024.jsonl")}), folder / "model/config.json", folder / "out"
    )


def test_rows_of_no_form_get_a_config_too(folder: Path) -> None:
    written_to(folder / "rows.jsonl", rows_of(aa=question, bb=answer))
    result = init(folder, "rows.jsonl")
    assert result.returncode == 0 and "undecided: no form reads these columns" in result.stdout
    entry = yaml.safe_load((folder / "config.yaml").read_text())["prepare"]["rows"]
    assert entry["undecided"] == ["aa", "bb"] and entry["split"] == {"validation": 2, "test": 2}
    result = init(folder, "rows.jsonl", "--columns", "prompt=aa,completion=bb")
    assert result.returncode == 0 and "undecided" not in result.stdout
    assert "36 rows of prompt" in result.stdout
    for options, said in (
        (
            ("--columns", "prompt"),
            "--columns 'prompt': use FIELD=COLUMN, as in prompt=question,completion=answer; the ",
        ),
        (("--columns", "prompt=cc,completion=bb"), "no row has cc; it has aa, bb"),
        (("--ignore", "cc"), "no row has cc"),
    ):
        result = init(folder, "rows.jsonl", *options)
        assert result.returncode == 2 and said in result.stderr.splitlines()[-1], result.stderr


def test_names_and_values_are_printed_escaped(folder: Path) -> None:
    """Terminal sequences, C1 controls and characters that change the direction of text."""
    rows = rows_of(question=lambda number: f"\x1b[31m\u202e {number}?", answer=lambda number: f"\x9b {number}")
    for row in rows:
        row["na\x1bme"] = f"\x07 {row['answer']}"
    written_to(folder / "rows.jsonl", rows)
    result = init(folder, "rows.jsonl")
    assert result.returncode == 0, result.stderr
    printed = result.stdout + (folder / "config.yaml").read_text()
    assert not {*"\x1b\x9b\x07\u202e"} & {*printed}
    assert yaml.safe_load((folder / "config.yaml").read_text())["prepare"]["rows"]["undecided"] == ["na\x1bme"]
    written_to(folder / "x\ny.jsonl", rows)
    result = init(folder, "x\ny.jsonl")
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
