"""Stages task and task_base for tasks of lm-evaluation-harness, through its Python API.

Metrics are a flat file of {task}_{metric} and its _stderr. The harness' own result, with dates, paths and versions, is
saved as harness/NAME.json beside their folder.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.settings import HarnessTaskSettings
from zerolora.config.values import HARNESS_FILES
from zerolora.errors import UserError, shown
from zerolora.files import write_json
from zerolora.log import result

if TYPE_CHECKING:
    from zerolora.evaluate.evaluated_models import EvaluatedModel

CACHE = Path("work/harness")
"""The harness' data sets converted to Arrow; its default is below HOME."""
FEWEST_WORDS = 4
"""Of a document's text that is compared with the prompts of training rows."""
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

    manager = _manager(settings.tasks)
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
                task_manager=manager,
                bootstrap_iters=RESAMPLES,
                random_seed=settings.seed,
                numpy_random_seed=settings.seed,
                torch_random_seed=settings.seed,
                fewshot_random_seed=settings.seed,
            )
    except Exception as error:
        raise _explained(error, settings) from error
    samples = values.pop("samples")
    metrics = flat(values)
    if data and weights.adapter is None:
        every = [row for rows in samples.values() for row in rows]
        documents = sorted({text for row in every for text in _texts(row["doc"])})
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


def set_environment(network: bool) -> None:
    """Set the caches to CACHE, and forbid code of data sets and, unless allowed, the network.

    Must run before datasets or huggingface_hub are imported, since they read the environment once.
    """
    os.environ.setdefault("HF_DATASETS_CACHE", str((CACHE / "datasets").absolute()))
    os.environ.setdefault("HF_MODULES_CACHE", str((CACHE / "modules").absolute()))
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if network:
            os.environ.pop(name, None)
        else:
            os.environ[name] = "1"


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


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a document that are questions or passages rather than classes or short answers."""
    if isinstance(value, str):
        yield from [value] * (len(value.split()) >= FEWEST_WORDS)
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _manager(names: list[str]) -> Any:
    """Return a task manager with these tasks. The harness' own 13,000 tasks are indexed only if needed."""
    from lm_eval.tasks import TaskManager

    folder = HARNESS_FILES if Path(HARNESS_FILES).is_dir() else None
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or not set(names) <= {*manager.all_tasks}:
        manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 3) or ["those of `lm-eval ls tasks`"]
            raise UserError(
                f"{shown(name)}: lm-evaluation-harness has no such task or group, and {HARNESS_FILES}/ defines none; "
                f"use one such as {', '.join(near)}"
            )
    return manager


def _explained(error: Exception, settings: HarnessTaskSettings) -> Exception:
    """Return a UserError for a network error, otherwise the error itself."""
    seen: BaseException | None = error
    while seen is not None:
        named = type(seen).__name__
        if isinstance(seen, ConnectionError | FileNotFoundError) or named in (
            *("OfflineModeIsEnabled", "LocalEntryNotFoundError", "DatasetNotFoundError", "ConnectError"),
            *("ConnectTimeout", "ReadTimeout", "HfHubHTTPError"),
        ):
            remedy = "connect this machine" if settings.network else "set network: true"
            return UserError(
                f"{', '.join(settings.tasks)}: a data set is not on this machine ({' '.join(str(seen).split())[:200]})"
                f"; {remedy}, or name tasks of {HARNESS_FILES}/ whose files are here"
            )
        seen = seen.__cause__ or seen.__context__
    return error


def _plain(value: Any) -> Any:
    """Return a value in types of JSON, others as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else str(value)
