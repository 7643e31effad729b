"""Probes: the project with some of the changes, run in the clone; their results are kept in bisect.json.

A probe is known by a hash of all files that it has, so that one that is the same as an earlier one costs nothing, after
a kill too. The clone has the results of the last probe and DVC's cache: Snakemake runs only the stages whose receipts
say so.
"""

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.bisect.changes import GENERATED, Changes
from zerolora.bisect.delta import State
from zerolora.bisect.revisions import LOCK, Clone, content_at
from zerolora.bisect.run_values import SEED
from zerolora.config.fingerprint import fingerprints
from zerolora.config.schema import Train
from zerolora.errors import UserError
from zerolora.files import read_object, stamp, write_json
from zerolora.git_environment import git_environment
from zerolora.search.rounds import run_to_end

RESULTS = ("summary.json", "metrics/difference.json")
"""Files of a run with its metrics. The latter has all digits."""


@dataclass(frozen=True)
class ProbeResult:
    """A state that was tried."""

    name: str
    metrics: tuple[dict[str, float], ...]
    """By seed, the numbers of summary.json and difference.json; none if it cannot run."""
    reason: str = ""
    """Why it cannot run."""

    def values(self, metric: str) -> list[float]:
        """Return a metric of each seed. Raises KeyError if it is missing."""
        return [each[metric] for each in self.metrics]


class Probes:
    """The probes of a bisection."""

    def __init__(self, folder: Path, changes: Changes, command: Sequence[str]) -> None:
        self.folder, self.changes, self.command = folder, changes, command
        self.file = folder / "bisect.json"
        self.record: dict[str, Any] = {"probes": {}}
        if self.file.is_file():
            self.record |= read_object(self.file, "zerolora bisect")
        self.clone = Clone(folder / "project", changes.good)
        self.runner = {
            "command": list(command),
            # Of a project with code, the code is in its files.
            "package": None if changes.has_code else fingerprints(),
            "libraries": _libraries(),
        }
        self.run_now: set[str] = set()
        """Keys of the probes that this command has run."""
        self.refused: set[str] = set()
        """Names of those that were refused before a stage began, which are not run again."""
        self.order: dict[str, ProbeResult] = {}
        """Those of this search by name, in order."""

    def tried(self, name: str, state: State, seeds: int, *, bad: bool = False) -> ProbeResult:
        """Return the probe of a state with at least this number of seeds; `bad` if it is the bad commit itself.

        Raises UserError if the command fails for all probes, KeyboardInterrupt if it was stopped.
        """
        try:
            key = self.changes.apply(state, self.clone, self.runner)
        except UserError as error:
            return self._listed(ProbeResult(name, (), str(error)))
        entry = self.record["probes"].get(key)
        again = entry and (
            entry["began"] and key not in self.run_now if entry["reason"] else len(entry["metrics"]) < seeds
        )
        if entry is None or again:
            if entry is None and bad:
                self.clone.put_lock(content_at(self.changes.bad, LOCK))
            entry = self._run(key, name, state, seeds, entry)
        if entry["reason"] and not entry["began"]:
            self.refused.add(name)
        return self._listed(ProbeResult(name, tuple(entry["metrics"]), entry["reason"]))

    def save(self, **values: Any) -> None:
        """Write bisect.json, with further values."""
        self.record |= values
        write_json(self.file, self.record)

    def hours(self) -> tuple[float, str] | None:
        """Return the rank-hours of a run and whether they are of GPUs, as the last probe measured them."""
        return hours_of(self.clone.project / "results" / self.changes.run)

    def _listed(self, probe: ProbeResult) -> ProbeResult:
        self.order[probe.name] = probe
        return probe

    def _run(self, key: str, name: str, state: State, seeds: int, before: dict[str, Any] | None) -> dict[str, Any]:
        self.changes.write_config(state, self.clone, seeds)
        project = self.clone.project
        results = [project / "results" / run for run in self._runs(seeds)]
        for file in (each / name for each in results for name in RESULTS):
            file.unlink(missing_ok=True)  # of another probe, if this one fails
        number = 1 + max((entry["number"] for entry in self.record["probes"].values()), default=0)
        number = before["number"] if before else number
        log = (self.folder / "logs" / f"{number}.log").absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        targets = [f"results/{run}/summary.json" for run in self._runs(seeds)]
        command = list(self.command) or [sys.executable, "-m", "zerolora", "run", *targets]
        before_it = self._products()
        with log.open("ab") as output:
            code, was_stopped = run_to_end(command, cwd=project, env=self._environment(), stdout=output, stderr=output)
        if was_stopped:
            raise KeyboardInterrupt
        metrics = [*map(metrics_of, results)]
        reason = ""
        if missing := [each.name for each, found in zip(results, metrics, strict=True) if not found]:
            if code == 0:
                text = " ".join(command)
                raise UserError(
                    f"{text}: succeeded without a result of {missing[0]}; give a command that runs all runs"
                )
            reason = _last_error(log) or f"exit code {code}"
            metrics = []
        entry = {
            **{"number": number, "name": name, "metrics": metrics, "reason": reason},
            "began": self._products() != before_it,
            **{"changes": sorted(map(str, state)), "log": str(log.relative_to(self.folder.absolute()))},
        }
        self.record["probes"][key] = entry
        self.run_now.add(key)
        self.save()
        return entry

    def _runs(self, seeds: int) -> list[str]:
        run, first = self.changes.run, self.changes.good_values.get(SEED, Train.model_fields["seed"].default)
        return [run, *(f"{run}-seed{first + number}" for number in range(1, seeds))]

    def _products(self) -> dict[Path, Any]:
        """Return the stamps of what stages write in the clone: not of results/config.json and results/settings, which
        are there before a stage begins."""
        own = [path for path in (self.clone.project / "results").glob("*/") if path.name != "settings"]
        roots = [*own, *(self.clone.project / name for name in GENERATED if name != "results")]
        return {path: stamp(path) for root in roots for path in (root, *root.rglob("*"))}

    def _environment(self) -> dict[str, str]:
        """Return the environment in which the code of the clone runs, if the project has its code."""
        source, environment = self.clone.project / "src", git_environment()
        if not self.changes.has_code:
            return environment
        former = environment.get("PYTHONPATH")
        return environment | {"PYTHONPATH": os.pathsep.join([str(source), *([former] if former else [])])}


