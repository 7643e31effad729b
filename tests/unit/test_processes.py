"""Ranks as forks of one loaded process: each is like a separate process, and none outlives its launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, project_environment
from pretended_driver import PretendedDriver

from zerolora.errors import UserError
from zerolora.machine import devices
from zerolora.train.launch.launcher import ALLOCATOR, GROWING_SEGMENTS, Codes, Ranks, check, environment_of, wait_for
from zerolora.train.launch.topology import topology

# A program whose ranks record their state and then run the code in `then`.
PROGRAM = """
import json, os, random, sys, threading, time
import numpy
from pathlib import Path
folder, before, then = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with (folder / "loaded").open("a") as file:
    file.write(f"{os.getpid()}\\n")
exec(before)
from zerolora.train.launch.fork import become_rank
become_rank()
rank = int(os.environ["RANK"])
print(f"rank {rank} prints", flush=True)
listener = os.environ["ZEROLORA_LISTENER"]
state = {
    "pid": os.getpid(), "parent": os.getppid(), "local": os.environ["LOCAL_RANK"], "drawn": random.random(),
    "numpy": float(numpy.random.rand()), "listener": os.path.exists(f"/proc/self/fd/{listener}"),
    "asks": "ZEROLORA_FORK" in os.environ, "malloc": os.environ.get("GLIBC_TUNABLES"),
    "name": Path("/proc/self/comm").read_text().strip(), "group": os.getpgid(0),
}
(folder / f"{rank}.part").write_text(json.dumps(state))
(folder / f"{rank}.part").rename(folder / f"{rank}.json")
exec(then)
"""
RANKS = 3
SLOWER = "each rank loads its libraries itself, which takes longer:"


def started(folder: Path, then: str = "pass", before: str = "pass", ranks: int = RANKS) -> Ranks:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(folder), before, then]
    environment = project_environment(ROOT) | {"GLIBC_TUNABLES": "glibc.malloc.mxfast=0"}
    return Ranks(topology({}, 1, ranks), command, environment, lambda rank: folder / f"{rank}.log")


def ended(ranks: Ranks, seconds: float = 60) -> Codes:
    deadline = time.monotonic() + seconds
    return wait_for(ranks, lambda _: time.monotonic() > deadline)


def states_of(folder: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("before", ["pass", "threading.Thread(target=threading.Event().wait, daemon=True).start()"])
def test_forked_ranks_are_like_processes(tmp_path: Path, before: str) -> None:
    """If a library has started a thread, which a fork would lack, ranks start the program again."""
    assert ended(started(tmp_path, before=before)) == dict.fromkeys(range(RANKS), 0)
    ranks = states_of(tmp_path)
    assert len((tmp_path / "loaded").read_text().split()) == (1 if before == "pass" else 1 + RANKS)
    assert len({rank["pid"] for rank in ranks}) == RANKS
    assert {rank["parent"] for rank in ranks} == {os.getpid()}
    assert {rank["group"] for rank in ranks} == {os.getpgid(0)}
    assert [rank["local"] for rank in ranks] == ["0", "1", "2"]
    assert [rank["name"] for rank in ranks] == ["zl-rank0", "zl-rank1", "zl-rank2"]
    assert [rank["listener"] for rank in ranks] == [True, False, False]
    assert {rank["asks"] for rank in ranks} == {False}
    assert {rank["malloc"] for rank in ranks} == {"glibc.malloc.mxfast=0"}
    assert len({rank["drawn"] for rank in ranks}) == len({rank["numpy"] for rank in ranks}) == RANKS
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(RANKS)]
    lacking = f"zerolora: {SLOWER} a fork would lack threads that a library has started (python)\n"
    reason = "" if before == "pass" else lacking
    assert logs == [f"{'' if rank else reason}rank {rank} prints\n" for rank in range(RANKS)]


def test_openblas_starts_no_threads_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS starts threads when numpy loads; then ranks cannot be forked."""
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    code = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    for device in ("cpu", "cuda"):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment_of(device), capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"


