"""Safetensors files: their headers, and rows of their tensors, read without memory mapping.

Pages of a mapped file count as memory of the process that touched them; data read here is freed after use. Source of
the format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field

from zerolora.errors import UserError
from zerolora.json_file import decoded, parsed
from zerolora.json_kinds import Count, JsonObject, Null, Text, check

if TYPE_CHECKING:
    import torch

ALIGNMENT = 8
"""Alignment of the first tensor; the header is padded with spaces."""
COMPARED = 4096
"""Rows of two tensors to compare at a time."""
LONGEST_HEADER = 100_000_000
"""Bytes, as in safetensors (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
AGAIN = "bring the file here again"
TYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
}
"""torch's name and the bytes per element, by the name in a header. Tensors of other types can only be copied."""


class HeaderEntry(JsonObject):
    """A tensor in a header."""

    dtype: Text
    shape: list[Count]
    data_offsets: Annotated[list[Count], Field(min_length=2, max_length=2)]


class Header(JsonObject):
    """A header: an entry for each tensor, by its name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, HeaderEntry]

    metadata: dict[str, Text] | Null = Field(None, alias="__metadata__")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a safetensors file, compared by identity."""

    path: Path
    name: str
    kind: str
    """Element type, as in the header."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.stop - self.start

    def read(self, first: int = 0, last: int | None = None) -> "torch.Tensor":
        """Return the rows `first` to `last` along the first dimension, or a scalar.

        Raises UserError if the file is too short.
        """
        import torch

        name, width = TYPES[self.kind]
        shape = self.shape
        if shape:
            first, last, _ = slice(first, last).indices(shape[0])
            shape = (last - first, *shape[1:])
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        if tensor.numel():
            offset = self.start + first * math.prod(self.shape[1:]) * width
            with self.path.open("rb", buffering=0) as file:
                read_into(file.fileno(), tensor.reshape(-1).view(torch.uint8).numpy().data, offset, self.path)
        return tensor

    def in_turn(self, spans: Iterable[tuple[int, int]]) -> "Iterator[torch.Tensor]":
        """Yield the rows of each of `spans`, which ascend and do not overlap."""
        for first, last in spans:
            yield self.read(first, last)


Factor: TypeAlias = "torch.Tensor | StoredTensor"
"""A tensor in memory or in its file."""


@dataclass(frozen=True)
class TensorFile:
    """The header of a safetensors file."""

    path: Path
    metadata: dict[str, str] | None
    tensors: dict[str, StoredTensor]
    """By name, in the order of their data."""
    header: bytes
    """All bytes before the first tensor, including the length field."""
    names: tuple[str, ...]
    """Tensor names in the order of the header."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())

    def resized(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], added: "Mapping[str, StoredTensor] | None" = None
    ) -> "TensorFile":
        """Return the header of a file `path` with the same tensors in the same order, some with new `shapes`, followed
        by `added` ones: by name, the tensor whose type and shape they have.

        Without either, it is identical byte for byte.
        """
        more = dict(added or {})
        kinds = self.tensors | more
        sizes = {
            name: each.nbytes if name not in shapes else math.prod(shapes[name]) * TYPES[each.kind][1]
            for name, each in kinds.items()
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = (end, end + size)
            end += size
        header = self.header
        if more or shapes.keys() & self.tensors.keys():
            entries: dict[str, Any] = {} if self.metadata is None else {"__metadata__": self.metadata}
            for name in (*self.names, *more):
                each = kinds[name]
                shape = list(shapes.get(name, each.shape))
                entries[name] = {"dtype": each.kind, "shape": shape, "data_offsets": list(offsets[name])}
            header = _header(entries)
        tensors = {
            name: StoredTensor(
                path, name, each.kind, shapes.get(name, each.shape), *(len(header) + at for at in offsets[name])
            )
            for name, each in kinds.items()
        }
        return TensorFile(path, self.metadata, tensors, header, (*self.names, *more))


def read_header(path: Path) -> TensorFile:
    """Return the header of a safetensors file. Raises UserError unless its tensors fill the rest of the file."""
    size = path.stat().st_size
    if not path.is_file():  # a pipe would never end
        raise _broken(path, "it is not a file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise _broken(path, f"{size} bytes, with a header of {length}")
        text = file.read(length)
    entries = parsed(path, decoded(path, text), AGAIN)
    check(entries, Header, path, AGAIN)
    metadata = entries.pop("__metadata__", None)
    result = {
        name: StoredTensor(
            path, name, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"])
        )
        for name, entry in entries.items()
    }
    tensors = dict(sorted(result.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 8 + length
    for name, each in tensors.items():
        wanted = math.prod(each.shape) * TYPES[each.kind][1] if each.kind in TYPES else each.nbytes
        if each.start != end or each.nbytes != wanted or wanted < 0:
            raise _broken(path, f"{name} has bytes {each.start} to {each.stop}, and should have {wanted} from {end}")
        end = each.stop
    if end != size:
        raise _broken(path, f"{size} bytes, and its tensors end at {end}")
    return TensorFile(path, metadata, tensors, len(text).to_bytes(8, "little") + text, tuple(result))


def save_tensors(tensors: "Mapping[str, torch.Tensor]", path: Path) -> None:
    """Write a safetensors file. Raises OSError, with the file's name, if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError:
        # Its error has no errno: allocate the same space to get it.
        try:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, sum(tensor.nbytes for tensor in tensors.values()))
        except OSError as error:
            error.filename = str(path)
            raise error from None
        raise


def write_one_by_one(
    entries: "Iterable[tuple[str, str, tuple[int, ...], Callable[[], Iterable[torch.Tensor]]]]",
    path: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file of tensors that are made one at a time.

    entries: name, type as in a header, shape and maker of each, which makes blocks of it, in the order of its numbers.
    Raises OSError, with the file's name, if the disk is full.
    """
    import torch

    listed = list(entries)
    try:
        with path.open("wb") as file:
            file.write(header_of(((name, kind, shape) for name, kind, shape, _ in listed), metadata))
            for name, kind, shape, make in listed:
                left = math.prod(shape) * TYPES[kind][1]
                for block in make():
                    left -= file.write(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                assert not left, f"{name} lacks {left} bytes"
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def header_of(entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return all bytes before the first tensor of the file that `write_one_by_one` writes of tensors of these names,
    types and shapes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    end = 0
    for name, kind, shape in entries:
        size = math.prod(shape) * TYPES[kind][1]
        described[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return _header(described)


def write_shapes(shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Write a safetensors file of fp32 zeros with these names and shapes. Its data is a hole, which takes no space on
    most file systems."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = _header(entries)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + end)


def _header(entries: dict[str, Any]) -> bytes:
    """Return the length field and the padded header of a file."""
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def rows_of(tensor: "Factor", first: int = 0, last: int | None = None) -> "torch.Tensor":
    """Return rows of a tensor along its first dimension, from memory or from its file."""
    return tensor.read(first, last) if isinstance(tensor, StoredTensor) else tensor[first:last]


def whole(tensor: "Factor") -> "torch.Tensor":
    """Return a tensor, from memory or from its file."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def equal(one: "Factor", other: "Factor") -> bool:
    """Return whether two tensors have the same shape and values, read in parts."""
    if one is other:
        return True
    if tuple(one.shape) != tuple(other.shape):
        return False
    spans = ((first, first + COMPARED) for first in range(0, one.shape[0], COMPARED))
    return all(bool((rows_of(one, *span) == rows_of(other, *span)).all()) for span in spans)


def read_into(file: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer from an open file. Raises UserError, naming `path`, if the file is too short."""
    while buffer:
        count = os.preadv(file, [buffer], offset)
        if not count:
            raise _broken(path, f"it ends at byte {offset}")
        buffer, offset = buffer[count:], offset + count


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{path}: is not a whole safetensors file ({why}); {AGAIN}")
