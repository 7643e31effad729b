"""train.compile: batches of few lengths, and strategies and models whose layers are not compiled."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.memory.estimate import impossible
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.model.padded_lengths import LENGTHS, padded, step_of
from zerolora.model.read_spec import from_config

TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128,
}  # fmt: skip


@given(st.integers(1, 100_000))
def test_all_rows_are_padded_to_four_lengths_at_most(longest: int) -> None:
    step = step_of(longest)
    lengths = {padded(length, step) for length in {1, longest, *range(1, longest, max(1, longest // 97))}}
    assert len(lengths) <= LENGTHS
    assert longest <= max(lengths) < longest + step <= longest + longest / LENGTHS + 8


def compiled(family: str, strategy: str) -> str | None:
    model = from_config(TINY | {"model_type": family, "num_local_experts": 4}, Path("config.json"))
    spec = TrainingSpec(
        strategy=strategy, method=LoraMethod(r=8), nodes=1, ranks_per_node=2, micro_batch=1, accumulation=1, length=64,
        activation_checkpointing=True, attention="flash", precision="bf16", compiles=True,
    )  # fmt: skip
    return impossible(spec, model)


@pytest.mark.parametrize("strategy", ["ddp", "zero0", "zero2", "zero2_offload"])
def test_strategies_with_whole_layers_compile_them(strategy: str) -> None:
    assert compiled("llama", strategy) is None


def test_stage_3_and_experts_are_refused_with_the_reason() -> None:
    assert "gathers weights inside a layer" in str(compiled("llama", "zero3"))
    assert "set compile: false" in str(compiled("llama", "zero3_offload"))
    assert "the experts of a mixtral are not compiled" in str(compiled("mixtral", "ddp"))
