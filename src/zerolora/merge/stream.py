"""Write merged weight files: space is allocated first, then blocks of rows are written in place by several threads.

Memory is one block for each thread, independent of the model; or a whole tensor if an update needs it; or a few times
the tensors that transformers converts to one weight. A weight that is dequantized is written in the order of its rows.
Copying starts while torch is imported, and finished blocks are flushed to disk while others are computed.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import hashlib
import importlib
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.merge.finite import check_merged, check_stored
from zerolora.merge.merge_plan import MergePlan, MergeUnit
from zerolora.methods.method import Update
from zerolora.model.added_tokens import SUMMED, mean_row
from zerolora.model.dequantized import DequantizedTensor
from zerolora.progress import Progress
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile, read_into
from zerolora.units import byte_size

if TYPE_CHECKING:
    import torch

THREADS = 8
"""Maximum threads; more would wait for the disk."""
AHEAD = 64
"""Maximum blocks in flight before the oldest is hashed."""
SPAN = 4 * 2**20
"""Bytes of a block of rows."""
COPIED = 32 * 2**20
"""Bytes of one copy."""
ALIGNED = 2**16
"""Alignment of copies in bytes, except for the first: file systems share whole blocks only, of 4 to 64 KiB."""
BLOCK = 2**17
"""Numbers of an fp32 copy and its update, 1 MiB together: they stay in a core's cache."""
SENT = 32 * 2**20
"""Bytes after which a flush to disk is started."""
THIN = 16
"""Minimum rows of a matrix block: with fewer, BLAS sums in another order than for the whole matrix."""
READ = 2**20
"""Bytes that are read at a time for hashing."""
NOT_COPIED = (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF)
"""Errors of copy_file_range where it is unsupported (man 2 copy_file_range)."""
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

_thread = threading.local()


@dataclass(frozen=True)
class _Output:
    """An open file that one thread at a time writes to."""

    handle: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    """ext4 serializes writes to a file, and waiting threads spin on cores that could compute."""


@dataclass(frozen=True)
class _Job:
    """The bytes of an output file up to `stop`, and the function that writes them; None if an earlier job does."""

    target: TensorFile
    stop: int
    work: Callable[[], None] | None
    alone: bool = False
    """Needs whole tensors in memory, so it runs one at a time in a separate thread, which has its own heap."""


def write_weights(plan: MergePlan, output: Path, hashed: bool) -> dict[str, str]:
    """Write the weight files of a plan and return the sha256 of each by name; without `hashed`, nothing.

    Space is allocated first. Raises UserError, naming `output`, if there is too little.
    """
    workers = min(len(os.sched_getaffinity(0)), THREADS)
    with contextlib.ExitStack() as stack:
        outputs = _allocated(plan, output, stack)
        writer = _Writer(plan, outputs)
        bar = stack.enter_context(Progress("merge", plan.nbytes, binary=True))
        pool, single = (stack.enter_context(ThreadPoolExecutor(count)) for count in (workers, 1))
        for each in (pool, single):
            stack.callback(each.shutdown, cancel_futures=True)
        single.submit(_import_torch)
        written = {target.path: len(target.header) for _, target in plan.files}
        digests = {target.path: hashlib.sha256(target.header) for _, target in plan.files if hashed}
        sent = dict.fromkeys(written, 0)
        bar.update(sum(written.values()))
        waiting: deque[tuple[_Job, Future[None] | None]] = deque()
        for job in [*writer.jobs(), None]:
            if job:
                waiting.append((job, (single if job.alone else pool).submit(job.work) if job.work else None))
            while len(waiting) > (AHEAD if job else 0):
                ended, future = waiting.popleft()
                if future:
                    future.result()
                path = ended.target.path
                if hashed:
                    _hash(digests[path], outputs[path].handle, written[path], ended.stop, path)
                bar.update(ended.stop - written[path])
                written[path] = ended.stop
                if ended.stop - sent[path] >= SENT:
                    _send(outputs[path].handle, sent[path], ended.stop)
                    sent[path] = ended.stop
    return {path.name: digest.hexdigest() for path, digest in digests.items()}


