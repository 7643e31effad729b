"""The headline metrics of a run, which `dvc metrics show` prints. All other metrics are in the stages' own files."""

from collections.abc import Mapping
from typing import Any


def headline(
    before: Mapping[str, float],
    after: Mapping[str, float],
    train: Mapping[str, float],
    resources: Mapping[str, float],
    used: Mapping[str, Any],
) -> dict[str, float]:
    """Return the headline metrics of one run. Names are short, since DVC prints all of them side by side.

    before, accuracy     share of right answers of base and merged model; missing if no row has a prompt
    acc_err              half the width of Wilson's 95 % interval of the accuracy (difference.json has its ends)
    loss                 mean cross-entropy per supervised token of the fine-tuned model, on the same rows; with
                         evaluate.enabled: false neither is there
    tok/s, step_s        training: tokens per second, seconds per optimizer step
    wall_s               seconds of training, including loading and saving
    host_use, gpu_use    ratio of measured to predicted peak memory (usage.py); no gpu_use on CPU

    before: evaluate.json of the base model. after: difference.json. train, resources: train.json and
    train_resources.json. used: the result of `usage`.
    """
    metrics = {"loss": after["loss"]} if "loss" in after else {}
    if "accuracy" in after:
        metrics |= {"before": before["accuracy"], "accuracy": after["accuracy"]}
        metrics |= {"acc_err": (after["accuracy_high"] - after["accuracy_low"]) / 2}
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
    """Round to four significant digits, or to a whole number from 1000 on."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
