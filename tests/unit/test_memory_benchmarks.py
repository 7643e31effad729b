"""The memory benchmarks: DeepSpeed's and accelerate's answers, and agreement with prediction; nothing is measured."""

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
    ("zero3", 1.43, 6.10),  # documented as 1.47, for a largest layer of 32,899,072
]


@pytest.mark.parametrize(("strategy", "host", "gpu"), T5)
def test_deepspeed_answers_as_documented(strategy: str, host: float, gpu: float) -> None:
    answer = baselines.deepspeed_answer(strategy, 2_851_000_000, 32_000_000, ranks_per_node=8)
    assert answer.host is not None and answer.gpu is not None
    assert answer.host / GIB == pytest.approx(host, rel=0.01)
    assert answer.gpu / GIB == pytest.approx(gpu, abs=0.01)


def test_deepspeed_answers_only_stages_2_and_3() -> None:
    for name, layout in STRATEGIES.items():
        answer = baselines.deepspeed_answer(name, 10**9, 10**6, 8)
        assert (answer.gpu is None) == (layout.stage < 2 or layout.engine != "deepspeed"), name
    # DeepSpeed#5304: frozen parameters are counted with optimizer states.
    assert baselines.deepspeed_answer("zero2", 8_030_261_248, 0, 8).gpu == 2 * 8_030_261_248 + 18 * 8_030_261_248 // 8


def test_accelerate_answers_four_copies_in_fp32() -> None:
    config = MODELS / "smollm2-135m.json"
    assert baselines.model_parameters(config) == (134_515_008, 49152 * 576)  # the tied embedding counts once
    fp32, bf16 = (baselines.accelerate_answer(config, precision).gpu for precision in ("fp32", "bf16"))
    assert fp32 == pytest.approx(4 * 4 * 134_515_008, rel=1e-6)  # 64 numbers of rotary embedding count too
    assert bf16 == pytest.approx(2 * 4 * 134_515_008, rel=1e-6)
    assert baselines.accelerate_answer(config, "bf16").host is None


def test_groups_can_be_predicted_and_rendered() -> None:
    for group in [*measure.cpu_groups(), *gpu_groups()]:
        model = read_model_spec(MODELS / f"{group['model']}.json")
        assert {"bf16", "fp16"} <= measure.zero_json(group).keys(), group
        for batch in group["batches"]:
            spec = measure.spec_of(group, batch)
            assert spec.reserve == 0
            assert spec.on_cpu == (group["device"] == "cpu")
            assert predict(model, spec).host["total"] > 0


def gpu_groups() -> list[measure.Group]:
    """Return the groups of a machine with one GPU."""
    return [{**group, "ranks": 1} for group in measure.gpu_groups()]


def test_recorded_predictions_are_current() -> None:
    result = json.loads((ROOT / "benchmarks/results/memory_cpu.json").read_text())
    for each in result["rows"]:
        assert measure.predicted_anew(each)["predicted_host"] == each["predicted_host"], each
