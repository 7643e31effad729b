"""Metrics of a run for other tools: its row in the comparison (results/compare/rows/<run>.json), and DVC's headline."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.settings import TrainingChoice
from zerolora.evaluate.free_form import BITS, FREE_FORM
from zerolora.evaluate.held_out_preference import change_in_training, less_likely
from zerolora.files import MANIFEST, read_json
from zerolora.report.figures import NOT_TERMS

POINTS = 100
"""Maximum points of a loss curve, evenly spaced."""
OF_CHOSEN = tuple(f"{answers}_log_probability_difference" for answers in ("chosen", "desirable"))
PARTS = ("data", "forward", "backward", "communication", "optimizer", "between")
"""Parts of a step's time, as in train_resources.json."""
LOADS = ("cpu_percent", "gpu_percent")
FIGURES = (
    *("accuracy", "accuracy_low", "accuracy_high", "loss", BITS, FREE_FORM),
    *("preference_accuracy", "preference_accuracy_low", "preference_accuracy_high", "preference_accuracy_per_token"),
    *(f"{answers}_log_probability_difference" for answers in ("chosen", "rejected", "desirable")),
    "longer_answer_rate",
)
"""Keys of difference.json."""


class Planned(NamedTuple):
    """Files of a run that precede its training."""

    estimate: Mapping[str, Any]
    """estimate.json."""
    choice: TrainingChoice
    """The entry `zerolora` of zero.json."""
    reasons: Mapping[str, Any]
    """render.json."""


