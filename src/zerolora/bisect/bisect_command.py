"""`zerolora bisect`: which change between two revisions cost the quality.

The good and the bad revision are trained with several seeds. If they differ by more than these explain, delta debugging
(delta.py) over what differs (changes.py) tries mixtures of both (probes.py), until it has the changes that are enough
to make the good one bad.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from zerolora import __version__
from zerolora.bisect import run_values
from zerolora.bisect.changes import Changes, changes
from zerolora.bisect.delta import Atom, Cause, Price, State, causes, price, union
from zerolora.bisect.noise import Noise, Side, step_of
from zerolora.bisect.probes import ProbeResult, Probes, hours_of, metrics_of
from zerolora.bisect.revisions import commit_of, export, uncommitted
from zerolora.errors import UserError, shown
from zerolora.files import locked
from zerolora.log import LOGGER, say
from zerolora.units import counted

FOLDER = Path("work/bisect")
HIGHER = ("accuracy", "preference_accuracy", "pref", "chosen")
"""Metrics of which more is better, in the order in which one is chosen."""
LOWER = ("bits", "loss")
"""Those of which less is."""
FOUND, NOTHING = 0, 1
"""Exit codes. 2 is that of a wrong use, as everywhere."""
SHOWN_FILES = 3


@dataclass(frozen=True)
class BisectRequest:
    """What the user asks for."""

    good: str
    bad: str
    run: str | None
    metric: str | None
    better: str | None
    """higher or lower; None if it is known of the metric."""
    seeds: int
    starts: bool
    """Whether it starts; otherwise only the plan is printed."""
    command: Sequence[str]


class NothingFoundError(Exception):
    """The reason why no change can be named."""


def bisect(request: BisectRequest) -> int:
    """Bisect, and return the exit code. Raises UserError for a usage error, or if a revision itself cannot run."""
    if request.seeds < 2:
        raise UserError(f"--seeds {request.seeds}: the noise of one seed is not known; use 2 or more")
    if request.metric and request.better is None and request.metric not in (*HIGHER, *LOWER):
        raise UserError(f"--metric {request.metric}: which way is better is not known; add --better higher or lower")
    good, bad = commit_of(request.good), commit_of(request.bad)
    if good == bad:
        raise UserError(f"{shown(request.good)} and {shown(request.bad)} are the same commit, {good[:8]}; give two")
    if files := uncommitted():
        more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
        LOGGER.warning(
            f"compared are the commits {good[:8]} and {bad[:8]}, without the uncommitted changes in "
            f"{', '.join(files[:SHOWN_FILES])}{more}"
        )
    compared = _changes(request, good, bad)
    known = metrics_of(Path("results") / compared.run)
    if known and request.metric and request.metric not in known:
        LOGGER.warning(
            f"--metric {request.metric}: results/{compared.run} has no such number, but the commits may; it has "
            f"{', '.join(sorted(known))}"
        )
    if not compared.atoms:
        say(f"{good[:8]} and {bad[:8]} do not differ in anything that run {compared.run} reads{_package(compared)}")
        return NOTHING
    cost = price(compared.atoms)
    say(_plan(request, compared, cost))
    if not request.starts:
        say("Nothing has run; the same command with --yes starts it.")
        return FOUND
    folder = FOLDER / f"{compared.run}-{good[:8]}-{bad[:8]}"
    with locked(folder, "this bisection is running already; wait until it has ended"):
        return _Bisection(request, compared, cost, Probes(folder, compared, request.command)).outcome()


def _changes(request: BisectRequest, good: str, bad: str) -> Changes:
    run, values = request.run, []
    for name, commit in ((request.good, good), (request.bad, bad)):
        with tempfile.TemporaryDirectory() as folder:
            export(commit, "config", Path(folder))
            run, own = run_values.read(Path(folder), run, f"{name} ({commit[:8]})")
            values.append(own)
    assert run is not None
    return changes(good, bad, run, (values[0], values[1]))


def _plan(request: BisectRequest, compared: Changes, cost: Price) -> str:
    """Return what is compared and what it takes."""
    lines = [f"{compared.good[:8]} and {compared.bad[:8]} differ for run {compared.run} in:"]
    lines += [f"  {atom.name}" for atom in compared.atoms]
    if not compared.has_code:
        lines.append(
            f"The project has no code: every probe runs the installed zerolora {__version__}{_package(compared)}."
        )
    seeds = request.seeds
    runs = 2 * seeds
    likely, most = runs + cost.single + 2 * (seeds - 1), runs + (cost.most + 2) * seeds
    known = hours_of(Path("results") / compared.run)
    text = f"{counted(likely, 'run')} for a single cause, {most:,} at most"
    if known:
        hours, what = known
        text += f": {hours * likely:.3g} and {hours * most:.3g} {what}-hours, at {hours:.3g} a run as in results/"
        text += compared.run
    else:
        text += f"; hours are not known without results/{compared.run}/usage.json"
    lines.append(
        f"Plan: both revisions with {seeds} seeds ({runs} runs), then at most {counted(cost.single, 'probe')} if one "
        f"change is the cause ({cost.most:,} whatever the causes are) of 1 to {seeds} seeds, which are {text}. "
        "Results that DVC or an earlier bisection has cost nothing."
    )
    return "\n".join(lines)


def _package(compared: Changes) -> str:
    """Return, after a sentence, that the package's version may be the cause, which no probe can have."""
    if not compared.other_package:
        return ""
    return "; the commits were run with different versions of it, as dvc.lock says, and what that costs no probe shows"


