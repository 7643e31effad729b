"""A rank that hangs or lags is named while it does so, by real ranks that are really stopped."""

import contextlib
import hmac
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
from bench import Bench, rank_process
from conftest import begun, served
from fork_server import Started

from zerolora.train.checkpoint.format import CorruptCheckpoint, header
from zerolora.train.launch.stop_signals import STOPPED
from zerolora.train.launch.topology import TOKEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Long enough to be disturbed, on whatever machine.
LONG: dict[str, Any] = {"max_steps": 100, "epochs": 50, "checkpoint_steps": 5}
ENDLESS: dict[str, Any] = {"max_steps": None, "epochs": 10000, "schedule": "constant", "checkpoint_steps": 2}
PATIENCE = 9.0  # seconds
PORT = 20000 + os.getpid() % 10000  # of UDP; other tests that run meanwhile have theirs
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), TOKEN: "a secret of this test"}


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
    deadline = time.monotonic() + 120
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


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_hung_rank_is_named_with_its_step_and_ends_the_run_which_goes_on(
    bench: Bench, undisturbed: Path, stopped: int
) -> None:
    """Rank 0, which the others ask, is no exception."""
    name = f"hung-{stopped}"
    process = start(bench, name)
    os.kill(rank_process(process.pid, stopped), signal.SIGSTOP)
    began = time.monotonic()
    code, errors = process.wait(), process.errors()
    assert code == 2, errors
    assert PATIENCE * 0.9 < time.monotonic() - began < PATIENCE + 60
    said = (bench.folder / name / "logs/rank1.log").read_text() if stopped == 0 else errors
    host = socket.gethostname()
    hangs = rf"rank {stopped} on {host}, last in .*step \d+.*, has not responded for \d+ s; "
    waits = rf"rank {1 - stopped} on {host} is in (?:step \d+, [\w ]+|the checkpoint of step \d+); "
    assert re.search(f"^zerolora: {hangs}{waits}training ends in [1-9] s unless it recovers$", said, re.MULTILINE), said
    ends = f"^zerolora: {hangs}{waits}run the same command to go on from its checkpoint$"
    assert re.search(ends, said, re.MULTILINE), said
    result = bench.start(name, **LONG)
    assert result.returncode == 0, result.stderr
    assert "resuming at step" in result.stderr
    for file in ("adapter/adapter_model.safetensors", "metrics/train.json", "metrics/loss.csv"):
        assert (bench.folder / name / file).read_bytes() == (undisturbed / file).read_bytes(), file


def test_a_rank_that_lags_is_named_once(bench: Bench) -> None:
    """At a stage where all wait in each layer. It is stopped for most of the time, in turns too short for silence."""
    process = start(bench, "lagging", patience=60, strategy="zero3", **ENDLESS)
    rank = rank_process(process.pid, 1)
    since: int | None = None
    step = 0
    # Judged are 20 steps, twice. By another judgement it is not named once more.
    while since is None or step < since + 25:
        step = step_of(bench, "lagging")
        assert since is not None or step < 150, process.errors()
        for number, seconds in ((signal.SIGSTOP, 0.04), (signal.SIGCONT, 0.02)):
            os.kill(rank, number)
            time.sleep(seconds)
        if since is None and "is slow" in process.errors():
            since = step
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait() == STOPPED
    slow = [line for line in process.errors().splitlines() if "is slow" in line]
    words = (
        rf"zerolora: rank 1 on {socket.gethostname()} is slow: "
        r"it computes [\d.]+ times as long as the others, which wait for it"
    )
    assert [bool(re.fullmatch(words, line.strip())) for line in slow] == [True], slow


