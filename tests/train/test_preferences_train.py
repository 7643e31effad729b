"""DPO under other methods, engines, models and starts: the first step's loss is that of an unchanged model, and later
ones are lower. Slow: each case is a training."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from bench import Bench, metrics
from test_models import EXPERTS, TEXT
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from zerolora.files import describe, read_json, write_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ALONE = {"objective": "dpo", "dpo": {"sft_weight": 0.0}, "max_steps": 3, "epochs": 2}
NF4 = {"quantization": {"type": "nf4"}}
# The strategy, and the settings of a run; the reference of a quantized base is another one.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("zero0", {"packing": "pairs-packed"}),
    "unpacked": ("ddp", {}),
    "sdpa": ("ddp", {"packing": "pairs-packed", "attention": "sdpa"}),
    "offloaded": ("fsdp_offload", {"activation_checkpointing": True}),
    "pissa": ("zero3", {"lora": {"r": 4, "init": "pissa"}}),
    "nf4": ("fsdp", {"method": "qlora", **NF4, "packing": "pairs-packed"}),
    "full": ("zero3", {"method": "full"}),
}


@pytest.fixture(scope="module", autouse=True)
def _rows(bench: Bench) -> None:
    bench.prefer()
    shutil.copytree(bench.folder / "pairs", bench.folder / "pairs-nf4")
    bench.refer("pairs-nf4", **NF4)


def train(bench: Bench, name: str, strategy: str = "zero2", **settings: Any) -> Path:
    data = "pairs-nf4" if "quantization" in settings else "pairs"
    own = {"data": data, "packing": "pairs-unpacked", "reference": f"{data}-reference"}
    return bench.run(name.replace(" ", "-"), strategy, **(own | ALONE | settings))


def columns_of(run: Path) -> dict[str, list[float]]:
    with (run / "metrics/loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def assert_starts_unchanged(run: Path) -> None:
    """See that the first step's policy is the reference, and that training then moves it."""
    columns = columns_of(run)
    assert columns["loss"][0] == pytest.approx(math.log(2), abs=1e-5)
    for name in ("reward_margin", "chosen_change", "rejected_change"):
        assert abs(columns[name][0]) < 2e-4
    assert columns["loss"][-1] < math.log(2) - 1e-3 and columns["reward_margin"][-1] > 1e-3


@pytest.mark.parametrize("name", RUNS)
def test_first_step_is_that_of_an_unchanged_model(name: str, bench: Bench) -> None:
    strategy, settings = RUNS[name]
    assert_starts_unchanged(train(bench, name, strategy, **settings))


def test_packing_and_strategy_change_no_loss(bench: Bench) -> None:
    expected = columns_of(train(bench, "unpacked-alone", "ddp", ranks_per_node=1, micro_batch=4))
    for strategy, settings in (("zero3_offload", {}), ("fsdp", {"attention": "sdpa"})):
        actual = columns_of(train(bench, f"again-{strategy}", strategy, **settings))
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["chosen_change"] == pytest.approx(expected["chosen_change"], rel=1e-4, abs=2e-5)


def test_a_run_resumes_at_another_stage_and_world_size(bench: Bench) -> None:
    own: dict[str, Any] = {"data": "labelled", "packing": "labelled-unpacked", "reference": "labelled-reference"}
    own |= {"objective": "kto"}
    first = bench.run("kto-first", "zero2", **own)
    shutil.copytree(bench.folder / "checkpoints/kto-first", bench.folder / "checkpoints/kto-moved")
    for last in (bench.folder / "checkpoints/kto-moved").glob("*/step-00000003.safetensors"):
        last.unlink()
        (last.parent / "finished").unlink()
    result = bench.start("kto-moved", "zero3", ranks_per_node=1, **own)
    assert "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    losses = metrics(bench.folder / "kto-moved")["losses"]
    assert losses == pytest.approx(metrics(first)["losses"], rel=1e-5)


