"""Traces that the estimate is compared with are reproduced, byte for byte, from real models and engines."""

import json
from typing import Any

import pytest
from conftest import served

from benchmarks.memory import compare

pytestmark = pytest.mark.slow

KEPT = compare.read_traces()


def quick(strategy: str) -> dict[str, Any]:
    """Return the smallest kept trace of a strategy; weights of 4 bits would ask for bitsandbytes."""
    found = [trace for trace in KEPT if trace["case"]["strategy"] == strategy and trace["case"]["method"] != "qlora"]
    small = [trace for trace in found if trace["case"]["model"] in ("smollm2-135m", "gpt2", "qwen2.5-0.5b")]
    return min(small, key=lambda trace: trace["bytes"]["peak"])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2_offload", "zero3"])
def test_a_trace_can_be_had_again(strategy: str) -> None:
    trace = quick(strategy)
    result = served(*compare.command(trace["case"]))
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) == trace["bytes"]
