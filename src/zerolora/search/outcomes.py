"""What came out of a trial, from what training wrote of its run."""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zerolora.config.studies import Study, Trial, run_of
from zerolora.errors import UserError
from zerolora.files import read_object

RESULTS = Path("results")


@dataclass(frozen=True)
class Outcome:
    """What came out of a trial."""

    state: Literal["waiting", "complete", "pruned", "failed"]
    """waiting = without a result yet; pruned = stopped at a bar."""
    loss: float | None = None
    """Validation loss of the published adapter."""
    validations: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of each validation, in order."""


def outcomes(search: str, study: Study) -> list[Outcome]:
    """Return what came out of each trial of a search. Raises UserError if a result is broken."""
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
        bars = {bar.step: bar.loss for bar in trial.stop_above}
        pruned = stopped and all(loss > bars.get(trained["steps"], math.inf) for _, loss in validations)
        loss = float(trained["loss_validation"])
        if not math.isfinite(loss):
            return Outcome("failed")
        return Outcome("pruned" if pruned else "complete", loss, validations)
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(f"{metrics}: train.json and loss.csv are not those of one training; delete both") from None
