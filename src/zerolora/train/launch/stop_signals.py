"""Stopping early: a signal asks the ranks to stop; all of them do so after the same step."""

import ctypes
import os
import signal
import sys

from zerolora.train.launch.topology import LAUNCHER

ASKED = signal.SIGUSR1
"""What the launcher sends to a rank that is to save and stop."""
ASKING = (ASKED, signal.SIGTERM, signal.SIGINT)
"""All signals that ask to stop. The launcher starts ranks with these blocked, so that none is lost while they load."""
STOPPED = 75
"""Exit code of a rank, and of the command, that has saved and stopped (EX_TEMPFAIL: the same command continues)."""
PARENT_DIED = 1
"""Linux's PR_SET_PDEATHSIG (man 2 prctl)."""


class Stop:
    """Whether this rank was asked to stop: by the launcher, by Slurm, or by the launcher's own end, as from SIGKILL.

    Ctrl-C is the launcher's to act on: a terminal sends it to ranks as well.
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
            self.asked = True  # the launcher has ended before

    @property
    def orphaned(self) -> bool:
        """Whether the launcher has ended: nobody waits for what this rank would publish."""
        return os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid())

    def _ask(self, *_: object) -> None:
        self.asked = True


class Stopped(Exception):
    """Training was asked to stop, and its state is saved; the message says where it stands."""
