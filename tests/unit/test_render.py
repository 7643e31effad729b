"""Rendered JSON: DeepSpeed takes it, training's values win, overrides are told."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.errors import UserError
from zerolora.memory.states import STRATEGIES
from zerolora.zero.render import lines, render

SETTINGS: dict[str, Any] = {
    "ranks": 1,
    "micro_batch": 2,
    "accumulation": 3,
    "strategy": "zero2",
    "own_json": None,
    "device": "cuda",
    "precision": "bf16",
    "gradient_clipping": 0.5,
}


def write_estimate(folder: Path, fitting: set[str], hidden: int = 64, trainable: int = 1000) -> Path:
    path = folder / "estimate.json"
    strategies = [{"strategy": name, "fits": name in fitting, "why": "needs 9.00 GiB"} for name in STRATEGIES]
    model = {"trainable_parameters": trainable, "hidden": hidden}
    path.write_text(json.dumps({"model": model, "strategies": strategies}))
    return path


@given(
    st.sampled_from(list(STRATEGIES)),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(["fp32", "fp16", "bf16"]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 20000),
    st.integers(1, 10**10),
)
def test_deepspeed_accepts_every_rendered_file(
    strategy: str, device: str, precision: str, micro_batch: int, accumulation: int, hidden: int, trainable: int
) -> None:
    import tempfile

    from deepspeed.runtime.config import DeepSpeedConfig

    with tempfile.TemporaryDirectory() as folder:
        predicted = write_estimate(Path(folder), set(), hidden, trainable)
        settings = {
            **SETTINGS,
            "strategy": strategy,
            "device": device,
            "precision": precision,
            "micro_batch": micro_batch,
            "accumulation": accumulation,
        }
        config, _ = render(settings, predicted)
    accepted = DeepSpeedConfig(config)
    assert accepted.zero_config.stage == STRATEGIES[strategy].stage
    assert accepted.train_micro_batch_size_per_gpu == micro_batch
    assert accepted.gradient_accumulation_steps == accumulation
    assert accepted.gradient_clipping == 0.5
    assert (accepted.zero_config.offload_optimizer is not None) == STRATEGIES[strategy].offload_optimizer
    assert (accepted.zero_config.offload_param is not None) == STRATEGIES[strategy].offload_parameters


@pytest.mark.parametrize(
    ("fitting", "chosen"),
    [(set(STRATEGIES), "zero0"), ({"zero3", "zero2_offload"}, "zero2_offload"), ({"zero3_offload"}, "zero3_offload")],
)
def test_auto_is_the_lowest_that_fits(tmp_path: Path, fitting: set[str], chosen: str) -> None:
    _, reasons = render({**SETTINGS, "strategy": "auto"}, write_estimate(tmp_path, fitting))
    assert reasons["strategy"] == f"{chosen}, the lowest stage that fits"


def test_auto_that_finds_nothing_says_what_each_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing fits: zero0 needs 9.00 GiB; .*larger GPUs"):
        render({**SETTINGS, "strategy": "auto"}, write_estimate(tmp_path, set()))


def test_training_wins_over_ones_own_json_and_says_so(tmp_path: Path) -> None:
    own = {
        "train_micro_batch_size_per_gpu": 7,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": 5},
        "wall_clock_breakdown": True,
    }
    path = "config/deepspeed/own.json"
    config, reasons = render({**SETTINGS, "strategy": path, "own_json": own}, write_estimate(tmp_path, set()))
    told = {entry["key"]: (entry["json"], entry["training"]) for entry in reasons["overrides"]}
    assert told == {
        "train_micro_batch_size_per_gpu": (7, 2),
        "gradient_clipping": (1.0, 0.5),
        "bf16.enabled": (False, True),
        "optimizer": ({"type": "Adam"}, "AdamW and train.schedule"),
    }
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 3
    assert config["wall_clock_breakdown"] is True
    assert config["zero_optimization"] == {
        "stage": 3,
        "stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
        "reduce_bucket_size": 5,
    }
    assert "gradient_clipping: your JSON says 1.0, training says 0.5" in lines(reasons)


def test_an_auto_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}
    with pytest.raises(UserError, match="sub_group_size is 'auto'"):
        render({**SETTINGS, "strategy": "x.json", "own_json": own}, write_estimate(tmp_path, set()))
