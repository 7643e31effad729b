"""Data files come back row by row, whatever their kind, and what is broken in them is named."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from zerolora.data import chunking, kinds
from zerolora.data.example import BadRow
from zerolora.data.readers import chunks, files_of
from zerolora.data.records import RECORDS, Chunk
from zerolora.errors import UserError


def _zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _zstd,
}
ROWS: list[dict[str, Any]] = [{"text": f'row {number}: 大, "quoted"\tand\\more'} for number in range(50)]
# The rows as each kind of text file holds them, and the line each begins on.
TEXTS: dict[str, tuple[str, list[int]]] = {
    ".jsonl": ("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), list(range(1, 51))),
    ".ndjson": ("\n\n".join(map(json.dumps, ROWS)), list(range(1, 101, 2))),
    ".json": (json.dumps(ROWS, indent=1, ensure_ascii=False), [2 + 3 * number for number in range(50)]),
    ".csv": ("text\n" + "".join('"{}"\r\n'.format(row["text"].replace('"', '""')) for row in ROWS), list(range(2, 52))),
    ".tsv": ("text\n" + "".join('"{}"\n'.format(row["text"].replace('"', '""')) for row in ROWS), list(range(2, 52))),
    ".txt": ("\n".join(row["text"] for row in ROWS), list(range(1, 51))),
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=8)
SIZES = st.integers(1, 80)
ROW_COUNTS = st.integers(1, 5)


@contextmanager
def _file(name: str, data: bytes) -> Iterator[Path]:
    """Have a file for a while; hypothesis calls a test many times within one tmp_path."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        yield path


def _read(path: Path, rows: int = 1000, size: int = 1 << 20) -> list[tuple[str, Any]]:
    """Return (place behind the path, value) of all rows, by way of a pickle as between processes."""
    found = []
    for chunk in chunks(path, rows, size):
        records = list(pickle.loads(pickle.dumps(chunk)).records())  # noqa: S301
        assert len(records) <= rows
        found += [(place.removeprefix(str(path)).lstrip(":"), value) for place, value in records]
    return found


def _values(path: Path, rows: int = 1000, size: int = 1 << 20) -> list[Any]:
    return [value for _, value in _read(path, rows, size)]


def _reasons(path: Path) -> dict[str, str]:
    """Return what is wrong with rows, by place."""
    return {place: str(value) for place, value in _read(path) if isinstance(value, BadRow)}


# Every kind, every compression


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", TEXTS)
def test_text_kinds(tmp_path: Path, kind: str, packing: str) -> None:
    text, lines = TEXTS[kind]
    path = tmp_path / f"rows{kind}{packing}"
    path.write_bytes(PACKERS[packing](text.encode()))
    for rows, size in ((1000, 1 << 20), (7, 1 << 20), (1000, 100), (1, 1)):
        assert _read(path, rows, size) == [(str(line), row) for line, row in zip(lines, ROWS, strict=True)]


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
def test_an_empty_file_has_no_rows(tmp_path: Path, kind: str, packing: str) -> None:
    blank = b"\n\r\n" if kind in (".csv", ".tsv") else b"\n \r\n\t\n"
    for number, data in enumerate((b"", blank, b"\xef\xbb\xbf")):
        path = tmp_path / f"{number}{kind}{packing}"
        path.write_bytes(PACKERS[packing](data))
        assert _read(path) == []
    (tmp_path / f"nothing{kind}{packing}").write_bytes(b"")
    assert _read(tmp_path / f"nothing{kind}{packing}") == []


@pytest.mark.parametrize("kind", TEXTS)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows{kind}"
    path.write_bytes(b"\xef\xbb\xbf" + TEXTS[kind][0].encode())
    for size in (1, 1 << 20):
        assert _values(path, size=size) == ROWS


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named(tmp_path: Path, kind: str, encoding: str) -> None:
    path = tmp_path / f"rows{kind}"
    path.write_bytes(("\ufeff" + TEXTS[kind][0]).encode(encoding))
    with pytest.raises(UserError, match=rf"rows{kind}: is UTF-16; save it as UTF-8"):
        _read(path)


