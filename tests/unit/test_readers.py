"""Data files of every kind and compression are read row by row; broken ones are named."""

import csv
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from reading import NESTED, PACKERS, ROWS, TEXTS, read_all, values_of

from zerolora import data as kinds
from zerolora.data import chunking
from zerolora.data.readers import chunks, files_of
from zerolora.data.records import RECORDS, Chunk
from zerolora.errors import UserError

# Every kind, every compression


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", TEXTS)
def test_text_kinds_read_back(tmp_path: Path, kind: str, packing: str) -> None:
    text, lines = TEXTS[kind]
    path = tmp_path / f"rows{kind}{packing}"
    path.write_bytes(PACKERS[packing](text.encode()))
    for rows, size in ((1000, 1 << 20), (7, 1 << 20), (1000, 100), (1, 1)):
        assert read_all(path, rows, size) == [(str(line), row) for line, row in zip(lines, ROWS, strict=True)]


@pytest.mark.parametrize("kind", TEXTS)
def test_chunks_do_not_depend_on_compression(tmp_path: Path, kind: str) -> None:
    cut = []
    for packing, pack in PACKERS.items():
        path = tmp_path / f"rows{kind}{packing}"
        path.write_bytes(pack(TEXTS[kind][0].encode()))
        cut.append([(chunk.first, chunk.data) for chunk in chunks(path, 10, 300)])
    assert len(cut[0]) > 4
    assert all(other == cut[0] for other in cut)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".txt"])
@pytest.mark.parametrize("packing", PACKERS)
def test_progress_sums_to_the_size_on_disk(tmp_path: Path, kind: str, packing: str) -> None:
    text = "text\n" * (kind == ".csv") + "[" * (kind == ".json")
    lines = [json.dumps({"text": os.urandom(40).hex()}) for _ in range(5000)]
    if kind in (".csv", ".txt"):
        lines = [json.loads(line)["text"] for line in lines]
    text += (",\n" if kind == ".json" else "\n").join(lines) + "]" * (kind == ".json")
    path = tmp_path / f"rows{kind}{packing}"
    path.write_bytes(PACKERS[packing](text.encode()))
    taken = [chunk.progress for chunk in chunks(path, size=10_000)]
    assert len(taken) > 20
    assert 0.95 * path.stat().st_size <= sum(taken) <= path.stat().st_size
    assert min(taken) >= 0
    if packing != ".bz2":  # whose blocks are longer than this file
        assert max(taken) < 0.7 * path.stat().st_size


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("packing", PACKERS)
def test_empty_file_has_no_rows(tmp_path: Path, kind: str, packing: str) -> None:
    blank = b"\n\r\n" if kind in (".csv", ".tsv") else b"\n \r\n\t\n"
    for number, data in enumerate((b"", blank, b"\xef\xbb\xbf")):
        path = tmp_path / f"{number}{kind}{packing}"
        path.write_bytes(PACKERS[packing](data))
        assert read_all(path) == []
    nothing = tmp_path / f"nothing{kind}{packing}"
    nothing.write_bytes(b"")
    if packing:  # compressed data is never empty: the file is truncated
        with pytest.raises(UserError, match="cannot be read to its end .it is empty.; fetch or write it again"):
            read_all(nothing)
    else:
        assert read_all(nothing) == []


