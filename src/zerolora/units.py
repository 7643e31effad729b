"""Parses and formats sizes in bytes."""

import re

_FACTORS = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}

GIB = 1024**3


def parse_bytes(text: str, zero: bool = False) -> int:
    """Return the bytes of a size such as "80GiB" or "1.5 GB"; zero is allowed only with `zero`.

    Raises ValueError if `text` is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", text)
    if not match or (float(match[1]) == 0 and not zero):
        raise ValueError("give a size with its unit, as in 80GiB")
    return int(float(match[1]) * _FACTORS[match[2]])


def byte_size(count: float) -> str:
    """Return bytes in the largest suitable binary unit, e.g. 9.8 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def gib(count: float) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{count / GIB:.2f} GiB"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, as in `1 run` and `1,000 runs`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
