"""Measure what it costs to start the ranks of a node: forks of one loaded process, and processes that load themselves.

    .venv/bin/python benchmarks/train/forked_ranks.py

Needs the base model: run `make run` first; counting opened files needs strace. The embedded default is trained for two
steps, with few rows to validate, by `zerolora train`, which forks its ranks (train/launch/fork.py), and by the same
ranks started by themselves, as a scheduler that starts one task a rank does. Both write the same adapter. Taken of
each: wall seconds until the first step has ended; and until all have ended, CPU seconds of all processes, wall seconds,
peak memory of all processes in which a shared page counts once (Pss), bytes that were read (rchar of /proc/PID/io,
which includes the page cache but no mapped file), and successful opens of files, in a run of its own. Writes
benchmarks/results/train_forked_ranks.json.
"""

import argparse
import contextlib
import hashlib
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from against_reference import VALIDATED, reference_task
from contest import QUIET, RESULTS, ROOT, Ours, about, add_options, model_of
from loading import memory

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.files import write_json
from zerolora.train.launch.launcher import environment_of
from zerolora.train.launch.topology import topology
from zerolora.train.telemetry.writer import FILE

EVERY = 0.3  # seconds between two measurements of memory
OFTEN = 0.05  # seconds between two looks for the first step
Start = Callable[[Ours, list[str]], list["subprocess.Popen[bytes]"]]


def main() -> None:
    """Start ranks in both ways, in turn, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "train_forked_ranks.json")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks to start")
    options = parser.parse_args()
    result: dict[str, Any] = about(options.device) | {
        "model": options.model.stem,
        "rounds": options.rounds,
        "ranks": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = resolve(load(ROOT / "config/config.yaml")).model_dump(mode="json")["runs"]["default"]["train"]
        del train["device"]
        task = reference_task(folder, model_of(options, folder), options, VALIDATED)
        for ranks in options.ranks:
            own = {"ranks_per_node": ranks, "micro_batch": 1, "max_steps": 2, "precision": options.precision}
            ours = task.ours(f"ours-{ranks}", {**train, **own}, {}, "zero2", "1")
            result["ranks"][str(ranks)] = compared(ours, options.rounds)
    write_json(options.output, result)


def compared(ours: Ours, rounds: int) -> dict[str, Any]:
    """Return the medians of each way, and whether both wrote the same adapter."""
    ways: dict[str, Start] = {"forked": forked, "separate": separate}
    result: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    adapters = set()
    for number in range(rounds):
        for way, start in list(ways.items())[:: 1 if number % 2 == 0 else -1]:
            result[way].append(taken(ours, start))
            adapters.add(adapter(ours))
            print(f"{ours.ranks} ranks, {way}: {result[way][-1]}", flush=True)
    medians: dict[str, Any] = {
        way: {name: statistics.median(each[name] for each in of_way) for name in of_way[0]}
        for way, of_way in result.items()
    }
    if shutil.which("strace"):
        for way, start in ways.items():
            medians[way]["opened_files"] = opened(ours, start)
    return medians | {"same_adapter": len(adapters) == 1, "of_rounds": result}


def taken(ours: Ours, start: Start) -> dict[str, float]:
    """Train once; return what it took."""
    shutil.rmtree(ours.folder / "checkpoints", ignore_errors=True)  # steps_made looks there
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    processes = start(ours, [])
    peak, read, measured, first_step = 0, {}, 0.0, 0.0
    while any(each.poll() is None for each in processes):
        time.sleep(OFTEN)
        if not first_step and steps_made(ours):
            first_step = time.monotonic() - begun
        if time.monotonic() - measured < EVERY:
            continue
        measured = time.monotonic()
        pss = 0
        for process in family(processes):
            with contextlib.suppress(OSError, psutil.Error, AttributeError, TypeError):
                pss += memory(process.pid)["Pss"]
                text = Path(f"/proc/{process.pid}/io").read_text()
                read[process.pid] = int(re.findall(r"rchar: (\d+)", text)[0])
        peak = max(peak, pss)
    check(processes, ours)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "first_step_seconds": first_step,
        "wall_seconds": time.monotonic() - begun,
        "pss_bytes": peak,
        "read_bytes": sum(read.values()),
    }


def steps_made(ours: Ours) -> bool:
    """Tell whether a step has ended of the training that runs: its telemetry has a line below the header."""
    files = (ours.folder / "checkpoints/run").glob(f"*/{FILE}")
    return any(path.read_text(encoding="utf-8").count("\n") > 1 for path in files)


def opened(ours: Ours, start: Start) -> int:
    """Train once under strace; return how many files were opened."""
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
    """Start `zerolora train`."""
    own = os.environ | QUIET | {"OMP_NUM_THREADS": ours.threads}
    with (ours.folder / "forked.log").open("wb") as log:
        return [subprocess.Popen([*tracer, *ours.command()], env=own, stdout=log, stderr=log)]


def separate(ours: Ours, tracer: list[str]) -> list["subprocess.Popen[bytes]"]:
    """Start each rank as a process of its own."""
    where = topology({}, 1, ours.ranks)
    arguments = ours.command()[4:]
    logs = arguments.index("--logs")
    del arguments[logs : logs + 2]
    command = [*tracer, sys.executable, "-m", "zerolora.train", *arguments]
    own = environment_of(ours.task.device) | QUIET | {"OMP_NUM_THREADS": ours.threads}
    with (ours.folder / "separate.log").open("wb") as log:
        return [where.start(rank, command, own, log) for rank in where.ranks]


def family(processes: list["subprocess.Popen[bytes]"]) -> list[psutil.Process]:
    """Return processes and all that they have started."""
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
