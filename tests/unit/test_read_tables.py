"""Parquet and Arrow files are read row by row; damage is named."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from reading import NESTED, read_all, values_of

from zerolora.data.example import BadRow
from zerolora.data.readers import chunks
from zerolora.errors import UserError


def write(path: Path, table: Any, form: str, batch: int) -> None:
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=batch)
        return
    opened = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


FORMS = [("parquet", "rows.parquet"), ("stream", "rows.arrow"), ("file", "rows.arrow")]


@pytest.mark.parametrize(("form", "name"), FORMS)
@pytest.mark.parametrize("batch", [7, 300])
def test_tables_read_back(tmp_path: Path, form: str, name: str, batch: int) -> None:
    path = tmp_path / name
    write(path, pyarrow.Table.from_pylist(NESTED), form, batch)
    expected = [(f" row {number}", row) for number, row in enumerate(NESTED, 1)]
    for rows, size in ((1000, 1 << 20), (10, 1 << 20), (1000, 500), (1, 1)):
        assert [(f" {place.lstrip()}", value) for place, value in read_all(path, rows, size)] == expected
    assert sum(chunk.progress for chunk in chunks(path, 10)) == pytest.approx(path.stat().st_size, rel=0.05)
    assert next(next(chunks(path)).records())[0] == f"{path}: row 1"


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_chunk_of_a_table_contains_only_its_rows(tmp_path: Path, form: str, name: str) -> None:
    write(tmp_path / name, pyarrow.Table.from_pylist([{"text": "x" * 1000}] * 2000), form, 2000)
    sizes = [len(chunk.data) for chunk in chunks(tmp_path / name, 10)]
    assert len(sizes) == 200
    assert max(sizes) < 15_000


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_table_may_have_no_rows(tmp_path: Path, form: str, name: str) -> None:
    write(tmp_path / name, pyarrow.Table.from_pylist(NESTED).slice(0, 0), form, 10)
    assert read_all(tmp_path / name) == []


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_truncated_table_is_named(tmp_path: Path, form: str, name: str) -> None:
    path = tmp_path / name
    write(path, pyarrow.Table.from_pylist(NESTED), form, 100)
    data = path.read_bytes()
    kind = "Parquet" if form == "parquet" else "Arrow"
    for length in [0, 1, 3, 8, *range(10, len(data), len(data) // 40), len(data) - 8, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=rf"{name}: is not a whole {kind} file .*fetch or write it again"):
            read_all(path)


def test_arrow_stream_cut_between_batches_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write(path, pyarrow.Table.from_pylist(NESTED), "stream", 100)
    reader = pyarrow.ipc.open_stream(source := pyarrow.OSFile(str(path)))
    reader.read_next_batch()
    path.write_bytes(path.read_bytes()[: source.tell()])
    with pytest.raises(UserError, match="is not a whole Arrow file .its end mark is missing"):
        read_all(path)


@pytest.mark.parametrize("form", ["stream", "file"])
def test_offsets_out_of_bounds_are_named(tmp_path: Path, form: str) -> None:
    """Arrow would follow them into other memory."""
    path = tmp_path / "rows.arrow"
    write(path, pyarrow.table({"text": ["abcd", "efgh", "ijkl"]}), form, 3)
    data = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 4, 8, 12))
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, offsets[:4] + (2**30).to_bytes(4, "little") + offsets[8:]))
    with pytest.raises(UserError, match="is not a whole Arrow file"):
        read_all(path)


def test_flipped_bytes_in_parquet_pages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(NESTED), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(byte ^ 0xFF for byte in data[4:200])
    path.write_bytes(data)
    with pytest.raises(UserError, match="rows.parquet: is not a whole Parquet file"):
        read_all(path)


FUZZ = """
import random, sys
from pathlib import Path
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


def test_malformed_arrow_file_crashes_no_process(tmp_path: Path) -> None:
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
    write(tmp_path / "good.arrow", table, "file", 15)
    arguments = [sys.executable, "-c", FUZZ, str(tmp_path / "good.arrow"), str(tmp_path / "rows.arrow")]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_column_name_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write(path, pyarrow.table({"instruction": ["a"], "größe": ["b"]}), "file", 1)
    path.write_bytes(path.read_bytes().replace("ö".encode(), b"\xff\xfe"))
    with pytest.raises(UserError, match=r"rows.arrow: is not a whole Arrow file \(.*can't decode byte 0xff"):
        read_all(path)


