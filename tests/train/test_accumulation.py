"""Gradients of many micro-batches are added in fp32 by every engine: in bf16 the step is that of one large batch."""

from typing import Any

import pytest
import torch
from bench import Bench, metrics
from safetensors.torch import load_file

from zerolora.config.settings import PackSettings, PrepareSettings
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.reference import records
from zerolora.files import write_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 64
RANKS = {"ddp": 1, "zero0": 2, "zero1": 2, "zero1_offload": 1, "zero2": 1, "zero2_offload": 1}
RANKS |= {"zero3": 1, "zero3_offload": 1, "fsdp": 1}
"""By strategy: two where this project adds gradients and DeepSpeed then reduces them."""


@pytest.fixture(scope="module")
def many(bench: Bench) -> Bench:
    """The bench with as many rows to train on."""
    folder = bench.folder
    write_json(folder / "many.json", records("tens", 0)[:ROWS])
    rows = bench.settings["prepare"]["rows"] | {
        "path": str(folder / "many.json"),
        "split": {"validation": 0, "test": 0},
    }
    prepare(PrepareSettings.model_validate(rows), folder / "m/tiny/manifest.json", folder / "many")
    pack_rows(PackSettings(packing=False, capacity=None), folder / "many", folder / "many-rows")
    return bench


def first_moments(bench: Bench, name: str, strategy: str, micro_batch: int, ranks: int = 1) -> torch.Tensor:
    """Return AdamW's first moments after a step of all rows in bf16: a tenth of the gradient."""
    settings: dict[str, Any] = {"ranks_per_node": ranks, "max_steps": 1, "global_batch": ROWS, "precision": "bf16"}
    settings |= {"micro_batch": micro_batch, "lora": {"r": 4, "dropout": 0.0}}
    bench.run(name, strategy, packing="many-rows", data="many", **settings)
    (checkpoint,) = (bench.folder / "checkpoints" / name).glob("*/step-*1.safetensors")
    tensors = sorted(load_file(checkpoint).items())
    return torch.cat([each.flatten() for name, each in tensors if name.partition("/")[0] == "exp_avg"])


@pytest.fixture(scope="module")
def large(many: Bench) -> torch.Tensor:
    return first_moments(many, "large", "ddp", ROWS)


@pytest.mark.parametrize("strategy", RANKS)
def test_many_micro_batches_are_one_large_batch(strategy: str, many: Bench, large: torch.Tensor) -> None:
    """Summed in bf16 they are 0.8 % off."""
    moments = first_moments(many, f"many-{strategy}", strategy, 1, RANKS[strategy])
    assert (moments - large).norm() / large.norm() < 0.004


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("fsdp", 2)])
def test_weights_of_bf16_are_rounded_after_each_step(strategy: str, ranks: int, many: Bench) -> None:
    settings: dict[str, Any] = {"ranks_per_node": ranks, "max_steps": 2, "global_batch": ROWS // 2, "micro_batch": 8}
    settings |= {"packing": "many-rows", "data": "many", "lora": {"r": 4}, "weights": "bf16"}
    run = many.run(f"rounded-{strategy}", strategy, **settings)
    trained = load_file(run / "adapter/adapter_model.safetensors")
    (last,) = (many.folder / "checkpoints" / run.name).glob("*/step-*2.safetensors")
    states = {name: each for name, each in load_file(last).items() if name.startswith("exp_avg")}
    assert states and any(each.any() for name, each in trained.items() if "lora_B" in name)
    assert all(torch.equal(each, each.bfloat16().float()) for each in (*trained.values(), *states.values()))


def test_a_mean_of_rows_is_the_same_in_any_split(many: Bench) -> None:
    """The mean of all tokens would differ by 5e-5."""

    def losses(micro_batch: int) -> list[float]:
        settings: dict[str, Any] = {"max_steps": 2, "global_batch": 16, "micro_batch": micro_batch}
        settings |= {"packing": "many-rows", "data": "many", "lora": {"r": 4}, "sft": {"mean": "row"}}
        found: list[float] = metrics(many.run(f"row-{micro_batch}", "ddp", **settings))["losses"]
        return found

    assert losses(8) == pytest.approx(losses(1), abs=5e-6)
