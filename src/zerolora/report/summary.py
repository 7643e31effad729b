"""The headline metrics of a run: the few that `dvc metrics show` prints. The stages' own files have all the others."""

from collections.abc import Mapping
from typing import Any


def headline(
    before: Mapping[str, float],
    after: Mapping[str, float],
    train: Mapping[str, float],
    resources: Mapping[str, float],
    used: Mapping[str, Any],
) -> dict[str, float]:
    """Return the metrics of one run; names are short, since DVC prints all of them side by side.

    before, accuracy     share of right answers of base and merged model, where rows ask something
    loss                 mean cross-entropy per supervised token of the merged model, on the same rows
    tok/s, step_s        of training: tokens per second, seconds per optimizer step
    wall_s               seconds of training, loading and saving included
    host_use, gpu_use    peak memory measured over predicted (usage.py); no gpu_use on CPU

    `before` and `after` are the evaluations, `train` and `resources` the metrics of training, `used` is usage's.
    """
    metrics = {"loss": after["loss"]}
    if "accuracy" in after:
        metrics |= {"before": before["accuracy"], "accuracy": after["accuracy"]}
    metrics |= {
        "tok/s": resources["tokens_per_second"],
        "step_s": resources["training_seconds"] / train["steps"],
        "wall_s": resources["total_seconds"],
        "host_use": used["measured_host_bytes"] / used["predicted_host_bytes"],
    }
    if used["predicted_gpu_bytes"]:
        metrics["gpu_use"] = used["measured_gpu_bytes"] / used["predicted_gpu_bytes"]
    return {name: _rounded(value) for name, value in metrics.items()}


def _rounded(value: float) -> float:
    """Return a value with four significant digits, whole ones from 1000 on."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
