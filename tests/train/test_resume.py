"""Checkpoints of real training: resumed on any stage and number of ranks, and what is refused or passed over."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench import Bench, metrics, rank_process
from conftest import ROOT, project_environment
from fork_server import Started
from safetensors.torch import load_file

from zerolora.train.checkpoint.format import header, read, write
from zerolora.train.checkpoint.store import FINISHED
from zerolora.train.launch.stop_signals import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
RANKS = (1, 2, 3)
# Every stage on two numbers of ranks, each followed by another stage on another number of ranks.
CHAIN = [(stage, RANKS[(turn + place) % 3]) for turn in range(2) for place, stage in enumerate(STAGES)]
STEPS = len(CHAIN) + 1
LONG: dict[str, Any] = {"max_steps": STEPS, "epochs": 40, "global_batch": 6, "lora": {"r": 4, "alpha": 8.0}}


def test_chain_covers_the_claimed_changes() -> None:
    assert len(set(CHAIN)) == len(STAGES) * 2 and {ranks for _, ranks in CHAIN} == set(RANKS)
    assert all(one[0] != next_one[0] and one[1] != next_one[1] for one, next_one in itertools.pairwise(CHAIN))


def test_run_moved_between_stages_and_rank_counts_equals_the_undisturbed_one(bench: Bench) -> None:
    """Every run gets the stop signal before its first step, makes that step, saves, and the next one resumes."""
    whole = metrics(bench.run("long", "zero2", ranks_per_node=2, **LONG))
    for step, (strategy, ranks) in enumerate(CHAIN, start=1):
        code, errors = stopped(bench, "handed", strategy, ranks_per_node=ranks, **LONG)
        assert code == STOPPED, errors
        assert f"step {step} of {STEPS} is saved" in errors
        assert f"resuming at step {step - 1} of {STEPS}" in errors or step == 1
    actual = metrics(bench.run("handed", "zero1", ranks_per_node=3, **LONG))
    assert actual["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(whole["loss_validation"], rel=1e-5)
    resources = json.loads((bench.folder / "handed/metrics/train_resources.json").read_text())
    assert resources["resumes"] == len(CHAIN)
    file = "adapter/adapter_model.safetensors"
    one, other = load_file(bench.folder / "long" / file), load_file(bench.folder / "handed" / file)
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], rtol=1e-4, atol=1e-4), name


def stopped(bench: Bench, name: str, strategy: str, **train: Any) -> tuple[int, str]:
    """Start a run, ask it to stop as soon as it runs, and return its exit code and what it said."""
    run = bench.begin(name, strategy, **train)
    rank_process(run.pid, 0)
    os.kill(run.pid, signal.SIGUSR1)
    return run.wait(), run.errors()


ENDLESS: dict[str, Any] = {"max_steps": None, "epochs": 10000, "schedule": "constant", "checkpoint_steps": 2}


def started(bench: Bench, name: str) -> Started:
    """Start a run that would take for ever, and return it once it has written a checkpoint."""
    run = bench.begin(name, **ENDLESS)
    wait_until(lambda: bool(checkpoints(bench, name)) or not run.runs())
    return run


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_saves_the_current_step(bench: Bench, number: signal.Signals) -> None:
    """Ctrl-C reaches the whole group of processes: launcher and ranks."""
    name = f"asked-{number.name}"
    process = started(bench, name)
    before = header(checkpoints(bench, name)[-1])["step"]
    ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
    for pid in [process.pid, *(ranks if number == signal.SIGINT else [])]:
        os.kill(pid, number)
    code, errors = process.wait(), process.errors()
    assert code == STOPPED, errors
    assert "zerolora: training stopped on request; run the same command to resume" in errors
    last = header(checkpoints(bench, name)[-1])["step"]
    assert last > before
    assert f"step {last} of" in errors
    assert not (bench.folder / name / "adapter").exists()


def test_ctrl_c_while_ranks_still_load_is_no_traceback(bench: Bench) -> None:
    """Ranks get it from the terminal before they can take it. By the real command, whose ranks take seconds to load."""
    command = bench.command("early", **ENDLESS)
    process = subprocess.Popen(command, env=project_environment(ROOT), stderr=subprocess.PIPE, text=True)
    ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
    for pid in [process.pid, *ranks]:
        os.kill(pid, signal.SIGINT)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == STOPPED, errors
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors


def test_a_second_ctrl_c_ends_it_at_once(bench: Bench) -> None:
    process = started(bench, "impatient")
    rank = rank_process(process.pid, 1)
    os.kill(rank, signal.SIGSTOP)  # a rank that hangs: no step ends any more
    process.signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.runs()
    process.signal(signal.SIGINT)
    assert process.wait() == 2
    errors = process.errors()
    assert "training was ended by SIGINT; run the same command to resume from its checkpoint" in errors


def test_when_the_launcher_is_killed_its_ranks_save_and_go(bench: Bench) -> None:
    process = started(bench, "orphaned")
    ranks = [psutil.Process(rank_process(process.pid, rank)) for rank in (0, 1)]
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=600)
    assert not alive
    step = header(checkpoints(bench, "orphaned")[-1])["step"]
    code, errors = stopped(bench, "orphaned", "zero2", **ENDLESS)
    assert code == STOPPED
    assert f"resuming at step {step} of" in errors


def test_a_run_is_trained_once_at_a_time(bench: Bench) -> None:
    first = started(bench, "twice")
    ranks = [rank_process(first.pid, rank) for rank in (0, 1)]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)  # it keeps its lock, and needs no core while the second one waits for that
    second = bench.start("twice", **ENDLESS)
    first.kill()
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    assert second.returncode == 2
    assert "checkpoints/twice: this run is being trained by process" in second.stderr
    assert "; wait for it, or end it" in second.stderr


def checkpoints(bench: Bench, name: str) -> list[Path]:
    """Return a run's checkpoints, the oldest first."""
    return sorted((bench.folder / "checkpoints" / name).glob("*/step-*.safetensors"))


