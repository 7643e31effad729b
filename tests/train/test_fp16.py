"""fp16 and its dynamic loss scale on a CPU: PyTorch computes it, and DeepSpeed's check of the device is patched."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, metrics

from zerolora.train.checkpoint.format import header

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ALLOWED = """
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: True
"""
STAGES = ["zero0", "zero3"]  # stage 1 is the run that these are compared with
# More than fp16 can hold, so that the first steps overflow; after four that do not, it grows.
SCALE = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 4}
STEPS: dict[str, Any] = {"max_steps": 16, "epochs": 10, "checkpoint_steps": 10, "schedule": "constant"}
# Steps that are alike. The scale grows in the tenth, where stage 0, which adds up in another order, overflows.
ALIKE = {"zero0": 9, "zero3": 11}


@pytest.fixture(scope="module")
def plain(bench: Bench) -> dict[str, Any]:
    """Return the metrics of the same run in fp32."""
    return metrics(bench.run("fp16-plain", "ddp", **STEPS))


@pytest.fixture(scope="module")
def middle(bench: Bench) -> list[dict[str, float]]:
    """Return loss and gradient norm of the steps of a run by stage 1 that overflows and grows."""
    return steps(trained(bench, "fp16-middle", "zero1"))


def test_fp16_reaches_the_losses_of_fp32(bench: Bench, plain: dict[str, Any]) -> None:
    """By stage 2; the next test holds the others against it."""
    run = trained(bench, "fp16-zero2", "zero2", initial_scale_power=8)
    assert metrics(run)["losses"] == pytest.approx(plain["losses"], rel=3e-3)
    assert newest(bench, "fp16-zero2")["updates"] == 16


@pytest.mark.parametrize("strategy", STAGES)
def test_steps_that_overflow_are_left_out_and_a_resumed_run_is_the_same_bytes(
    bench: Bench, middle: list[dict[str, float]], strategy: str
) -> None:
    name = f"fp16-{strategy}-overflow"
    whole = trained(bench, name, strategy)
    actual = steps(whole)
    alike = ALIKE[strategy]
    assert actual[:alike] == [pytest.approx(each, rel=1e-3, nan_ok=True) for each in middle[:alike]]
    updates = sum(not math.isnan(each["gradient_norm"]) for each in actual)
    assert newest(bench, name)["updates"] == updates < 16
    assert newest(bench, name)["loss_scale"]["cur_scale"] < 2**24
    checkpoints = bench.folder / "checkpoints"
    shutil.copytree(checkpoints / name, checkpoints / f"{name}-resumed")
    next((checkpoints / f"{name}-resumed").glob("*/step-00000016.safetensors")).unlink()
    resumed = trained(bench, f"{name}-resumed", strategy)
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv", "metrics/train.json"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes(), file
    assert str(steps(resumed)) == str(actual)


def trained(bench: Bench, name: str, strategy: str, **scale: int) -> Path:
    """Train in fp16, although the config of a CPU refuses it, and return the run's directory."""
    command = bench.command(name, strategy, **STEPS)
    folder = bench.folder / name
    config = json.loads((folder / "zero.json").read_text())
    config["zerolora"]["precision"] = "fp16"
    if strategy in ("zero2", "zero3"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # as render has it of 16 bits
    (folder / "zero.json").write_text(json.dumps({**config, "fp16": {**SCALE, **scale}}))
    result = bench.server.run(command, bench.folder, bench.environment, ALLOWED)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def steps(run: Path) -> list[dict[str, float]]:
    """Return loss and gradient norm of every step; the norm of one that overflowed is not a number."""
    with (run / "metrics/telemetry.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(row[name] or "nan") for name in ("loss", "gradient_norm")} for row in rows]


def newest(bench: Bench, name: str) -> dict[str, Any]:
    """Return what a run's last checkpoint says of itself."""
    return header(max((bench.folder / "checkpoints" / name).glob("*/step-*.safetensors")))
