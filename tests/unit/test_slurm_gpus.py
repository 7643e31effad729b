"""What sbatch is asked for a job whose GPUs are counted by Snakemake and asked for by node."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from zerolora.compat.slurm_executor_patches import gpus_of_each_node


class Resources(dict[str, Any]):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("resources", "line", "parsed"),
    [
        ({"gres": "gpu:4", "gpu": 8, "nodes": 2}, " --gres=gpu:4", (4, None)),
        ({"gres": "gpu:1", "gpu": 1}, " --gres=gpu:1", (1, None)),
        ({"gres": "gpu:a100:2", "gpu": 2}, " --gres=gpu:a100:2", (2, "a100")),
        ({"gres": "", "gpu": 0}, "", (0, None)),
        ({"gpu": 2}, " --gpus=2", (2, None)),
    ],
)
def test_gpus_are_asked_for_once(resources: dict[str, Any], line: str, parsed: tuple[int, str | None]) -> None:
    """The executor's own functions. A user's rule that has `gpu` alone is asked for as before."""
    executor = importlib.import_module("snakemake_executor_plugin_slurm")
    gpus_of_each_node(executor)
    gpus_of_each_node(executor)  # once more changes nothing
    job: Any = SimpleNamespace(resources=Resources(resources), name="train", threads=4)
    assert executor.set_gres_string(job) == line
    assert executor.partitions.parse_gpu_requirements(job) == parsed