@pytest.mark.parametrize("kind", TEXTS)
def test_byte_order_mark_is_skipped(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows{kind}"
    path.write_bytes(b"\xef\xbb\xbf" + TEXTS[kind][0].encode())
    for size in (1, 1 << 20):
        assert values_of(path, size=size) == ROWS


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf_16_and_32_are_named(tmp_path: Path, kind: str, encoding: str, mark: str) -> None:
    path = tmp_path / f"rows{kind}"
    path.write_bytes((mark + TEXTS[kind][0]).encode(encoding))
    with pytest.raises(UserError, match=rf"rows{kind}: is {encoding[:6].upper()}; save it as UTF-8"):
        read_all(path)


@pytest.mark.parametrize("kind", TEXTS)
def test_windows_line_ends_read_back(tmp_path: Path, kind: str) -> None:
    text, lines = TEXTS[kind]
    path = tmp_path / f"rows{kind}"
    path.write_bytes(text.replace("\r\n", "\n").replace("\n", "\r\n").encode())
    for size in (1, 50, 1 << 20):
        assert read_all(path, size=size) == [(str(line), row) for line, row in zip(lines, ROWS, strict=True)]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_compressed_file_is_named(tmp_path: Path, kind: str, packing: str) -> None:
    data = PACKERS[packing](TEXTS[kind][0].encode() * (1 if kind == ".json" else 50))
    path = tmp_path / f"rows{kind}{packing}"
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    broken = [data[: len(data) // 2], data[:-1], data[:5], TEXTS[kind][0].encode(), *[flipped] * (packing != ".zst")]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"rows{kind}{packing}: cannot be read.*fetch or write it again"):
            read_all(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv.gz", "rows.parquet", "rows.arrow"):
        with pytest.raises(UserError, match=name):
            read_all(tmp_path / name)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".txt"])
def test_row_may_be_longer_than_a_chunk(tmp_path: Path, kind: str) -> None:
    rows = [{"text": "a"}, {"text": 'x"\\ 大' * 800_000}, {"text": "b"}]
    path = tmp_path / f"rows{kind}"
    if kind == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["text"], *([row["text"]] for row in rows)])
    elif kind == ".txt":
        path.write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if kind == ".jsonl" else f"[{','.join(lines)}]")
    for size in (1 << 20, 1 << 16):
        assert values_of(path, size=size) == rows


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": "' + "x" * 5000, 2),
        ("rows.json", '[{"a": 1},\n{"a": "' + "x" * 5000, 2),
        ("rows.json", '{"a": "' + "x" * 5000, 1),
        ("rows.csv", 'a\nb\n"c' + "x\n" * 5000, 3),
    ],
)
def test_endless_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, line: int
) -> None:
    monkeypatch.setattr(chunking, "LONGEST_ROW", 1000)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}:{line}: a row begins here that is longer than .* MiB"):
        read_all(tmp_path / name, size=100)


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("rows.csv", "a,b\n", "1,2\n"),
        ("rows.json", '[{"a": 1}', ',{"a": 1}]'),
        ("rows.json", '{\n"a": 1}', '{"a": 1}'),
    ],
)
def test_blank_lines_do_not_fill_memory(tmp_path: Path, name: str, begin: str, end: str) -> None:
    (tmp_path / name).write_text(begin + "\n" * 1_000_000 + end)
    tracemalloc.start()
    actual = [record for chunk in chunks(tmp_path / name, size=1000) for record in chunk.records()]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 500_000
    assert actual[-1][0].endswith(str(1_000_001 + begin.count("\n")))
    assert all(isinstance(value, dict) for _, value in actual)


@pytest.mark.parametrize("text", ["[" + "\n" * 5000, "[" + " " * 5000, '[{"a": 1}, ' + " " * 5000])
def test_blanks_count_as_part_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(chunking, "LONGEST_ROW", 1000)
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError, match=r"rows.json:.*: a row begins here that is longer than .* MiB"):
        read_all(tmp_path / "rows.json", size=100)


MEMORY = """
import sys, psutil, numpy, pyarrow.parquet
from pathlib import Path
from zerolora.data.readers import chunks
resident = lambda: psutil.Process().memory_info().rss
before, most, rows = resident(), 0, 0
for chunk in chunks(Path(sys.argv[1])):
    rows += sum(1 for _ in chunk.records())
    most = max(most, resident())
print(rows, most - before)
"""


def _gz_of_100_mb(path: Path) -> int:
    """Write one compressed block repeatedly, which is quick."""
    listed = path.name.startswith("rows.json.")
    lines = [json.dumps({"text": f"{number} " + "word 大 " * 60}) for number in range(2000)]
    block = gzip.compress("".join(f",{line}\n" if listed else f"{line}\n" for line in lines).encode())
    count = 100 * 2**20 // sum(len(line) + 1 for line in lines)
    with path.open("wb") as file:
        file.write(gzip.compress(b"[{}") if listed else b"")
        for _ in range(count):
            file.write(block)
        file.write(gzip.compress(b"]") if listed else b"")
    return 2000 * count + listed


def _parquet_of_120_mb(path: Path) -> int:
    """Write one row group, which a reader might load whole."""
    table = pyarrow.table({"text": [os.urandom(1000).hex() for _ in range(60_000)]})
    parquet.write_table(table, path, row_group_size=10**6, use_dictionary=False)
    assert parquet.ParquetFile(path).num_row_groups == 1
    return table.num_rows