def _libraries() -> list[str]:
    """Return the installed distributions with their versions, as their folders are named."""
    return sorted({path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")})


def metrics_of(run: Path) -> dict[str, float]:
    """Return the numbers of a run's difference.json, which has all digits, and of summary.json; none without the
    latter."""
    if not (run / "summary.json").is_file():
        return {}
    result: dict[str, float] = {}
    for file in (run / name for name in RESULTS):
        if file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
            result |= {key: each for key, each in values.items() if type(each) in (int, float) and math.isfinite(each)}
    return result


def hours_of(run: Path) -> tuple[float, str] | None:
    """Return the rank-hours of a run's training, measured, or else predicted by `render`, and of what; None if neither
    is there."""
    for file, keys in (
        (run / "usage.json", ("accounted_rank_hours", "measured_rank_hours")),
        (run / "render.json", ()),
    ):
        if not file.is_file():
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        if keys:
            hours = next((values[key] for key in keys if key in values), None)
            what = "GPU" if values.get("predicted_gpu_bytes") else "rank"
        else:
            ranked = values.get("choice", {}).get("ranked", [])
            hours, what = (
                (ranked[0]["rank_hours"], "GPU" if ranked[0]["gpu_bytes"] else "rank") if ranked else (None, "")
            )
        if hours is not None:
            return float(hours), what
    return None


def _last_error(log: Path) -> str:
    """Return the last line of a log that says what is wrong."""
    lines = [" ".join(line.split()) for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    wanted = re.compile(r"error|refused|failed|cannot|invalid", re.IGNORECASE)
    return next((line for line in reversed(lines) if wanted.search(line)), lines[-1] if lines else "")[:300]
