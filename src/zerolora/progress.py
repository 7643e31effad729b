"""Progress of a stage: a bar in a terminal, periodic lines in a log, and the status file (log.py)."""

import sys
import time

from zerolora.log import update_status

LOG_SECONDS = 15
"""Interval of log lines without a terminal."""
STATUS_SECONDS = 0.5
"""Interval of status file updates."""


class Progress:
    """Counts units of work towards `total`.

    `name` is the unit, e.g. "step"; with `binary` the units are bytes and `name` is the action. `silent` counts without
    output, for ranks above 0.
    """

    def __init__(self, name: str, total: int, done: int = 0, *, binary: bool = False, silent: bool = False) -> None:
        """`done` units were completed by an earlier process."""
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self.name, self.total, self.done, self.binary, self.silent = name, total, done, binary, silent
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name if binary else None,
            unit="B" if binary else name,
            unit_scale=binary,
            unit_divisor=1024,
            disable=silent or not terminal,
            dynamic_ncols=True,
        )
        self._lines = not silent and not terminal
        self._first = done
        self._started = self._logged = time.monotonic()
        self._updated = 0.0
        if not silent:
            update_status(name=name, done=done, total=total, text="")

    def __enter__(self) -> "Progress":
        return self

    def update(self, amount: int = 1, text: str = "") -> None:
        """Count `amount` more units; `text` is shown next to the bar."""
        self.done += amount
        if self.silent:
            return
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(amount)
        now, ended = time.monotonic(), self.done >= self.total
        left = (now - self._started) / max(self.done - self._first, 1) * max(self.total - self.done, 0)
        shown = "  ".join([*([text] if text else []), f"{self._bar.format_interval(left)} left"])
        if ended or now - self._updated >= STATUS_SECONDS:
            self._updated = now
            update_status(name=self.name, done=self.done, total=self.total, text=shown)
        if self._lines and (ended or now - self._logged >= LOG_SECONDS):
            self._logged = now
            print(f"{self.name} {self._amount(self.done)}/{self._amount(self.total)}  {shown}", file=sys.stderr)

    def rate(self, more: int = 0) -> float:
        """Return the units/s of this process so far, including `more` that are not counted yet."""
        return (self.done + more - self._first) / max(time.monotonic() - self._started, 1e-9)

    def _amount(self, value: int) -> str:
        return str(self._bar.format_sizeof(value, "B", 1024) if self.binary else value)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
