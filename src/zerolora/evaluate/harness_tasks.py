"""The tasks of lm-evaluation-harness: where they are defined, and the texts of their documents."""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolora.config.settings import HarnessTaskSettings
from zerolora.config.values import HARNESS_FILES
from zerolora.errors import UserError, shown

CACHE = Path("work/harness")
"""The harness' data sets converted to Arrow; its default is below HOME."""
FEWEST_WORDS = 4
"""Of a document's text that is compared with the prompts of training rows."""


def questions(settings: HarnessTaskSettings) -> list[str]:
    """Return the prompts of all documents of the tasks, without few-shot examples, and the texts of at least
    FEWEST_WORDS words in them. Raises UserError as `manager` does, or if the documents cannot be read."""
    set_environment(settings.network)
    found = manager(settings.tasks)
    try:
        result = [text for task in found.load(list(settings.tasks))["tasks"].values() for text in _asked(task)]
    except Exception as error:
        raise explained(error, settings) from error
    return result


def _asked(task: Any) -> Iterator[str]:
    for document in task.eval_docs:
        if isinstance(prompt := task.doc_to_text(document), str):
            yield prompt
        yield from texts_in(document)


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


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a document that are questions or passages rather than classes or short answers."""
    if isinstance(value, str):
        yield from [value] * (len(value.split()) >= FEWEST_WORDS)
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(each)


def manager(names: list[str]) -> Any:
    """Return a task manager with these tasks. The harness' own 13,000 tasks are indexed only if needed."""
    from lm_eval.tasks import TaskManager

    folder = HARNESS_FILES if Path(HARNESS_FILES).is_dir() else None
    found = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if found is None or not set(names) <= {*found.all_tasks}:
        found = TaskManager(include_path=folder)
    for name in names:
        if name not in found.all_tasks:
            near = difflib.get_close_matches(name, found.all_tasks, 3) or ["those of `lm-eval ls tasks`"]
            raise UserError(
                f"{shown(name)}: lm-evaluation-harness has no such task or group, and {HARNESS_FILES}/ defines none; "
                f"use one such as {', '.join(near)}"
            )
    return found


def explained(error: Exception, settings: HarnessTaskSettings) -> Exception:
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