@pytest.fixture(scope="module")
def finished(bench: Bench) -> Path:
    return bench.run("finished", ranks_per_node=1)


def interrupted(bench: Bench, finished: Path, name: str) -> list[Path]:
    """Make a run that was killed after its second step, its outputs lost, and return its checkpoints."""
    shutil.copytree(bench.folder / "checkpoints/finished", bench.folder / "checkpoints" / name)
    checkpoints(bench, name)[-1].unlink()
    (checkpoints(bench, name)[-1].parent / FINISHED).unlink()
    return checkpoints(bench, name)


def test_last_two_checkpoints_stay(bench: Bench, finished: Path) -> None:
    actual = [header(path) for path in checkpoints(bench, "finished")]
    assert [manifest["step"] for manifest in actual] == [2, 3]


def test_corrupt_checkpoint_is_named_and_skipped(bench: Bench, finished: Path) -> None:
    """A flipped bit; tests/unit/test_checkpoint.py has any other damage."""
    name = "torn"
    shutil.copytree(bench.folder / "checkpoints/finished", bench.folder / "checkpoints" / name)
    torn = checkpoints(bench, name)[-1]
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    result = bench.start(name, ranks_per_node=1)
    assert result.returncode == 0, result.stderr
    assert f"{torn} is passed over: " in result.stderr
    assert "resuming at step 2 of 3" in result.stderr
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv", "metrics/train.json"):
        assert (bench.folder / name / file).read_bytes() == (finished / file).read_bytes(), file


def test_without_a_complete_checkpoint_training_starts_over(bench: Bench, finished: Path) -> None:
    for path in interrupted(bench, finished, "hopeless"):
        path.write_bytes(b"")
    result = bench.start("hopeless", ranks_per_node=1)
    assert result.returncode == 0, result.stderr
    assert "resuming at" not in result.stderr
    assert (bench.folder / "hopeless/metrics/loss.csv").read_bytes() == (finished / "metrics/loss.csv").read_bytes()


def test_changed_config_starts_over_and_lists_the_differences(bench: Bench, finished: Path) -> None:
    old = interrupted(bench, finished, "changed")[-1]
    result = bench.start("changed", ranks_per_node=1, learning_rate=2e-2, seed=7)
    assert result.returncode == 0, result.stderr
    why = "train.learning_rate was 0.01 and is 0.02; train.seed was 42 and is 7"
    assert f"{old} is not resumed, since {why}; training starts over" in result.stderr
    assert old.exists()


def test_named_checkpoint_of_another_config_is_refused(bench: Bench, finished: Path) -> None:
    old = interrupted(bench, finished, "refused")[-1]
    result = bench.start("refused", ranks_per_node=1, weight_decay=0.5, resume=str(old))
    assert result.returncode == 2
    assert f"train.resume: {old} cannot be resumed, since train.weight_decay was 0.0 and is 0.5" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (bench.folder / "refused/adapter").exists()


def test_a_checkpoint_of_other_trained_parameters_is_refused(bench: Bench, finished: Path) -> None:
    """As all-linear of an earlier version may have meant: the rest would start in the middle of training."""
    old = interrupted(bench, finished, "narrower")[-1]
    state, manifest = read(old)
    lost = min(state.parts["weight"])
    for tensors in state.parts.values():
        del tensors[lost]
    write(old.parent, state, manifest["resume_key"], manifest["run_fingerprint"])
    result = bench.start("narrower", ranks_per_node=1)
    assert result.returncode == 2
    said = (
        f"{old}: has other trained parameters than this run: 1 that only this run trains, as {lost}; give the targets"
    )
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not (bench.folder / "narrower/adapter").exists()


