"""The outcomes of a search's trials, read from the results of their runs, and a table of them."""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zerolora.config.studies import Study, Trial, run_of
from zerolora.errors import UserError, shown
from zerolora.files import read_object
from zerolora.report.comparison_terminal import terminal_width

RESULTS = Path("results")
STATES = ("complete", "pruned", "waiting", "failed")
"""In the order of the table."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial."""

    state: Literal["waiting", "complete", "pruned", "failed"]
    """waiting = no result yet; pruned = stopped by train.stop_above."""
    loss: float | None = None
    """Validation loss of the saved adapter."""
    validations: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of each validation, in order."""


def outcomes(search: str, study: Study) -> list[Outcome]:
    """Return the outcome of each trial of a search. Raises UserError if a result is invalid."""
    return [_outcome(run_of(search, number), trial) for number, trial in enumerate(study.trials)]


def _outcome(run: str, trial: Trial) -> Outcome:
    metrics = RESULTS / run / "metrics"
    if trial.failed:
        return Outcome("failed")
    if not (metrics / "train.json").exists():
        return Outcome("waiting")
    trained = read_object(metrics / "train.json", "snakemake all")
    try:
        with (metrics / "loss.csv").open(encoding="utf-8", newline="") as file:
            rows = [(int(row["step"]), float(row["loss_validation"] or "nan")) for row in csv.DictReader(file)]
        validations = [(step, loss) for step, loss in rows if math.isfinite(loss)]
        stopped = trained["steps"] < trained["planned_steps"]
        bounds = {bound.step: bound.loss for bound in trial.stop_above}
        pruned = stopped and all(loss > bounds.get(trained["steps"], math.inf) for _, loss in validations)
        loss = float(trained["loss_validation"])
        if not math.isfinite(loss):
            return Outcome("failed")
        return Outcome("pruned" if pruned else "complete", loss, validations)
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(f"{metrics}: train.json and loss.csv are not those of one training; delete both") from None


def table(name: str, study: Study) -> str:
    """Return a table of the trials for a terminal, sorted by state and loss."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    keys = sorted({key for trial in study.trials for key in trial.values})
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("run", *keys, "loss", "state"):
        rows.add_column(Text(title), justify="right" if title == "loss" else "left", overflow="fold")
    trials = sorted(
        zip(outcomes(name, study), range(len(study.trials)), study.trials, strict=True),
        key=lambda each: (STATES.index(each[0].state), each[0].loss or 0.0, each[1]),
    )
    for outcome, number, trial in trials:
        values = [shown(trial.values[key]) if key in trial.values else "" for key in keys]
        loss = "" if outcome.loss is None else f"{outcome.loss:.4f}"
        rows.add_row(*map(Text, [run_of(name, number), *values, loss, outcome.state]))
    file = io.StringIO()
    console = Console(file=file, width=terminal_width(), no_color=True, highlight=False)
    console.print(rows)
    for _, number, trial in trials:
        if trial.failed:
            console.print(Text(f"{run_of(name, number)}: {trial.failed}"))
    if trials and trials[0][0].state == "complete":
        best = run_of(name, trials[0][1])
        console.print(Text(f"\nThe lowest validation loss is that of {best}; its page is results/{best}/report.html."))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
