"""The tokenizer library within bounds of time and memory, and its errors in one line.

A model's tokenizer.json has regular expressions and replacements of any kind, so a short text may take hours or fill
the memory, in Rust code that no signal interrupts and that ends the process where memory is short. So a thread looks at
each call that takes longer than a moment, and ends the process with the error, as for a hanging rank.
"""

import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.model import foreign

SECONDS, SECONDS_A_CHARACTER = 60.0, 1e-4
"""Of CPU time a call: a tokenizer takes about a microsecond for a character."""
BYTES, BYTES_A_CHARACTER = 1 << 30, 2000
"""By which a call may let the process grow: a token takes some 400 bytes, and a character is at most a few tokens."""
TICK = 0.1
"""Seconds between two looks."""
IDLE_TICKS = 10
"""Ticks without a call after which the thread ends: a process with threads cannot be forked as well."""
PAGE = resource.getpagesize()
CODE = 2
"""Exit code, as of any UserError."""


class BoundedTokenizer:
    """A `tokenizers.Tokenizer` whose calls are bounded, and raise UserError where its code panics or refuses a text."""

    def __init__(self, backend: Any, name: str) -> None:
        vars(self).update(_backend=backend, _name=name)

    def encode(self, sequence: Any, pair: Any = None, is_pretokenized: bool = False, **options: Any) -> Any:
        """Encode one text; as a batch, since only then does the library let other threads run."""
        text = sequence if pair is None else (sequence, pair)
        return self.encode_batch([text], is_pretokenized=is_pretokenized, **options)[0]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> Any:
        """Decode one list of tokens, likewise."""
        return self.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        value = getattr(self._backend, attribute)
        return _Call(value, self._name) if callable(value) and hasattr(value, "__self__") else value

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self._backend, attribute, value)

    def __reduce__(self) -> Any:
        return BoundedTokenizer, (self._backend, self._name)


class _Call:
    """A method of the library."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with _WATCH.lock:
            # The calls of a process follow each other, but for a server's: the youngest of them is watched.
            call = _WATCH.call = (self.name, arguments)
            if _WATCH.thread is None:
                _WATCH.start()
        try:
            return self.function(*arguments, **options)
        except BaseException as error:
            # A plain Exception, as for a word that a vocabulary lacks, is the library's too.
            if type(error) is not Exception and not foreign.is_panic(error):
                raise
            raise UserError(
                f"{self.name}: the tokenizer refuses a text: {foreign.reason(error)}; use another model, or correct "
                "that file"
            ) from None
        finally:
            if _WATCH.call is call:
                _WATCH.call = None


class _Watch:
    """The thread that looks at the current call, while there are any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.call: tuple[str, tuple[Any, ...]] | None = None
        self.thread: threading.Thread | None = None
        self.message: mmap.mmap | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        idle, before = 0, None
        seconds, size = 0.0, 0
        while True:
            time.sleep(TICK)
            call = self.call
            if call is None:
                idle += 1
                with self.lock:
                    if idle > IDLE_TICKS and self.call is None:
                        self.thread = None
                        return
                continue
            idle = 0
            if call is not before:
                before, seconds, size = call, time.process_time(), _resident()
                continue
            name, arguments = call
            count = _characters(arguments)
            if time.process_time() - seconds > (limit := SECONDS + count * SECONDS_A_CHARACTER):
                self.end(f"{name}: takes more than {limit:.0f} s for a text of {count:,} characters")
            if _resident() - size > (most := BYTES + count * BYTES_A_CHARACTER):
                self.end(f"{name}: takes more than {most / 2**30:.1f} GiB for a text of {count:,} characters")

    def end(self, message: str) -> None:
        """End the process; the unfinished output is not published."""
        message += "; its regular expressions or replacements are not for this text: use another model"
        if self.message is not None:
            content = message.encode()[: len(self.message)]
            self.message[: len(content)] = content
        else:
            LOGGER.error(message)
            sys.stderr.flush()
        os._exit(CODE)


_WATCH = _Watch()


def shared_message() -> mmap.mmap:
    """Return memory for the error that ends one of the processes that this one will fork (`in_worker`)."""
    return mmap.mmap(-1, 4096)


def in_worker(message: mmap.mmap) -> None:
    """Leave the error that ends this process to its parent."""
    _WATCH.message = message


def text_of(message: mmap.mmap) -> str:
    """Return the error that ended a worker, empty if none did."""
    return bytes(message[:]).rstrip(b"\0").decode(errors="replace")


def _characters(arguments: tuple[Any, ...]) -> int:
    """Return the characters, or tokens, in the texts that a call was given."""
    texts = arguments[0] if arguments else ""
    if isinstance(texts, str) or not isinstance(texts, list | tuple):
        return len(texts) if isinstance(texts, str) else 1
    return sum(_characters((text,)) for text in texts)


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (ten times a second)
        return int(file.read().split()[1]) * PAGE


def _renew() -> None:
    global _WATCH  # noqa: PLW0603 (a fork has no thread, and perhaps a lock that nobody will release)
    _WATCH = _Watch()


os.register_at_fork(after_in_child=_renew)
