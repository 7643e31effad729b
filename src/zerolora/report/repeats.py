"""Runs that differ in their seed alone: the mean of their figures, and whether two such groups can be told apart.

The interval of a difference is that of an analysis of variance: the groups have the same spread, pooled over all of
them, so that a run without repeats can be compared with a repeated one. It allows for the number of groups (Tukey and
Kramer: C. Y. Kramer, Biometrics 12, 1956, 307-310), so that the best of many is not taken for better than it is.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zerolora.config.grid_rules import OF_LOSS
from zerolora.config.grids import SEED
from zerolora.evaluate.intervals import LEVEL
from zerolora.report.comparison_columns import ACCURACY, TASK, Column, Overrides
from zerolora.report.comparison_rows import Row

LOWER = ("loss", "loss_validation")
"""Figures of which the lowest is the best."""
HIGHER = (ACCURACY.key, "preference_accuracy")
"""Those of which the highest is. Of a task's metric, which one is best is not known."""


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seed alone, one or more."""

    runs: tuple[str, ...]
    values: tuple[float, ...]
    """A figure of each run."""

    @property
    def name(self) -> str:
        """Name of the first run."""
        return self.runs[0]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def squares(self) -> float:
        """Sum of the squared distances from the mean."""
        return math.fsum((value - self.mean) ** 2 for value in self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation, of two values or more."""
        return math.sqrt(self.squares / (len(self.values) - 1))

    def interval(self) -> tuple[float, float]:
        """Return Student's interval of the mean, of two values or more."""
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, len(self.values) - 1)) * self.deviation / math.sqrt(len(self.values))
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class RepeatedFigure:
    """A figure of groups on the same rows, of which at least one has several runs."""

    column: Column
    groups: tuple[SeedGroup, ...]
    of_all: bool = True
    """Whether these are all groups that have the figure: none has other rows, or another loss."""

    @property
    def repeated(self) -> list[SeedGroup]:
        """The groups of several runs."""
        return [group for group in self.groups if len(group.values) > 1]

    def best(self) -> SeedGroup | None:
        """Return the group of the best mean; None if it is not known which one is best."""
        if self.column.key not in (*LOWER, *HIGHER):
            return None
        best_of = min if self.column.key in LOWER else max
        return best_of(self.groups, key=lambda group: group.mean)

    def difference(self, first: SeedGroup, second: SeedGroup) -> tuple[float, float, float]:
        """Return by how much the second mean is higher, and the ends of its interval."""
        return difference_of(self.groups, first, second)

    def as_good(self) -> list[SeedGroup]:
        """Return the groups that cannot be told apart from the best one by their seeds, which is not among them."""
        if (best := self.best()) is None:
            return []
        others = [group for group in self.groups if group is not best]
        return [group for group in others if (ends := self.difference(best, group))[1] <= 0 <= ends[2]]


def difference_of(groups: Sequence[SeedGroup], first: SeedGroup, second: SeedGroup) -> tuple[float, float, float]:
    """Return by how much the second mean of two groups among several is higher, and the ends of its interval."""
    free = sum(len(group.values) - 1 for group in groups)
    spread = math.sqrt(math.fsum(group.squares for group in groups) / free)
    runs = 1 / len(first.values) + 1 / len(second.values)
    half = _range(len(groups), free) * spread * math.sqrt(runs / 2)
    less = second.mean - first.mean
    return less, less - half, less + half


@functools.cache
def _range(groups: int, free: int) -> float:
    """Return the quantile of the studentized range, which takes up to seconds."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(LEVEL, groups, free))


def figures(rows: Sequence[Row], columns: Sequence[Column], overrides: Overrides) -> list[RepeatedFigure]:
    """Return the figures of groups of runs of which one has repeats: accuracy, losses and the metrics of tasks, by
    themselves for each data set that is evaluated, and losses for each loss."""
    members: dict[str, dict[Any, Row]] = {}
    for row in rows:
        own = dict(overrides.get(row["run"], {}))
        seed = own.pop(SEED, None)
        members.setdefault(repr(sorted(own.items())), {}).setdefault(seed, row)  # a run written twice is no repeat
    result = []
    for column in columns:
        if column.key not in (*HIGHER, *LOWER) and (not column.key.startswith(TASK) or column.table_only):
            continue
        comparable: dict[str, list[SeedGroup]] = {}
        for group in members.values():
            if known := [row for row in group.values() if row.get(column.key) is not None]:
                chosen = overrides.get(known[0]["run"], {})
                evaluated = chosen.get("held_out", chosen.get("dataset"))
                alike = repr([evaluated, *[(key, chosen[key]) for key in sorted(chosen) if _sets_apart(key, column)]])
                values = tuple(float(row[column.key]) for row in known)
                comparable.setdefault(alike, []).append(SeedGroup(tuple(row["run"] for row in known), values))
        for groups in comparable.values():
            if any(len(each.values) > 1 for each in groups):
                result.append(RepeatedFigure(column, tuple(groups), len(comparable) == 1))
    return result


def _sets_apart(key: str, column: Column) -> bool:
    """Return whether a figure of runs with different values of a key cannot be compared, as another loss."""
    return column.key in LOWER and key.split(".")[:2] in OF_LOSS


def table_of(figures: Sequence[RepeatedFigure]) -> list[list[str]]:
    """Return a header and a line for each group with repeats: mean, standard deviation and interval of each figure."""
    groups = {group.name: len(group.values) for figure in figures for group in figure.repeated}
    cells: dict[str, dict[str, str]] = {}
    for figure in figures:
        own = cells.setdefault(figure.column.title, {})
        own |= {group.name: _cell(figure.column, group) for group in figure.repeated}
    lines = ([name, str(seeds), *(own.get(name, "") for own in cells.values())] for name, seeds in groups.items())
    return [["run", "seeds", *cells], *lines]


def _cell(column: Column, group: SeedGroup) -> str:
    ends = "–".join(map(column.text, group.interval()))
    return f"{column.text(group.mean)} ± {column.text(group.deviation)} ({ends})"


def verdicts(figures: Sequence[RepeatedFigure]) -> list[str]:
    """Return a sentence for each figure of which it is known whether more or less is better."""
    return [line for figure in figures if (line := best_line(figure))]


def best_line(figure: RepeatedFigure) -> str | None:
    """Return whether the seeds tell the best group from the others; None if there is nothing to compare."""
    best = figure.best()
    if best is None or len(figure.groups) < 2:
        return None
    word = "lowest" if figure.column.key in LOWER else "highest"
    among = "" if figure.of_all else f"Of {_listed(figure.groups)}, "
    has = f"{among}{best.name} has the {word} mean {figure.column.title}"
    if same := figure.as_good():
        return f"{has}, not distinguishable by seeds from {_listed(same)}."
    return f"{has}, by more than seeds explain."


def _listed(groups: Sequence[SeedGroup]) -> str:
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return ", ".join(group.name for group in groups[:3]) + more


def metrics(figures: Sequence[RepeatedFigure]) -> dict[str, float]:
    """Return mean, standard deviation and interval of each group with repeats, for DVC."""
    result: dict[str, Any] = {}
    for figure in figures:
        for group in figure.repeated:
            low, high = group.interval()
            values = {"mean": group.mean, "deviation": group.deviation, "low": low, "high": high}
            result |= {f"repeats.{group.name}.{figure.column.key}_{name}": value for name, value in values.items()}
    return result