@pytest.mark.parametrize("kind", TEXTS)
def test_windows_line_ends(tmp_path: Path, kind: str) -> None:
    text, lines = TEXTS[kind]
    path = tmp_path / f"rows{kind}"
    path.write_bytes(text.replace("\r\n", "\n").replace("\n", "\r\n").encode())
    for size in (1, 50, 1 << 20):
        assert _read(path, size=size) == [(str(line), row) for line, row in zip(lines, ROWS, strict=True)]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, kind: str, packing: str) -> None:
    data = PACKERS[packing](TEXTS[kind][0].encode() * (1 if kind == ".json" else 50))
    path = tmp_path / f"rows{kind}{packing}"
    for length in (len(data) // 2, len(data) - 1, 5):
        path.write_bytes(data[:length])
        with pytest.raises(
            UserError, match=rf"rows{kind}{packing}: cannot be read to its end .*fetch or write it again"
        ):
            _read(path)


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_a_file_that_is_not_compressed_after_all_is_named(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"rows.jsonl{packing}"
    path.write_bytes(TEXTS[".jsonl"][0].encode())
    with pytest.raises(UserError, match=rf"rows.jsonl{packing}: cannot be read"):
        _read(path)


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, packing: str) -> None:
    data = bytearray(PACKERS[packing](TEXTS[".jsonl"][0].encode()))
    data[len(data) // 2] ^= 4
    path = tmp_path / f"rows.jsonl{packing}"
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"rows.jsonl{packing}: cannot be read"):
        _read(path)


def test_a_file_that_has_gone_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv.gz", "rows.parquet", "rows.arrow"):
        with pytest.raises(UserError, match=name):
            _read(tmp_path / name)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".txt"])
def test_a_row_much_longer_than_a_chunk(tmp_path: Path, kind: str) -> None:
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
        assert _values(path, size=size) == rows


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": "' + "x" * 5000, 2),
        ("rows.json", '[{"a": 1},\n{"a": "' + "x" * 5000, 2),
        ("rows.json", '{"a": "' + "x" * 5000, 1),
        ("rows.csv", 'a\nb\n"c' + "x\n" * 5000, 3),
    ],
)
def test_a_row_without_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, line: int
) -> None:
    monkeypatch.setattr(chunking, "LONGEST_ROW", 1000)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}:{line}: a row begins here that is longer than .* MiB"):
        _read(tmp_path / name, size=100)


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("rows.csv", "a,b\n", "1,2\n"),
        ("rows.json", '[{"a": 1}', ',{"a": 1}]'),
        ("rows.json", '{\n"a": 1}', '{"a": 1}'),
    ],
)
def test_blank_lines_do_not_fill_the_memory(tmp_path: Path, name: str, begin: str, end: str) -> None:
    (tmp_path / name).write_text(begin + "\n" * 1_000_000 + end)
    tracemalloc.start()
    found = [record for chunk in chunks(tmp_path / name, size=1000) for record in chunk.records()]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 500_000
    assert found[-1][0].endswith(str(1_000_001 + begin.count("\n")))
    assert all(isinstance(value, dict) for _, value in found)


@pytest.mark.parametrize("text", ["[" + "\n" * 5000, "[" + " " * 5000, '[{"a": 1}, ' + " " * 5000])
def test_blanks_count_as_part_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(chunking, "LONGEST_ROW", 1000)
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError, match=r"rows.json:.*: a row begins here that is longer than .* MiB"):
        _read(tmp_path / "rows.json", size=100)


MEMORY = """
import sys, psutil, numpy, pyarrow.parquet
from pathlib import Path
from zerolora.data.readers import chunks
held = lambda: psutil.Process().memory_info().rss
before, most, rows = held(), 0, 0
for chunk in chunks(Path(sys.argv[1])):
    rows += sum(1 for _ in chunk.records())
    most = max(most, held())
print(rows, most - before)
"""


def _gz_of_200_mb(path: Path) -> int:
    """Write the same compressed block again and again: quick, and as long as any other gzip file."""
    listed = path.name.startswith("rows.json.")
    lines = [json.dumps({"text": f"{number} " + "word 大 " * 60}) for number in range(2000)]
    block = gzip.compress("".join(f",{line}\n" if listed else f"{line}\n" for line in lines).encode())
    count = 200 * 2**20 // sum(len(line) + 1 for line in lines)
    with path.open("wb") as file:
        file.write(gzip.compress(b"[{}") if listed else b"")
        for _ in range(count):
            file.write(block)
        file.write(gzip.compress(b"]") if listed else b"")
    return 2000 * count + listed


def _parquet_of_150_mb(path: Path) -> int:
    """Write one row group, which a reader might take into memory as a whole."""
    table = pyarrow.table({"text": [os.urandom(1000).hex() for _ in range(75_000)]})
    parquet.write_table(table, path, row_group_size=10**6, use_dictionary=False)
    assert parquet.ParquetFile(path).num_row_groups == 1
    return table.num_rows


