"""Lines, lists and tables of text read back, however they are chunked; broken ones are named."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import JSON, OBJECTS, ROW_COUNTS, SIZES, file_of, read_all, reasons_of, values_of

from zerolora.data.example import BadRow
from zerolora.errors import UserError

# JSON lines


@given(OBJECTS, st.data(), SIZES, ROW_COUNTS)
@settings(max_examples=50)
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
    with file_of("rows.jsonl", text.encode()) as path:
        assert read_all(path, rows, size) == expected


def test_broken_lines_spoil_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"a": 1}\n{"a": 2\n{"a": "\xe5\xa4\xa7\xff"}\n\n[1]\n"x"\nnull\n{"a": 3} {}\n'
        b'{"a": "\xe5\xa4"}\n' + b'{"a": ' * 5000 + b'\n{"a": ' + b"1" * 5000 + b'}\n{"a": 4}'
    )
    assert [value for _, value in read_all(path) if not isinstance(value, BadRow)] == [{"a": 1}, {"a": 4}]
    reasons = reasons_of(path)
    assert list(reasons) == ["2", "3", "5", "6", "7", "8", "9", "10", "11"]
    assert reasons["2"].startswith("is not JSON: Expecting ',' delimiter at character 8; write one object a line")
    assert reasons["3"] == "byte 11 of line 3 (0xff) is not UTF-8; save the file as UTF-8"
    assert reasons["5"].startswith("is a list; write an object, as in")
    assert reasons["6"].startswith("is 'x'; write an object")
    assert reasons["7"].startswith("is None; write an object")
    assert "Extra data at character 10" in reasons["8"]
    assert reasons["9"].startswith("byte 8 of line 9 (0xe5) is not UTF-8")
    assert "nested too deep" in reasons["10"]
    assert "digits" in reasons["11"]


LINES: list[tuple[str, str]] = [
    ('{"a": 1}\r{"a": 2}\r', "has carriage returns as line ends, as of old Macs; convert them to line feeds"),
    (
        '{"a": ' + "9" * 6000 + "}",
        "is not JSON that can be read: a number has more than 4,300 digits; fix or remove it",
    ),
    ('{"a": 1},', "ends with a comma, but a line holds one object alone; remove it, or make the file a list"),
    ('{"a": "\t"}', "is not JSON: Invalid control character at character 8; write one object a line"),
    ('{"a": "x', "is not JSON: Unterminated string at character 7; write one object a line"),
    ('{"a": 1, "a": 2}', "has the key 'a' twice in one object, of which one value would be lost; remove one"),
    ('{"b": [{"c": 1, "a": 2, "a": 2}]}', "has the key 'a' twice in one object"),
    ('[{"a": 1}, {"a": 2}]', "is a list; write an object, as in"),
]


def test_text_with_carriage_returns_alone_is_no_single_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"one\rtwo\rthree\r")
    assert reasons_of(path) == {"1": "has carriage returns as line ends, as of old Macs; convert them to line feeds"}
    path.write_bytes(b"one\r\ntwo\rthree\n")
    assert values_of(path) == [{"text": "one"}, {"text": "two\rthree"}]


@pytest.mark.parametrize(("line", "said"), LINES)
def test_broken_line_says_what_to_write(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{line}\n{{"a": 3}}\n')
    assert values_of(path)[1] == {"a": 3}
    assert reasons_of(path)["1"].startswith(said)


@pytest.mark.parametrize("text", ['[{"a": 1, "a": 2},\n{"a": 3}]', '{\n"a": 1, "a": 2}\n{"a": 3}'])
def test_duplicate_key_is_a_bad_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    for size in (1, 1 << 20):
        actual = read_all(path, size=size)
        assert str(actual[0][1]).startswith("has the key 'a' twice in one object")
        assert actual[1][1] == {"a": 3}


@pytest.mark.parametrize(
    "text", ['[\n {"a": 1},\n {"a": 2}\n]\n', '\n[{"a": 1},\n{"a": 2}]', '[{"a": 1}\n,{"a": 2}]', "[", "[\n]"]
)
@pytest.mark.parametrize("kind", ["jsonl", "ndjson"])
def test_list_in_a_file_of_lines_is_one_error(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_text(text)
    line = 2 if text.startswith("\n") else 1
    for size in (1, 5, 1 << 20):
        with pytest.raises(UserError, match=rf"rows.{kind}:{line}: begins a list, but a .{kind} file .*call it .json"):
            read_all(path, size=size)


def test_nan_column_is_absent(tmp_path: Path) -> None:
    """As pandas' to_dict and json.dumps write a missing text. Only columns are affected."""
    rows = [{"a": float("nan"), "b": "NaN", "c": 1.5}, {"a": "x", "b": {"d": float("nan")}, "c": float("inf")}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name in ("rows.jsonl", "rows.json"):
        first, second = values_of(tmp_path / name)
        assert first == {"a": None, "b": "NaN", "c": 1.5}
        assert second["b"]["d"] != second["b"]["d"] and second["c"] == float("inf")


def test_index_of_pandas_is_a_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for header, name in ((",a,b", "Unnamed: 0"), (",a,Unnamed: 0", "Unnamed: 0.1"), (",a", "Unnamed: 0")):
        path.write_text(f"{header}\n" + "7,x,y\n"[: 2 * (header.count(",") + 1) - 1] + "\n")
        (row,) = values_of(path)
        assert (next(iter(row)), row[name], row["a"]) == (name, "7", "x")


@given(st.binary(max_size=40), SIZES)
def test_any_bytes_spoil_only_their_line(noise: bytes, size: int) -> None:
    noise = noise.replace(b"\n", b"")
    with file_of("rows.jsonl", b'{"a": 1}\n' + noise + b'\n{"a": 2}\n') as path:
        actual = read_all(path, size=size)
    assert (actual[0], actual[-1]) == (("1", {"a": 1}), ("3", {"a": 2}))
    assert all(place == "2" for place, _ in actual[1:-1])


def test_other_line_separators_are_text(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\x85c\x0bd"}, {"text": "next"}]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    assert values_of(tmp_path / "rows.jsonl") == rows
    (tmp_path / "rows.txt").write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
    assert values_of(tmp_path / "rows.txt") == rows


def test_lines_of_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"  one \r\n\n \t\ntwo\nthr\xffee\nfour")
    good = [(place, value) for place, value in read_all(path) if isinstance(value, dict)]
    assert good == [("1", {"text": "  one "}), ("4", {"text": "two"}), ("6", {"text": "four"})]
    assert reasons_of(path) == {"5": "byte 4 of line 5 (0xff) is not UTF-8; save the file as UTF-8"}


# JSON


def _listed(objects: list[Any], data: st.DataObject) -> tuple[str, list[tuple[str, Any]]]:
    """Return objects as a JSON list with white space anywhere, and each with its first line."""
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
@settings(max_examples=50)
def test_any_list_reads_back(objects: list[dict[str, Any]], data: st.DataObject, size: int, rows: int) -> None:
    text, expected = _listed(objects, data)
    whole = json.loads(text)
    with file_of("rows.json", text.encode()) as path:
        actual = read_all(path, rows, size)
    assert [value for _, value in actual] == whole
    assert [place for place, _ in actual] == [place for place, _ in expected]


@given(OBJECTS, st.data(), SIZES)
@settings(max_examples=50)
def test_truncated_list_is_refused(objects: list[dict[str, Any]], data: st.DataObject, size: int) -> None:
    text = _listed(objects, data)[0].strip().encode()
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with file_of("rows.json", cut) as path, pytest.raises(UserError, match=r"rows.json:\d+: not JSON"):
        read_all(path, size=size)


@given(st.lists(st.dictionaries(st.text(), JSON, min_size=1, max_size=3), min_size=1), st.data(), SIZES, ROW_COUNTS)
@settings(max_examples=50)
def test_objects_without_a_list_read_back(
    objects: list[dict[str, Any]], data: st.DataObject, size: int, rows: int
) -> None:
    """Pretty-printed or one a line, in a .json file."""
    indent = data.draw(st.sampled_from([None, 0, 2]))
    texts = [json.dumps(value, indent=indent) for value in objects]
    lines = [1]
    for text in texts:
        lines.append(lines[-1] + text.count("\n") + 1)
    with file_of("rows.json", "\n".join(texts).encode()) as path:
        assert read_all(path, rows, size) == [(str(line), value) for line, value in zip(lines, objects, strict=False)]


def test_json_file_of_lines_may_have_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    assert values_of(path)[::2] == [{"a": 1}, {"a": 3}]
    assert list(reasons_of(path)) == ["2"]
    path.write_text('{"a": "x}\n{"a": 3}\n')
    assert list(reasons_of(path)) == ["1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"a": 1},\n{"a": 2},\n{"a": 3 "b": 4},\n{"a": 5}]',
            """:3: not JSON: Expecting ',' delimiter before '"b": 4},'""",
        ),
        ('[{"a": 1}\n{"a": 2}]', """:2: not JSON: Expecting ',' delimiter before '{"a": 2}]'"""),
        ('[{"a": 1},\n]', ":2: not JSON: Expecting value before ']'"),
        ("[" + "9" * 6000 + "]", ":1: not JSON: a number has more than 4,300 digits before "),
        ('[{"a": 1}]\n{"b": 2}', """:2: the list ends before '{"b": 2}'"""),
        ('[{"a": 1}]\n]', ":2: the list ends before ']'"),
        ('[{"a": 1}\n', ":2: not JSON: the list is not closed at the end"),
        ("[\n", ":2: not JSON: the list is not closed at the end"),
        ("[,{}]", ":1: not JSON: Expecting value before ',{}]'"),
        ('[{"a": "x\ny"}]', ":1: not JSON: Invalid control character at the end"),
        ('[{"a": 1},\n{"a": "x', """:2: not JSON: Unterminated string before '"x'"""),
        ('[{"a": "\\x"}]', ":1: not JSON: Invalid \\escape"),
        ('[{"a": 大}]', ":1: not JSON: Expecting value before '大}]'"),
        ("[" + '{"a":' * 5000, ":1: not JSON: it is nested too deep"),
        ('[\n{"a": ' + "1" * 5000 + "}]", ":2: not JSON: a number has more than 4,300 digits"),
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
            read_all(path, size=size)
        assert str(caught.value).startswith(f"{path}{message}")


def test_early_error_is_reported_without_reading_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n{"a" 2},' + '{"a": 3},' * 100_000)
    with pytest.raises(UserError, match=r"rows.json:2: not JSON: Expecting ':' delimiter before '2\},"):
        read_all(path, size=100)


def test_elements_that_are_not_objects_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1},\n5, "x", [1], null, true, -1.5e3,\n{"a": "\xff",\n "b": "\xfe"}, {"a": 2},\n12]')
    for size in (1, 2, 1 << 20):
        actual = read_all(path, size=size)
        assert [value for _, value in actual if isinstance(value, dict)] == [{"a": 1}, {"a": 2}]
        assert [place for place, _ in actual] == ["1"] + ["2"] * 6 + ["3", "4", "5"]
        assert str(actual[1][1]).startswith("is 5; write an object")
        assert str(actual[3][1]).startswith("is a list; write an object")
        assert str(actual[7][1]) == "byte 8 of line 3 (0xff) is not UTF-8; save the file as UTF-8"


