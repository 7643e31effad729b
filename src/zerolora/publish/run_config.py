"""The part of a config that a run needs, without the places of this machine: what it takes to make the run again."""

from pathlib import Path
from typing import Any

import yaml

from zerolora.config.file import read_written_out
from zerolora.config.schema import data_folders
from zerolora.config.selection_checks import all_of
from zerolora.config.values import HUB_ADAPTERS, JUDGE
from zerolora.errors import printable
from zerolora.publish.finished import CONFIG, FinishedRun

CONFIG_SECTIONS = ("hardware", "pack", "estimate", "render", "train", "merge", "evaluate", "report")
"""Sections that every run reads. Export, and tasks that nothing of a run reads, are not needed to reproduce it."""
ELSEWHERE = "/path/to"


def config_of_run(run: FinishedRun) -> dict[str, Any]:
    """Return the run's part of config/config.yaml, without shorthands."""
    values = read_written_out(CONFIG)
    made_of = all_of(run.config, run.name)
    names, datasets = made_of["runs"], made_of["prepare"]
    models = {run.resolved.prepare[name].model for name in datasets}
    paths = [Path(path) for name in datasets for path in run.resolved.prepare[name].reads_rows]
    tasks = {task.name for name in names for task in run.resolved.runs[name].train.validation_tasks} | made_of["tasks"]
    paths += [Path(run.resolved.task_rows[name].path) for name in tasks]
    starts = {run.resolved.runs[name].train.from_adapter for name in names}
    folders = {
        name
        for name, folder in data_folders(run.config.fetch).items()
        if any(Path(folder).is_relative_to(path) or path.is_relative_to(folder) for path in paths)
    }

    def uses(source: str, name: str) -> bool:
        if source in ("data", "package_data"):
            return f"{source}.{name}" in folders
        return f"{HUB_ADAPTERS}/{name}" in starts if source == "adapter" else name in models

    used: dict[str, Any] = {key: values[key] for key in CONFIG_SECTIONS if key in values}
    used["fetch"] = {
        source: {name: value for name, value in (entries or {}).items() if uses(source, name)}
        for source, entries in values["fetch"].items()
    }
    for section in ("prepare", "samples", "selections"):
        if entries := {name: each for name, each in (values.get(section) or {}).items() if name in made_of[section]}:
            used[section] = entries
    # A run of a grid or a search is written out, since the other runs need not be finished.
    for group in ("runs", "continued"):
        of_group = {
            name: {key: each for key, each in value.items() if key != "repeats"}
            for name, value in (values.get(group) or {}).items()
            if name in names
        }
        for name in sorted(names & run.config.expanded_runs.keys()):
            if run.config.is_continued(name) == (group == "continued"):
                of_group[name] = run.config.all_runs[name].model_dump(exclude_defaults=True)
        if of_group or group in values:
            used[group] = of_group
    if any(run.config.selections[name].check == JUDGE for name in made_of["selections"]):
        used["judge"] = values["judge"]
    for kind, of_kind in (("rows", tasks), ("harness", made_of["harness"])):
        if of_kind:
            used.setdefault("tasks", {})[kind] = {name: values["tasks"][kind][name] for name in sorted(of_kind)}
    return used


def as_yaml(config: dict[str, Any]) -> str:
    """Return a config as YAML for a page."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(printable(line) for line in text.splitlines())


def without_absolute_paths(value: Any) -> Any:
    """Return a value in which each absolute path has the place of its directory only."""
    if isinstance(value, dict):
        return {key: without_absolute_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_absolute_paths(item) for item in value]
    absolute = isinstance(value, str) and value.startswith(("/", "~"))
    return f"{ELSEWHERE}/{Path(value).name}" if absolute else value
