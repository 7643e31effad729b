"""Compare two ways to start the ranks of a node: forks of one loaded process, and processes that load by themselves.

    .venv/bin/python benchmarks/train/forked_ranks.py
    .venv/bin/python benchmarks/train/forked_ranks.py --start

With --start, only what differs is measured: ranks that load what training loads before it uses its device, and end,
started both ways by the launcher, in the environment that Snakemake gives the rule. For `cpu`, and for `cuda`, with
torch's build for CUDA (tests/cuda/install) and as many pretended GPUs as ranks: libraries see them while they load, and
no rank uses one. CPU and wall seconds go into the result's `start`; alternating rounds, medians.

It needs the base model, as from `make run`, or a config.json as --model; counting opened files needs strace. The
embedded default is trained for two steps, with few validation rows, by `zerolora stage train`, which forks its ranks
(train/launch/fork.py), and by ranks started one by one, as by a scheduler with one task a rank. Both write the same
adapter. Measures the wall seconds until the first step has ended, and until all processes have ended: CPU seconds, wall
seconds, peak memory of all processes, shared pages counted once (Pss), bytes read (rchar of /proc/PID/io, which
includes the page cache but no mapped file), and, in a separate run, files opened. Writes
benchmarks/results/train_forked_ranks.json.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/cuda"))
import cuda_build
import psutil
from contest import QUIET, Ours, about, parser, reference, training_settings
from measuring import children_cpu_seconds, kernel_sizes, medians, turns

from zerolora.files import write_json
from zerolora.machine import devices
from zerolora.train.launch import launcher
from zerolora.train.launch.launcher import OPENBLAS, Ranks, environment_of
from zerolora.train.launch.topology import topology
from zerolora.train.telemetry.writer import FILE

THREADS = ("GOTO_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Variables that Snakemake sets to a job's threads, beside those that the rule sets again."""
EVERY = 0.3  # seconds between two samples of memory
OFTEN = 0.05  # seconds between two checks for the first step
Start = Callable[[Ours, list[str]], list["subprocess.Popen[bytes]"]]


# A rank until it uses its device (train/__main__.py, rank.py).
LOADED = """
import gc, sys
gc.disable()
from zerolora.compat.left_out import leave_out
leave_out("torchao")
{gpus}
from zerolora.train import rank
rank._load(rank._arguments())
rank.become_rank()
import torch
assert not torch.cuda.is_initialized()
"""
GPUS = """
import torch
torch.cuda._device_count_nvml = lambda: {count}
"""
FORKED, SEPARATE = "forked", "separate"


def main() -> None:
    """Start ranks in both ways, in turn, write."""
    made = parser(__doc__, "train_forked_ranks.json")
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks to start")
    made.add_argument("--start", action="store_true", help="measure only the start, and update the result")
    made.add_argument("--start-devices", nargs="+", choices=("cpu", "cuda"), default=["cpu", "cuda"])
    options = made.parse_args()
    if options.start:
        result = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
        with reference(options) as task:
            train = training_settings() | {"micro_batch": 1, "max_steps": 2, "precision": "fp32", "ranks_per_node": 2}
            started = starts(options, rank_arguments(task.ours("ours", train, {}, "zero2", "1")))
        write_json(options.output, result | {"start": result.get("start", {}) | about("cpu") | started})
        return
    result = about(options.device)
    result |= {"model": options.model.stem, "rounds": options.rounds, "ranks": {}}
    train = training_settings() | {"micro_batch": 1, "max_steps": 2, "precision": options.precision}
    with reference(options) as task:
        for ranks in options.ranks:
            ours = task.ours(f"ours-{ranks}", {**train, "ranks_per_node": ranks}, {}, "zero2", "1")
            result["ranks"][str(ranks)] = compared(ours, options.rounds)
    write_json(options.output, result)