def test_broken_utf_8_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[\n{"a": 1,\n "b": "\xc3\xa4\xff"}]')
    assert reasons_of(path) == {"2": "byte 10 of line 3 (0xff) is not UTF-8; save the file as UTF-8"}


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
    with file_of(f"rows.{'csv' if delimiter == ',' else 'tsv'}", text.getvalue().encode()) as path:
        assert read_all(path, rows, size) == expected[1:]


@given(st.text(st.sampled_from('ab大,"\n\r'), max_size=40), SIZES, ROW_COUNTS)
@example('a"b",c\n"d",e\n', 1, 1)
@example('"a" b,c\n"d\ne",f\n', 1, 1)
@example('a,"b\r\n"\r\n\r\nc\rd\ne', 1, 1)
def test_any_text_is_read_as_by_the_csv_module(text: str, size: int, rows: int) -> None:
    """However it is chunked, well formed or not."""
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
    with file_of("rows.csv", b"x,y\n" + text.encode()) as path:
        if unclosed:
            with pytest.raises(UserError, match=r"rows.csv:\d+: a quote is opened and never closed before "):
                read_all(path, rows, size)
        else:
            actual = read_all(path, rows, size)
            assert [(place, None if isinstance(value, BadRow) else value) for place, value in actual] == expected