class _Bisection:
    """A bisection that runs."""

    def __init__(self, request: BisectRequest, compared: Changes, cost: Price, probes: Probes) -> None:
        self.request, self.compared, self.probes, self.cost = request, compared, probes, cost
        self.everything = union(compared.atoms)
        self.noise: Noise
        self.metric: str
        self.first = 1
        """Seeds with which a probe begins."""
        self.verdicts: dict[str, str] = {}
        self.said: set[str] = set()

    def outcome(self) -> int:
        """Search, print what was found, and return the exit code."""
        self.probes.save(
            good=self.compared.good,
            bad=self.compared.bad,
            run=self.compared.run,
            atoms=[atom.name for atom in self.compared.atoms],
            plan=self.cost.__dict__,
        )
        try:
            self._measure()
            found = causes(self.compared.atoms, self._is_bad)
            lines = [line for cause in found for line in self._lines(cause)]
            lines += self._rest(found)
        except NothingFoundError as error:
            self.probes.save(causes=[], verdict=str(error))
            say(self._table())
            say(str(error))
            return NOTHING
        self.probes.save(
            causes=[{"atoms": [atom.name for atom in cause.atoms]} for cause in found], verdict="\n".join(lines)
        )
        say(self._table())
        say("\n".join(lines))
        if self.probes.refused:
            LOGGER.info(
                f"What was refused before its first stage is not tried again; if its changes are not the cause, delete "
                f"its entry in {self.probes.file}."
            )
        return FOUND

    def _measure(self) -> None:
        """Run both revisions with all seeds. Raises NothingFoundError if they do not differ by more than noise."""
        seeds = self.request.seeds
        good = self._revision(self.request.good, self.probes.tried("GOOD", frozenset(), seeds))
        bad = self._revision(self.request.bad, self.probes.tried("BAD", self.everything, seeds, bad=True))
        self.metric = _metric(self.request, good.metrics + bad.metrics)
        sign = 1 if self._better == "higher" else -1
        values = good.values(self.metric), bad.values(self.metric)
        step = step_of(self.metric, good.metrics + bad.metrics)
        self.noise = Noise(values[0], values[1], self.cost.single, step=step)
        loss, low, high = self.noise.interval(*values)
        means = [f"{fmean(each):.4g}" for each in values]
        counts = sorted({len(each) for each in values})
        with_seeds = f"{counts[0]} seeds each" if len(counts) == 1 else f"{len(values[0])} and {len(values[1])} seeds"
        text = f"{self.metric} is {means[0]} in GOOD and {means[1]} in BAD, with {with_seeds}"
        interval = f"difference {loss:.3g}, 95 %: {low:.3g} to {high:.3g}, Student's t of pooled seeds"
        self.probes.save(metric=self.metric, better=self._better, difference=[loss, low, high])
        if loss and not self.noise.is_known():
            raise NothingFoundError(
                f"{text}, all alike: what other seeds change is not known; choose another --metric, such as a loss"
            )
        if not self.noise.is_beyond():
            text += f": not beyond the noise of the seeds ({interval}); more --seeds see less"
            raise NothingFoundError(text + _package(self.compared))
        if loss * sign < 0:
            raise NothingFoundError(f"{text}: BAD is the better one ({interval}); exchange both to see what gained")
        needed = self.noise.seeds_needed()
        if needed is None or needed > seeds:
            raise NothingFoundError(
                f"{text}: beyond the noise ({interval}), but too close to it to judge single probes; use --seeds "
                f"{needed or 'with more than 100'}"
            )
        self.first = self.noise.seeds_to_begin(seeds)
        say(f"{text}: beyond the noise ({interval}).")
        if known := self.probes.hours():
            hours, what = known
            likely = hours * self.first * self.cost.single
            say(f"A run took {hours:.3g} {what}-hours: at most {likely:.3g} for a single cause.")

    def _revision(self, name: str, probe: ProbeResult) -> ProbeResult:
        """Return the probe of a revision itself. Raises UserError if it cannot run, or has not the metric."""
        if probe.reason:
            raise UserError(
                f"{name}: cannot run: {probe.reason}; its log is in {self.probes.folder}/logs; if the cause is not in "
                f"the commit, delete {self.probes.file} to try again"
            )
        _metric(self.request, probe.metrics)
        return probe

    @property
    def _better(self) -> str:
        return self.request.better or ("higher" if self.metric in HIGHER else "lower")

    def _is_bad(self, state: State) -> bool:
        """Return whether a state is on the side of BAD, with more seeds while that is unclear."""
        if not state or state == self.everything:
            return bool(state)
        name = self._name(state)
        for seeds in range(self.first, self.request.seeds + 1):
            probe = self._tried(name, state, seeds)
            if probe.reason:
                self._say(probe, "cannot run")
                return False
            values = probe.values(self.metric)
            side = self.noise.side(values)
            if len(values) > 1:
                self.noise.others[name] = values
            if side != "unclear":
                break
        self._say(probe, side)
        return side == "bad"

    def _tried(self, name: str, state: State, seeds: int) -> ProbeResult:
        probe = self.probes.tried(name, state, seeds)
        if any(self.metric not in each for each in probe.metrics):
            return ProbeResult(name, (), f"its results have no {self.metric}")
        return probe

    def _say(self, probe: ProbeResult, verdict: Side | Literal["cannot run"]) -> None:
        if self.verdicts.get(probe.name) != verdict or probe.name not in self.said:
            why = probe.reason or f"{self.metric} {fmean(probe.values(self.metric)):.4g}"
            LOGGER.info(f"{verdict}: {why}: {probe.name}")
        self.verdicts[probe.name] = verdict
        self.said.add(probe.name)

    def _name(self, state: State) -> str:
        """Return the names of the atoms of a state, or of those that it lacks, whichever are fewer."""
        inside, outside = (
            [name for atom in self.compared.atoms for name in _names(atom, changes)]
            for changes in (state, self.everything - state)
        )
        return ", ".join(inside) if len(inside) <= len(outside) else f"all but {', '.join(outside)}"

    def _loss(self, state: State) -> tuple[str, bool]:
        """Return what a state costs, with its interval, and whether that is beyond the noise."""
        name = self._name(state)
        probe = self._tried(name, state, self.request.seeds)
        if probe.reason:
            return f"cannot run alone ({probe.reason})", False
        values = probe.values(self.metric)
        self.verdicts.setdefault(name, self.noise.side(values))
        loss, *ends = self.noise.interval(self.noise.good, values)
        if self._better == "lower":
            loss, ends = -loss, [-end for end in reversed(ends)]
        return f"{loss:.3g} of {self.metric} (95 %: {ends[0]:.3g} to {ends[1]:.3g})", ends[0] > 0

    def _lines(self, cause: Cause) -> list[str]:
        """Return a line for a cause, and whether the others of several atoms cost anything alone. Raises
        NothingFoundError if the cause alone costs nothing beyond the noise."""
        text, is_beyond = self._loss(cause.changes)
        names = " and ".join(atom.name for atom in cause.atoms)
        if not is_beyond:
            raise NothingFoundError(f"{names}: the search ended here, but alone this costs {text}: use more --seeds")
        if len(cause.atoms) == 1:
            return [f"{names} costs {text}"]
        alone = [(atom.name, *self._loss(atom.changes)) for atom in cause.atoms]
        costly = sum(beyond for *_, beyond in alone)
        how = "alone, each costs a part" if costly else "an interaction: none costs it alone"
        if 0 < costly < len(alone):
            how = "what seeds cannot tell from nothing alone may do nothing, or only with the others"
        return [f"{names} cost together {text}; {how}", *(f"  alone: {name}: {loss}" for name, loss, _ in alone)]

    def _rest(self, found: Sequence[Cause]) -> list[str]:
        """Return a line on BAD without the causes."""
        rest = self.everything.difference(*(cause.changes for cause in found))
        if not rest:
            return []
        text, is_beyond = self._loss(rest)
        how = "less than half of the loss has other causes" if is_beyond else "no loss beyond the noise"
        return [f"BAD without {'this' if len(found) == 1 else 'these'} costs {text}: {how}"]

    def _table(self) -> str:
        """Return a line for each probe."""
        lines = [["probe", "seeds", self.metric, "verdict", "changes"]]
        for number, probe in enumerate(self.probes.order.values()):
            verdict = self.verdicts.get(probe.name, "cannot run" if probe.reason else "")
            known = not probe.reason and verdict != "cannot run"
            value = f"{fmean(probe.values(self.metric)):.4g}" if known else ""
            lines.append([str(number), str(len(probe.metrics) or ""), value, verdict, probe.name])
        widths = [max(map(len, column)) for column in zip(*(line[:-1] for line in lines), strict=True)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)), line[-1]])
            for line in lines
        )


def _names(atom: Atom, state: State) -> Iterator[str]:
    """Yield the names of the largest atoms with changes of a state alone."""
    if atom.changes <= state:
        yield atom.name
    elif atom.changes & state:
        for part in atom.parts:
            yield from _names(part, state)


def _metric(request: BisectRequest, results: Sequence[Mapping[str, float]]) -> str:
    """Return the metric to compare. Raises UserError if a result lacks it, or none has a known direction."""
    common = sorted(set.intersection(*map(set, results)))
    metric = request.metric or next((each for each in (*HIGHER, *LOWER) if each in common), None)
    if metric is None:
        raise UserError(f"no result has a metric whose better side is known; add --metric: {', '.join(common)}")
    if metric not in common:
        raise UserError(f"--metric {metric}: a result has no such number; choose among {', '.join(common)}")
    return metric
