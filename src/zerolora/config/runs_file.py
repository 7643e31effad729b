"""Writes config/runs.yaml, the names that dvc.yaml loops over, since DVC cannot merge overrides or expand grids.

    zerolora expand

The file belongs in git, like a lock file. Of a run it has only what dvc.yaml reads: data set, names of shared outputs,
and the adapter to start from. All instances of a DVC stage have the same number of dependencies: an instance without an
own file depends on one that changes only when the stage has to run anyway.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolora.config.evaluated_questions import OF_TASK, evaluated_questions
from zerolora.config.run_objectives import needs_reference, reference_adapter, teacher_of
from zerolora.config.schema import MOST_READ, MOST_VALIDATION_TASKS, Config, Prepare
from zerolora.config.settings import HeldOutSettings
from zerolora.config.stages import STAGES
from zerolora.errors import UserError
from zerolora.files import MANIFEST, write_text

Names = dict[str, dict[str, Any]]
RUNS = Path("config/runs.yaml")
DATA_FILES = ("dropped.jsonl", "lengths.csv", "mask.html")
assert len(DATA_FILES) == MOST_VALIDATION_TASKS
assert sum("item.reads" in path for path in STAGES["prepare"].reads) == MOST_READ
NOTHING = "results/settings/nothing"
"""Directory of files that never change."""
HEAD = """\
# What dvc.yaml has a stage for, each with the files that it reads. Written by Snakemake, by the stage resolve and by
# `zerolora expand`: edit config/config.yaml, not this file.
"""


def text_of(config: Config) -> str:
    """Return the text of the file, independent of the order of keys and values in the config."""
    return HEAD + "\n".join(_lines(_groups(config))) + "\n"


def _groups(config: Config) -> dict[str, Names]:
    fetch, tasks = config.fetch, {**config.tasks.rows, **config.tasks.harness}
    packed: Names = {}
    estimated: Names = {}
    rendered: Names = {}
    referenced: Names = {}
    taught: Names = {}
    runs: Names = {}
    for name, run in config.all_runs.items():
        shared = config.shared_by(name)
        packed[shared.packed] = {"dataset": run.dataset}
        estimated[shared.estimated] = {"packed": shared.packed}
        rendered[shared.rendered] = {"estimated": shared.estimated}
        data = f"results/data/{run.dataset}"
        start = run.train.get("from_adapter") or f"{data}/stats.json"
        names = shared._asdict()
        names["referenced"], reference = names["referenced"] * (needed := needs_reference(config, name)), ""
        if needed:
            referenced[shared.referenced] = {
                "dataset": run.dataset,
                "start": reference_adapter(config, name) or f"{data}/stats.json",
            }
            reference = f"results/{shared.referenced}/reference/manifest.json"
        names["taught"] *= (teacher := teacher_of(config, name)) is not None
        if teacher:
            begins = teacher.adapter or f"{data}/stats.json"
            taught[shared.taught] = {"dataset": run.dataset, "start": begins, "teacher": teacher.model}
            reference = f"results/{shared.taught}/teacher/manifest.json"
        files = [f"results/tasks/{task}.jsonl" for task in validation_tasks(config, name)]
        runs[name] = {
            "dataset": run.dataset,
            "start": start,
            "reference": reference or f"{data}/mask.json",
            # Without as many tasks, files that change only with the data's manifest.
            "tasks": files + [f"{data}/{file}" for file in DATA_FILES[len(files) :]],
            **names,
        }

    def of_tasks(kind: str, names: Mapping[str, Any]) -> Names:
        return {
            f"{name}-{task}": {
                **{kind: name, "task": task},
                "rows": f"results/tasks/{task}.jsonl" if task in config.tasks.rows else _settings("tasks", task),
            }
            for name in names
            for task in tasks
        }

    def of_sample(name: str) -> dict[str, Any]:
        dataset, run = config.prompts_of(name), config.samples[name].of.run
        names = {"dataset": dataset, "model": config.prepare[dataset].model, "run": run or ""}
        data, results = f"results/data/{dataset}", f"results/{run}"
        of_run = [f"{results}/adapter/manifest.json", f"{results}/merged/manifest.json"]
        # Without a run, files that change only with the data's manifest, which has the base model's.
        return {**names, "answering": of_run if run else [f"{data}/{file}" for file in DATA_FILES[:2]]}

    evaluated: Names = {run.dataset: {} for run in config.all_runs.values()}
    return {
        "models": {
            **{name: {"source": _settings("fetch", name)} for name in (*fetch.package, *fetch.hub)},
            **{name: {"source": model.path} for name, model in fetch.directory.items()},
        },
        "hub_data": {name: {} for name in fetch.data},
        "package_data": {name: {} for name in fetch.package_data},
        "adapters": {name: {} for name in fetch.adapter},
        "prepare": {name: {"model": data.model, "reads": _files_of(data)} for name, data in config.prepare.items()},
        "evaluated": evaluated,
        "packed": packed,
        "estimated": estimated,
        "rendered": rendered,
        "referenced": referenced,
        "taught": taught,
        "runs": runs,
        "task_rows": {name: {"path": task.path} for name, task in config.tasks.rows.items()},
        "tasks_of_base": of_tasks("dataset", evaluated),
        "tasks_of_runs": of_tasks("run", config.all_runs),
        "samples": {name: of_sample(name) for name in config.samples},
        "held_out": {
            name: {"reads": _file_of(each, name.removeprefix(OF_TASK))}
            for name, each in evaluated_questions(config).items()
        },
        "selections": {
            name: {"sample": each.samples, "dataset": config.prompts_of(each.samples)}
            for name, each in config.selections.items()
        },
    }


def _files_of(data: Prepare) -> list[str]:
    """Return the files that a data set depends on, as many for each."""
    files = [path if path == data.path else f"{path}/{MANIFEST}" for path in data.reads]
    return files + [f"{NOTHING}/{number}.json" for number in range(len(files), MOST_READ)]


def _file_of(questions: HeldOutSettings, task: str) -> str:
    """Return the file that questions are in; of the harness' tasks, which have none, their settings."""
    if questions.dataset:
        return f"results/data/{questions.dataset}/{MANIFEST}"
    return f"results/tasks/{task}.jsonl" if questions.task else _settings("tasks", task)


def validation_tasks(config: Config, run: str) -> list[str]:
    """Return the tasks at the validations of a run, by its own value or the config's."""
    tasks: list[str] = config.all_runs[run].train.get("validation_tasks", config.train.validation_tasks)
    return tasks


def _settings(group: str, name: str) -> str:
    return f"results/settings/{group}/{name}.json"


def _lines(groups: dict[str, Names]) -> Iterator[str]:
    """Yield one line per name, quoted, since YAML 1.2, which DVC reads, takes 1e5 for a number."""
    for group, names in groups.items():
        yield f"{group}:" if names else f"{group}: {{}}"
        for name, value in sorted(names.items()):
            yield f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"


def is_current(config: Config) -> bool:
    """Return whether the file is up to date with the config."""
    try:
        return RUNS.read_text(encoding="utf-8") == text_of(config)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def write_runs(config: Config) -> bool:
    """Write the file unless it is up to date; return whether it was written."""
    if is_current(config):
        return False
    write_text(RUNS, text_of(config))
    return True


def check_runs(config: Config) -> None:
    """Write the file if it is out of date and raise UserError, since DVC has already read it."""
    if write_runs(config):
        raise UserError(
            f"{RUNS}: was written for other runs, models, data or tasks than config/config.yaml has, and is up to date "
            "now; run `dvc repro` again"
        )
