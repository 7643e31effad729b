"""What the memory benchmarks ask, of whom, and how they put answers together. They measure nothing here."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_plan import training_plan

from benchmarks.memory import baselines, measure
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.memory.predict import Prediction, predict
from zerolora.model.read_spec import read_model_spec
from zerolora.strategies import STRATEGIES
from zerolora.train.feed import Batches

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


def test_groups_cover_what_they_claim() -> None:
    on_gpu, on_cpu = gpu_groups(), measure.cpu_groups()
    assert {group["model"] for group in on_gpu} == {"qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-14b"}
    wanted = {"zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"}
    for groups in (on_gpu, on_cpu):
        assert {group["strategy"] for group in groups} >= wanted
        assert {group["checkpointing"] for group in groups} == {True, False}
        assert {batch["loss"] for group in groups for batch in group["batches"]} == {"full", "fused"}
    assert {group["precision"] for group in on_cpu} == {"fp32", "bf16"}
    assert {group["attention"] for group in on_cpu} == {"flash", "sdpa", "eager"}
    assert {group["ranks"] for group in on_cpu} == {1, 2}


def prediction_of(group: measure.Group) -> Prediction:
    """Return the prediction of a group's first batch."""
    return predict(read_model_spec(MODELS / f"{group['model']}.json"), measure.spec_of(group, group["batches"][0]))


def test_ranks_are_joined_worst_gpu_and_sum_of_host() -> None:
    answers = [{"host_peak": 3, "gpu_allocated": 5}, {"host_peak": 4, "gpu_allocated": 2}]
    assert measure.joined(answers, 2) == {"host_peak": 7, "gpu_allocated": 5}
    assert measure.joined([{"failed": "out of memory"}], 2) == {"failed": "out of memory"}
    assert measure.joined(answers[:1], 2) is None


def test_a_row_has_errors_and_reserve() -> None:
    group = gpu_groups()[0]
    prediction = prediction_of(group)
    total = prediction.gpu["total"]
    found = {"gpu_allocated": total // 2, "gpu_reserved": total, "gpu_in_use": total, "host_peak": 1}
    result = measure.row(group, group["batches"][0], prediction, found)
    assert result["error"] == pytest.approx(1.0)
    assert result["implied_reserve"] == total - total // 2
    told = measure.summary([result, {"skipped": "too large"}])
    assert (told["measured"], told["not_measured"]) == (1, 1)
    assert told["implied_reserve_most"] == result["implied_reserve"]


def test_what_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    group = gpu_groups()[0]
    prediction = prediction_of(group)
    monkeypatch.setattr(measure, "graphics_memory", lambda: prediction.gpu["total"])
    assert "the GPU has" in (measure.too_large(group, prediction) or "")


def test_a_rank_that_dies_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {**measure.cpu_groups()[0], "model": "smollm2-135m", "ranks": 1}
    (tmp_path / "weights").mkdir()
    monkeypatch.setattr(measure, "written_model", lambda *_: tmp_path / "weights")
    monkeypatch.setattr(measure, "run_rank_command", lambda _: [sys.executable, "-c", "raise SystemExit('no room')"])
    assert measure.start(group, tmp_path) == [{"failed": "a rank ended early; no room"}]


def test_a_rank_that_hangs_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "GROUP_SECONDS", 0.3)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert measure.wait([process]) == "not done after 0.3 s"
    assert process.poll() is not None


def test_the_loading_that_random_weights_stand_in_for_is_there() -> None:
    from zerolora.train import base_model

    assert (
        inspect.signature(base_model.read).parameters.keys()
        == inspect.signature(measure.random_on_device).parameters.keys()
    )


def written(tmp_path: Path, device: str = "cpu", **changes: Any) -> list[dict[str, Any]]:
    """Return the prepared rows of a batch on two ranks."""
    batch = {"micro_batch": 2, "length": 80, "loss": "fused", "logits": 3, "masked": True, **changes}
    data = measure.written_rows({"device": device, "ranks": 2}, batch, tmp_path / "rows")
    rows = open_split(data, "train").to_list()
    assert len(open_plan(data / "plan.arrow").members) == len(rows)
    return rows


def test_rows_of_a_batch_have_lengths_of_their_own_the_longest_as_asked(tmp_path: Path) -> None:
    rows = written(tmp_path)
    lengths = [row["length"] for row in rows]
    assert len(rows) == measure.CPU_STEPS * 2 * 2
    assert max(lengths) == lengths[0] == 80
    assert min(lengths) >= 0.85 * 80 and len(set(lengths)) > 5
    assert all(len(row["input_ids"]) == len(row["labels"]) == row["length"] for row in rows)
    assert all(row["supervised"] == sum(label != IGNORED for label in row["labels"]) == 3 for row in rows)


def test_rows_without_a_mask_need_no_padding(tmp_path: Path) -> None:
    assert {row["length"] for row in written(tmp_path, masked=False, logits=0)} == {80}


def test_a_micro_batch_is_padded_only_if_masked(tmp_path: Path) -> None:
    batch = {"micro_batch": 2, "length": 80, "loss": "fused", "logits": 3, "masked": True}
    asked = training_plan(micro_batch=2, global_batch=4, seed=1)

    def made(**changes: Any) -> list[dict[str, Any]]:
        data = measure.written_rows({"device": "cpu", "ranks": 2}, batch | changes, tmp_path / "rows")
        batches = Batches(open_split(data, "train"), open_plan(data / "plan.arrow"), asked, 0, 2)
        assert batches.steps == measure.CPU_STEPS
        steps = range(batches.steps)
        return [measure.micro_batch(batches, number, batch | changes, torch.device("cpu")) for number in steps]

    masked, whole = made(), made(masked=False)
    assert any(inputs["attention_mask"].sum() < inputs["input_ids"].numel() for inputs in masked)
    assert all(len(inputs["targets"]) == 6 for inputs in masked + whole)
    assert all("attention_mask" not in inputs and inputs["input_ids"].shape == (2, 80) for inputs in whole)


def test_on_a_gpu_every_step_is_the_largest(tmp_path: Path) -> None:
    rows = written(tmp_path, "cuda", micro_batch=1)
    assert [row["length"] for row in rows] == [80] * measure.STEPS * 2


def test_results_are_numbers_of_bytes() -> None:
    path = ROOT / "benchmarks/results/memory_cpu.json"
    result = json.loads(path.read_text())
    assert result["measured"] >= 16
    assert all(row["host_peak"] > 2**28 for row in result["rows"] if "host_peak" in row)


def test_predictions_are_those_of_today() -> None:
    result = json.loads((ROOT / "benchmarks/results/memory_cpu.json").read_text())
    for each in result["rows"]:
        assert measure.predicted_anew(each)["predicted_host"] == each["predicted_host"], each