def test_rows_decode_at_any_stack_depth(tmp_path: Path) -> None:
    """Workers decode rows on a deeper or shallower stack than the process that cuts the file."""
    (tmp_path / "rows.json").write_text(f'[{{"a": {"[" * 600}{"]" * 600}}}, {{"b": 1}}]')
    result = list(chunks(tmp_path / "rows.json"))

    def deeper(levels: int) -> list[Any]:
        return deeper(levels - 1) if levels else [value for chunk in result for _, value in chunk.records()]

    assert [list(value) for value in deeper(400)] == [["a"], ["b"]]


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_duplicate_columns_are_named(tmp_path: Path, form: str, name: str) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    write(tmp_path / name, table, form, 1)
    with pytest.raises(UserError, match=f"{name}: two columns are called 'a'; rename one"):
        read_all(tmp_path / name)


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
def test_columns_of_any_text_type_are_read(tmp_path: Path, kind: Any) -> None:
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
    for form, name in FORMS:
        write(tmp_path / name, table, form, 2)
        assert values_of(tmp_path / name) == [{"text": values}, {"text": values}, {"text": None}]


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [text], lambda text: {"a": [text]}])
def test_text_that_is_not_utf_8_spoils_only_its_row(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    binary = pyarrow.array([wrap(b"fine"), wrap(b"caf\xe9"), wrap(b"good")])
    texts = {pyarrow.binary(): pyarrow.string()}

    def as_text(type_: Any) -> Any:
        if pyarrow.types.is_list(type_):
            return pyarrow.list_(as_text(type_.value_type))
        if pyarrow.types.is_struct(type_):
            return pyarrow.struct([(field.name, as_text(field.type)) for field in type_])
        return texts[type_]

    table = pyarrow.table({"text": binary.view(as_text(binary.type))})
    for form, name in FORMS:
        write(tmp_path / name, table, form, 3)
        first, bad, good = values_of(tmp_path / name)
        assert (first, good) == ({"text": wrap("fine")}, {"text": wrap("good")})
        assert isinstance(bad, BadRow) and "can't decode byte 0xe9" in str(bad)


def test_nan_column_is_absent(tmp_path: Path) -> None:
    table = pyarrow.table({"a": pyarrow.array([float("nan"), 1.5]), "b": ["x", "y"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert values_of(tmp_path / "rows.parquet") == [{"a": None, "b": "x"}, {"a": 1.5, "b": "y"}]


JSON = pyarrow.json_()


def _nested(texts: list[bytes | None]) -> dict[str, Any]:
    """Return arrays with JSON as a column, in a struct, in a list of structs, and in a map."""
    raw = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), pyarrow.array(texts, pyarrow.binary()).buffers())
    column = pyarrow.ExtensionArray.from_storage(JSON, raw)
    struct = pyarrow.StructArray.from_arrays([column, pyarrow.array(["x"] * len(texts))], ["a", "b"])
    offsets = list(range(len(texts) + 1))
    keys = pyarrow.array(["k"] * len(texts))
    return {
        "column": column,
        "struct": struct,
        "list": pyarrow.ListArray.from_arrays(offsets, struct),
        "map": pyarrow.MapArray.from_arrays(offsets, keys, column),
    }


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_json_in_a_table_reads_back(tmp_path: Path, form: str, name: str) -> None:
    """As `datasets` writes objects whose keys differ by row."""
    for text, decoded in (
        (b'{"a": {"b": null}, "c": [1]}', {"a": {"b": None}, "c": [1]}),
        (b'"x"', "x"),
        (b"null", None),
    ):
        write(tmp_path / name, pyarrow.table(_nested([text, None])), form, 2)
        both = [
            {"column": value, "struct": {"a": value, "b": "x"}, "list": [{"a": value, "b": "x"}], "map": [("k", value)]}
            for value in (decoded, None)
        ]
        assert values_of(tmp_path / name) == both


@pytest.mark.parametrize(("form", "name"), FORMS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "holds '{' as JSON, which it is not: Expecting property name enclosed in double quotes at character 2"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice in one object, of which one value would be lost; remove one"),
        (b"[" * 100_000, "holds JSON that cannot be read: "),
        (b'"\xff"', "can't decode byte 0xff"),
    ],
    ids=["no JSON", "twice", "deep", "UTF-8"],
)
def test_broken_json_in_a_table_spoils_only_its_row(
    tmp_path: Path, form: str, name: str, text: bytes, said: str
) -> None:
    for column, array in _nested([text, b"1"]).items():
        write(tmp_path / name, pyarrow.table({column: array}), form, 2)
        bad, good = values_of(tmp_path / name)
        assert isinstance(bad, BadRow) and said in str(bad) and "\n" not in str(bad)
        assert isinstance(good, dict)
