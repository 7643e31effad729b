"""Finite weights in, finite weights out: what a merge writes has no NaN and no infinity."""

from collections.abc import Iterable

from zerolora.errors import UserError
from zerolora.float_bits import EXPONENTS, READ, is_finite, is_infinite
from zerolora.tensor_file import TYPES, StoredTensor, read_into


def check_stored(tensors: Iterable[StoredTensor], start: int, stop: int) -> None:
    """Raise UserError, naming the tensor, unless the numbers are finite that begin at bytes `start` to `stop` of the
    tensors' file. A single number may be infinity: it is a limit that limits nothing, as in Gemma 4's audio tower."""
    for stored in tensors:
        if stored.kind not in EXPONENTS or stored.stop <= start or stored.start >= stop:
            continue
        width = TYPES[stored.kind][1]
        first, last = (stored.start + -(-max(each - stored.start, 0) // width) * width for each in (start, stop))
        with stored.path.open("rb", buffering=0) as file:
            for begin in range(first, min(last, stored.stop), READ):
                block = memoryview(bytearray(min(READ, last - begin, stored.stop - begin)))
                read_into(file.fileno(), block, begin, stored.path)
                if not is_finite(block, stored.kind) and (stored.shape or not is_infinite(block, stored.kind)):
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
