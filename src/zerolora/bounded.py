"""Limits CPU time, memory and output of templates and CPU time of regular expressions, and locates template errors.

transformers' sandbox protects files and Python's internals from a template, but not from an endless loop. Templates
come with a model or from the user. Regular expressions come with an adapter or from the user and may need exponential
time.
"""

import contextlib
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from zerolora.errors import UserError

SECONDS = 5  # CPU time per conversation; typical is well under a millisecond
MEMORY = 1 << 30  # additional bytes per conversation
LONGEST = 1 << 25  # characters of a rendered conversation
RENDERING = "for one conversation; shorten its loops"
PAGE = resource.getpagesize()
MAIN = threading.main_thread()
Result = TypeVar("Result")


class _TooLong(BaseException):
    """The time is up. Not an Exception, so that no library catches it."""


class _Measured:
    """Cached address-space limits, since measuring takes longer than rendering a conversation."""

    done = False
    """Whether they were measured in this process."""
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    """Limits of the process, restored afterwards."""
    bounds = limits
    """Limits while rendering."""


@contextlib.contextmanager
def bounded(name: str, task: str = RENDERING) -> Iterator[None]:
    """Raise UserError, naming the template, if the block needs more than SECONDS or MEMORY.

    Outside the main thread, which receives the signals, only memory is limited.
    """
    _measure()
    try:
        with _limits():
            yield
    except _TooLong:
        raise too_long(name, task) from None
    except MemoryError:
        raise too_large(name) from None


def bounded_matching(name: str) -> contextlib.AbstractContextManager[None]:
    """Raise UserError if the block needs more than SECONDS to match regular expressions with a model's names."""
    return bounded(name, "to match the model's modules; use expressions without a repeat inside a repeat, as in (a+)+")


def within_bounds(name: str, render: Callable[[], Result]) -> Result:
    """Return the result of a function without side effects within the limits of `bounded`, and, for a text, of
    LONGEST."""
    if not _Measured.done:
        _measure()
    timed = threading.get_ident() == MAIN.ident
    try:
        try:
            # Inlined _limits, whose two calls would take a third of the time of a short conversation.
            resource.setrlimit(resource.RLIMIT_AS, _Measured.bounds)
            try:
                if timed:
                    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
                result = render()
            finally:
                if timed:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                resource.setrlimit(resource.RLIMIT_AS, _Measured.limits)
        except MemoryError:
            # The process may have grown since it was measured.
            _measure()
            with _limits():
                result = render()
    except _TooLong:
        raise too_long(name) from None
    except MemoryError:
        raise too_large(name) from None
    if isinstance(result, str) and len(result) > LONGEST:
        raise UserError(f"{name}: writes {len(result):,} characters for one conversation; shorten its output")
    return result


def too_long(name: str, task: str = RENDERING) -> UserError:
    """Return the error of a template that takes too long."""
    return UserError(f"{name}: takes more than {SECONDS} s {task}")


def too_large(name: str) -> UserError:
    """Return the error of a template that takes too much memory."""
    return UserError(f"{name}: takes more than {MEMORY >> 30} GiB for one conversation; shorten its output")


def line_of(error: Exception, program: Any) -> int | None:
    """Return the line of a compiled template (jinja2.Template) that raised an error, None if none did."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == program.filename]
    return program.get_corresponding_lineno(lines[-1]) if lines else None


class _limits:
    def __enter__(self) -> None:
        self.timed = threading.get_ident() == MAIN.ident
        resource.setrlimit(resource.RLIMIT_AS, _Measured.bounds)
        if self.timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)

    def __exit__(self, *error: object) -> None:
        if self.timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, _Measured.limits)


def _measure() -> None:
    """Store the limits of this process, and derive those for rendering from its address space."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        size = int(os.read(file, 64).split()[0]) * PAGE
    finally:
        os.close(file)
    if threading.get_ident() == MAIN.ident:
        signal.signal(signal.SIGVTALRM, _stop)
    soft, hard = _Measured.limits = resource.getrlimit(resource.RLIMIT_AS)
    known = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    _Measured.bounds = min([size + MEMORY, *known]), hard
    _Measured.done = True


def _forget() -> None:
    _Measured.done = False


os.register_at_fork(after_in_child=_forget)


def _stop(signum: int, frame: Any) -> None:
    raise _TooLong
