"""`where`, `better`, `classes` and `undecided`: which rows are kept, and which answer is the better one."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from conftest import refusal
from pyarrow import parquet
from test_prepare import Folder, supervised_tokens
from transformers import AutoTokenizer

from zerolora.config.file import load
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import open_split
from zerolora.errors import UserError
from zerolora.first_config.columns import layout_of

NONE = {"validation": 0, "test": 0}


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Folder:
    return Folder(tmp_path, tiny_model)


def texts(count: int = 6, **columns: list[Any]) -> list[dict[str, Any]]:
    """Return rows, with a value of each column in turn."""
    return [
        {
            "prompt": f"What is {row} and 1?",
            "completion": f"It is {row + 1}.",
            **{name: held[row % len(held)] for name, held in columns.items()},
        }
        for row in range(count)
    ]


def kept(folder: Folder, rows: list[dict[str, Any]], where: dict[str, Any], **changed: Any) -> list[int]:
    """Return the numbers of the rows that are trained."""
    folder.prepare(rows, split=NONE, where=where, **changed)
    decoder = AutoTokenizer.from_pretrained(folder.manifest.parent)
    learned = [str(decoder.decode(supervised_tokens(row))) for row in open_split(folder.output, "train")]
    return [int(text.split()[2].partition(".")[0]) - 1 for text in learned]


@pytest.mark.parametrize(
    ("values", "wanted", "rows"),
    [
        ([True, False], [True], [0, 2, 4]),
        ([1, 0], [1], [0, 2, 4]),
        (["yes", "no", "maybe"], ["yes", "no"], [0, 1, 3, 4]),
        ([5, 3.5, 1], ">= 3.5", [0, 1, 3, 4]),
        ([-2, 0, 2], "< 0", [0, 3]),
        ([None, "bad"], [None], [0, 2, 4]),
        ([None, 4], "> 1", [1, 3, 5]),
    ],
)
def test_where_keeps_rows_by_values(folder: Folder, values: list[Any], wanted: Any, rows: list[int]) -> None:
    assert kept(folder, texts(x=values), {"x": wanted}) == rows
    assert folder.stats()["excluded_rows"] == 6 - len(rows)


def test_where_reads_a_field_of_an_object(folder: Folder) -> None:
    assert kept(folder, texts(meta=[{"good": True}, {"good": False}]), {"meta.good": [True]}) == [0, 2, 4]


@pytest.mark.parametrize(("wanted", "rows"), [([True], [0, 2]), ("> 2", [1, 2]), ([4], [2])])
def test_where_compares_the_texts_of_csv(folder: Folder, wanted: Any, rows: list[int]) -> None:
    column = "score" if wanted != [True] else "good"
    cells = [("true", 1), ("FALSE", 3), ("True", 4)]
    lines = [f"What is {row}?,It is {row + 1}.,{good},{score}" for row, (good, score) in enumerate(cells)]
    (folder.path / "rows.csv").write_text("\n".join(["prompt,completion,good,score", *lines]))
    other = "good" if column == "score" else "score"
    assert kept(folder, None, {column: wanted}, path="rows.csv", ignore=[other]) == rows  # type: ignore[arg-type]


def test_where_that_keeps_nothing_is_refused(folder: Folder) -> None:
    line = refusal(folder.prepare, texts(x=["a", "b"]), split=NONE, where={"x": ["c"]})
    assert "where and better keep none of its 6 rows" in line


def test_rows_that_are_left_out_need_no_declaration(folder: Folder) -> None:
    """Neither must they be valid. The other fields of an object need one."""
    rows: list[dict[str, Any]] = [
        *texts(meta=[{"good": True, "by": "Ann"}]),
        {"meta": {"good": False}, "note": "wrong"},
    ]
    assert kept(folder, rows, {"meta.good": [True]}) == [*range(6)]
    rows[0]["meta"] = {"good": True, "by": "Bo"}
    line = refusal(kept, folder, rows, {"meta.good": [True]})
    assert line.startswith(f"{folder.path}/rows.json:") and "meta.by is 'Ann', 'Bo' in " in line


def test_a_text_is_not_compared_with_a_number(folder: Folder) -> None:
    with pytest.raises(UserError, match="x is 'high', and '> 2' compares numbers"):
        folder.prepare(texts(x=[4, "high"]), split=NONE, where={"x": "> 2"})


def two_sources(folder: Folder, first: list[Any], second: list[Any]) -> None:
    folder.write("data/rows.jsonl", texts(set=["train", "train", "test"]))
    sources = {
        "training": {"path": "rows.jsonl", "where": {"set": first}},
        "exam": {"path": "rows.jsonl", "where": {"set": second}, "split": "test"},
    }
    prepare(folder.settings(path="data", split=NONE, sources=sources), folder.manifest, folder.output, 1)


def test_a_column_holds_rows_out(folder: Folder) -> None:
    two_sources(folder, ["train"], ["test"])
    assert [len(open_split(folder.output, name)) for name in ("train", "validation", "test")] == [4, 0, 2]


def test_sources_of_one_file_that_overlap_are_refused(folder: Folder) -> None:
    with pytest.raises((UserError, ValueError), match=r"rows\.jsonl"):
        two_sources(folder, ["train", "test"], ["test"])


def pairs(**columns: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"What is {row}?",
            "one": f"First {row}.",
            "other": f"Second {row}.",
            **{name: held[row] for name, held in columns.items()},
        }
        for row in range(len(next(iter(columns.values()))))
    ]


def first_is_chosen(folder: Folder, rows: list[dict[str, Any]], better: dict[str, Any]) -> list[bool]:
    """Return for each row that is trained whether the answer in the column of `chosen` is the chosen one."""
    folder.write("rows.json", rows)
    columns = {"chosen": "one", "rejected": "other"}
    settings = folder.settings(rows="pairs", split=NONE, columns=columns, better=better)
    prepare(settings, folder.manifest, folder.output, 1)
    decoder = AutoTokenizer.from_pretrained(folder.manifest.parent)
    return ["First" in decoder.decode(row["input_ids"]) for row in open_split(folder.output, "train")]


@pytest.mark.parametrize(
    ("columns", "better", "chosen"),
    [
        ({"x": [-2, 1, 0, -1]}, {"column": "x", "first": "< 0"}, [True, False, True]),
        (
            {"x": ["a", "b", "tie", "a"]},
            {"column": "x", "first": ["a"], "second": ["b"], "tie": ["tie"]},
            [True, False, True],
        ),
        ({"s": [5, 1, 2, 4], "t": [3, 2, 2, 1]}, {"scores": ["s", "t"]}, [True, False, True]),
    ],
)
def test_better_orders_the_answers(
    folder: Folder, columns: dict[str, list[Any]], better: dict[str, Any], chosen: list[bool]
) -> None:
    assert first_is_chosen(folder, pairs(**columns), better) == chosen
    stats = folder.stats()
    assert (stats["swapped_rows"], stats["tied_rows"]) == (1, 1)


def test_better_exchanges_columns_of_the_default_names(folder: Folder) -> None:
    rows = [{"prompt": f"{row}?", "chosen": f"First {row}.", "rejected": "No.", "x": row - 1} for row in range(3)]
    settings = folder.settings(rows="pairs", split=NONE, better={"column": "x", "first": "> 0"})
    folder.write("rows.json", rows)
    prepare(settings, folder.manifest, folder.output, 1)
    assert (folder.stats()["swapped_rows"], folder.stats()["tied_rows"]) == (1, 1)


def test_where_and_better_are_counted_apart(folder: Folder) -> None:
    rows = pairs(x=[-1, 1, 0, 1], good=[True, True, True, False])
    folder.write("rows.json", rows)
    columns = {"chosen": "one", "rejected": "other"}
    selection = {"better": {"column": "x", "first": "< 0"}, "where": {"good": [True]}}
    settings = folder.settings(rows="pairs", split=NONE, columns=columns, **selection)
    prepare(settings, folder.manifest, folder.output, 1)
    counts = [folder.stats()[f"{name}_rows"] for name in ("read", "excluded", "tied", "swapped", "train")]
    assert counts == [4, 1, 1, 1, 2]


def test_an_unknown_verdict_is_a_bad_row(folder: Folder) -> None:
    better = {"column": "x", "first": ["a"], "second": ["b"]}
    with pytest.raises(UserError, match=r"x is 'c', and better does not say which answer"):
        first_is_chosen(folder, pairs(x=["a", "c"]), better)


@pytest.mark.parametrize("values", [[0, 1], [False, True], ["0", "1"]])
def test_classes_are_learned_by_their_names(folder: Folder, values: list[Any]) -> None:
    rows = [{"text": f"Film {row}.", "label": values[row % 2]} for row in range(4)]
    columns = {"prompt": "text", "completion": "label"}
    folder.prepare(rows, split=NONE, columns=columns, classes={"label": ["bad", "good"]})
    decoder = AutoTokenizer.from_pretrained(folder.manifest.parent)
    learned = [str(decoder.decode(supervised_tokens(row))) for row in open_split(folder.output, "train")]
    assert [text.partition("<")[0] for text in learned] == ["bad", "good", "bad", "good"]
    rows[3]["label"] = 2
    with pytest.raises(UserError, match="label is 2, and classes has names for 0 to 1"):
        folder.prepare(rows, split=NONE, columns=columns, classes={"label": ["bad", "good"]})


def test_classes_of_a_table_are_proposed_and_learned(folder: Folder) -> None:
    feature = {"names": ["bad", "good"], "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})}
    table = pyarrow.Table.from_pylist([{"text": f"Film {row}.", "label": row % 2} for row in range(4)])
    path = folder.path / "rows.parquet"
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    proposed = layout_of([path], {"prompt": "text", "completion": "label"}, [], "rows").settings()
    folder.prepare(split=NONE, path="rows.parquet", **proposed)
    decoder = AutoTokenizer.from_pretrained(folder.manifest.parent)
    learned = [str(decoder.decode(supervised_tokens(row))) for row in open_split(folder.output, "train")]
    assert [text.partition("<")[0] for text in learned] == ["bad", "good", "bad", "good"]


def test_a_config_with_undecided_columns_stops_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "prepare:\n  mine:\n    model: m\n    path: rows.jsonl\n    split: {validation: 0, test: 0}\n"
        "    undecided:\n    - score  # numbers\n"
    )
    with pytest.raises(UserError, match=r"config\.yaml:\d+: prepare\.mine.*undecided has score"):
        load(path)
