"""How far a long stage is: a bar in a terminal, a line now and then in a log."""

import sys
import time

from tqdm import tqdm

LOG_SECONDS = 15


class Progress:
    """Counts bytes of the input towards `total`, and rows."""

    def __init__(self, total: int, name: str) -> None:
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            desc=name,
            disable=not terminal,
            dynamic_ncols=True,
        )
        self.lines, self.name, self.total = not terminal, name, total
        self.done = self.rows = 0
        self.started = self.logged = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def update(self, amount: int, rows: int) -> None:
        """Count another part of the input."""
        self.done += amount
        self.rows += rows
        now = time.monotonic()
        rate = self.rows / max(now - self.started, 1e-9)
        self.bar.set_postfix_str(f"{self.rows:,} rows, {rate:,.0f} rows/s", refresh=False)
        self.bar.update(amount)
        if self.lines and now - self.logged >= LOG_SECONDS:
            self.logged = now
            left = (now - self.started) * (self.total - self.done) / max(self.done, 1)
            print(
                f"{self.name}: {self.done / max(self.total, 1):.0%}, {self.rows:,} rows, {rate:,.0f} rows/s, "
                f"{max(left, 0):.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        self.bar.close()
