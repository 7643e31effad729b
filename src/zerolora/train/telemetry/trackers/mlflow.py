"""MLflow, into a file store unless MLFLOW_TRACKING_URI names a server."""

import os
from pathlib import Path
from typing import Any

from zerolora.train.telemetry.trackers.tracker import PROJECT, StartedRun, Tracker


def _start(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    import mlflow

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", folder.as_uri()))
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    mlflow.start_run(run_name=run)
    mlflow.log_params(settings)
    return StartedRun(lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


# Its databases are another dependency; files need none.
TRACKER = Tracker("mlflow", "mlflow", _start, {"MLFLOW_ALLOW_FILE_STORE": "true"})
