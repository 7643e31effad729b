"""The rounds of a search: choose values, run the trials, read their outcomes, until there are enough.

    zerolora search NAME -- snakemake --profile profiles/slurm all

The state of a search is its file of trials (config/studies.py) and their results. A killed search resumes: the command
runs the trials in the file before it chooses others.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerolora.config.file import load
from zerolora.config.runs_file import write_runs
from zerolora.config.schema import Search
from zerolora.config.studies import FOLDER, Study, path_of, read_study, run_of, write_study
from zerolora.errors import UserError, shown
from zerolora.files import locked
from zerolora.log import LOGGER
from zerolora.report.comparison_rows import NO_MESSAGE, all_runs
from zerolora.search.outcomes import RESULTS, outcomes
from zerolora.search.trial_values import choose


def search(name: str, config: Path, command: Sequence[str]) -> Study:
    """Run a search to its end and return its trials. Without a command, choose the values of a round if none is
    waiting.

    Raises UserError if the config or the file of trials is invalid, or if the command fails for a reason other than a
    failed trial.
    """
    with locked(FOLDER, f"another search is running here; run {name} when it has ended"):
        while True:
            settings, study = _settings(config, name), read_study(name)
            # Also if all trials are finished: the config may have been edited since, which changes their losses.
            runnable = any(not trial.failed for trial in study.trials)
            if command and runnable and _after(command, name, study, config) != study:
                continue  # run the others, without those that failed
            if any(outcome.state == "waiting" for outcome in outcomes(name, study)):
                if not command:
                    return study
            elif len(study.trials) >= settings.trials:
                return study
            else:
                study = _choose(name, study, settings, config)
                if not command:
                    return study


def _settings(config: Path, name: str) -> Search:
    searches = load(config, before_first_trial=True).searches
    if name not in searches:
        known = f"use one of {', '.join(searches)}" if searches else "add one to searches (docs/grids.md)"
        raise UserError(f"{config}: has no search {shown(name)}; {known}")
    return searches[name]


def _choose(name: str, study: Study, settings: Search, config: Path) -> Study:
    """Add the trials of a round to the file. Raises UserError and restores the file if a run is invalid."""
    first = len(study.trials)
    count = min(settings.at_once, settings.trials - first)
    further = Study(trials=[*study.trials, *choose(settings, study.trials, outcomes(name, study), count)])
    write_study(name, further)
    try:
        checked = load(config)
    except UserError:
        if study.trials:
            write_study(name, study)
        else:
            path_of(name).unlink()
        raise
    write_runs(checked)
    for number in range(first, len(further.trials)):
        values = ", ".join(f"{key} {shown(value)}" for key, value in further.trials[number].values.items())
        LOGGER.info(f"{run_of(name, number)}: {values}")
    return further


def _after(command: Sequence[str], name: str, study: Study, config: Path) -> Study:
    """Run the command and return the trials, with failed ones marked.

    Raises UserError if it fails for a reason other than a failed trial, or leaves a trial without a result.
    """
    write_runs(load(config))
    (code, _), text = run_to_end(command), " ".join(command)
    if code == 0:
        waiting = [number for number, each in enumerate(outcomes(name, study)) if each.state == "waiting"]
        if waiting:
            run = run_of(name, waiting[0])
            raise UserError(f"{text}: succeeded without a result of {run}; give a command that runs all runs")
        return study
    runs = {run_of(name, number): trial for number, trial in enumerate(study.trials)}
    failed = {run: reason for run, reason in _reasons() if run in runs and not runs[run].failed}
    if not failed:
        raise UserError(
            f"{text}: ended with exit code {code}, but no trial of {name} failed; fix the error above and run the "
            "search again to resume it"
        )
    for run, reason in failed.items():
        LOGGER.warning(f"{run}: failed and is skipped from now on: {reason}")
        runs[run] = runs[run].model_copy(update={"failed": reason})
    study = Study(trials=list(runs.values()))
    write_study(name, study)
    write_runs(load(config, before_first_trial=True))
    return study


def _reasons() -> Iterator[tuple[str, str]]:
    """Yield each failed or refused run and the reason; runs that were stopped from outside have none."""
    for row in all_runs(RESULTS)[0] if (RESULTS / "config.json").exists() else ():
        if row["status"] in ("failed", "refused") and NO_MESSAGE not in row["reason"]:
            yield row["run"], row["reason"]


def run_to_end(command: Sequence[str], **options: Any) -> tuple[int, bool]:
    """Run a command, with options of Popen, and return its exit code and whether it was asked to stop. Ctrl-C reaches
    it directly, SIGTERM as a SIGINT: it ends by itself.

    Snakemake 9.27 takes its own lock in its handler of SIGTERM, and hangs if it has that lock at that moment; of a
    SIGINT it ends its jobs and then itself. A shell has its background commands ignore SIGINT, which a command would
    inherit, so that one gets a session of its own instead, where no Ctrl-C arrives.
    """
    interrupted, terminated = threading.Event(), threading.Event()
    running: subprocess.Popen[bytes] | None = None

    def forward(*_: object) -> None:
        terminated.set()
        if running:
            running.send_signal(signal.SIGINT)

    # Installed before the command starts, so that no signal ends the search alone. It is born with their defaults.
    in_background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ctrl_c = (lambda *_: None) if in_background else (lambda *_: interrupted.set())
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, ctrl_c),
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
    }
    try:
        running = subprocess.Popen(command, start_new_session=in_background, **options)
        if terminated.is_set():
            running.send_signal(signal.SIGINT)
        code = running.wait()
        return code, interrupted.is_set() or terminated.is_set()
    except OSError as error:
        raise UserError(
            f"{shown(command[0])}: {os.strerror(error.errno or 0)}; give the command that runs all runs after --, as "
            "in snakemake --profile profiles/local all"
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