@pytest.mark.parametrize(
    ("name", "write", "limit"),
    [
        ("rows.jsonl.gz", _gz_of_200_mb, 60e6),
        ("rows.json.gz", _gz_of_200_mb, 60e6),
        ("rows.parquet", _parquet_of_150_mb, 80e6),  # of which 30 MB are Arrow's own from the first row on
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


# JSON lines


@given(OBJECTS, st.data(), SIZES, ROW_COUNTS)
def test_any_lines_read_back(objects: list[dict[str, Any]], data: st.DataObject, size: int, rows: int) -> None:
    text, expected = "", []
    for value in objects:
        text += data.draw(st.sampled_from(["", "\n", "  \r\n"]))
        expected.append((str(1 + text.count("\n")), value))
        text += json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
        expected[-1] = (expected[-1][0], json.loads(text.rpartition("\n")[2]))
        text += data.draw(st.sampled_from(["\n", "\r\n", " \n"]))
    if text and data.draw(st.booleans()):
        text = text.removesuffix("\n")
    with _file("rows.jsonl", text.encode()) as path:
        assert _read(path, rows, size) == expected


def test_broken_lines_spoil_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"a": 1}\n{"a": 2\n{"a": "\xe5\xa4\xa7\xff"}\n\n[1]\n"x"\nnull\n{"a": 3} {}\n'
        b'{"a": "\xe5\xa4"}\n' + b'{"a": ' * 5000 + b'\n{"a": ' + b"1" * 5000 + b'}\n{"a": 4}'
    )
    assert [value for _, value in _read(path) if not isinstance(value, BadRow)] == [{"a": 1}, {"a": 4}]
    reasons = _reasons(path)
    assert list(reasons) == ["2", "3", "5", "6", "7", "8", "9", "10", "11"]
    assert reasons["2"].startswith("is not JSON: Expecting ',' delimiter at character 8; write one object a line")
    assert reasons["3"] == "byte 11 of line 3 (0xff) is not UTF-8; save the file as UTF-8"
    assert reasons["5"].startswith("is a list; write an object, as in")
    assert reasons["6"].startswith("is 'x'; write an object")
    assert reasons["7"].startswith("is None; write an object")
    assert "Extra data at character 10" in reasons["8"]
    assert reasons["9"].startswith("byte 8 of line 9 (0xe5) is not UTF-8")
    assert "recursion" in reasons["10"]
    assert "digits" in reasons["11"]


@given(st.binary(max_size=40), SIZES)
def test_any_bytes_spoil_only_their_own_line(noise: bytes, size: int) -> None:
    noise = noise.replace(b"\n", b"")
    with _file("rows.jsonl", b'{"a": 1}\n' + noise + b'\n{"a": 2}\n') as path:
        found = _read(path, size=size)
    assert (found[0], found[-1]) == (("1", {"a": 1}), ("3", {"a": 2}))
    assert all(place == "2" for place, _ in found[1:-1])


def test_strange_line_separators_are_text(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\x85c\x0bd"}, {"text": "next"}]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    assert _values(tmp_path / "rows.jsonl") == rows
    (tmp_path / "rows.txt").write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
    assert _values(tmp_path / "rows.txt") == rows


def test_lines_of_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"  one \r\n\n \t\ntwo\nthr\xffee\nfour")
    good = [(place, value) for place, value in _read(path) if isinstance(value, dict)]
    assert good == [("1", {"text": "  one "}), ("4", {"text": "two"}), ("6", {"text": "four"})]
    assert _reasons(path) == {"5": "byte 4 of line 5 (0xff) is not UTF-8; save the file as UTF-8"}


# JSON


def _listed(objects: list[Any], data: st.DataObject) -> tuple[str, list[tuple[str, Any]]]:
    """Return objects as a JSON list with white space anywhere, and each with the line it begins on."""
    white = st.sampled_from(["", " ", "\n", "\r\n\t", "\n\n"])
    text, expected = data.draw(white) + "[" + data.draw(white), []
    for number, value in enumerate(objects):
        text += ("," if number else "") + data.draw(white)
        line = 1 + text.count("\n")
        indent, ascii_only = data.draw(st.sampled_from([None, 0, 2])), data.draw(st.booleans())
        text += json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(errors="replace").decode()
        expected.append((str(line), value))
        text += data.draw(white)
    return text + "]" + data.draw(white), expected


@given(OBJECTS, st.data(), SIZES, ROW_COUNTS)
def test_any_list_reads_back(objects: list[dict[str, Any]], data: st.DataObject, size: int, rows: int) -> None:
    text, expected = _listed(objects, data)
    whole = json.loads(text)
    with _file("rows.json", text.encode()) as path:
        found = _read(path, rows, size)
    assert [value for _, value in found] == whole
    assert [place for place, _ in found] == [place for place, _ in expected]


@given(OBJECTS, st.data(), SIZES)
def test_a_list_that_was_cut_off_is_never_taken_for_a_whole_one(
    objects: list[dict[str, Any]], data: st.DataObject, size: int
) -> None:
    text = _listed(objects, data)[0].strip().encode()
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with _file("rows.json", cut) as path, pytest.raises(UserError, match=r"rows.json:\d+: not JSON"):
        _read(path, size=size)


@given(st.lists(st.dictionaries(st.text(), JSON, min_size=1, max_size=3), min_size=1), st.data(), SIZES, ROW_COUNTS)
def test_objects_one_behind_the_other(objects: list[dict[str, Any]], data: st.DataObject, size: int, rows: int) -> None:
    """Pretty-printed objects, or one on each line, in a file that is called .json."""
    indent = data.draw(st.sampled_from([None, 0, 2]))
    texts = [json.dumps(value, indent=indent) for value in objects]
    lines = [1]
    for text in texts:
        lines.append(lines[-1] + text.count("\n") + 1)
    with _file("rows.json", "\n".join(texts).encode()) as path:
        assert _read(path, rows, size) == [(str(line), value) for line, value in zip(lines, objects, strict=False)]


def test_a_json_file_of_lines_bears_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    assert _values(path)[::2] == [{"a": 1}, {"a": 3}]
    assert list(_reasons(path)) == ["2"]
    path.write_text('{"a": "x}\n{"a": 3}\n')
    assert list(_reasons(path)) == ["1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"a": 1},\n{"a": 2},\n{"a": 3 "b": 4},\n{"a": 5}]',
            """:3: not JSON: Expecting ',' delimiter before '"b": 4},'""",
        ),
        ('[{"a": 1}\n{"a": 2}]', """:2: not JSON: Expecting ',' delimiter before '{"a": 2}]'"""),
        ('[{"a": 1},\n]', ":2: not JSON: Expecting value before ']'"),
        ('[{"a": 1}]\n{"b": 2}', """:2: the list ends before '{"b": 2}'"""),
        ('[{"a": 1}]\n]', ":2: the list ends before ']'"),
        ('[{"a": 1}\n', ":2: not JSON: the list is not closed at the end"),
        ("[\n", ":2: not JSON: the list is not closed at the end"),
        ("[,{}]", ":1: not JSON: Expecting value before ',{}]'"),
        ('[{"a": "x\ny"}]', ":1: not JSON: Invalid control character at the end"),
        ('[{"a": 1},\n{"a": "x', """:2: not JSON: Unterminated string before '"x'"""),
        ('[{"a": "\\x"}]', ":1: not JSON: Invalid \\escape"),
        ('[{"a": 大}]', ":1: not JSON: Expecting value before '大}]'"),
        ("[" + '{"a":' * 5000, ":1: not JSON: maximum recursion depth"),
        ('[\n{"a": ' + "1" * 5000 + "}]", ":2: not JSON: Exceeds the limit"),
        ('{\n "a": 1\n}\nx', ":4: not JSON: Expecting value before 'x'"),
        ('{\n "a": 1\n', ":3: not JSON: Expecting ',' delimiter at the end"),
        ("\n\nhello\n", ":3: begins with 'hello'; write a list of objects, or an object a line"),
        ("<html>", ":1: begins with '<html>'; write a list"),
    ],
)
def test_broken_json_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    for size in (20, 33, 1 << 20):
        with pytest.raises(UserError) as caught:
            _read(path, size=size)
        assert str(caught.value).startswith(f"{path}{message}")