@pytest.mark.parametrize(
    ("name", "write", "limit"),
    [
        ("rows.jsonl.gz", _gz_of_100_mb, 60e6),
        ("rows.json.gz", _gz_of_100_mb, 60e6),
        ("rows.parquet", _parquet_of_120_mb, 80e6),  # 30 MB are Arrow's own from the first row on
    ],
)
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, name: str, write: Callable[[Path], int], limit: float
) -> None:
    expected = write(tmp_path / name)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / name], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    rows, grown = map(int, result.stdout.split())
    assert rows == expected
    assert grown < limit


# Sources


def _names(path: Path) -> list[str]:
    return [str(file.relative_to(path)) for file in files_of(path)]


def test_directory_is_read_in_order(tmp_path: Path) -> None:
    for name in (
        "b.jsonl", "a/2.csv.zst", "a/1.parquet", "c.txt", "a.json",
        "README.md", "README", "LICENSE.txt", "readme.txt", "notes.md", "manifest.json", "dataset_infos.json",
        "b.jsonl.dvc", ".hidden.json", "_SUCCESS", "_old/x.json", ".cache/x.json", "a/manifest.json",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert _names(tmp_path) == ["a/1.parquet", "a/2.csv.zst", "a.json", "b.jsonl", "c.txt"]
    assert _names(tmp_path / "_old") == ["x.json"]
    (tmp_path / "Rows.V2.JSONL.GZ").touch()
    assert files_of(tmp_path / "Rows.V2.JSONL.GZ") == [tmp_path / "Rows.V2.JSONL.GZ"]


@pytest.mark.parametrize("name", ["rows.xlsx", "rows", "rows.parquet.gz", "rows.gz", "rows.jsonl.zip", "jsonl"])
def test_unknown_kinds_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(
            UserError, match=rf"{name}: is not a supported data file; supported types: .json, .jsonl, .*.zst"
        ):
            files_of(source)


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x.json: there is no such file or directory"):
        files_of(tmp_path / "x.json")
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match="contains no data file"):
        files_of(tmp_path)


def test_saved_data_set_is_read_in_its_order(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(NESTED)
    whole.save_to_disk(tmp_path / "set", num_shards=3)
    state = json.loads((tmp_path / "set/state.json").read_text())
    assert [value for file in files_of(tmp_path / "set") for value in values_of(file)] == NESTED

    state["_data_files"].reverse()
    (tmp_path / "set/state.json").write_text(json.dumps(state))
    assert _names(tmp_path / "set") == [f"data-0000{number}-of-00003.arrow" for number in (2, 1, 0)]
    assert len(files_of(tmp_path)) == 3

    (tmp_path / "set/data-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError, match="state.json names data-00001-of-00003.arrow, which is missing"):
        files_of(tmp_path / "set")

    DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "sets")
    with pytest.raises(UserError, match=r"sets: contains the splits train, test; set path: .*/sets/train"):
        files_of(tmp_path / "sets")
    assert len(files_of(tmp_path / "sets/train")) == 1


def test_chunks_know_their_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' * 5)
    actual = list(chunks(path, rows=2))
    assert [(chunk.file, chunk.first, len(list(chunk.records()))) for chunk in actual] == [
        (str(path), 1, 2),
        (str(path), 3, 2),
        (str(path), 5, 1),
    ]
    assert isinstance(actual[0], Chunk)
    assert next(actual[1].records()) == (f"{path}:3", {"a": 1})


@pytest.mark.parametrize("target", ["elsewhere", "."])
def test_linked_folder_is_refused(tmp_path: Path, target: str) -> None:
    """A link to a parent folder could also never be read to its end."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (data / "link").symlink_to(target if target == "." else elsewhere)
    with pytest.raises(UserError, match=r"data/link: is a link to a folder, whose changes DVC would not see"):
        files_of(data)


def test_linked_file_and_linked_path_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "data/rows.jsonl").symlink_to("../rows.jsonl")
    (tmp_path / "link").symlink_to("data")
    assert files_of(tmp_path / "link") == [tmp_path / "link/rows.jsonl"]
    assert len(list(chunks(tmp_path / "link/rows.jsonl"))) == 1


def test_file_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text("{}")
    with pytest.raises(UserError, match="not UTF-8; rename it"):
        files_of(tmp_path)


def test_every_kind_of_file_is_cut_and_read() -> None:
    assert set(chunking.CUTS) == set(kinds.TEXTS)
    # A JSON list is cut into chunks of kind `values`, a file of objects into jsonl.
    assert set(RECORDS) == {*kinds.TEXTS, *kinds.TABLES, "values"} - {"json"}
