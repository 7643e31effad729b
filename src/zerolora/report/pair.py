"""Two fine-tuned models compared row by row: `zerolora compare FIRST SECOND`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.evaluate.difference import UNMERGED, Answer, difference
from zerolora.evaluate.free_form import FREE_FORM
from zerolora.evaluate.intervals import LEVEL, disagree
from zerolora.files import read_json
from zerolora.report import repeats, tasks
from zerolora.report.comparison_columns import columns_of
from zerolora.report.comparison_rows import ROWS, finished
from zerolora.report.comparison_terminal import aligned
from zerolora.report.run_settings import run_names, settings_of_run
from zerolora.units import counted

EVALUATED = "zerolora stage evaluate"
HEADER = ("metric", "second less first", "95 % interval")


def compare_pair(results: Path, first: str, second: str) -> str:
    """Return the metrics of two runs on the same held-out rows and tasks, their differences with intervals, and
    McNemar's test of the answers that only one of them has right.

    Raises UserError if a run is unknown or not evaluated, or if the runs were evaluated on other rows.
    """
    known = run_names(results)
    for run in (first, second):
        if run not in known:
            raise UserError(f"compare: {run!r} is not a run of the config; use two of {', '.join(known)}")
    (before, base), (after, tuned) = (_evaluated(results, run) for run in (first, second))
    where = [_rows_of(results, run) for run in (first, second)]
    # Rows without a question have no answers, so that only their data set tells whether they are the same.
    if _asked(base) != _asked(tuned) or before["rows"] != after["rows"] or (not base and where[0] != where[1]):
        raise UserError(
            f"compare: {first} was evaluated on {where[0]}, and {second} on {where[1]}, which are not the same rows, "
            "or are judged in another way; compare runs with the same dataset, evaluate.split and evaluate.rows"
        )
    figures = difference(before, after, (base, tuned))
    lines = [f"{first} and {second} on {where[1]}, {counted(figures['rows'], 'row')}", ""]
    first_metric = "loss" if figures.get(FREE_FORM) else "accuracy"
    changes = sorted(tasks.held_out_changes(figures).items(), key=lambda item: (item[0] != first_metric, item[0]))
    of_tasks = tasks.compared(_tasks_of_both(results, first, second), results / first, results / second)
    changes += [(f"{task} {metric}", each) for task, of_task in of_tasks.items() for metric, each in of_task.items()]
    lines += aligned([[HEADER[0], first, second, *HEADER[1:]], *(_row(*change) for change in changes)])
    return "\n".join([*lines, *_verdict(figures, first, second), *_over_seeds(results, first, second)])


def _evaluated(results: Path, run: str) -> tuple[Any, Any]:
    """Return a run's metrics and answers on its held-out rows."""
    metrics = read_json(results / run / "metrics/evaluate.json", EVALUATED)
    if not metrics.get("enabled", True):
        raise UserError(f"compare: {run} is not evaluated; set evaluate.enabled: true, and hold out rows")
    return metrics, read_json(results / run / "answers.json", EVALUATED)


def _asked(answers: Sequence[Answer]) -> list[tuple[Any, ...]]:
    """Return what must be the same of two runs' answers: question, expected answer, and the names of the scores."""
    return [(each["question"], each["expected"], sorted(each.keys() - {UNMERGED})) for each in answers]


def _rows_of(results: Path, run: str) -> str:
    settings = settings_of_run(results, run)
    return f"split {settings['evaluate']['split']} of {settings['dataset']}"


def _tasks_of_both(results: Path, first: str, second: str) -> list[str]:
    """Return the further tasks that both runs have results of."""
    one, other = ({*settings_of_run(results, run)["report"]["tasks"]} for run in (first, second))
    files = [results / run / tasks.FOLDER for run in (first, second)]
    return sorted(
        name
        for name in one & other
        if all((folder / file).is_file() for folder in files for file in tasks.files_of(name))
    )


def _row(name: str, change: Mapping[str, Sequence[float]]) -> list[str]:
    first, second = change["base"], change["tuned"]
    less, *ends = change["difference"] or [second[0] - first[0]]
    interval = f"{ends[0]:+.4g} to {ends[1]:+.4g}" if ends else ""
    return [name.replace("_", " "), f"{first[0]:.4g}", f"{second[0]:.4g}", f"{less:+.4g}", interval]


def _verdict(figures: Mapping[str, Any], first: str, second: str) -> Iterator[str]:
    if "gained" not in figures:
        return
    alone = [f"{figures[name]} right in {run} alone" for name, run in (("lost", first), ("gained", second))]
    yield ""
    yield f"{'; '.join(alone)}; McNemar's exact p {figures['p']:.2g}"
    if disagree(figures["difference_low"], figures["difference_high"], figures["p"]):
        yield "The interval and p disagree, since few answers differ; p is exact."
    if figures["p"] >= 1 - LEVEL:
        yield "Not distinguishable by these rows. Other seeds may differ more than that."


def _over_seeds(results: Path, first: str, second: str) -> Iterator[str]:
    """Yield what the repeats of two runs say of each figure."""
    overrides = read_json(results / "config.json", "zerolora stage resolve")["compare"]["runs"]
    rows = finished((run for run in overrides if (results / ROWS / f"{run}.json").is_file()), results / ROWS)
    for figure in repeats.figures(rows, columns_of(rows, overrides), overrides):
        pair = [group for run in (first, second) for group in figure.groups if run in group.runs]
        if (
            len(pair) < 2
            or pair[0] is pair[1]
            or not (of_two := repeats.RepeatedFigure(figure.column, tuple(pair))).repeated
        ):
            continue
        text = figure.column.text
        means = " and ".join(f"{text(group.mean)} of {counted(len(group.runs), 'seed')}" for group in pair)
        less, low, high = of_two.difference(*pair)
        same = "; not distinguishable by seeds" if low <= 0 <= high else ""
        yield f"Mean {figure.column.title} {means}: {less:+.4g}, 95 % interval {low:+.4g} to {high:+.4g}{same}"
