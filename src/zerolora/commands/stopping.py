"""A request to stop, as commands outside training meet it: what they write stays whole."""

import contextlib
import signal
from collections.abc import Iterator

from zerolora.train.launch.stop_signals import Stopped


@contextlib.contextmanager
def stoppable(state: str) -> Iterator[None]:
    """Let what runs be stopped by SIGTERM and Ctrl-C so that it cleans up; `state` says how things then stand."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}; {state}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