def row(
    results: Path,
    planned: Planned,
    compared: Mapping[str, Any],
    trained: Mapping[str, Any],
    resources: Mapping[str, Any],
    used: Mapping[str, Any],
    failure: str | None,
    loss_unit: str,
    split: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the row of the run in `results`: a flat table of figures, and the data of its charts.

    compared: difference.json. trained, resources: train.json and train_resources.json. used: usage.json. failure: the
    reason why the run does not pass its gate. loss_unit: the unit of the loss, as in "per supervised token". split: the
    evaluated one. notes: what the run had besides the config file, and what the user
    keeps of other code. Sizes are in bytes, times in seconds, energy in joules; unmeasured figures are missing.

        status, reason    done, or failed with the gate's reason
        strategy          and micro_batch, accumulation: render's choice
        curve             [[step, training loss], …]
        memory            {gpu, host: predicted bytes by term, capacity_gpu, capacity_host}; empty for a user's own
                          DeepSpeed JSON, whose terms are not in estimate.json
        parts             seconds of a step by PARTS
    """
    rendered = planned.choice
    files = read_json(results / "adapter" / MANIFEST, "zerolora stage train")["files"]
    on_gpu = bool(used["predicted_gpu_bytes"])
    hours = used.get("accounted_rank_hours", used["measured_rank_hours"])
    step = resources["training_seconds"] / trained["steps"]
    result: dict[str, Any] = {
        "status": "failed" if failure else "done",
        "reason": failure or "; ".join(_remarks(compared, trained, split, notes)),
        **{key: getattr(rendered, key) for key in ("strategy", "micro_batch", "accumulation")},
        **{name: compared[name] for name in FIGURES if name in compared},
        "steps": trained["steps"],
        "trainable_parameters": trained["trainable_parameters"],
        **{name: trained[name] for name in ("loss_validation",) if name in trained},
        "wall_seconds": resources["total_seconds"],
        "step_seconds": step,
        "predicted_step_seconds": planned.reasons["choice"]["ranked"][0]["step_seconds"],
        "tokens_per_second": resources["tokens_per_second"],
        **{name: resources[name] for name in ("mfu", "energy_joules", "checkpoint_bytes") if name in resources},
        **_loads(results / "metrics" / "telemetry.csv"),
        "predicted_host_bytes": used["predicted_host_bytes"],
        "measured_host_bytes": used["measured_host_bytes"],
        "communication_bytes": sum(size for name, size in resources.items() if name.endswith("_bytes_per_step")),
        "gpu_hours" if on_gpu else "rank_hours": hours,
        "adapter_bytes": sum(file["bytes"] for name, file in files.items() if name.endswith(".safetensors")),
        "loss_unit": loss_unit,
        "curve": _curve(results / "metrics" / "loss.csv"),
        "memory": _memory(planned.estimate, rendered.strategy),
        "parts": {part: resources[f"{part}_share"] * step for part in PARTS if f"{part}_share" in resources},
    }
    if on_gpu:
        result |= {name: used[name] for name in ("predicted_gpu_bytes", "measured_gpu_bytes")}
    return result


def _remarks(
    compared: Mapping[str, Any], trained: Mapping[str, Any], split: str, notes: Sequence[str]
) -> Iterable[str]:
    yield from notes
    if trained["steps"] < trained["planned_steps"]:
        yield f"stopped early, after {trained['steps']} of {trained['planned_steps']} steps"
    if not compared.get("enabled", True):
        yield f"not evaluated: {why_not(split)}"
    elif split == "validation":
        yield "evaluated on the validation rows, which also choose the best adapter"
    if answers := less_likely(compared):
        change = compared[f"{answers}_log_probability_difference"]
        yield f"the {answers} answers became less likely, by {-change:.3g} nats an answer"
    elif (since := change_in_training(trained)) and since[1] < 0:
        yield f"training made the chosen answers less likely, by {-since[1]:.3g} nats an answer on {since[0]}"


def why_not(split: str) -> str:
    """Return the reason for a run without an evaluation."""
    return "no row is held out (split)" if split == "none" else "evaluate.enabled is false"


def _loads(telemetry: Path) -> dict[str, float]:
    """Return the means of LOADS, weighted by the seconds of each step."""
    means = {}
    with telemetry.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    for name in LOADS:
        read = [(float(line[name]), float(line["seconds"])) for line in lines if line[name] and line["seconds"]]
        if read:
            means[name] = sum(load * seconds for load, seconds in read) / sum(seconds for _, seconds in read)
    return means


def _curve(table: Path) -> list[tuple[int, float]]:
    with table.open(encoding="utf-8", newline="") as file:
        points = [(int(line["step"]), float(line["loss"])) for line in csv.DictReader(file)]
    count = min(POINTS, len(points))
    indices = {round(index * (len(points) - 1) / max(1, count - 1)) for index in range(count)}
    return [points[index] for index in sorted(indices)]


def _memory(predicted: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    for entry in predicted["strategies"]:
        if entry["strategy"] == strategy:
            # Activations are negative where they use memory counted for gradients.
            terms = {
                where: {name: size for name, size in entry[where].items() if name not in NOT_TERMS and size > 0}
                for where in ("gpu", "host")
            }
            return {**terms, **{f"capacity_{where}": predicted["capacity"][where] for where in terms}}
    return {}


def headline(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the headline metrics of a run, which `dvc metrics show` prints side by side: hence the short names. Equal
    runs have equal ones.

    before, accuracy     share of right answers of base and merged model; missing if no row has a prompt
    acc_err              half the width of Wilson's 95 % interval of the accuracy (difference.json has its ends)
    bits_before, bits    of free-form answers, in place of these three: bits per byte of the data's answers, of base and
                         fine-tuned model, and `loss_before`, the loss of the base model
    pref_before, pref    of pairs, in place of these three: the share whose chosen answer base and merged model find
                         more likely than the rejected one
    chosen               change of the log-probability of a chosen, or of a desirable answer, in nats; no acc_err then
    loss                 mean cross-entropy per supervised token of the fine-tuned model, on the same rows; missing,
                         as the accuracies, with evaluate.enabled: false

    before: evaluate.json of the base model. after: difference.json.
    """
    metrics = {"loss": after["loss"]} if "loss" in after else {}
    change = [each for each in OF_CHOSEN if each in after]
    if "preference_accuracy" in after:
        metrics |= {"pref_before": before["preference_accuracy"], "pref": after["preference_accuracy"]}
    elif after.get(FREE_FORM):
        metrics |= {"loss_before": before["loss"]}
        metrics |= {"bits_before": before[BITS], "bits": after[BITS]} if BITS in before else {}
    elif "accuracy" in after:
        metrics |= {"before": before["accuracy"], "accuracy": after["accuracy"]}
        if not change:
            metrics |= {"acc_err": (after["accuracy_high"] - after["accuracy_low"]) / 2}
    if change:
        metrics["chosen"] = after[change[0]]
    return {name: _rounded(value) for name, value in metrics.items()}


def timings(train: Mapping[str, float], resources: Mapping[str, float], used: Mapping[str, Any]) -> dict[str, float]:
    """Return what differs between equal runs.

    tok/s, step_s        training: tokens per second, seconds per optimizer step
    wall_s               seconds of training, including loading and saving
    host_use, gpu_use    ratio of measured to predicted peak memory (usage.py); no gpu_use on CPU

    train, resources: train.json and train_resources.json. used: the result of `usage`.
    """
    metrics = {
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