def test_settings_without_effect_on_the_loss_resume(bench: Bench, finished: Path) -> None:
    interrupted(bench, finished, "harmless")
    result = bench.start(
        "harmless", "zero3", ranks_per_node=2, checkpoint_minutes=1.0, activation_checkpointing=True, attention="eager"
    )
    assert result.returncode == 0, result.stderr
    assert "resuming at step 2 of 3" in result.stderr
    assert metrics(bench.folder / "harmless")["losses"] == pytest.approx(metrics(finished)["losses"], rel=1e-5)


def test_resume_never_starts_over(bench: Bench, finished: Path) -> None:
    interrupted(bench, finished, "never")
    result = bench.start("never", ranks_per_node=1, resume="never")
    assert result.returncode == 0, result.stderr
    assert "resuming at" not in result.stderr


def test_finished_run_is_reused_only_if_nothing_changed(bench: Bench, finished: Path) -> None:
    shutil.copytree(bench.folder / "checkpoints/finished", bench.folder / "checkpoints/again")
    again = bench.start("again", ranks_per_node=1, checkpoint_minutes=5.0)  # changes nothing of what is trained
    assert "resuming at step 3 of 3" in again.stderr
    assert (bench.folder / "again/metrics/train.json").read_bytes() == (finished / "metrics/train.json").read_bytes()
    other = bench.start("again", "zero1", ranks_per_node=1)
    assert other.returncode == 0, other.stderr
    assert "is of a finished run; training starts over" in other.stderr
    assert "resuming at" not in other.stderr


# Stage 1 has the optimizer of stage 2; test_training.py resumes ddp in 32 bits, and test_fp16.py stage 0.
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_bf16_trains_and_resumes_to_the_same_bytes(bench: Bench, reference: dict[str, Any], strategy: str) -> None:
    name = f"bf16-{strategy}-whole"
    whole = bench.run(name, strategy, precision="bf16")
    assert metrics(whole)["losses"] == pytest.approx(reference["losses"], rel=3e-4)
    shutil.copytree(bench.folder / "checkpoints" / name, bench.folder / "checkpoints" / f"{name}-resumed")
    checkpoints(bench, f"{name}-resumed")[-1].unlink()
    resumed = bench.run(f"{name}-resumed", strategy, precision="bf16")
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv", "metrics/train.json"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes(), file


def test_dropout_resumes_to_the_same_bytes(bench: Bench) -> None:
    dropped: dict[str, Any] = {"lora": {"r": 4, "dropout": 0.3}}
    whole = bench.run("dropout", **dropped)
    shutil.copytree(bench.folder / "checkpoints/dropout", bench.folder / "checkpoints/dropout-resumed")
    checkpoints(bench, "dropout-resumed")[-1].unlink()
    resumed = bench.run("dropout-resumed", **dropped)
    file = "adapter/adapter_model.safetensors"
    assert (resumed / file).read_bytes() == (whole / file).read_bytes()


def test_unwritable_directory_is_one_line(bench: Bench) -> None:
    (bench.folder / "checkpoints").mkdir(exist_ok=True)
    (bench.folder / "checkpoints/blocked").write_text("a file where a folder should be")
    result = bench.start("blocked", ranks_per_node=1)
    assert result.returncode == 2
    assert "cannot be made (Not a directory); checkpoints go there" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_disk_that_is_full_at_the_end_costs_no_step(bench: Bench) -> None:
    """Two trainings, on a file system that is too small for the adapter."""
    place = bench.folder / "full"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        command = bench.command("full", lora={"r": 64})  # render would refuse the small disk
        subprocess.run(["mount", "-o", "remount,size=256k", str(place)], check=True)
        refused = bench.server.run(command, bench.folder, bench.environment)
        assert refused.returncode == 2, refused.stderr
        (line,) = [line for line in refused.stderr.splitlines() if "No space left" in line]
        name = f"{place}/adapter/adapter_model.safetensors: No space left on device; free some space there"
        assert name in line and line.endswith("the same command then resumes from the last checkpoint")
        assert "Traceback" not in refused.stderr
        assert not [path for path in place.iterdir() if "adapter" in path.name]
        subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True)
        assert "resuming at step 3 of 3" in bench.server.run(command, bench.folder, bench.environment).stderr
        assert (place / "adapter/manifest.json").is_file()
    finally:
        subprocess.run(["umount", str(place)], check=True)
