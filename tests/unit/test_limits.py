"""Resource limits of one machine follow from the configured hardware and visible GPUs."""

from typing import Any

import pytest

from zerolora.config.resolve import hardware_limits
from zerolora.config.schema import Hardware, RunSections, Train

GPUS = {"device": "cuda", "gpus_per_node": 4, "gpu_memory": "80GiB", "compute_capability": 8.0}


def run(hardware: dict[str, Any], nodes: int = 1) -> RunSections:
    return RunSections.model_construct(
        hardware=Hardware.model_validate(hardware), train=Train.model_construct(nodes=nodes)
    )


@pytest.mark.parametrize(
    ("runs", "visible", "limits"),
    [
        ([run({"host_memory": "2GiB"})], None, {"mem_mb": 2048}),
        ([run({}), run(GPUS | {"host_memory": "64GiB"})], None, {"mem_mb": 65536, "gpu": 4}),
        ([run(GPUS), run(GPUS | {"gpus_per_node": 2})], None, {"mem_mb": 24576, "gpu": 4}),
        ([run(GPUS)], "3,GPU-ab", {"mem_mb": 24576, "gpu": 2}),
        ([run(GPUS)], "", {"mem_mb": 24576, "gpu": 0}),
        ([run(GPUS | {"nodes": 2}, nodes=2)], None, {"mem_mb": 24576, "gpu": 8}),
    ],
)
def test_limits(runs: list[RunSections], visible: str | None, limits: dict[str, int]) -> None:
    assert hardware_limits(runs, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == limits
