"""Telemetry of real training: a line a step however often it stops, what it says, and what trackers get of it."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench import Bench
from safetensors.torch import load_file

from zerolora.train.telemetry.stopwatch import PARTS
from zerolora.train.telemetry.writer import COLUMNS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
LONG: dict[str, Any] = {"max_steps": STEPS, "epochs": 40, "checkpoint_steps": None}
WIDTH = 4  # bytes of fp32
SUMS = 8 * (3 + 1)  # the loop's own all-reduce: loss and two flags, and the loss of the one source
NORM = 4
# In the process that forks the ranks: writes the operations of each step for which a host waits for its GPU, up to and
# with its first read of the sums; what it reads then is its own.
COUNTING = """
import json, os, torch
from torch.utils._python_dispatch import TorchDispatchMode
from zerolora.train.loop import Loop
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
waits, step = [], Loop._optimizer_step
class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.name().partition(".")[0].removeprefix("aten::")
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in arguments[1])
        if name in WAITS or by_mask:
            waits.append(name)
        return function(*arguments, **(named or {}))
def counted(name):
    function = getattr(torch.Tensor, name)
    def call(*arguments, **named):
        waits.append(name)
        return function(*arguments, **named)
    setattr(torch.Tensor, name, call)
for name in ("cpu", "tolist", "numpy"):
    counted(name)
def counted_step(self, due):
    waits.clear()
    with Counting():
        result = step(self, due)
    until = waits.index("cpu") + 1
    with open(os.environ["COUNTED"] + os.environ["RANK"], "a") as file:
        file.write(json.dumps(waits[:until] + ["cpu"] * waits[until:].count("cpu")) + chr(10))
    return result
Loop._optimizer_step = counted_step
"""


def lines(run: Path) -> list[dict[str, Any]]:
    """Return a run's telemetry, empty cells as None."""
    with (run / "metrics/telemetry.csv").open(newline="") as file:
        return [{name: float(cell) if cell else None for name, cell in row.items()} for row in csv.DictReader(file)]


def resources(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics/train_resources.json").read_text())


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "ddp", "fsdp"])
def test_every_engine_leaves_a_line_a_step(bench: Bench, strategy: str) -> None:
    run, counts = bench.folder / f"told-{strategy}", bench.folder / f"waits-{strategy}-"
    command = bench.command(run.name, strategy, **LONG)
    result = bench.server.run(command, bench.folder, bench.environment | {"COUNTED": str(counts)}, COUNTING)
    assert result.returncode == 0, result.stderr[-3000:]
    if strategy in ("ddp", "fsdp"):  # DeepSpeed itself reads more
        for rank in (0, 1):
            steps = counts.with_name(f"{counts.name}{rank}").read_text().splitlines()
            first = ["tolist", "cpu"]  # of which the first are the flags of the gradients
            assert [json.loads(line) for line in steps] == [first, *[["cpu"]] * (STEPS - 1)]
    actual = lines(run)
    assert [row["step"] for row in actual] == list(range(1, STEPS + 1))
    assert all(tuple(row) == COLUMNS for row in actual)
    with (run / "metrics/loss.csv").open(newline="") as file:
        for row, told in zip(actual, csv.DictReader(file), strict=True):
            assert (row["loss"], row["learning_rate"]) == (float(told["loss"]), float(told["learning_rate"]))
    for row in actual:
        parts = [row[f"{part}_seconds"] for part in PARTS]
        assert all(part >= 0 for part in parts)
        assert 0.8 * row["seconds"] <= sum(parts) <= row["seconds"] * 1.001
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"], rel=1e-4)
        assert row["gradient_norm"] > 0
        assert 0 <= row["cpu_percent"] <= 100
        assert row["host_memory_bytes"] > 0
        assert row["mfu"] is row["gpu_percent"] is row["gpu_memory_bytes"] is None  # an unmeasured CPU
        assert row["gpu_energy_joules"] is None
    assert actual[0]["between_seconds"] == 0 < actual[1]["between_seconds"]
    (*_, last) = sorted((bench.folder / "checkpoints" / run.name).rglob("step-*.safetensors"))
    assert resources(run)["checkpoint_bytes"] == last.stat().st_size
    assert "energy_joules" not in resources(run)
    flops, trained = (json.loads((run / name).read_text()) for name in ("zero.json", "metrics/train.json"))
    per = flops["zerolora"]["flops"]
    mean = trained["tokens"] / (STEPS * 4)  # of rows, which are about as long as each other
    expected = per["token"] * trained["tokens"] + per["squared_token"] * trained["tokens"] * mean
    expected += per["supervised_token"] * trained["supervised_tokens"]
    done = sum(row["tflops_per_second"] * row["seconds"] for row in actual) * 2 * 1e12  # on two ranks
    assert done == pytest.approx(expected, rel=0.01)