# Two ranks that go through steps together, with nothing to compute; then each does what it was told.
TWO_RANKS = """
import sys, time
from zerolora import log
from zerolora.train.launch.heartbeat import Heartbeat

log.set_up()
heartbeat = Heartbeat()
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


def stand_in(rank: int, then: str) -> Started:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", **MEETING}
    return begun("python", "-c", TWO_RANKS, then, ZEROLORA_PATIENCE=str(PATIENCE), **place)


def wait_until_they_go(*ranks: Started) -> None:
    """Wait until these stand-ins make steps."""
    deadline = time.monotonic() + 60
    while any(rank.output() != "goes\n" for rank in ranks):
        assert time.monotonic() < deadline, [rank.errors() for rank in ranks]
        time.sleep(0.05)


def test_ranks_that_live_and_go_no_further_are_said_to_hang() -> None:
    """Whose collective never ends because another rank is in something else."""
    other = stand_in(1, STANDS)
    first = stand_in(0, f"heartbeat.step(6, 'forward'); {STANDS}")
    code, errors = first.wait(), first.errors()
    other.kill()
    assert code == 2
    host = socket.gethostname()
    assert re.search(
        r"^zerolora: step 5, backward hangs: no rank has gone on for \d+ s; "
        rf"rank 0 on {host} is in step 6, forward; rank 1 on {host} is in step 5, backward; run the same command",
        errors,
        re.MULTILINE,
    ), errors


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


HOST = "evil\x1b[31m"


def datagrams() -> list[bytes]:
    """Return what a user of the machine can send who does not know the token, and what no rank of a launch sends."""
    good: dict[str, Any] = {
        "rank": 1,
        "host": HOST,
        "part": "step 9, backward",
        "kind": "step",
        "sent": 10**6,
        "turns": 10**6,
    }
    key = MEETING[TOKEN].encode()

    def signed(status: Any, key: bytes = key) -> bytes:
        text = json.dumps(status).encode()
        return hmac.digest(key, text, "sha256") + text

    wrong: list[dict[str, Any]] = [
        {"turns": "x"}, {"turns": None}, {"turns": -1}, {"turns": 1.5}, {"turns": True}, {"turns": 10**400},
        {"rank": 0}, {"rank": 2}, {"rank": -1}, {"rank": "1"}, {"host": 5}, {"host": "x" * 1000}, {"part": []},
        {"kind": "meeting"}, {"longest": float("nan")}, {"longest": float("inf")}, {"seconds": "1"}, {"more": 1},
    ]  # fmt: skip
    others: list[Any] = [None, 1, [], {}, "x"]
    return [
        b"", b"x", os.urandom(31), os.urandom(4096), json.dumps(good).encode(),
        signed(good, b""), signed(good, b"another secret"),
        *(signed(value) for value in others),
        *(signed(good | change) for change in wrong),
        hmac.digest(key, b"{", "sha256") + b"{",
    ]  # fmt: skip


def test_what_others_send_changes_nothing_and_ends_nothing() -> None:
    """They send to rank 0, whose port is known, throughout twice the time after which a silent rank ends training."""
    ranks = [stand_in(rank, GOES_ON) for rank in (0, 1)]
    wait_until_they_go(*ranks)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline:
            for each in datagrams():
                other.sendto(each, ("127.0.0.1", PORT))
            time.sleep(0.2)
    assert [rank.runs() for rank in ranks] == [True, True]
    for rank in ranks:
        rank.kill()
        assert rank.errors() == ""


def test_a_datagram_that_is_sent_again_does_not_stand_for_a_silent_rank() -> None:
    """Recorded from rank 1 and repeated, after rank 1 has stopped."""
    first = stand_in(0, GOES_ON)
    wait_until_they_go(first)
    status = {"rank": 1, "host": HOST, "part": f"step 9{HOST}", "kind": "step", "sent": 1, "turns": 9}
    text = json.dumps(status).encode()
    recorded = hmac.digest(MEETING[TOKEN].encode(), text, "sha256") + text
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        deadline = time.monotonic() + PATIENCE + 60
        while first.runs() and time.monotonic() < deadline:
            other.sendto(recorded, ("127.0.0.1", PORT))
            time.sleep(0.2)
    assert first.wait() == 2
    errors = first.errors()
    assert re.search(r"rank 1 on evil\\x1b\[31m, last in step 9evil\\x1b\[31m, has not responded for \d+ s", errors)
    assert "\x1b" not in errors


def test_without_a_token_ranks_say_that_hangs_are_not_detected() -> None:
    code = "from zerolora import log; from zerolora.train.launch.heartbeat import Heartbeat; log.set_up(); Heartbeat()"
    place = {"RANK": "0", "WORLD_SIZE": "2", **MEETING, TOKEN: ""}
    result = served("python", "-c", code, **place)
    assert result.returncode == 0
    assert result.stderr.startswith(
        "zerolora: ranks that hang are not detected: ZEROLORA_TOKEN is not set; before srun"
    )


def test_ranks_that_never_meet_say_who_is_missing() -> None:
    code = "from zerolora.train.launch.heartbeat import Heartbeat; import time; Heartbeat(); time.sleep(1000)"
    place = {"WORLD_SIZE": "3", **MEETING, "ZEROLORA_PATIENCE": "2"}
    first, third = (begun("python", "-c", code, RANK=str(rank), **place) for rank in (0, 2))
    assert first.wait() == 2
    with contextlib.suppress(ProcessLookupError):  # its own patience may have ended
        third.kill()
    errors = first.errors()
    assert "waits for rank 1 to come to 127.0.0.1 for" in errors


def test_a_patience_that_is_no_number_is_a_users_mistake(bench: Bench) -> None:
    result = served(*bench.command("impatient"), ZEROLORA_PATIENCE="soon")
    assert result.returncode == 2
    assert "zerolora: ZEROLORA_PATIENCE is 'soon'; write seconds, as in 180" in result.stderr
    assert "Traceback" not in result.stderr
