"""A rank that hangs or lags is named while it does so, by real ranks that are really stopped."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench import Bench, rank_process
from conftest import begun, served
from fork_server import Started

from zerolora.train.checkpoint.format import CorruptCheckpoint, header
from zerolora.train.launch.stop_signals import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Long enough to be disturbed, on whatever machine.
LONG: dict[str, Any] = {"max_steps": 100, "epochs": 50, "checkpoint_steps": 5}
ENDLESS: dict[str, Any] = {"max_steps": None, "epochs": 10000, "schedule": "constant", "checkpoint_steps": 5}
PATIENCE = 9.0  # seconds
PORT = 20000 + os.getpid() % 10000  # other tests that run meanwhile have theirs
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
BEGUN: list[Started] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """End the runs of a test that failed, whose ranks may stand still."""
    yield
    while BEGUN:
        process = BEGUN.pop()
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in (launcher := psutil.Process(process.pid)).children(recursive=True):
                child.kill()
            launcher.kill()


def start(bench: Bench, name: str, patience: float = PATIENCE, **train: Any) -> Started:
    """Start a run, and return it once it has written a checkpoint."""
    process = bench.begin(name, variables={"ZEROLORA_PATIENCE": str(patience)}, **{**LONG, **train})
    BEGUN.append(process)
    deadline = time.monotonic() + 600
    while not step_of(bench, name):
        assert process.runs(), process.errors()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def step_of(bench: Bench, name: str) -> int:
    """Return the step of a run's newest checkpoint, 0 if there is none."""
    files = sorted((bench.folder / "checkpoints" / name).glob("*/step-*.safetensors"))
    try:
        return int(header(files[-1])["step"]) if files else 0
    except CorruptCheckpoint:  # pruned a moment ago
        return 0


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Any:
    return bench.run("unhung", **LONG)


def test_hung_rank_is_named_with_its_step_and_the_run_resumes(bench: Bench, undisturbed: Path) -> None:
    """Rank 0, which the others ask; tests/slurm/test_events.py has another one."""
    name = "hung"
    process = start(bench, name)
    os.kill(rank_process(process.pid, 0), signal.SIGSTOP)
    began = time.monotonic()
    code, errors = process.wait(), process.errors()
    assert code == 2, errors
    assert PATIENCE * 0.9 < time.monotonic() - began < PATIENCE + 60
    said = (bench.folder / name / "logs/rank1.log").read_text()
    host = socket.gethostname()
    hangs = rf"rank 0 on {host}, last in .*step \d+.*, has not responded for \d+ s; "
    waits = rf"rank 1 on {host} is in (?:step \d+, [\w ]+|the checkpoint of step \d+); "
    assert re.search(f"^zerolora: {hangs}{waits}training ends in [1-9] s unless it recovers$", said, re.MULTILINE), said
    ends = f"^zerolora: {hangs}{waits}run the same command to resume from its checkpoint$"
    assert re.search(ends, said, re.MULTILINE), said
    result = bench.start(name, **LONG)
    assert result.returncode == 0, result.stderr
    assert "resuming at step" in result.stderr
    for file in ("adapter/adapter_model.safetensors", "metrics/train.json", "metrics/loss.csv"):
        assert (bench.folder / name / file).read_bytes() == (undisturbed / file).read_bytes(), file