def test_the_pass_before_a_step_gathers_weights_once(bench: Bench) -> None:
    """And so does the step itself, whose order of modules is known although another pass precedes it."""
    own: dict[str, Any] = {"data": "labelled", "packing": "labelled-unpacked", "objective": "kto"}
    own |= {"reference": "labelled-reference", "micro_batch": 2, "global_batch": 4, "max_steps": 3}
    run = bench.run("gathered", "zero3", **own)
    with (run / "metrics/telemetry.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    sent = read_json(run / "metrics/train_resources.json", "")
    gathered = float(last["communication_bytes"])
    gathered -= sent["reduce_scatter_bytes_per_step"] + sent["all_reduce_bytes_per_step"]
    parameters = read_json(bench.folder / "m/tiny/manifest.json", "")["parameters"]
    assert gathered == pytest.approx(2 * 4 * (parameters + metrics(run)["trainable_parameters"]), rel=0.1)


def test_a_run_that_goes_on_from_an_adapter_is_compared_with_it(bench: Bench) -> None:
    adapter = str(bench.run("sft", "zero2") / "adapter")
    shutil.copytree(bench.folder / "pairs", bench.folder / "pairs-sft")
    bench.refer("pairs-sft", from_adapter=adapter)
    own = {"data": "pairs-sft", "reference": "pairs-sft-reference", "from_adapter": adapter}
    assert_starts_unchanged(train(bench, "continued", **own))
    of_base = bench.start("wrong", **(ALONE | own | {"packing": "pairs-unpacked", "reference": "pairs-reference"}))
    assert of_base.returncode == 2
    assert f"has log-probabilities under the base model, and the run compares with {adapter}" in of_base.stderr


def test_mismatched_sequences_are_compared_with_their_reference(bench: Bench) -> None:
    folder = bench.folder / "shifted-reference"
    shutil.copytree(bench.folder / "labelled-reference", folder)
    columns = pyarrow.ipc.open_stream(folder / "train.arrow").read_all()
    shift = {"reference": 0.0, "reference_mismatched": 5.0}
    shifted = pyarrow.table({name: columns[name].to_numpy() + by for name, by in shift.items()})
    with pyarrow.ipc.new_stream(folder / "train.arrow", shifted.schema) as writer:
        writer.write_table(shifted)
    manifest = read_json(folder / "manifest.json", "")
    write_json(folder / "manifest.json", manifest | {"files": describe(folder)})
    own = {"data": "labelled", "packing": "labelled-unpacked", "objective": "kto"}
    refused = bench.start("shifted", reference="shifted-reference", **own)
    assert refused.returncode == 2 and "other log-probabilities than the stage reference" in refused.stderr


def test_a_mixture_of_experts_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**(TEXT | EXPERTS))
    config.vocab_size = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tiny_model / "tokenizer_config.json", model)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (tmp_path / "bench").mkdir()
    bench = Bench(tmp_path / "bench", model)
    bench.prefer()
    assert_starts_unchanged(train(bench, "experts", "zero3"))
    # The stage reference quantizes experts as training does.
    shutil.copytree(bench.folder / "pairs", bench.folder / "pairs-nf4")
    bench.refer("pairs-nf4", **NF4)
    own = {"data": "pairs-nf4", "reference": "pairs-nf4-reference", "method": "qlora"}
    assert_starts_unchanged(train(bench, "quantized experts", "zero2", **own))


def test_a_step_without_undesirable_answers_has_no_figure_of_theirs(bench: Bench) -> None:
    """Global batches of two answers, of which some are alike."""
    own = {"data": "labelled", "packing": "labelled-unpacked", "reference": "labelled-reference", "objective": "kto"}
    run = bench.run("one-label", "zero2", **own, global_batch=2, max_steps=8, epochs=2)
    with (run / "metrics/loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = [(bool(row["desirable_reward"]), bool(row["undesirable_reward"])) for row in rows]
    assert len({*known}) > 1 and all(any(each) for each in known)
    with (run / "metrics/telemetry.csv").open(newline="") as file:
        assert [bool(row["undesirable_reward"]) for row in csv.DictReader(file)] == [each for _, each in known]
    assert all(math.isfinite(value) for value in metrics(run).values() if isinstance(value, float))
