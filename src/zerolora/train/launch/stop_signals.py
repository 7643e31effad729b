"""Stop signals: all ranks stop after the same step."""

import ctypes
import os
import signal
import sys

from zerolora.train.launch.topology import LAUNCHER

ASKED = signal.SIGUSR1
"""The launcher's signal to a rank to save and stop."""
ASKING = (ASKED, signal.SIGTERM, signal.SIGINT)
"""All stop signals. The launcher starts ranks with these blocked, so that none is lost while they load."""
STOPPED = 75
"""Exit code of a rank, and of the command, after saving and stopping (EX_TEMPFAIL: the same command continues)."""
PARENT_DIED = 1
"""Linux's PR_SET_PDEATHSIG (man 2 prctl)."""


class Stop:
    """Whether this rank must stop: on a signal of the launcher or Slurm, or after the launcher's end, as from SIGKILL.

    Ctrl-C, which a terminal sends to ranks as well, is left to the launcher.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (ASKED, signal.SIGTERM):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PARENT_DIED, ASKED)
        if self.orphaned:
            self.asked = True  # the launcher ended before the prctl

    @property
    def orphaned(self) -> bool:
        """Whether the launcher has ended."""
        return os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid())

    def _ask(self, *_: object) -> None:
        self.asked = True


class Stopped(Exception):
    """Training has stopped on request, with its state saved; the message has the position."""