@pytest.mark.timeout(900)
def test_slow_rank_and_falling_throughput_are_reported_once(bench: Bench) -> None:
    """At a stage where all wait in each layer. It is stopped for most of the time, in turns too short for silence.

    It takes a minute: throughput is compared over 20 steps, and ranks twice over at least 10 seconds.
    """
    process = start(bench, "lagging", patience=60, strategy="zero3", **ENDLESS)
    rank = rank_process(process.pid, 1)
    while step_of(bench, "lagging") < 25:
        assert process.runs(), process.errors()
        time.sleep(0.1)
    fell = re.compile(r"zerolora: step \d+: \d+ tokens/s, after \d+ before .*: communication takes ")
    step, since = 0, dict.fromkeys(("slow", "fell"), 0)
    # Judged are 20 steps, twice. By another judgement it is not named once more.
    while not all(since.values()) or step < since["slow"] + 25:
        step = step_of(bench, "lagging")
        assert all(since.values()) or step < 250, process.errors()
        for number, seconds in ((signal.SIGSTOP, 0.04), (signal.SIGCONT, 0.02)) * 10:
            os.kill(rank, number)
            time.sleep(seconds)
        said = process.errors().splitlines()
        since["slow"] = since["slow"] or (step if any("is slow" in line for line in said) else 0)
        since["fell"] = since["fell"] or (step if any(fell.match(line) for line in said) else 0)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait() == STOPPED
    slow = [line for line in process.errors().splitlines() if "is slow" in line]
    words = (
        rf"zerolora: rank 1 on {socket.gethostname()} is slow: "
        r"it computes [\d.]+ times as long as the others, which wait for it"
    )
    assert [bool(re.fullmatch(words, line.strip())) for line in slow] == [True], slow


# Two ranks that go through steps together, with nothing to compute; then each runs its own text.
TWO_RANKS = """
import sys, time
from zerolora import log
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.rendezvous import rendezvous

log.set_up()
heartbeat = Heartbeat()
rendezvous("gloo")
heartbeat.at("loading")
for step in range(1, 6):
    heartbeat.step(step, "forward")
    time.sleep(0.05)
    heartbeat.step(step, "backward")
print("goes", flush=True)
exec(sys.argv[1])
"""
GOES_ON = "for step in range(6, 10000): heartbeat.step(step, 'forward'); time.sleep(0.05)"
STANDS = "time.sleep(1000)"


def stand_in(rank: int, then: str, **variables: str) -> Started:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", **MEETING, **variables}
    return begun("python", "-c", TWO_RANKS, then, ZEROLORA_PATIENCE=str(PATIENCE), **place)


def wait_until_they_go(*ranks: Started) -> None:
    """Wait until these stand-ins make steps."""
    deadline = time.monotonic() + 600
    while any(rank.output() != "goes\n" for rank in ranks):
        assert time.monotonic() < deadline, [rank.errors() for rank in ranks]
        time.sleep(0.05)


def test_ranks_without_progress_are_reported_as_hanging() -> None:
    """Whose collective never ends because another rank is in something else."""
    other = stand_in(1, STANDS)
    first = stand_in(0, f"heartbeat.step(6, 'forward'); {STANDS}")
    code, errors = first.wait(), first.errors()
    other.kill()
    assert code == 2
    host = socket.gethostname()
    assert re.search(
        r"^zerolora: step 5, backward hangs: no rank has made progress for \d+ s; "
        rf"rank 0 on {host} is in step 6, forward; rank 1 on {host} is in step 5, backward; run the same command",
        errors,
        re.MULTILINE,
    ), errors


STATUS: dict[str, Any] = {
    "rank": 1, "host": "h", "part": "step 1, forward", "kind": "step", "sent": 10**9, "turns": 1, "longest": 0.1,
    "steps": 1, "seconds": 0.1,
}  # fmt: skip
FOREIGN = (
    b"\xff\xfe not UTF-8",
    b'{"x": 1}',
    b"[" * 100_000,
    json.dumps(STATUS).encode(),
    b"0" * 64 + json.dumps(STATUS | {"longest": "zz"}).encode(),
    b"0" * 64 + json.dumps(STATUS | {"host": "\x1b[31mnode"}).encode(),
)


def wait_until_read(store: torch.distributed.TCPStore, first: str, second: str) -> None:
    """Wait until rank 0 has read a new status of rank 1: between the two writes of its own that follow one."""
    for key in (second, first, first):
        before, deadline = store.get(key), time.monotonic() + 60
        while store.get(key) == before:
            assert time.monotonic() < deadline, f"{key} is not written"
            time.sleep(0.02)


