"""Stage report: the page of a run and its metrics, from the outputs of the other stages.

zerolora stage report RUN
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolora.config.settings import ReportSettings
from zerolora.evaluate import held_out_preference
from zerolora.evaluate.difference import Answer, changed, difference
from zerolora.evaluate.free_form import FREE_FORM
from zerolora.evaluate.intervals import disagree
from zerolora.fail_if import parse
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.log import result
from zerolora.planner.zero_json import ZeroJson
from zerolora.report import figures, tasks
from zerolora.report.html import render as render_page
from zerolora.report.provenance import commands, provenance
from zerolora.report.row import Planned, headline, row, timings, why_not
from zerolora.report.show import before_and_after
from zerolora.report.usage import cost, ratios, table, usage
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.objective import Objective

SHOWN_FIRST = 3
"""Number of answers next to the result."""
Pair = tuple[Answer, Answer]
"""The answers of base and fine-tuned model to the same row."""


def report(
    settings: ReportSettings,
    run: str,
    model: Path,
    data: Path,
    packing: Path,
    estimate_file: Path,
    zero_file: Path,
    reasons: Path,
    base: Path,
    results: Path,
    config: Path,
    lock: Path,
    accounted: dict[str, Any] | None,
    usage_file: Path,
    summary_file: Path,
    timings_file: Path,
    difference_file: Path,
    row_file: Path,
    output: Path,
) -> None:
    """Write the self-contained HTML page, predicted and measured resources (usage.py), the changes row by row
    (evaluate/difference.py), the headline metrics and timings, and the run's row of the comparison (row.py).

    `accounted` has Slurm's accounting, None without it. Raises UserError if an earlier stage's file is missing.
    """
    metrics = results / "metrics"
    before, after = (read_json(folder / "evaluate.json", "zerolora stage evaluate") for folder in (base, metrics))
    used = {
        "base": read_json(base / "evaluate_resources.json", "zerolora stage evaluate"),
        "merged": read_json(metrics / "evaluate_resources.json", "zerolora stage evaluate"),
        "train": read_json(metrics / "train_resources.json", "zerolora stage train"),
    }
    trained = read_json(metrics / "train.json", "zerolora stage train")
    objective = OBJECTIVES[settings.objective].configured(settings.objective_settings)
    estimate = read_json(estimate_file, "zerolora stage estimate")
    render = read_json(reasons, "zerolora stage render")
    adapter = read_json(results / "adapter" / MANIFEST, "zerolora stage train")
    train_usage = usage(render["slurm_resources"], used["train"], accounted)
    answers = (
        read_json(base / "answers.json", "zerolora stage evaluate"),
        read_json(results / "answers.json", "zerolora stage evaluate"),
    )
    compared = difference(before, after, answers)
    groups = [name.removesuffix(".difference") for name in compared if name.endswith(".difference")]
    tasks.set_aside(settings.tasks, base, results)
    task_metrics = tasks.compared(settings.tasks, base, results)
    origin = provenance(run, model, data, results, config, lock, settings.kept)
    zero = ZeroJson.read(zero_file)
    columns, rows = table(train_usage)
    pairs, changed_pairs = list(zip(*answers, strict=True)), changed(*answers)
    first_metric = "loss" if compared.get(FREE_FORM) else "accuracy"
    failure = _gate_failure(settings.fail_if, compared)
    page = render_page(
        "page.html",
        run=run,
        model=model.name,
        data=data.name,
        not_evaluated="" if after.get("enabled", True) else why_not(settings.split),
        before=before,
        after=after,
        difference=compared,
        disagree=disagree,
        less_likely=held_out_preference.less_likely(compared),
        since_start=held_out_preference.change_in_training(trained),
        taught=objective if objective.taught else None,
        metrics=sorted(tasks.held_out_changes(compared).items(), key=lambda item: (item[0] != first_metric, item[0])),
        tasks=task_metrics,
        groups=groups,
        names_of_groups={group: figures.group_name(group) for group in ["", *groups]},
        gate={"fail_if": settings.fail_if, "failure": failure},
        pairs=pairs[: settings.examples],
        changed=changed_pairs[: settings.examples],
        first=_first(pairs, changed_pairs)[: min(SHOWN_FIRST, settings.examples)],
        cost=cost(train_usage, trained, used["train"], sum(file["bytes"] for file in adapter["files"].values())),
        used=used,
        train=trained,
        usage={"columns": columns, "rows": rows, "jobs": train_usage.get("accounted_jobs")},
        stats=read_json(data / "stats.json", "zerolora stage prepare"),
        mask=read_json(data / "mask.json", "zerolora stage prepare"),
        packing=read_json(packing / "stats.json", "zerolora stage pack"),
        estimate=estimate,
        strategy=zero.choice.strategy,
        render=render,
        zero=zero_file.read_text(encoding="utf-8"),
        charts=_charts(
            compared, groups, data, metrics, estimate, render, zero, train_usage, used["train"], trained, objective
        ),
        loss_unit=objective.loss_unit,
        learning_rate=settings.learning_rate,
        provenance=origin,
        commands=commands(origin["commit"], f"results/{run}/report.html"),
    )
    write_json(usage_file, train_usage)
    write_json(summary_file, headline(before, compared))
    write_json(timings_file, timings(trained, used["train"], train_usage))
    write_json(difference_file, compared)
    reason = f"evaluate.fail_if: {settings.fail_if}: {failure}" if failure else None
    planned = Planned(estimate, zero.choice, render)
    own_row = row(
        results,
        planned,
        compared,
        trained,
        used["train"],
        train_usage,
        reason,
        objective.loss_unit,
        settings.split,
        [origin[name] for name in ("values", "kept") if name in origin],
    )
    write_json(row_file, own_row | tasks.flat(task_metrics))
    write_text(output, page)
    result(before_and_after(before, compared))


def _charts(
    compared: Mapping[str, float],
    groups: Sequence[str],
    data: Path,
    metrics: Path,
    estimate: Mapping[str, Any],
    render: Mapping[str, Any],
    zero: ZeroJson,
    used: Mapping[str, Any],
    resources: Mapping[str, Any],
    trained: Mapping[str, Any],
    objective: Objective,
) -> dict[str, Any]:
    """Return the charts by section of the page."""
    strategy = zero.choice.strategy
    telemetry = metrics / "telemetry.csv"
    rendered, wanted = render["choice"]["ranked"][0], render["slurm_resources"]
    measured_step = resources["training_seconds"] / trained["steps"]
    memory = [
        figures.memory_bars(estimate, "gpu", strategy, rendered["gpu_bytes"], used["measured_gpu_bytes"]),
        figures.memory_bars(estimate, "host", strategy, wanted["host_bytes"], used["measured_host_bytes"]),
    ]
    titles = {held_out_preference.ACCURACY: "Pairs whose chosen answer is more likely.", "accuracy": "Accuracy."}
    scores = [(title, metric) for metric, title in titles.items() if f"{metric}_low" in compared]
    if compared.get(FREE_FORM):
        groups, scores = [], []
    return {
        "score": [figures.scores(compared, [""], "accuracy", *score) for score in scores[:1]],
        "groups": [figures.scores(compared, ["", *groups], "groups-chart", "Accuracy of groups.")] if groups else [],
        "loss": figures.learning_curves(metrics / "loss.csv", objective),
        "steps": figures.step_times(telemetry),
        "load": figures.load(telemetry),
        "memory": memory if wanted["gpus"] else memory[::-1],
        "predicted": [figures.accuracy_of_prediction(ratios(used, rendered["step_seconds"], measured_step))],
        "lengths": [figures.lengths(data / "lengths.csv")],
    }


def _first(pairs: Sequence[Pair], changed: Sequence[Pair]) -> list[Pair]:
    """Return the answers, most telling first: a lost one, all gained ones, the other lost ones, the unchanged ones."""
    lost = [pair for pair in changed if not pair[1]["right"]]
    gained = [pair for pair in changed if pair[1]["right"]]
    return [*lost[:1], *gained, *lost[1:], *(pair for pair in pairs if pair[0]["right"] == pair[1]["right"])]


def _gate_failure(fail_if: str | None, compared: dict[str, Any]) -> str | None:
    """Return why the stage accept will fail, None if it will pass."""
    if fail_if is None:
        return None
    try:
        return parse(fail_if).failure(compared)
    except KeyError as error:
        return f"there is no {error.args[0]}"
