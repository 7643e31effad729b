"""The trials of a search as a table in a terminal."""

import io

from zerolora import errors
from zerolora.config.studies import Study, run_of
from zerolora.report.comparison_terminal import terminal_width
from zerolora.search.outcomes import Outcome, outcomes


def shown(name: str, study: Study) -> str:
    """Return a row for each trial, the lowest loss first, what failed last."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    keys = sorted({key for trial in study.trials for key in trial.values})
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("run", *keys, "loss", "state"):
        table.add_column(Text(title), justify="right" if title == "loss" else "left", overflow="fold")
    result = outcomes(name, study)
    order = sorted(range(len(result)), key=lambda number: (*_place(result[number]), number))
    for number in order:
        trial, outcome = study.trials[number], result[number]
        values = [errors.shown(trial.values[key]) if key in trial.values else "" for key in keys]
        loss = "" if outcome.loss is None else f"{outcome.loss:.4f}"
        table.add_row(*map(Text, [run_of(name, number), *values, loss, outcome.state]))
    file = io.StringIO()
    console = Console(file=file, width=terminal_width(), no_color=True, highlight=False)
    console.print(table)
    for number in order:
        if study.trials[number].failed:
            console.print(Text(f"{run_of(name, number)}: {study.trials[number].failed}"))
    if order and result[order[0]].state == "complete":
        best = run_of(name, order[0])
        console.print(Text(f"\nThe lowest validation loss is that of {best}; its page is results/{best}/report.html."))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _place(outcome: Outcome) -> tuple[int, float]:
    state = ("complete", "pruned", "waiting", "failed").index(outcome.state)
    return state, 0.0 if outcome.loss is None else outcome.loss
