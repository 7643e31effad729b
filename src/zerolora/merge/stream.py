"""Write merged weight files in place: laid out before the first number is read, a few blocks of rows at a time.

The memory is that of a block for each thread, whatever the model; of a whole tensor where an update needs it, and of a
few times the tensors that transformers makes one weight of. While torch is imported, bytes are copied already, and
while blocks are computed, those before them are on their way to the disk.
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
from zerolora.merge.merge_plan import MergePlan, MergeUnit
from zerolora.methods.method import Update
from zerolora.model.added_tokens import SUMMED, mean_row
from zerolora.progress import Progress
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile, read_into
from zerolora.units import byte_size

if TYPE_CHECKING:
    import torch

THREADS = 8
"""At most: more wait for the disk."""
AHEAD = 64
"""Blocks that may be written before those in front of them have been hashed."""
SPAN = 4 * 2**20
"""Bytes of a tensor's rows that one thread reads, changes and writes."""
COPIED = 32 * 2**20
"""Bytes that are copied at a time."""
ALIGNED = 2**16
"""Bytes: copies begin at multiples, but for the first. A file system shares whole blocks, of 4 to 64 KiB, or none."""
BLOCK = 2**17
"""Numbers whose fp32 copy and update are held at a time: 1 MiB, which stays in a core's own cache."""
SENT = 32 * 2**20
"""Bytes after which the system is told to bring them to the disk, and not to wait until there are more."""
THIN = 16
"""Rows of a matrix that a block has at least: for fewer, BLAS sums in another order than for the whole matrix."""
READ = 2**20
"""Bytes that are hashed at a time."""
NOT_COPIED = (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF)
"""What copy_file_range answers where it cannot copy (man 2 copy_file_range)."""
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

_thread = threading.local()


@dataclass(frozen=True)
class _Output:
    """An open file, which one thread at a time writes to."""

    handle: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    """ext4 lets one write of a file proceed at a time, and has the others spin for their turn, on cores that could
    compute."""


@dataclass(frozen=True)
class _Job:
    """Bytes of an output file, in order, and what writes them; None for bytes that an earlier job writes."""

    target: TensorFile
    stop: int
    work: Callable[[], None] | None
    alone: bool = False
    """It needs a whole tensor, or several, in memory: one at a time, in a thread, and so a heap, of their own."""


