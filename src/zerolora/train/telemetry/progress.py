"""How far training is, for who watches a terminal or reads a log."""

import sys
import time

from tqdm import tqdm

LOG_SECONDS = 15  # between two lines where there is no terminal for a bar


def say(line: str) -> None:
    """Print a line to stderr; a bar there makes room for it."""
    tqdm.write(line, file=sys.stderr)


class Progress:
    """A bar with loss, the gradient's norm, tokens/s and remaining time in a terminal; a line now and then in a log.
    Rank 0 only."""

    def __init__(self, steps: int, rank: int, done: int = 0) -> None:
        """`done` of the `steps` were made by an earlier run."""
        terminal = sys.stderr.isatty()
        self.silent = rank != 0
        self.bar = tqdm(total=steps, initial=done, unit="step", disable=self.silent or not terminal, dynamic_ncols=True)
        self.lines = not self.silent and not terminal
        self.started = self.logged = time.monotonic()
        self.steps, self.step, self.done = steps, done, done

    def __enter__(self) -> "Progress":
        return self

    def update(self, loss: float, tokens: int, norm: float | None) -> None:
        """Count a step with this loss and norm of the gradient; `tokens` are those of all steps of this process."""
        self.step += 1
        now = time.monotonic()
        rate = tokens / (now - self.started)
        figures = [f"loss {loss:.4f}", *([] if norm is None else [f"norm {norm:.3g}"]), f"{rate:.0f} tokens/s"]
        self.bar.set_postfix_str(", ".join(figures), refresh=False)
        self.bar.update()
        if self.lines and (now - self.logged >= LOG_SECONDS or self.step == self.steps):
            self.logged = now
            left = (now - self.started) / (self.step - self.done) * (self.steps - self.step)
            line = "  ".join([f"step {self.step}/{self.steps}", *figures, f"{tqdm.format_interval(left)} left"])
            print(line, file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        self.bar.close()