def test_a_break_far_from_the_end_is_seen_without_reading_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n{"a" 2},' + '{"a": 3},' * 100_000)
    with pytest.raises(UserError, match=r"rows.json:2: not JSON: Expecting ':' delimiter before '2\},"):
        _read(path, size=100)


def test_elements_that_are_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1},\n5, "x", [1], null, true, -1.5e3,\n{"a": "\xff",\n "b": "\xfe"}, {"a": 2},\n12]')
    for size in (1, 2, 1 << 20):
        found = _read(path, size=size)
        assert [value for _, value in found if isinstance(value, dict)] == [{"a": 1}, {"a": 2}]
        assert [place for place, _ in found] == ["1"] + ["2"] * 6 + ["3", "4", "5"]
        assert str(found[1][1]).startswith("is 5; write an object")
        assert str(found[3][1]).startswith("is a list; write an object")
        assert str(found[7][1]) == "byte 8 of line 3 (0xff) is not UTF-8; save the file as UTF-8"


def test_broken_utf_8_behind_a_line_break_names_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[\n{"a": 1,\n "b": "\xc3\xa4\xff"}]')
    assert _reasons(path) == {"2": "byte 10 of line 3 (0xff) is not UTF-8; save the file as UTF-8"}


# CSV


CELLS = st.text(st.sampled_from('ab大,;"\n\r\t '), max_size=6)