def write_weights(plan: MergePlan, output: Path, hashed: bool) -> dict[str, str]:
    """Write the weight files of a plan and return the sha256 of each by name, none without `hashed`.

    Their space is taken first. Raises UserError, which names `output`, if there is too little.
    """
    workers = min(_cores(), THREADS)
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
    """Import torch, a tenth faster without looking for garbage among what it only adds to."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
    finally:
        if collecting:
            gc.enable()


def _allocated(plan: MergePlan, output: Path, stack: contextlib.ExitStack) -> dict[Path, _Output]:
    """Return open files of their final sizes, with their headers."""
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
    """Writes the tensors of a plan to open files."""

    def __init__(self, plan: MergePlan, outputs: dict[Path, _Output]) -> None:
        self.plan, self.outputs = plan, outputs
        self.targets = {each.name: each for _, target in plan.files for each in target.tensors.values()}

    def jobs(self) -> Iterator[_Job]:
        """Yield the jobs of all files, each file's in the order of its bytes."""
        begun: set[int] = set()
        for source, target in self.plan.files:
            copied: list[StoredTensor] = []
            for stored in source.tensors.values():
                unit = self.plan.units.get(stored.name)
                if unit is None:
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
        """Yield what copies tensors that lie side by side."""
        if not tensors:
            return
        source, first, stop = tensors[0].path, tensors[0].start, tensors[-1].stop
        shift = self.targets[tensors[0].name].start - first
        aligned = min(-(-first // ALIGNED) * ALIGNED, stop)
        for start, end in itertools.pairwise(sorted({first, *range(aligned, stop, COPIED), stop})):
            work = functools.partial(_copy, source, start, end, self.outputs[target.path], start + shift)
            yield _Job(target, end + shift, work)

    def _rows(self, unit: MergeUnit, target: TensorFile) -> Iterator[_Job]:
        """Yield what writes the rows of a tensor, all at once where the update needs all."""
        (stored,) = unit.stored
        into = self.targets[unit.copy or stored.name]
        mean = None
        if unit.rows is not None:
            mean = mean_row(stored.read(first, first + SUMMED) for first in range(0, stored.shape[0], SUMMED))
        by_rows = all(update.by_rows for update in unit.updates.values())
        for first, last in spans(into.shape, SPAN // TYPES[stored.kind][1]) if by_rows else [(0, _length(into))]:
            work = functools.partial(self._write_rows, unit, mean, first, last)
            stop = into.start + last * into.nbytes // max(_length(into), 1)
            yield _Job(target, stop, work, alone=not by_rows)

    def _write_rows(self, unit: MergeUnit, mean: "torch.Tensor | None", first: int, last: int) -> None:
        import torch

        _compute_alone()
        (stored,) = unit.stored
        into = self.targets[unit.copy or stored.name]
        rows = stored.read(first, last)
        if mean is not None:
            added = mean.to(rows.dtype).expand(last - first - len(rows), *mean.shape)
            rows = torch.cat([rows, added])
        for update in unit.updates.values():
            apply(update, rows, first)
        offset = into.start + first * (into.nbytes // max(_length(into), 1))
        _write(self.outputs[into.path], _bytes(rows), offset)

    def _convert(self, unit: MergeUnit) -> None:
        """Write all stored tensors of a unit that transformers converts."""
        _compute_alone()
        names = self.plan.names
        weights = names.converted({each.name: each.read() for each in unit.stored})
        for weight, update in unit.updates.items():
            weights[weight] = weights[weight].contiguous()
            apply(update, weights[weight], 0)
        for name, tensor in names.stored(weights, [each.name for each in unit.stored]).items():
            into = self.targets[name]
            _write(self.outputs[into.path], _bytes(tensor.contiguous()), into.start)
        del weights, tensor
        _return_freed_memory()


def apply(update: Update, rows: "torch.Tensor", first: int) -> None:
    """Make of `rows` what they are after training, in place: computed in fp32 and rounded once."""
    for start, stop in spans(tuple(rows.shape), BLOCK) if update.by_rows and rows.ndim else [(0, None)]:
        block = rows[start:stop] if rows.ndim else rows
        full = block.float()  # itself, if it is fp32
        update.apply(full, first + start)
        if full is not block:
            block.copy_(full)


def spans(shape: tuple[int, ...], numbers: int) -> list[tuple[int, int]]:
    """Return first and last row of blocks of about so many numbers, of a matrix none of them thin."""
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
    """Copy bytes of a file, in the kernel where it can: on some file systems both then share them."""
    with source.open("rb", buffering=0) as file:
        while start < stop:
            try:
                with output.turn:
                    count = os.copy_file_range(file.fileno(), output.handle, stop - start, start, offset)
            except OSError as error:
                if error.errno not in NOT_COPIED:
                    raise
                count = 0
            if not count:  # some file systems say 0 for what they cannot copy
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
    """Hash bytes that were just written, which the page cache still has."""
    buffer = memoryview(bytearray(min(stop - start, READ)))
    while start < stop:
        part = buffer[: stop - start]
        read_into(handle, part, start, path)
        digest.update(part)
        start += len(part)


def _send(handle: int, start: int, stop: int) -> None:
    """Have the system write these bytes to the disk now, without waiting for it, where the C library can ask for it."""
    send = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if send:
        send(handle, ctypes.c_int64(start), ctypes.c_int64(stop - start), SYNC_FILE_RANGE_WRITE)


def _compute_alone() -> None:
    """Have torch compute in this thread alone: the others have blocks of their own."""
    import torch

    if not getattr(_thread, "alone", False):
        torch.set_num_threads(1)
        _thread.alone = True


def _return_freed_memory() -> None:
    """Let the C library give what was freed back to the system: glibc keeps several groups' worth of small tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
