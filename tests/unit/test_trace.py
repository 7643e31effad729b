"""Traces that the estimate is compared with are reproduced byte for byte from real models and engines."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import served

from benchmarks.memory import compare

pytestmark = pytest.mark.slow

TRACES = compare.read_traces()


def quick(strategy: str) -> dict[str, Any]:
    """Return a strategy's smallest recorded trace without 4-bit weights, which need bitsandbytes."""
    of_strategy = [trace for trace in TRACES if trace["case"]["strategy"] == strategy]
    actual = [trace for trace in of_strategy if trace["case"]["method"] not in ("qlora", "qdora")]
    small = [trace for trace in actual if trace["case"]["model"] in ("smollm2-135m", "gpt2", "qwen2.5-0.5b")]
    return min(small, key=lambda trace: trace["bytes"]["peak"])


def traced(case: dict[str, Any]) -> Any:
    """Return the bytes of a new trace."""
    result = served(*compare.command(case))
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_sequence_parallel_estimate_matches_a_trace() -> None:
    """Three ranks share each row of a real model; the estimate is within 0.1 %."""
    case = {
        "model": "smollm2-135m", "layers": 4, "method": "lora", "strategy": "zero2", "ranks": 6, "micro_batch": 1,
        "length": 6000,
        "checkpointing": False, "attention": "flash", "logits": 0, "r": 8, "precision": "bf16", "dropout": 0.0,
        "loss": "fused", "sequence_parallel": 3,
    }  # fmt: skip
    shared = compare.compared(case, traced(case))
    assert abs(shared["error"]) < 1e-3
    assert shared["predicted"] < 0.5 * compare.compared(case | {"sequence_parallel": 1}, {"peak": 1})["predicted"]


def test_added_tokens_estimate_matches_a_trace() -> None:
    """64 added tokens of a real model; the estimate is within 0.1 %."""
    case = {
        "model": "smollm2-135m", "layers": 4, "method": "lora", "strategy": "zero2", "ranks": 2, "micro_batch": 2,
        "length": 1024,
        "checkpointing": True, "attention": "sdpa", "logits": 0, "r": 8, "precision": "bf16", "dropout": 0.0,
        "loss": "fused", "added_tokens": 64,
    }  # fmt: skip
    assert abs(compare.compared(case, traced(case))["error"]) < 1e-3


def test_trace_is_reproducible() -> None:
    trace = quick("zero3")
    assert traced(trace["case"]) == trace["bytes"]


def test_estimate_of_a_type_without_a_table_matches_a_trace() -> None:
    """Linear attention takes several times as much as attention of its sizes, and JetMoe reads its experts' tokens."""
    script = Path(compare.__file__).with_name("model_types.py")
    result = served(sys.executable, str(script), "--print", "qwen3_5_text", "jetmoe")
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(("qwen3_5_text", "jetmoe"))]
    # JetMoe's class cannot recompute its layers.
    assert [row[:2] for row in rows] == [["qwen3_5_text", "trace"], ["qwen3_5_text", "trace"], ["jetmoe", "trace"]]
    assert all(abs(float(row[2].rstrip("%"))) < 3 for row in rows)