@given(st.data(), st.integers(1, 4), SIZES, ROW_COUNTS, st.sampled_from([",", "\t"]))
def test_any_table_reads_back(data: st.DataObject, width: int, size: int, rows: int, delimiter: str) -> None:
    table = data.draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=6))
    names = [f"column {number}" for number in range(width)]
    text, expected = io.StringIO(), []
    # Python 3.11 does not quote a lone \r.
    quoting: Any = data.draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
    if any("\r" in cell for cells in table for cell in cells):
        quoting = csv.QUOTE_ALL
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end)
    for cells in [names, *table]:
        expected.append((str(1 + text.getvalue().count("\n")), dict(zip(names, cells, strict=True))))
        writer.writerow(cells)
    with _file(f"rows.{'csv' if delimiter == ',' else 'tsv'}", text.getvalue().encode()) as path:
        assert _read(path, rows, size) == expected[1:]


@given(st.text(st.sampled_from('ab大,"\n\r'), max_size=40), SIZES, ROW_COUNTS)
@example('a"b",c\n"d",e\n', 1, 1)
@example('"a" b,c\n"d\ne",f\n', 1, 1)
@example('a,"b\r\n"\r\n\r\nc\rd\ne', 1, 1)
def test_any_text_is_read_as_the_csv_module_reads_it(text: str, size: int, rows: int) -> None:
    """Wherever it is cut, and whether or not it is well formed."""
    expected: list[tuple[str, Any]] = []
    reader = csv.reader(io.StringIO(text, newline="\n"), strict=True)
    line, unclosed = 2, False
    while True:
        try:
            cells: Any = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            unclosed = "unexpected end" in str(error)
            cells = BadRow()
        if cells:
            good = isinstance(cells, list) and len(cells) == 2
            expected.append((str(line), dict(zip("xy", cells, strict=True)) if good else None))
        line = 2 + reader.line_num
    with _file("rows.csv", b"x,y\n" + text.encode()) as path:
        if unclosed:
            with pytest.raises(UserError, match=r"rows.csv:\d+: a quote is opened and never closed before "):
                _read(path, rows, size)
        else:
            found = _read(path, rows, size)
            assert [(place, None if isinstance(value, BadRow) else value) for place, value in found] == expected


def test_lines_are_counted_through_quoted_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n"1\n2\n3",x\n\ny,"z\r\n"\r\nlast,row')
    assert _read(path) == [
        ("2", {"a": "1\n2\n3", "b": "x"}),
        ("6", {"a": "y", "b": "z\r\n"}),
        ("8", {"a": "last", "b": "row"}),
    ]


def test_broken_records_spoil_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b'a,b\n1,2\n1\n1,2,3\n"x" y,2\n5" disk,6\n\xe5\xa4\xa7\xff,2\n"p\nq\xfe",2\n'
        b'"x\ny" z,2\n  \na\rb,2\n[1],"[""x""]"\n'
    )
    good = [value for _, value in _read(path) if isinstance(value, dict)]
    assert good == [{"a": "1", "b": "2"}, {"a": '5" disk', "b": "6"}, {"a": "[1]", "b": '["x"]'}]
    reasons = _reasons(path)
    assert list(reasons) == ["3", "4", "5", "7", "8", "10", "12", "13"]
    assert reasons["3"].startswith("has 1 columns where the header has 2; quote cells")
    assert reasons["4"].startswith("has 3 columns where the header has 2")
    assert reasons["5"].startswith("is not CSV (lines 5 to 5: ',' expected after '\"'); put such a cell in quotes")
    assert reasons["7"] == "byte 4 of line 7 (0xff) is not UTF-8; save the file as UTF-8"
    assert reasons["8"] == "byte 2 of line 9 (0xfe) is not UTF-8; save the file as UTF-8"
    assert reasons["10"].startswith("is not CSV (lines 10 to 11: ")
    assert "new-line character seen in unquoted field" in reasons["13"]