def starts(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Return the medians of each way to start ranks with a rank's arguments, by device and number of ranks."""
    result: dict[str, Any] = {}
    for device in options.start_devices:
        if device == "cuda" and (reason := cuda_build.missing()):
            print(f"without cuda: {reason}", flush=True)
            continue
        for ranks in options.ranks:
            ways: dict[str, list[dict[str, float]]] = {FORKED: [], SEPARATE: []}
            for way in turns(ways, options.rounds):
                ways[way].append(loaded(way, device, ranks, arguments))
                print(f"{device}, {ranks} ranks, {way}: {ways[way][-1]}", flush=True)
            figures = {way: medians(of_way) for way, of_way in ways.items()}
            ratio = figures[FORKED]["cpu_seconds"] / figures[SEPARATE]["cpu_seconds"]
            result.setdefault(device, {})[str(ranks)] = figures | {"cpu_forked_over_separate": ratio, "of_rounds": ways}
    return result


def loaded(way: str, device: str, ranks: int, arguments: list[str]) -> dict[str, float]:
    """Start ranks that end before they use their device; return CPU and wall seconds, and whether they were forks."""
    given = {name: str(ranks) for name in THREADS}  # Snakemake's, and then the rule's
    own = (
        environment_of(device) | given | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | dict.fromkeys(OPENBLAS, "1")
    )
    gpus = ""
    if device == "cuda":
        gpus = GPUS.format(count=ranks)
        path = [*cuda_build.path(), *filter(None, [os.environ.get("PYTHONPATH")])]
        own |= {"PYTHONPATH": os.pathsep.join(path), devices.VISIBLE: ",".join(map(str, range(ranks)))}
    command = [sys.executable, "-c", LOADED.format(gpus=gpus), *arguments]
    with tempfile.TemporaryDirectory() as folder:

        def log_of(rank: int) -> Path:
            return Path(folder, f"{rank}.log")

        before, begun = children_cpu_seconds(), time.monotonic()
        kind = Ranks if way == FORKED else Separate
        running = kind(topology({}, 1, ranks), command, own, log_of)
        launcher.check(launcher.wait_for(running, lambda _: False), log_of)
        said = log_of(0).read_text(encoding="utf-8")
        figures = {"cpu_seconds": children_cpu_seconds() - before, "wall_seconds": time.monotonic() - begun}
    return figures | {"forks": float(way == FORKED and "loads its libraries itself" not in said)}


class Separate(Ranks):
    """Ranks that the launcher starts as separate processes."""

    def _fork(self, command: list[str], environment: Mapping[str, str]) -> None:
        for rank in self._where.ranks:
            with launcher._output(self._logs(rank)) as output:
                self._processes[rank] = self._where.start(rank, command, environment, output)


def compared(ours: Ours, rounds: int) -> dict[str, Any]:
    """Return the medians of each way, and whether both wrote the same adapter."""
    ways: dict[str, Start] = {"forked": forked, "separate": separate}
    result: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    adapters = set()
    for way in turns(ways, rounds):
        result[way].append(measured(ours, ways[way]))
        adapters.add(adapter(ours))
        print(f"{ours.ranks} ranks, {way}: {result[way][-1]}", flush=True)
    figures: dict[str, Any] = {way: medians(of_way) for way, of_way in result.items()}
    if shutil.which("strace"):
        for way, start in ways.items():
            figures[way]["opened_files"] = opened(ours, start)
    return figures | {"same_adapter": len(adapters) == 1, "of_rounds": result}


def measured(ours: Ours, start: Start) -> dict[str, float]:
    """Train once; return times and memory."""
    shutil.rmtree(ours.folder / "checkpoints", ignore_errors=True)  # steps_made looks there
    before, begun = children_cpu_seconds(), time.monotonic()
    processes = start(ours, [])
    peak, read, sampled, first_step = 0, {}, 0.0, 0.0
    while any(each.poll() is None for each in processes):
        time.sleep(OFTEN)
        if not first_step and steps_made(ours):
            first_step = time.monotonic() - begun
        if time.monotonic() - sampled < EVERY:
            continue
        sampled = time.monotonic()
        pss = 0
        for process in family(processes):
            with contextlib.suppress(OSError, psutil.Error, AttributeError, TypeError):
                pss += kernel_sizes(process.pid, "smaps_rollup")["Pss"]
                text = Path(f"/proc/{process.pid}/io").read_text()
                read[process.pid] = int(re.findall(r"rchar: (\d+)", text)[0])
        peak = max(peak, pss)
    check(processes, ours)
    return {
        "cpu_seconds": children_cpu_seconds() - before,
        "first_step_seconds": first_step,
        "wall_seconds": time.monotonic() - begun,
        "pss_bytes": peak,
        "read_bytes": sum(read.values()),
    }


def steps_made(ours: Ours) -> bool:
    """Return whether a step has ended: telemetry.csv has a line below its header."""
    files = (ours.folder / "checkpoints/run").glob(f"*/{FILE}")
    return any(path.read_text(encoding="utf-8").count("\n") > 1 for path in files)


def opened(ours: Ours, start: Start) -> int:
    """Train once under strace; return the number of opened files."""
    log = ours.folder / "opened"
    strace = ["strace", "-D", "-f", "--seccomp-bpf", "-qq", "-z", "-A", "-e", "trace=open,openat", "-o", str(log)]
    processes = start(ours, strace)
    for process in processes:
        process.wait()
    check(processes, ours)
    count = sum(" = " in line for line in log.read_text(errors="replace").splitlines())
    log.unlink()
    return count


def forked(ours: Ours, tracer: list[str]) -> list["subprocess.Popen[bytes]"]:
    """Start `zerolora stage train`."""
    own = os.environ | QUIET | {"OMP_NUM_THREADS": ours.threads}
    with (ours.folder / "forked.log").open("wb") as log:
        return [subprocess.Popen([*tracer, *ours.command()], env=own, stdout=log, stderr=log)]


def separate(ours: Ours, tracer: list[str]) -> list["subprocess.Popen[bytes]"]:
    """Start each rank as a separate process."""
    where = topology({}, 1, ours.ranks)
    command = [*tracer, sys.executable, "-m", "zerolora.train", *rank_arguments(ours)]
    own = environment_of(ours.task.device) | QUIET | {"OMP_NUM_THREADS": ours.threads}
    with (ours.folder / "separate.log").open("wb") as log:
        return [where.start(rank, command, own, log) for rank in where.ranks]


def rank_arguments(ours: Ours) -> list[str]:
    """Return the arguments of a rank: those of `zerolora stage train`, without the launcher's."""
    arguments = ours.arguments()
    logs = arguments.index("--logs")
    del arguments[logs : logs + 2]
    return arguments


def family(processes: list["subprocess.Popen[bytes]"]) -> list[psutil.Process]:
    """Return processes and their descendants."""
    result = []
    for each in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(each.pid)
            result += [process, *process.children(recursive=True)]
    return result


def check(processes: list["subprocess.Popen[bytes]"], ours: Ours) -> None:
    """Raise SystemExit if a process failed."""
    if any(each.returncode for each in processes):
        raise SystemExit(f"a rank failed; see {ours.folder}")


def adapter(ours: Ours) -> str:
    """Return the hash of the trained adapter."""
    return hashlib.sha256((ours.folder / "run/adapter/adapter_model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