def test_engines_agree_on_the_gradients_norm(bench: Bench) -> None:
    """It is measured before it is clipped, wherever gradients lie."""
    norms = {
        strategy: [row["gradient_norm"] for row in lines(found(bench, f"told-{strategy}", strategy))]
        for strategy in ("zero2", "zero3", "ddp", "fsdp")
    }
    for strategy, measured in norms.items():
        assert measured == pytest.approx(norms["ddp"], rel=1e-4), strategy


def found(bench: Bench, name: str, strategy: str) -> Path:
    """Return a run of another test, or make it if that test was not selected."""
    run = bench.folder / name
    return run if (run / "metrics").exists() else bench.run(name, strategy, **LONG)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "ddp", "fsdp"])
def test_collectives_send_the_predicted_bytes(bench: Bench, tiny_model: Path, strategy: str) -> None:
    """φ trained parameters, two micro-batches; planner/cost.py says of each what is sent when."""
    run = found(bench, f"told-{strategy}", strategy)
    adapter = WIDTH * json.loads((run / "metrics/train.json").read_text())["trainable_parameters"]
    told = {name.removesuffix("_bytes_per_step"): size for name, size in resources(run).items() if "_bytes_per" in name}
    exact = {
        "zero2": {"all_reduce": 2 * adapter + NORM + SUMS, "all_gather": adapter},
        "zero3": {"reduce_scatter": 2 * adapter},
        "ddp": {"all_reduce": adapter + SUMS},
        "fsdp": {"reduce_scatter": adapter, "all_reduce": SUMS},
    }[strategy]
    assert {name: told[name] for name in exact} == exact
    if strategy in ("zero3", "fsdp"):
        frozen = WIDTH * json.loads((bench.folder / "m/tiny/manifest.json").read_text())["parameters"]
        assert told["all_gather"] > frozen
    if strategy == "fsdp":
        weights = load_file(tiny_model / "model.safetensors")
        outside = WIDTH * sum(weight.numel() for name, weight in weights.items() if ".layers." not in name)
        # Its padding, and that the first step finds what is outside the layers gathered, are the rest.
        assert told["all_gather"] == pytest.approx(2 * (2 * (frozen + adapter) - outside), rel=0.02)
    if strategy == "zero3":
        # The whole model may be live. Each micro-batch gathers it once when the order of modules is known, whatever a
        # validation made of it first; what is too small to be sharded is the rest.
        gathered = lines(run)[-1]["communication_bytes"] - told["reduce_scatter"] - told["all_reduce"]
        assert gathered == pytest.approx(2 * (frozen + adapter), rel=0.1)
    assert lines(run)[-1]["communication_bytes"] == pytest.approx(sum(told.values()), rel=0.5)


def test_stage_3_keeps_no_weight_of_a_validation(bench: Bench) -> None:
    """They would be live beside as many as may be."""
    run = bench.run("validated-zero3", "zero3", **LONG, validation_steps=4)
    sent = [row["communication_bytes"] for row in lines(run)]
    assert sent[3] <= sent[4] < 1.2 * sent[3]


def test_one_rank_and_no_clipping(bench: Bench) -> None:
    """Nobody needs the norm then; ZeRO has it all the same."""
    for strategy, known in (("ddp", False), ("zero2", True)):
        run = bench.run(f"alone-{strategy}", strategy, ranks_per_node=1, gradient_clipping=0.0)
        assert [row["gradient_norm"] is not None for row in lines(run)] == [known] * 3, strategy