def test_cells_may_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a\n" + "x" * 500_000 + "\n")
    assert len(_values(path)[0]["a"]) == 500_000  # the csv module's own limit is 131,072


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,,c", ":1: column 2 has no name; the first line must name every column"),
        (",a", ":1: column 1 has no name"),
        ('a,"  "', ":1: column 2 has no name"),
        ("\na,b,a", ":2: two columns are called 'a'; rename one"),
        ('"a" b,c', ":1: the header is not CSV"),
        ('"a', ":1: a quote is opened and never closed"),
    ],
)
def test_a_header_names_each_column_once(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(header + "\n1,2,3\n")
    with pytest.raises(UserError) as caught:
        _read(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_header_of_many_columns_is_checked_in_no_time(tmp_path: Path) -> None:
    wide = 50_000
    (tmp_path / "rows.csv").write_text(",".join(f"c{number}" for number in range(wide)) + "\n" + "1," * wide + "\n")
    began = time.process_time()
    ((_, value),) = _read(tmp_path / "rows.csv")
    assert "columns where the header has" in str(value)
    assert time.process_time() - began < 5


def test_a_header_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a,\xff\n1,2\n")
    with pytest.raises(UserError, match=r"rows.csv:1: the header byte 3 of line 1 \(0xff\) is not UTF-8"):
        _read(tmp_path / "rows.csv")


def test_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    for text in ("a,b", "a,b\n", "\n\na,b\n\n"):
        (tmp_path / "rows.csv").write_text(text)
        assert _read(tmp_path / "rows.csv") == []


# Tables


def _table(rows: list[dict[str, Any]]) -> Any:
    return pyarrow.Table.from_pylist(rows)


def _write_table(path: Path, table: Any, form: str, batch: int) -> None:
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=batch)
        return
    opened = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


FORMS = [("parquet", "rows.parquet"), ("stream", "rows.arrow"), ("file", "rows.arrow")]
NESTED = [
    {"text": f"{number} 大", "messages": [{"role": "user", "content": "x" * number}] * (number % 3), "n": number}
    for number in range(300)
]


@pytest.mark.parametrize(("form", "name"), FORMS)
@pytest.mark.parametrize("batch", [7, 300])
def test_tables(tmp_path: Path, form: str, name: str, batch: int) -> None:
    path = tmp_path / name
    _write_table(path, _table(NESTED), form, batch)
    expected = [(f" row {number}", row) for number, row in enumerate(NESTED, 1)]
    for rows, size in ((1000, 1 << 20), (10, 1 << 20), (1000, 500), (1, 1)):
        assert [(f" {place.lstrip()}", value) for place, value in _read(path, rows, size)] == expected
    assert sum(chunk.progress for chunk in chunks(path, 10)) == pytest.approx(path.stat().st_size, rel=0.05)
    assert next(next(chunks(path)).records())[0] == f"{path}: row 1"


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_a_chunk_of_a_table_holds_its_own_rows_only(tmp_path: Path, form: str, name: str) -> None:
    _write_table(tmp_path / name, _table([{"text": "x" * 1000}] * 2000), form, 2000)
    sizes = [len(chunk.data) for chunk in chunks(tmp_path / name, 10)]
    assert len(sizes) == 200
    assert max(sizes) < 15_000


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_a_table_without_rows(tmp_path: Path, form: str, name: str) -> None:
    _write_table(tmp_path / name, _table(NESTED).slice(0, 0), form, 10)
    assert _read(tmp_path / name) == []


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_dictionaries_are_read_as_their_values(tmp_path: Path, form: str, name: str) -> None:
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    _write_table(tmp_path / name, table, form, 2)
    assert _values(tmp_path / name, 1) == [{"text": "a"}, {"text": "b"}, {"text": "a"}]


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_a_truncated_table_is_named(tmp_path: Path, form: str, name: str) -> None:
    path = tmp_path / name
    _write_table(path, _table(NESTED), form, 100)
    data = path.read_bytes()
    kind = "Parquet" if form == "parquet" else "Arrow"
    for length in [0, 1, 3, 8, *range(10, len(data), len(data) // 40), len(data) - 8, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=rf"{name}: is not a whole {kind} file .*fetch or write it again"):
            _read(path)


def test_an_arrow_stream_cut_between_two_batches_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    _write_table(path, _table(NESTED), "stream", 100)
    reader = pyarrow.ipc.open_stream(source := pyarrow.OSFile(str(path)))
    reader.read_next_batch()
    path.write_bytes(path.read_bytes()[: source.tell()])
    with pytest.raises(UserError, match="is not a whole Arrow file .its end mark is missing"):
        _read(path)


@pytest.mark.parametrize("form", ["stream", "file"])
def test_offsets_that_point_outside_are_named(tmp_path: Path, form: str) -> None:
    """Arrow follows them into memory that is not its own."""
    path = tmp_path / "rows.arrow"
    _write_table(path, pyarrow.table({"text": ["abcd", "efgh", "ijkl"]}), form, 3)
    data = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 4, 8, 12))
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, offsets[:4] + (2**30).to_bytes(4, "little") + offsets[8:]))
    with pytest.raises(UserError, match="is not a whole Arrow file"):
        _read(path)