def test_another_process_that_writes_to_the_store_ends_nothing() -> None:
    """And is reported; once it has gone, a rank that hangs is found as before."""
    ranks = [stand_in(rank, GOES_ON, ZEROLORA_SECRET="s" * 64) for rank in (0, 1)]
    wait_until_they_go(*ranks)
    other = torch.distributed.TCPStore("127.0.0.1", PORT, is_master=False, wait_for_workers=False)
    keys = [f"zerolora/heartbeat/0/{rank}" for rank in (0, 1)]
    other.wait(keys)
    signed_by_one = [other.get(key) for key in keys]
    deadline = time.monotonic() + PATIENCE + 3
    while time.monotonic() < deadline:
        for number, key in enumerate(keys):
            for content in (*FOREIGN, signed_by_one[1 - number]):
                other.set(key, content)  # type: ignore[arg-type]  # it takes bytes too
                time.sleep(0.01)
    assert [rank.runs() for rank in ranks] == [True, True], [rank.errors() for rank in ranks]
    wait_until_read(other, *keys)
    ranks[1].signal(signal.SIGSTOP)
    assert ranks[0].wait() == 2
    errors = ranks[0].errors()
    ranks[1].kill()
    lines = [line for line in errors.splitlines() if line.startswith("zerolora: ")]
    assert "as the status of rank 1 is not its own, so whether that rank hangs is not known" in lines[0], errors
    assert sum("is not its own" in line for line in lines) == 1 and "Traceback" not in errors, errors
    assert "\x1b" not in errors
    assert re.search(r"rank 1 on .* has not responded for \d+ s; .*run the same command to resume", lines[-1]), errors


def test_a_monitor_that_fails_says_so_and_training_goes_on() -> None:
    """Both threads, on every try: the error is reported once each."""
    broken = "import zerolora.train.launch.heartbeat as h\ndef fail(*_): raise ValueError('broken')\n"
    broken += "h.verified = fail; h._Monitor._judge = fail\n"
    ranks = [stand_in(0, f"{broken}{GOES_ON.replace('10000', '160')}\nimport os; os._exit(0)"), stand_in(1, GOES_ON)]
    assert ranks[0].wait() == 0, ranks[0].errors()
    ranks[1].kill()
    said = r"^zerolora: the detection of hanging ranks fails on rank 0 on .* \(ValueError: broken\) and is tried again"
    assert len(re.findall(said, ranks[0].errors(), re.MULTILINE)) == 2, ranks[0].errors()
    assert "Traceback" not in ranks[0].errors()


def test_a_job_that_was_suspended_as_a_whole_does_not_hang() -> None:
    ranks = [stand_in(rank, GOES_ON) for rank in (0, 1)]
    wait_until_they_go(*ranks)
    for number, seconds in ((signal.SIGSTOP, 11), (signal.SIGCONT, 4)):
        for rank in ranks:
            rank.signal(number)
        time.sleep(seconds)
    assert [rank.runs() for rank in ranks] == [True, True]
    for rank in ranks:
        rank.kill()


def test_a_rank_that_loses_rank_0_names_it_and_ends() -> None:
    """And with it the store, as with the node of rank 0."""
    first = stand_in(0, f"{GOES_ON.replace('10000', '60')}\nimport os; os._exit(0)")
    other = stand_in(1, GOES_ON)
    assert first.wait() == 0
    assert other.wait() == 2
    said = rf"^zerolora: rank 0 on {socket.gethostname()}, last in step \d+, forward, has not responded for \d+ s; "
    assert re.search(said, other.errors(), re.MULTILINE), other.errors()


def test_ranks_that_never_meet_say_who_is_missing() -> None:
    place = {"WORLD_SIZE": "3", **MEETING, "ZEROLORA_PATIENCE": "2"}
    first, third = (begun("python", "-c", TWO_RANKS, STANDS, RANK=str(rank), **place) for rank in (0, 2))
    assert first.wait() == 2
    with contextlib.suppress(ProcessLookupError):  # its own patience may have ended
        third.kill()
    errors = first.errors()
    assert "waits for rank 1 to come to 127.0.0.1 for" in errors


def test_a_patience_that_is_no_number_is_a_users_mistake(bench: Bench) -> None:
    result = served(*bench.command("impatient"), ZEROLORA_PATIENCE="soon")
    assert result.returncode == 2
    assert "zerolora: ZEROLORA_PATIENCE is 'soon'; give seconds, as in 180" in result.stderr
    assert "Traceback" not in result.stderr
