"""Files of rows for the tests of readers, and what is read of them."""

import bz2
import gzip
import json
import lzma
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import strategies as st

from zerolora.data.example import BadRow
from zerolora.data.readers import chunks


def zstd_of(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd_of,
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

NESTED = [
    {"text": f"{number} 大", "messages": [{"role": "user", "content": "x" * number}] * (number % 3), "n": number}
    for number in range(300)
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=8)
SIZES = st.integers(1, 80)
ROW_COUNTS = st.integers(1, 5)


@contextmanager
def file_of(name: str, data: bytes) -> Iterator[Path]:
    """Have a file for a while; hypothesis calls a test many times within one tmp_path."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        yield path


def read_all(path: Path, rows: int = 1000, size: int = 1 << 20) -> list[tuple[str, Any]]:
    """Return (place behind the path, value) of all rows, by way of a pickle as between processes."""
    result = []
    for chunk in chunks(path, rows, size):
        records = list(pickle.loads(pickle.dumps(chunk)).records())  # noqa: S301
        assert len(records) <= rows
        result += [(place.removeprefix(str(path)).lstrip(":"), value) for place, value in records]
    return result


def values_of(path: Path, rows: int = 1000, size: int = 1 << 20) -> list[Any]:
    return [value for _, value in read_all(path, rows, size)]


def reasons_of(path: Path) -> dict[str, str]:
    """Return what is wrong with rows, by place."""
    return {place: str(value) for place, value in read_all(path) if isinstance(value, BadRow)}
