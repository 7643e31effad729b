"""Stages task and task_base for tasks of lm-evaluation-harness, through its Python API.

Metrics are a flat file of {task}_{metric} and its _stderr. The harness' own result, with dates, paths and versions, is
saved as harness/NAME.json beside their folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.settings import HarnessTaskSettings
from zerolora.evaluate.harness_tasks import explained, manager, set_environment, texts_in
from zerolora.files import write_json
from zerolora.log import result

if TYPE_CHECKING:
    from zerolora.evaluate.evaluated_models import EvaluatedModel

RESAMPLES = 1000
"""Bootstrap resamples for the standard error of metrics that are not means."""


def ask_harness(
    settings: HarnessTaskSettings, weights: "EvaluatedModel", data: Path | None, output: Path, answers: Path
) -> None:
    """Evaluate a model on tasks of the harness; write metrics to `output` and each answer to `answers`.

    data: as for asked_task.ask; its training rows are searched for the texts of the tasks' documents. Raises UserError
    for a task that the harness lacks, or cannot read without a network.
    """
    set_environment(settings.network)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from zerolora.evaluate.asked_task import loaded
    from zerolora.evaluate.task_leaks import leaks
    from zerolora.model.greedy import own_settings, stops_alone
    from zerolora.model.rope import grows

    found = manager(settings.tasks)
    model, tokenizer, _ = loaded(weights, data)
    # Its rows are of any length, and in a batch all would have the rotary factors of the longest.
    batch = 1 if grows(model, getattr(model.config.get_text_config(), "max_position_embeddings", 0)) else settings.batch
    model.tie_weights = lambda: None  # called by HFLM; would overwrite a head that was trained beside tied embeddings
    try:
        with own_settings(model, stops_alone(model)):  # the task's own come on top
            values: Any = simple_evaluate(
                HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, trust_remote_code=False),
                tasks=list(settings.tasks),
                num_fewshot=settings.few_shot,
                limit=settings.limit,
                apply_chat_template=settings.chat_template,
                task_manager=found,
                bootstrap_iters=RESAMPLES,
                random_seed=settings.seed,
                numpy_random_seed=settings.seed,
                torch_random_seed=settings.seed,
                fewshot_random_seed=settings.seed,
            )
    except Exception as error:
        raise explained(error, settings) from error
    samples = values.pop("samples")
    metrics = flat(values)
    if data and weights.adapter is None:
        every = [row for rows in samples.values() for row in rows]
        documents = sorted({text for row in every for text in texts_in(row["doc"])})
        asked = sorted({str(row["arguments"][0][0]) for row in every if row["arguments"]})
        metrics |= leaks(data, tokenizer, documents, asked, output.stem)
    fields = ("doc_id", "doc", "target", "filter", "filtered_resps")
    entries = {
        name: [
            {key: _plain(row[key]) for key in (*fields, *row.get("metrics", ())) if key in row} for row in samples[name]
        ]
        for name in sorted(samples)
    }
    write_json(answers, entries)
    # Not in the folder of the metrics: DVC compares all files there.
    write_json(output.parents[1] / "harness" / output.name, _plain(values))
    write_json(output, metrics)
    figures = [
        f"{name} {value:.3g}" for name, value in metrics.items() if not name.endswith(("_stderr", "_rows", "_prompts"))
    ]
    result(", ".join(figures[:4]) + (", …" if len(figures) > 4 else ""))


def flat(evaluated: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the harness' result: {task}_{metric}, {task}_{metric}_{filter} for a named filter, their
    _stderr, and {task}_rows, sorted by name."""
    metrics: dict[str, float] = {}
    for task, values in {**evaluated["results"], **evaluated.get("groups", {})}.items():
        for key, value in values.items():
            name, _, filter_ = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and filter_:
                stderr = "_stderr" * name.endswith("_stderr")
                plain = name.removesuffix("_stderr")
                metrics[f"{task}_{plain}{'' if filter_ == 'none' else f'_{filter_}'}{stderr}"] = float(value)
    for task, counts in evaluated.get("n-samples", {}).items():
        metrics[f"{task}_rows"] = counts["effective"]
    return dict(sorted(metrics.items()))


def _plain(value: Any) -> Any:
    """Return a value in types of JSON, others as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else str(value)