def test_lines_are_counted_through_quoted_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n"1\n2\n3",x\n\ny,"z\r\n"\r\nlast,row')
    assert read_all(path) == [
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
    good = [value for _, value in read_all(path) if isinstance(value, dict)]
    assert good == [{"a": "1", "b": "2"}, {"a": '5" disk', "b": "6"}, {"a": "[1]", "b": '["x"]'}]
    reasons = reasons_of(path)
    assert list(reasons) == ["3", "4", "5", "7", "8", "10", "12", "13"]
    assert reasons["3"].startswith("has 1 column where the header has 2; quote cells")
    assert reasons["4"].startswith("has 3 columns where the header has 2")
    assert reasons["5"].startswith("is not CSV (lines 5 to 5: ',' expected after '\"'); put such a cell in quotes")
    assert reasons["7"] == "byte 4 of line 7 (0xff) is not UTF-8; save the file as UTF-8"
    assert reasons["8"] == "byte 2 of line 9 (0xfe) is not UTF-8; save the file as UTF-8"
    assert reasons["10"].startswith("is not CSV (lines 10 to 11: ")
    assert "new-line character seen in unquoted field" in reasons["13"]


def test_cells_may_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a\n" + "x" * 500_000 + "\n")
    assert len(values_of(path)[0]["a"]) == 500_000  # the csv module's own limit is 131,072


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,,c", ":1: column 2 has no name; the first line must name every column"),
        (",", ":1: column 2 has no name"),
        ('""', ":1: column 1 has no name"),
        ('a,"  "', ":1: column 2 has no name"),
        ("\na,b,a", ":2: two columns are called 'a'; rename one"),
        ('"a" b,c', ":1: the header is not CSV"),
        ('"a', ":1: a quote is opened and never closed"),
    ],
)
def test_header_must_name_each_column_once(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(header + "\n1,2,3\n")
    with pytest.raises(UserError) as caught:
        read_all(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_wide_header_is_checked_quickly(tmp_path: Path) -> None:
    wide = 50_000
    (tmp_path / "rows.csv").write_text(",".join(f"c{number}" for number in range(wide)) + "\n" + "1," * wide + "\n")
    began = time.process_time()
    ((_, value),) = read_all(tmp_path / "rows.csv")
    assert "columns where the header has" in str(value)
    assert time.process_time() - began < 5


def test_header_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a,\xff\n1,2\n")
    with pytest.raises(UserError, match=r"rows.csv:1: the header byte 3 of line 1 \(0xff\) is not UTF-8"):
        read_all(tmp_path / "rows.csv")


def test_header_alone_has_no_rows(tmp_path: Path) -> None:
    for text in ("a,b", "a,b\n", "\n\na,b\n\n"):
        (tmp_path / "rows.csv").write_text(text)
        assert read_all(tmp_path / "rows.csv") == []