def test_the_first_steps_of_a_resumed_run_keep_their_lines(bench: Bench) -> None:
    """As if the machine had died after the sixth line and the fourth step's checkpoint, in the middle of a line."""
    often = LONG | {"checkpoint_steps": 2}
    whole = bench.run("watched", **often)
    folder = bench.folder / "checkpoints/watched-again"
    shutil.copytree(bench.folder / "checkpoints/watched", folder)
    next(folder.glob("*/step-00000006.safetensors")).unlink()
    live = next(folder.glob("*/telemetry.csv"))
    assert live.read_text() == (whole / "metrics/telemetry.csv").read_text()
    live.write_text(live.read_text()[:-20])
    again = bench.run("watched-again", **often)
    one, other = ((run / "metrics/telemetry.csv").read_text().splitlines() for run in (whole, again))
    assert len(one) == len(other) == 1 + STEPS
    assert one[: 1 + 4] == other[: 1 + 4]
    assert one[5:] != other[5:]
    assert live.read_text() == (again / "metrics/telemetry.csv").read_text()


def test_lost_telemetry_lines_are_restored_from_the_checkpoint(bench: Bench) -> None:
    run = bench.run("unwatched", checkpoint_steps=1)
    folder = bench.folder / "checkpoints/unwatched-again"
    shutil.copytree(bench.folder / "checkpoints/unwatched", folder)
    next(folder.glob("*/step-00000003.safetensors")).unlink()
    next(folder.glob("*/telemetry.csv")).unlink()
    rows = lines(bench.run("unwatched-again", checkpoint_steps=1))
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in lines(run)]
    assert [row["seconds"] is None for row in rows] == [True, True, False]


def tracked(bench: Bench, name: str, kind: str) -> Path:
    """Make a run that is tracked, stopped after a step and resumed; return where its tracker wrote."""
    train = LONG | {"tracker": kind, "checkpoint_steps": 2}
    bench.run(name, **train)
    next((bench.folder / "checkpoints" / name).glob("*/step-00000006.safetensors")).unlink()
    assert "resuming at step 4" in bench.start(name, **train).stderr
    return bench.folder / "tracking" / name / kind


def test_dvclive_gets_every_step_once(bench: Bench) -> None:
    folder = tracked(bench, "live", "dvclive")
    told = lines(bench.folder / "live")
    for name in ("loss", "learning_rate", "gradient_norm", "forward_seconds", "tokens_per_second"):
        with (folder / f"plots/metrics/{name}.tsv").open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1)), name
        assert [float(row[name]) for row in rows] == pytest.approx([row[name] for row in told], rel=1e-5)
    assert json.loads((folder / "metrics.json").read_text())["step"] == STEPS
    assert "learning_rate: 0.01" in (folder / "params.yaml").read_text()
    assert not list(folder.rglob("dvc.yaml"))


def test_tensorboard_gets_every_step_once(bench: Bench) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked(bench, "board", "tensorboard")))
    events.Reload()
    told = lines(bench.folder / "board")
    assert {"loss", "gradient_norm", "cpu_percent"} <= set(events.Tags()["scalars"])
    for name in ("loss", "backward_seconds"):
        points = [(point.step, point.value) for point in events.Scalars(name)]
        assert [step for step, _ in points] == list(range(1, STEPS + 1)), name
        assert [value for _, value in points] == pytest.approx([row[name] for row in told], rel=1e-4)


def test_failing_tracker_is_reported_once_and_training_continues(bench: Bench) -> None:
    (bench.folder / "tracking").mkdir(exist_ok=True)
    (bench.folder / "tracking/blocked-tracker").write_text("a file where a folder should be")
    result = bench.start("blocked-tracker", tracker="tensorboard")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("train.tracker: tensorboard failed and is skipped from now on") == 1
    assert len(lines(bench.folder / "blocked-tracker")) == 3


def test_missing_tracker_package_is_one_line_before_anything_loads(bench: Bench) -> None:
    result = bench.start("untracked", tracker="swanlab")
    assert result.returncode == 2
    assert re.fullmatch(
        r"zerolora: train.tracker is swanlab, but that package is not installed; install it with "
        r"`\S+ -m pip install swanlab`, or set tracker: none\n",
        result.stderr,
    )
