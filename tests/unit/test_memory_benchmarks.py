"""What the memory benchmarks ask, of whom, and how they put answers together. They measure nothing here."""

import json
from pathlib import Path

import pytest

from benchmarks.memory import baselines, measure
from zerolora.memory.predict import predict
from zerolora.model.read_spec import read_model_spec
from zerolora.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "config/recipes/models"
GIB = 2**30

# DeepSpeed's documentation, t5-3b on one node of eight GPUs: strategy, host and GPU in GiB.
T5 = [
    ("zero3_offload", 71.71, 0.12),
    ("zero3_offload_optimizer", 63.74, 0.79),
    ("zero3", 1.43, 6.10),  # documented: 1.47, of a largest layer of 32,899,072; its row says 32M
]


@pytest.mark.parametrize(("strategy", "host", "gpu"), T5)
def test_deepspeed_answers_as_documented(strategy: str, host: float, gpu: float) -> None:
    answer = baselines.deepspeed_answer(strategy, 2_851_000_000, 32_000_000, ranks_per_node=8)
    assert answer.host is not None and answer.gpu is not None
    assert answer.host / GIB == pytest.approx(host, rel=0.01)
    assert answer.gpu / GIB == pytest.approx(gpu, abs=0.01)


def test_deepspeed_has_no_answer_below_stage_2_nor_for_other_engines() -> None:
    for name, layout in STRATEGIES.items():
        answer = baselines.deepspeed_answer(name, 10**9, 10**6, 8)
        assert (answer.gpu is None) == (layout.stage < 2 or layout.engine != "deepspeed"), name


def test_deepspeed_counts_adapters_and_frozen_weights_alike() -> None:
    # DeepSpeed#5304: 8 billion frozen parameters get the states of 8 billion trained ones.
    answer = baselines.deepspeed_answer("zero2", 8_030_261_248, 0, 8)
    assert answer.gpu == 2 * 8_030_261_248 + 18 * 8_030_261_248 // 8


def test_parameters_are_counted_as_deepspeed_does() -> None:
    total, largest = baselines.model_parameters(MODELS / "smollm2-135m.json")
    assert (total, largest) == (134_515_008, 49152 * 576)  # the tied embedding counts once


def test_accelerate_answers_four_copies_in_fp32() -> None:
    config = MODELS / "smollm2-135m.json"
    fp32, bf16 = (baselines.accelerate_answer(config, precision).gpu for precision in ("fp32", "bf16"))
    assert fp32 == pytest.approx(4 * 4 * 134_515_008, rel=1e-6)  # 64 numbers of rotary embedding count too
    assert bf16 == pytest.approx(2 * 4 * 134_515_008, rel=1e-6)
    assert baselines.accelerate_answer(config, "bf16").host is None


def test_every_group_is_known_to_prediction_and_render() -> None:
    for group in [*measure.cpu_groups(), *gpu_groups()]:
        model = read_model_spec(MODELS / f"{group['model']}.json")
        assert {"bf16", "fp16"} <= measure.zero_json(group).keys(), group
        for batch in group["batches"]:
            spec = measure.spec_of(group, batch)
            assert spec.reserve == 0
            assert spec.on_cpu == (group["device"] == "cpu")
            assert predict(model, spec).host["total"] > 0


def gpu_groups() -> list[measure.Group]:
    """Return the groups as on a machine of one GPU."""
    return [{**group, "ranks": 1} for group in measure.gpu_groups()]


def test_predictions_are_those_of_today() -> None:
    result = json.loads((ROOT / "benchmarks/results/memory_cpu.json").read_text())
    for each in result["rows"]:
        assert measure.predicted_again(each)["predicted_host"] == each["predicted_host"], each
