"""Finite weights in, finite weights out: what a merge writes has no NaN and no infinity."""

from collections.abc import Iterable
from typing import Any

from zerolora.errors import UserError
from zerolora.tensor_file import TYPES, StoredTensor, read_into

EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
"""Bits of the exponent, which are all set in NaN and infinity alone (IEEE 754), of each type with both."""
READ = 2**20
"""Bytes that are looked at at a time: they stay in a core's cache."""


def is_finite(data: memoryview, kind: str) -> bool:
    """Return whether the numbers of a type, as safetensors names it, have no NaN and no infinity."""
    import numpy as np

    if kind not in EXPONENTS:
        return True
    numbers: Any = np.frombuffer(data, dtype=f"u{TYPES[kind][1]}")
    exponent = numbers.dtype.type(EXPONENTS[kind])
    step = READ // numbers.dtype.itemsize
    return not any(
        bool(((numbers[first : first + step] & exponent) == exponent).any()) for first in range(0, len(numbers), step)
    )


def check_stored(tensors: Iterable[StoredTensor], start: int, stop: int) -> None:
    """Raise UserError, naming the tensor, unless the numbers are finite that begin at bytes `start` to `stop` of the
    tensors' file."""
    for stored in tensors:
        if stored.kind not in EXPONENTS or stored.stop <= start or stored.start >= stop:
            continue
        width = TYPES[stored.kind][1]
        first, last = (stored.start + -(-max(each - stored.start, 0) // width) * width for each in (start, stop))
        with stored.path.open("rb", buffering=0) as file:
            for begin in range(first, min(last, stored.stop), READ):
                block = memoryview(bytearray(min(READ, last - begin, stored.stop - begin)))
                read_into(file.fileno(), block, begin, stored.path)
                if not is_finite(block, stored.kind):
                    raise UserError(
                        f"{stored.path}: {stored.name} has NaN or infinity, so no model with it computes; fetch the "
                        "weights again, or use another base model"
                    )


def check_merged(data: memoryview, into: StoredTensor, bases: Iterable[StoredTensor]) -> None:
    """Raise UserError, naming the tensor, unless merged numbers of `bases` are finite."""
    if is_finite(data, into.kind):
        return
    bases = list(bases)
    for stored in bases:
        check_stored([stored], stored.start, stored.stop)
    raise UserError(
        f"{bases[0].path}: {into.name} with the adapter added has numbers that are not finite in {into.kind}; use the "
        "adapter unmerged, or store the base model in F32"
    )