def _import_torch() -> None:
    """Import torch without garbage collection, which is a tenth faster."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
    finally:
        if collecting:
            gc.enable()


def _allocated(plan: MergePlan, output: Path, stack: contextlib.ExitStack) -> dict[Path, _Output]:
    """Open the output files, allocate their space and write their headers."""
    outputs: dict[Path, _Output] = {}
    for _, target in plan.files:
        result = os.statvfs(target.path.parent)
        free = result.f_bavail * result.f_frsize + sum(each.nbytes for _, each in plan.files if each.path in outputs)
        handle = os.open(target.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        outputs[target.path] = _Output(handle)
        stack.callback(os.close, handle)
        try:
            os.posix_fallocate(handle, 0, target.nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                error.filename = str(output / target.path.name)
                raise
            raise UserError(
                f"{output}: the merged weights take {byte_size(plan.nbytes)}, and {byte_size(free)} are free there; "
                "free some space, or write to another disk"
            ) from None
        _write(outputs[target.path], memoryview(target.header), 0)
    return outputs


class _Writer:
    """Writes a plan's tensors to open files."""

    def __init__(self, plan: MergePlan, outputs: dict[Path, _Output]) -> None:
        self.plan, self.outputs = plan, outputs
        self.targets = {each.name: each for _, target in plan.files for each in target.tensors.values()}

    def jobs(self) -> Iterator[_Job]:
        """Yield the jobs of all files, in the order of each file's bytes."""
        begun: set[int] = set()
        for source, target in self.plan.files:
            copied: list[StoredTensor] = []
            for stored in source.tensors.values():
                unit = self.plan.units.get(stored.name)
                if unit is None and isinstance(stored, DequantizedTensor):
                    unit = MergeUnit((stored,), {})
                if unit is None:
                    if copied and copied[-1].stop != stored.start:  # a part of a dequantized weight is between them
                        yield from self._copies(copied, target)
                        copied = []
                    copied.append(stored)
                    continue
                yield from self._copies(copied, target)
                copied = []
                if unit.converted:
                    work = None if id(unit) in begun else functools.partial(self._convert, unit)
                    begun.add(id(unit))
                    yield _Job(target, self.targets[stored.name].stop, work, alone=True)
                else:
                    yield from self._rows(unit, target)
            yield from self._copies(copied, target)
            for unit in self.plan.copies.get(source.path, ()):
                yield from self._rows(unit, target)

    def _copies(self, tensors: list[StoredTensor], target: TensorFile) -> Iterator[_Job]:
        """Yield jobs that copy adjacent tensors."""
        if not tensors:
            return
        source, first, stop = tensors[0].path, tensors[0].start, tensors[-1].stop
        shift = self.targets[tensors[0].name].start - first
        # Other tensors, such as a mask of minus infinity, are not read by the model.
        weights = [each for each in tensors if self.plan.names.of_model(each.name)[0] in self.plan.names.shapes]
        aligned = min(-(-first // ALIGNED) * ALIGNED, stop)
        for start, end in itertools.pairwise(sorted({first, *range(aligned, stop, COPIED), stop})):
            work = functools.partial(self._copy, weights, source, start, end, self.outputs[target.path], start + shift)
            yield _Job(target, end + shift, work)

    def _copy(self, weights: list[StoredTensor], source: Path, start: int, end: int, output: _Output, to: int) -> None:
        check_stored(weights, start, end)
        _copy(source, start, end, output, to)

    def _rows(self, unit: MergeUnit, target: TensorFile) -> Iterator[_Job]:
        """Yield jobs that write the rows of a tensor; a single one if an update needs the whole tensor."""
        (stored,) = unit.stored
        into = self.targets[unit.copy or stored.name]
        mean = None
        if unit.rows is not None:
            rows = stored.shape[0]
            mean = mean_row(stored.in_turn((first, min(first + SUMMED, rows)) for first in range(0, rows, SUMMED)))
        by_rows = all(update.by_rows for update in unit.updates.values())
        if by_rows and isinstance(stored, DequantizedTensor):
            yield _Job(target, into.stop, functools.partial(self._dequantize, unit, mean), alone=True)
            return
        for first, last in spans(into.shape, SPAN // TYPES[stored.kind][1]) if by_rows else [(0, _length(into))]:
            work = functools.partial(self._write_rows, unit, mean, first, last)
            stop = into.start + last * into.nbytes // max(_length(into), 1)
            yield _Job(target, stop, work, alone=not by_rows)

    def _write_rows(self, unit: MergeUnit, mean: "torch.Tensor | None", first: int, last: int) -> None:
        _compute_alone()
        self._write_read(unit, mean, first, last, unit.stored[0].read(first, last))

    def _dequantize(self, unit: MergeUnit, mean: "torch.Tensor | None") -> None:
        """Write a tensor that is dequantized in the order of its rows."""
        _compute_alone()
        (stored,) = unit.stored
        into = self.targets[unit.copy or stored.name]
        blocks = spans(into.shape, SPAN // TYPES[stored.kind][1])
        length = _length(stored)  # less than the result's, if rows are added
        read = stored.in_turn((min(first, length), min(last, length)) for first, last in blocks)
        for (first, last), rows in zip(blocks, read, strict=True):
            self._write_read(unit, mean, first, last, rows)

    def _write_read(
        self, unit: MergeUnit, mean: "torch.Tensor | None", first: int, last: int, rows: "torch.Tensor"
    ) -> None:
        """Write the rows `first` to `last`, of which `rows` were stored."""
        import torch

        (stored,) = unit.stored
        into = self.targets[unit.copy or stored.name]
        if mean is not None:
            added = mean.to(rows.dtype).expand(last - first - len(rows), *mean.shape)
            rows = torch.cat([rows, added])
        for update in unit.updates.values():
            apply(update, rows, first)
        data = _bytes(rows)
        check_merged(data, into, unit.stored)
        _write(self.outputs[into.path], data, into.start + first * (into.nbytes // max(_length(into), 1)))

    def _convert(self, unit: MergeUnit) -> None:
        """Write the stored tensors of a converted unit."""
        _compute_alone()
        names = self.plan.names
        weights = names.converted({each.name: each.read() for each in unit.stored})
        for weight, update in unit.updates.items():
            weights[weight] = weights[weight].contiguous()
            apply(update, weights[weight], 0)
        for name, tensor in names.stored(weights, [each.name for each in unit.stored]).items():
            into, data = self.targets[name], _bytes(tensor.contiguous())
            check_merged(data, into, unit.stored)
            _write(self.outputs[into.path], data, into.start)
        del weights, tensor
        _return_freed_memory()


def apply(update: Update, rows: "torch.Tensor", first: int) -> None:
    """Apply an update to `rows` in place, in fp32 and rounded once."""
    for start, stop in spans(tuple(rows.shape), BLOCK) if update.by_rows and rows.ndim else [(0, None)]:
        block = rows[start:stop] if rows.ndim else rows
        full = block.float()  # itself, if it is fp32
        update.apply(full, first + start)
        if full is not block:
            block.copy_(full)


def spans(shape: tuple[int, ...], numbers: int) -> list[tuple[int, int]]:
    """Return start and stop of blocks of about this many numbers, for a matrix at least THIN rows each."""
    if not shape:
        return [(0, 1)]
    thin = THIN if len(shape) == 2 else 1
    step = max(numbers // max(math.prod(shape[1:]), 1) // thin, 1) * thin
    firsts = list(range(0, shape[0], step)) or [0]
    if len(firsts) > 1 and shape[0] - firsts[-1] < thin:
        firsts.pop()
    return list(itertools.pairwise([*firsts, shape[0]]))


def _length(stored: StoredTensor) -> int:
    return stored.shape[0] if stored.shape else 1


def _bytes(tensor: "torch.Tensor") -> memoryview:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _copy(source: Path, start: int, stop: int, output: _Output, offset: int) -> None:
    """Copy bytes of a file, in the kernel if possible, which lets some file systems share them."""
    with source.open("rb", buffering=0) as file:
        while start < stop:
            try:
                with output.turn:
                    count = os.copy_file_range(file.fileno(), output.handle, stop - start, start, offset)
            except OSError as error:
                if error.errno not in NOT_COPIED:
                    raise
                count = 0
            if not count:  # some file systems return 0 if unsupported
                buffer = memoryview(bytearray(min(stop - start, READ)))
                read_into(file.fileno(), buffer, start, source)
                _write(output, buffer, offset)
                count = len(buffer)
            start, offset = start + count, offset + count


def _write(output: _Output, data: memoryview, offset: int) -> None:
    while data:
        with output.turn:
            count = os.pwrite(output.handle, data, offset)
        data, offset = data[count:], offset + count


def _hash(digest: Any, handle: int, start: int, stop: int, path: Path) -> None:
    """Hash bytes that were just written and are still in the page cache."""
    buffer = memoryview(bytearray(min(stop - start, READ)))
    while start < stop:
        part = buffer[: stop - start]
        read_into(handle, part, start, path)
        digest.update(part)
        start += len(part)


def _send(handle: int, start: int, stop: int) -> None:
    """Start flushing these bytes to disk, if the C library has sync_file_range."""
    send = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if send:
        send(handle, ctypes.c_int64(start), ctypes.c_int64(stop - start), SYNC_FILE_RANGE_WRITE)


def _compute_alone() -> None:
    """Limit torch to this thread: other threads compute other blocks."""
    import torch

    if not getattr(_thread, "alone", False):
        torch.set_num_threads(1)
        _thread.alone = True


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc would keep that of several groups of small tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
