"""Finds NaN and infinity in the bytes of a safetensors tensor."""

from typing import Any

from zerolora.tensor_file import TYPES

EXPONENTS = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""Bits of the exponent by type, all set in NaN and infinity alone (IEEE 754; bfloat16 is the upper half of float32)."""
READ = 2**20
"""Bytes that are looked at at a time: they stay in a core's cache."""


def integers(data: Any, kind: str) -> Any:
    """Return the floats of a buffer as numpy's unsigned integers of the same width."""
    import numpy as np

    return np.frombuffer(data, dtype=f"u{TYPES[kind][1]}")


def is_finite(data: Any, kind: str) -> bool:
    """Return whether a buffer of floats has no NaN and no infinity; one of another type has neither."""
    if kind not in EXPONENTS:
        return True
    numbers = integers(data, kind)
    exponent, step = numbers.dtype.type(EXPONENTS[kind]), READ // TYPES[kind][1]
    parts = (numbers[first : first + step] for first in range(0, len(numbers), step))
    return not any(bool(((part & exponent) == exponent).any()) for part in parts)


def is_infinite(data: Any, kind: str) -> bool:
    """Return whether all floats of a buffer are infinity, of either sign."""
    numbers = integers(data, kind)
    sign = numbers.dtype.type(1 << (8 * TYPES[kind][1] - 1))
    return bool(((numbers | sign) == (numbers.dtype.type(EXPONENTS[kind]) | sign)).all())
