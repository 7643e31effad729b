"""Bounds of CPU time and memory for a template of the user's own, and the line of its file that an error comes from.

transformers' sandbox keeps a template from files and from Python's internals, but not from a loop without end.
"""

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Iterator
from typing import Any

from zerolora.errors import UserError

SECONDS = 5  # of CPU time for one conversation, which takes well under a millisecond
MEMORY = 1 << 30  # bytes for one conversation, beyond what the process has
PAGE = resource.getpagesize()


class _TooLong(BaseException):
    """The time is up. No Exception, so that no handler of a library takes it."""


@contextlib.contextmanager
def bounded(name: str) -> Iterator[None]:
    """Raise UserError, naming the template, if what compiles or renders it inside takes more than SECONDS or MEMORY.

    Only for the main thread, as signals are.
    """
    before = signal.signal(signal.SIGVTALRM, _stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [each for each in (soft, hard, _address_space() + MEMORY) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except _TooLong:
        raise UserError(f"{name}: takes more than {SECONDS} s for one conversation; shorten its loops") from None
    except MemoryError:
        raise UserError(f"{name}: takes more than {MEMORY >> 30} GiB for one conversation; write less") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def line_of(error: Exception, program: Any) -> int | None:
    """Return the line of a compiled template (jinja2.Template) from which an error was raised, None if from none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == program.filename]
    return program.get_corresponding_lineno(lines[-1]) if lines else None


def _address_space() -> int:
    """Return the bytes of this process's address space. Called for every row, so without a file object."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 64).split()[0]) * PAGE
    finally:
        os.close(file)


def _stop(signum: int, frame: Any) -> None:
    raise _TooLong