def test_ranks_on_gpus_have_growing_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user sets torch's allocator, or a GPU is a virtual one, whose memory cannot be mapped."""
    driver = PretendedDriver(9.0, 9.0)
    monkeypatch.setattr(devices, "driver_library", lambda: driver)
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert environment_of("cuda")["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in environment_of("cpu")
    driver.maps_memory = False
    assert "PYTORCH_ALLOC_CONF" not in environment_of("cuda")
    driver.maps_memory = True
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert "PYTORCH_ALLOC_CONF" not in environment_of("cuda")


def test_torch_reads_the_allocators_setting() -> None:
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    own = {**os.environ, ALLOCATOR[0]: GROWING_SEGMENTS}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GROWING_SEGMENTS


def test_cpu_ranks_call_no_cuda() -> None:
    """With a CUDA build of torch, bitsandbytes' query for a GPU would prevent forks."""
    code = """
import os, torch
from zerolora.compat.bitsandbytes_patches import load
load()
torch.cuda.is_available(), torch.cuda.device_count()
if not os.fork():
    os._exit(torch.cuda._is_in_bad_fork())
print(os.waitstatus_to_exitcode(os.wait()[1]), torch.cuda.is_available())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment_of("cpu"), capture_output=True, text=True, check=True
    )
    assert done.stdout == "0 False\n"


def test_cuda_call_before_the_fork_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: a CPU build of torch has no such call."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # modules of other tests set it as they are imported
    before = "import types; sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(" + (
        "is_initialized=lambda: False, _is_in_bad_fork=lambda: True))"
    )
    assert ended(started(tmp_path, before=before)) == dict.fromkeys(range(RANKS), 0)
    assert len((tmp_path / "loaded").read_text().split()) == 1 + RANKS
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(RANKS)]
    said = f"zerolora: {SLOWER} a library has called CUDA before the fork\n"
    assert logs == [f"{'' if rank else said}rank {rank} prints\n" for rank in range(RANKS)]


def test_one_rank_is_not_forked(tmp_path: Path) -> None:
    assert ended(started(tmp_path, ranks=1)) == {0: 0}
    assert (tmp_path / "loaded").read_text().split() == [str(states_of(tmp_path, 1)[0]["pid"])]


def test_exit_code_of_a_failed_rank_is_reported(tmp_path: Path) -> None:
    then = f"""
while rank != 1 or len(list(folder.glob("*.json"))) < {RANKS}:
    time.sleep(0.05)
os._exit(7)
"""
    codes = ended(started(tmp_path, then))
    assert codes == {0: None, 1: 7, 2: None}
    with pytest.raises(UserError, match="(?s)^rank 1 failed with exit code 7; its last lines:.*rank 1 prints"):
        check(codes, lambda rank: tmp_path / f"{rank}.log")
    assert not any(psutil.pid_exists(rank["pid"]) for rank in states_of(tmp_path))


def test_users_mistake_in_a_rank_is_reported(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_text("zerolora: careful\nLoading: 100%\nzerolora: r is 0\nzerolora: alpha is 0\n")
    with pytest.raises(UserError) as error:
        check({0: None, 1: 2}, lambda rank: tmp_path / f"{rank}.log")
    assert str(error.value) == "r is 0\nalpha is 0"


def test_signal_that_ended_a_rank_is_reported(tmp_path: Path) -> None:
    codes = ended(started(tmp_path, "time.sleep(1000) if rank else os.kill(os.getpid(), 11)"))
    assert codes[0] == -signal.SIGSEGV
    with pytest.raises(UserError, match="rank 0 failed with signal SIGSEGV"):
        check(codes, lambda rank: tmp_path / f"{rank}.log")


def test_killed_rank_is_named_before_its_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections close first, so a peer may fail before the kernel reports the kill."""
    monkeypatch.setattr("zerolora.train.launch.launcher.CAUSE_SECONDS", 60)
    then = f"""
while len(list(folder.glob("*.json"))) < {RANKS}:
    time.sleep(0.05)
if rank == 0:
    os._exit(1)
first = json.loads((folder / "0.json").read_text())["pid"]
while rank == 1 and Path(f"/proc/{{first}}/cmdline").exists():
    time.sleep(0.05)
if rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(1000)
"""
    codes = ended(started(tmp_path, then))
    assert codes == {0: 1, 1: -signal.SIGKILL, 2: None}
    with pytest.raises(UserError, match="rank 1 failed with signal SIGKILL"):
        check(codes, lambda rank: tmp_path / f"{rank}.log")


def test_failure_to_load_belongs_to_rank_0(tmp_path: Path) -> None:
    codes = ended(started(tmp_path, before="raise SystemExit('no such library')"))
    assert codes == {0: 1, 1: None, 2: None}
    with pytest.raises(UserError, match="(?s)rank 0 failed with exit code 1; its last lines:.*no such library"):
        check(codes, lambda rank: tmp_path / f"{rank}.log")


def test_ranks_can_be_ended_while_loading(tmp_path: Path) -> None:
    ranks = started(tmp_path, before="import time; time.sleep(1000)")
    loaded = tmp_path / "loaded"
    while not (loaded.is_file() and loaded.read_text()):
        time.sleep(0.05)
    assert set(ranks.codes().values()) == {None}
    ranks.end()
    assert not psutil.pid_exists(int(loaded.read_text()))


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    """A launcher killed before its ranks begin leaves no process."""
    code = f"""
import sys, time
sys.path[:0] = {[str(ROOT / folder) for folder in ("tests/unit", "tests", "tests/launchers", "tests/slurm")]}
from pathlib import Path
from test_processes import started
ranks = started(Path({str(tmp_path)!r}))
while ranks._parent.poll() is None:
    time.sleep(0.05)
print("forked", flush=True)
time.sleep(1000)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env=project_environment(ROOT), stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout and launcher.stdout.readline() == "forked\n"
    forked = psutil.Process(launcher.pid).children()
    assert len(forked) == RANKS
    launcher.kill()
    launcher.communicate()
    _, alive = psutil.wait_procs(forked, timeout=600)
    assert alive == []
    assert not list(tmp_path.glob("*.json"))
