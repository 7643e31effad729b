"""Bounds of CPU time, memory and output for templates, and the line of a template that an error comes from; bounds of
the time of a regular expression.

transformers' sandbox keeps a template from files and from Python's internals, but not from a loop without end. A
template comes with a model or from the user; both are bounded in the same way. A regular expression comes with an
adapter or from the user, and may take longer than anyone waits for a text of 50 characters.
"""

import contextlib
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from zerolora.errors import UserError, wording

SECONDS = 5  # of CPU time for one conversation, which takes well under a millisecond
MEMORY = 1 << 30  # bytes for one conversation, beyond what the process has
LONGEST = 1 << 25  # characters that a template may make of a conversation
RENDERING = wording("for one conversation; shorten its loops")
PAGE = resource.getpagesize()
MAIN = threading.main_thread()
Result = TypeVar("Result")


class _TooLong(BaseException):
    """The time is up. No Exception, so that no handler of a library takes it."""


class _Measured:
    """The address space of this process when it was last looked at: that takes longer than a conversation."""

    done = False
    """Whether in this process."""
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    """Those of the process, to which it returns."""
    bounds = limits
    """Those of a conversation."""


@contextlib.contextmanager
def bounded(name: str, task: str = RENDERING) -> Iterator[None]:
    """Raise UserError, naming the template, if what compiles or renders it inside takes more than SECONDS or MEMORY.

    In other threads than the main one, which gets the signals, only memory is bounded.
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
    """Raise UserError, naming them, if regular expressions take more than SECONDS for all names of a model."""
    return bounded(
        name, wording("to match the model's modules; write expressions without a repeat inside a repeat, as in (a+)+")
    )


def within_bounds(name: str, render: Callable[[], Result]) -> Result:
    """Return what a function without side effects returns, in the bounds of `bounded`; a text, of at most LONGEST
    characters."""
    if not _Measured.done:
        _measure()
    timed = threading.get_ident() == MAIN.ident
    try:
        try:
            # As _limits, whose two calls would take a third of the time of a short conversation.
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
            # The process may have grown by itself since it was measured.
            _measure()
            with _limits():
                result = render()
    except _TooLong:
        raise too_long(name) from None
    except MemoryError:
        raise too_large(name) from None
    if isinstance(result, str) and len(result) > LONGEST:
        raise UserError(f"{name}: writes {len(result):,} characters for one conversation; write less")
    return result


def too_long(name: str, task: str = RENDERING) -> UserError:
    """Return the error of a template that takes too long."""
    return UserError(f"{name}: takes more than {SECONDS} s {task}")


def too_large(name: str) -> UserError:
    """Return the error of a template that takes too much memory."""
    return UserError(f"{name}: takes more than {MEMORY >> 30} GiB for one conversation; write less")


def line_of(error: Exception, program: Any) -> int | None:
    """Return the line of a compiled template (jinja2.Template) from which an error was raised, None if from none."""
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
    """Note this process's limits, and set those of a conversation by the bytes of its address space."""
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
