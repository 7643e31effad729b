"""Reads data files in chunks. This process only locates the ends of rows; `Chunk.records` does the expensive part
(decoding JSON, converting Arrow to Python) and may run in another process.
"""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerolora.data import COMPRESSIONS, DATA_FILE, ENDINGS, TABLES, TEXTS
from zerolora.data.chunking import CUTS
from zerolora.data.published import of_entries, others_of, setting_of, settled, split_of
from zerolora.data.records import Chunk
from zerolora.data.tables import tables
from zerolora.errors import UserError
from zerolora.files import checked_name
from zerolora.model.foreign import saved_files, saved_splits

# Files beside the data: hidden files, metadata of `datasets` and this project, DVC's pointers, texts.
NO_DATA = re.compile(r"[._].*|(manifest|dataset_infos?)\.json|(README|LICENSE).*|.*\.(md|dvc)", re.IGNORECASE)
# Byte order marks, or the zeros in a text that begins with ASCII (RFC 4627, 3).
ENCODINGS = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|([^\0]\0\0\0){2}|(\0\0\0[^\0]){2}"),
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff|([^\0]\0){4}|(\0[^\0]){4}"),
}
SAVED_BY = "datasets.save_to_disk"


def files_of(path: Path) -> list[Path]:
    """Return the data files of a source: the file itself, or all below a directory, sorted or in the order of a saved
    data set.

    Raises UserError if there are none, for a file of unknown type, a pipe or a device, and for a saved DatasetDict.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory; correct the path")
    checked_name(path)
    files = list(_below(path)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: contains no data file; add one ({ENDINGS})")
    for file in files:
        _kind(checked_name(file))
        if not file.is_file() and file.exists():
            raise UserError(f"{file}: is a pipe or a device; a file is expected")
    return files


def all_files(folder: Path) -> list[Path]:
    """Return every file of a folder that has the ending of a data file, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and DATA_FILE.fullmatch(path.name))
    return [path for path in paths if not any(NO_DATA.fullmatch(part) for part in path.relative_to(folder).parts)]


def entries_of_saved(directory: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the `sources` of a saved DatasetDict: each split's name and settings, and the names of the splits that are
    left out, as train_1M beside train; empty for another directory."""
    if not (directory / "dataset_dict.json").is_file():
        return [], []
    splits = settled({name: split_of(name) for name in saved_splits(directory, SAVED_BY)})
    left_out = others_of({name: (split, name) for name, split in splits.items()})
    return [(name, setting_of(split)) for name, split in splits.items() if name not in left_out], left_out


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the data files below `folder` that match a pattern, as in data/train-*.parquet. Raises UserError if there
    are none."""
    result = sorted(path for path in folder.glob(pattern) if not NO_DATA.fullmatch(path.name))
    files = list(dict.fromkeys(file for path in result for file in files_of(path)))
    for path in {parent for file in files for parent in file.parents if parent.is_relative_to(folder)} - {folder}:
        check_not_linked(path)
    if not files:
        raise UserError(f"{folder / pattern}: no data file has such a name; correct the pattern")
    return files


def check_not_linked(folder: Path) -> None:
    """Raise UserError if a folder is a link: DVC does not follow it, and a link to a parent would be read forever."""
    if folder.is_symlink():
        raise UserError(
            f"{folder}: is a link to a folder, whose changes DVC would not see; "
            "put the folder itself there, or links to its files"
        )


def chunks(path: Path, rows: int = 1000, size: int = 1 << 20) -> Iterator[Chunk]:
    """Stream a file as chunks of at most `rows` rows and about `size` bytes, in order and in bounded memory.

    The chunks depend only on the file's content. Raises UserError, naming the file, if it is truncated or corrupt, or
    if a broken row hides the next one.
    """
    kind, packing = _kind(path)
    if kind in TABLES:
        yield from tables(path, kind, rows, size)
    else:
        yield from _texts(path, kind, packing, rows, size)


def _below(directory: Path) -> Iterator[Path]:
    splits, left_out = entries_of_saved(directory)
    if splits:
        without = f", without {', '.join(left_out)}, which would be pooled with them" if left_out else ""
        raise UserError(
            f"{directory}: contains the splits {', '.join([*(name for name, _ in splits), *left_out])}; set path: "
            f"{directory} with {of_entries(splits)}{without}, or path: {directory / splits[0][0]} for that one alone"
        )
    if (directory / "state.json").is_file() and any(directory.glob("data-*.arrow")):
        for name in saved_files(directory, SAVED_BY):
            if not (directory / name).is_file():
                raise UserError(f"{directory}: state.json names {name}, which is missing; save it again")
            yield directory / name
        return
    for path in sorted(directory.iterdir()):
        if NO_DATA.fullmatch(path.name):
            continue
        if path.is_dir():
            check_not_linked(path)
            yield from _below(path)
        else:
            yield path


def _kind(path: Path) -> tuple[str, str]:
    """Return a file's type and compression ("" for none) from its name."""
    *_, outer, last = ["", "", *(suffix[1:].lower() for suffix in path.suffixes)]
    if last in COMPRESSIONS and outer in TEXTS:
        return outer, last
    if last in TEXTS or last in TABLES:
        return last, ""
    raise UserError(f"{path}: is not a supported data file; supported types: {ENDINGS}")


def _texts(path: Path, kind: str, packing: str, rows: int, size: int) -> Iterator[Chunk]:
    cut = CUTS[kind]
    try:
        if not path.stat().st_size:
            if packing:  # an empty stream has some bytes when compressed
                raise EOFError("it is empty")
            return
        with path.open("rb") as raw, _unpacked(raw, packing) as stream:
            before = 0
            for chunk in cut(Chunk(str(path), kind), _blocks(path, stream, size), rows, size):
                yield chunk._replace(progress=raw.tell() - before)
                before = raw.tell()
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read to its end ({error}); fetch or write it again") from None


def _unpacked(raw: Any, packing: str) -> Any:
    if packing == "zst":
        import pyarrow

        return pyarrow.input_stream(raw, compression="zstd")
    openers: dict[str, Callable[[Any], Any]] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    return openers[packing](raw) if packing else raw


def _blocks(path: Path, stream: Any, size: int) -> Iterator[bytes]:
    """Yield the blocks of a stream, without a byte order mark."""
    first = stream.read(max(size, 8))
    if encoding := next((name for name, begins in ENCODINGS.items() if begins.match(first)), None):
        raise UserError(f"{path}: is {encoding}; save it as UTF-8")
    if first := first.removeprefix(b"\xef\xbb\xbf"):
        yield first
    yield from iter(lambda: stream.read(size), b"")
