"""Ctrl-C in Snakemake: once ends its jobs and then itself, again ends it at once, and neither prints a traceback."""

import os
import signal
import sys
import threading
import time

SAME_SECONDS = 1  # within them it is the same Ctrl-C, sent by terminal and parent, or by an impatient finger


def calm() -> None:
    """Take SIGINT from now on, unless somebody else has it, or it is ignored as with nohup.

    A second KeyboardInterrupt would be raised while Snakemake handles the first, in whichever thread it waits for. The
    jobs of a Snakemake that ends at once end too (zerolora.machine.parents).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    first: list[float] = []

    def interrupt(*_: object) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - first[0] > SAME_SECONDS:
            print("ended by a second Ctrl-C; its jobs end too", file=sys.stderr, flush=True)
            os._exit(130)

    signal.signal(signal.SIGINT, interrupt)
