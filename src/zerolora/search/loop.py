"""The rounds of a search: choose values, have an engine run the trials, read what came out, until there are enough.

    zerolora search NAME -- snakemake --profile profiles/slurm all

All that a search knows is in its file of trials (config/studies.py). One that was killed goes on from there: trials
that have been asked for are run before others are chosen.
"""

import csv
import fcntl
import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolora.compare.rows import NO_MESSAGE, what_is_there
from zerolora.config.expanded import expand
from zerolora.config.file import load
from zerolora.config.schema import Config, Search
from zerolora.config.studies import FOLDER, Study, Trial, path_of, read_study, run_of, write_study
from zerolora.errors import UserError, shown
from zerolora.files import read_json
from zerolora.log import LOGGER
from zerolora.search.choice import choose

RESULTS = Path("results")


def search(name: str, config: Path, command: Sequence[str]) -> Study:
    """Run a search to its end and return its trials. Without a command, choose the values of a round if none waits.

    Raises UserError if the config or the file of trials is wrong, or the command fails and no trial's failure is why.
    """
    with _alone(name):
        while True:
            asked, study = _searched(config, name), read_study(name)
            if command and any(trial.state != "failed" for trial in study.trials):
                # Finished trials too: an edit of the config since then has changed their losses.
                study = _told(name, study, command, config)
                write_study(name, study)
                expand(load(config, before_first_trial=True))
            if any(trial.state == "asked" for trial in study.trials):
                if not command:
                    return study
            elif len(study.trials) >= asked.trials:
                return study
            else:
                _choose(name, study, asked, config)
                if not command:
                    return read_study(name)


def _searched(config: Path, name: str) -> Search:
    searches = load(config, before_first_trial=True).searches
    if name not in searches:
        known = f"write one of {', '.join(searches)}" if searches else "add one to searches (docs/search.md)"
        raise UserError(f"{config}: has no search {shown(name)}; {known}")
    return searches[name]


def _choose(name: str, study: Study, asked: Search, config: Path) -> None:
    """Add the trials of a round, and write them if their runs are possible. Raises UserError if one is not."""
    count = min(asked.at_once, asked.trials - len(study.trials))
    first = len(study.trials)
    further = Study(trials=[*study.trials, *choose(asked, study.trials, count)])
    write_study(name, further)
    try:
        checked: Config = load(config)
    except UserError:
        if study.trials:
            write_study(name, study)
        else:
            path_of(name).unlink()
        raise
    expand(checked)
    for number in range(first, len(further.trials)):
        LOGGER.info(f"{run_of(name, number)}: {said(further.trials[number].values)}")


def _told(name: str, study: Study, command: Sequence[str], config: Path) -> Study:
    """Run the command and return the trials with their results; if it fails, with the trials that failed.

    Raises UserError if it fails and no trial's failure is why.
    """
    expand(load(config))
    code = _run(command)
    runs = {run_of(name, number): trial for number, trial in enumerate(study.trials)}
    if code == 0:
        told = {run: trial if trial.state == "failed" else _with_result(run, trial) for run, trial in runs.items()}
        return Study(trials=list(told.values()))
    failed = {run: reason for run, reason in _reasons() if run in runs and runs[run].state != "failed"}
    if not failed:
        raise UserError(
            f"{' '.join(command)}: ended with exit code {code}, and no trial of {name} is why; mend what it says "
            "above, and run the search again, which goes on from here"
        )
    for run, reason in failed.items():
        LOGGER.warning(f"{run}: failed, and is left out from here on: {reason}")
        runs[run] = runs[run].model_copy(update={"state": "failed", "reason": reason})
    return Study(trials=list(runs.values()))


def _reasons() -> Iterator[tuple[str, str]]:
    """Yield each run that failed or was refused, and why. One that was stopped from outside has no reason."""
    for row in what_is_there(RESULTS)[0]:
        if row["status"] in ("failed", "refused") and NO_MESSAGE not in row["reason"]:
            yield row["run"], row["reason"]


def _run(command: Sequence[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UserError(
            f"{shown(command[0])}: {os.strerror(error.errno or 0)}; write the command that runs all runs after --, as "
            "in snakemake --profile profiles/local all"
        ) from None


def _with_result(run: str, trial: Trial) -> Trial:
    """Return a trial with what training wrote of its run. Raises UserError if that is missing."""
    metrics = RESULTS / run / "metrics"
    trained: dict[str, Any] = read_json(metrics / "train.json", "snakemake all")
    with (metrics / "loss.csv").open(encoding="utf-8", newline="") as file:
        rows = [(int(row["step"]), row["loss_validation"]) for row in csv.DictReader(file)]
    validations = [(step, float(loss)) for step, loss in rows if loss and math.isfinite(float(loss))]
    pruned = trained["steps"] < trained["planned_steps"] and any(
        bar.step == trained["steps"] and all(loss > bar.loss for _, loss in validations) for bar in trial.stop_above
    )
    return trial.model_copy(
        update={
            "state": "pruned" if pruned else "complete",
            "loss": trained["loss_validation"],
            "validations": validations,
        }
    )


def said(values: dict[str, Any]) -> str:
    """Return values for a message, as in train.learning_rate 0.0002, train.lora.r 8."""
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items())


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold a lock on all searches. Raises UserError if another search runs."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = os.open(FOLDER, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{FOLDER}: another search runs here; run {name} when it has ended") from None
        yield
    finally:
        os.close(folder)