def test_flipped_bytes_in_parquet_pages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(_table(NESTED), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(byte ^ 0xFF for byte in data[4:200])
    path.write_bytes(data)
    with pytest.raises(UserError, match="rows.parquet: is not a whole Parquet file"):
        _read(path)


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_broken_utf_8_in_a_table_spoils_only_its_row(tmp_path: Path, form: str, name: str) -> None:
    texts = pyarrow.array([b"good", b"b\xff\xfed", b"fine"])
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    _write_table(tmp_path / name, pyarrow.table({"text": broken}), form, 3)
    found = _read(tmp_path / name)
    assert found[0][1] == {"text": "good"}
    assert found[2][1] == {"text": "fine"}
    assert "can't decode byte 0xff" in str(found[1][1])


FUZZ = """
import random, sys
from pathlib import Path
from zerolora.data import tables
from zerolora.data.readers import chunks
from zerolora.errors import UserError
good, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
for seed in range(400):
    draw = random.Random(seed)
    data = bytearray(good)
    for _ in range(draw.choice([1, 2, 5])):
        place = draw.randrange(len(data) - 4) & ~3
        data[place : place + 4] = draw.choice([b"\\xff\\xff\\xff\\x7f", b"\\0\\0\\0\\x80", draw.randbytes(4)])
    path.write_bytes(data)
    try:
        for chunk in chunks(path):
            list(chunk.records())
    except UserError:
        pass
"""


def test_a_malformed_arrow_file_ends_no_process(tmp_path: Path) -> None:
    rows = [
        {
            "instruction": f"q{number}" * (number % 5),
            "output": None if number % 3 else "é",
            "list": ["a"] * (number % 3),
        }
        for number in range(40)
    ]
    table = pyarrow.Table.from_pylist(rows)
    table = table.append_column("kind", pyarrow.array(["x", "y"] * 20).dictionary_encode())
    with pyarrow.OSFile(str(tmp_path / "good.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=15)
    arguments = [sys.executable, "-c", FUZZ, str(tmp_path / "good.arrow"), str(tmp_path / "rows.arrow")]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_column_whose_name_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    table = pyarrow.table({"instruction": ["a"], "größe": ["b"]})
    sink = io.BytesIO()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "rows.arrow").write_bytes(sink.getvalue().replace("ö".encode(), b"\xff\xfe"))
    with pytest.raises(UserError, match=r"rows.arrow: is not a whole Arrow file \(.*can't decode byte 0xff"):
        _read(tmp_path / "rows.arrow")


def test_a_value_is_decoded_at_any_depth_of_the_stack(tmp_path: Path) -> None:
    """Workers decode what the process that cuts files has decoded already, on a stack of another depth."""
    (tmp_path / "rows.json").write_text(f'[{{"a": {"[" * 600}{"]" * 600}}}, {{"b": 1}}]')
    found = list(chunks(tmp_path / "rows.json"))

    def deeper(levels: int) -> list[Any]:
        return deeper(levels - 1) if levels else [value for chunk in found for _, value in chunk.records()]

    assert [list(value) for value in deeper(400)] == [["a"], ["b"]]


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_two_columns_of_one_name(tmp_path: Path, form: str, name: str) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    _write_table(tmp_path / name, table, form, 1)
    with pytest.raises(UserError, match=f"{name}: two columns are called 'a'; rename one"):
        _read(tmp_path / name)


# Sources


def _names(path: Path) -> list[str]:
    return [str(file.relative_to(path)) for file in files_of(path)]


def test_a_file_is_its_own_source(tmp_path: Path) -> None:
    path = tmp_path / "Rows.V2.JSONL.GZ"
    path.touch()
    assert files_of(path) == [path]


def test_a_directory_holds_all_data_below_it_in_order(tmp_path: Path) -> None:
    for name in (
        "b.jsonl", "a/2.csv.zst", "a/1.parquet", "c.txt", "a.json",
        "README.md", "README", "LICENSE.txt", "readme.txt", "notes.md", "manifest.json", "dataset_infos.json",
        "b.jsonl.dvc", ".hidden.json", "_SUCCESS", "_old/x.json", ".cache/x.json", "a/manifest.json",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert _names(tmp_path) == ["a/1.parquet", "a/2.csv.zst", "a.json", "b.jsonl", "c.txt"]


def test_a_hidden_directory_that_is_named_is_read(tmp_path: Path) -> None:
    (tmp_path / "_data").mkdir()
    (tmp_path / "_data/x.json").touch()
    assert _names(tmp_path / "_data") == ["x.json"]


@pytest.mark.parametrize("name", ["rows.xlsx", "rows", "rows.parquet.gz", "rows.gz", "rows.jsonl.zip", "jsonl"])
def test_unknown_kinds_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(
            UserError, match=rf"{name}: is of no kind that can be read; those are .json, .jsonl, .*.zst"
        ):
            files_of(source)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x.json: there is no such file or directory"):
        files_of(tmp_path / "x.json")
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match="holds no data file"):
        files_of(tmp_path)


def test_a_saved_data_set_is_read_in_its_own_order(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(NESTED)
    whole.save_to_disk(tmp_path / "set", num_shards=3)
    state = json.loads((tmp_path / "set/state.json").read_text())
    assert [value for file in files_of(tmp_path / "set") for value in _values(file)] == NESTED

    state["_data_files"].reverse()
    (tmp_path / "set/state.json").write_text(json.dumps(state))
    assert _names(tmp_path / "set") == [f"data-0000{number}-of-00003.arrow" for number in (2, 1, 0)]
    assert len(files_of(tmp_path)) == 3

    (tmp_path / "set/data-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError, match="state.json names data-00001-of-00003.arrow, which is not there"):
        files_of(tmp_path / "set")

    DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "sets")
    with pytest.raises(UserError, match=r"sets: holds the splits train, test; write path: .*/sets/train"):
        files_of(tmp_path / "sets")
    assert len(files_of(tmp_path / "sets/train")) == 1


def test_a_chunk_says_where_it_is_from(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' * 5)
    found = list(chunks(path, rows=2))
    assert [(chunk.file, chunk.first, len(list(chunk.records()))) for chunk in found] == [
        (str(path), 1, 2),
        (str(path), 3, 2),
        (str(path), 5, 1),
    ]
    assert isinstance(found[0], Chunk)
    assert next(found[1].records()) == (f"{path}:3", {"a": 1})


@pytest.mark.parametrize("target", ["elsewhere", "."])
def test_a_linked_folder_is_refused_as_dvc_does_not_look_into_it(tmp_path: Path, target: str) -> None:
    """One that leads to a folder above itself could not be read to an end either."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (data / "link").symlink_to(target if target == "." else elsewhere)
    with pytest.raises(UserError, match=r"data/link: is a link to a folder, whose changes DVC would not see"):
        files_of(data)


def test_a_linked_file_and_a_path_that_is_a_link_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "data/rows.jsonl").symlink_to("../rows.jsonl")
    (tmp_path / "link").symlink_to("data")
    assert files_of(tmp_path / "link") == [tmp_path / "link/rows.jsonl"]
    assert len(list(chunks(tmp_path / "link/rows.jsonl"))) == 1


def test_a_data_file_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text("{}")
    with pytest.raises(UserError, match="not UTF-8; rename it"):
        files_of(tmp_path)


TEXT_TYPES = [
    pyarrow.string(),
    pyarrow.large_string(),
    pyarrow.list_(pyarrow.string()),
    pyarrow.large_list(pyarrow.large_string()),
    pyarrow.list_(pyarrow.string(), 1),
    pyarrow.struct([("a", pyarrow.list_(pyarrow.struct([("b", pyarrow.string())])))]),
    pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.string())),
    pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
    pyarrow.string_view(),
    pyarrow.null(),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=map(str, TEXT_TYPES))
def test_arrow_columns_of_any_kind_of_text_are_read(tmp_path: Path, kind: Any) -> None:
    values: Any = "one"
    if pyarrow.types.is_null(kind):
        values = None
    elif pyarrow.types.is_struct(kind):
        values = {"a": [{"b": "one"}, {"b": None}]}
    elif pyarrow.types.is_map(kind):
        values = [("key", ["one"])]
    elif pyarrow.types.is_nested(kind):
        values = ["one"]
    table = pyarrow.table({"text": pyarrow.array([values, values, None], kind)})
    with pyarrow.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    rows = [row for chunk in chunks(tmp_path / "x.arrow") for _, row in chunk.records()]
    assert rows == [{"text": values}, {"text": values}, {"text": None}]


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [text], lambda text: {"a": [text]}])
def test_a_text_in_arrow_that_is_not_utf8_spoils_its_row_only(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    binary = pyarrow.array([wrap(b"caf\xe9"), wrap(b"good")])
    texts = {pyarrow.binary(): pyarrow.string()}

    def as_text(type_: Any) -> Any:
        if pyarrow.types.is_list(type_):
            return pyarrow.list_(as_text(type_.value_type))
        if pyarrow.types.is_struct(type_):
            return pyarrow.struct([(field.name, as_text(field.type)) for field in type_])
        return texts[type_]

    table = pyarrow.table({"text": binary.view(as_text(binary.type))})
    with pyarrow.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    bad, good = (row for chunk in chunks(tmp_path / "x.arrow") for _, row in chunk.records())
    assert isinstance(bad, BadRow) and good == {"text": wrap("good")}


def test_every_kind_of_file_is_cut_and_read() -> None:
    assert set(chunking.CUTS) == set(kinds.TEXTS)
    # A JSON list is cut into chunks of another kind, `values`, and a file of objects into jsonl.
    assert set(RECORDS) == {*kinds.TEXTS, *kinds.TABLES, "values"} - {"json"}
