"""What the engines cost for many data sets: a plan, and a start with nothing to do. benchmarks/scale.py asks for sizes.

One is the first data set of the project; each of the others is a file of its own with one row. All have one run, since
the target `all` leaves out a data set that no run uses. Config, model and the first data set go through their stages;
what all other jobs would write is made up (scale_runs.py).
"""

import json
from pathlib import Path
from typing import Any

import yaml
from scale_runs import copy_of, engines


def measure(project: Path, data_sets: int, dvc: bool) -> dict[str, Any]:
    """Return the jobs and the figures of so many data sets in a copy of `project`, of `dvc` too or not."""
    with copy_of(project) as directory:
        return engines(directory, write_data_sets(directory, data_sets), dvc)


def write_data_sets(directory: Path, data_sets: int) -> str:
    """Give the project's config so many data sets, each with a run, in place of its runs; return the first one.

    The others have the first one's settings.
    """
    path = directory / "config/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    first, settings = next(iter(config["prepare"].items()))
    folder = Path("data/made_up")
    (directory / folder).mkdir(parents=True)
    config["prepare"] = {first: settings}
    for index in range(1, data_sets):
        file = folder / f"{index}.json"
        row = {"instruction": "Which data set is this?", "output": f"It is number {index}."}
        (directory / file).write_text(json.dumps([row]), encoding="utf-8")
        config["prepare"][f"{first}{index}"] = settings | {"path": str(file)}
    config |= {"runs": {name: {"dataset": name} for name in config["prepare"]}, "continued": {}, "grids": {}}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(first)
