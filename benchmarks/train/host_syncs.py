"""Count how often a training step makes the host wait for the GPU.

    .venv/bin/python benchmarks/train/host_syncs.py

One rank trains the reference task twice, for a few steps and for some more, under torch.cuda.set_sync_debug_mode, which
warns at every call of torch that waits. The difference is that of the steps in between; what loading, checks and
validation cost cancels. Calls outside torch, as in NCCL and DeepSpeed's own kernels, are not seen, nor is a CPU's run,
which has none. Writes benchmarks/results/train_host_syncs.json: waits of a step, and the lines that wait.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from contest import QUIET, Ours, about, parser, reference, training_settings
from measuring import last_line, wait

from zerolora.files import write_json
from zerolora.train.launch.launcher import environment_of
from zerolora.train.launch.topology import topology

FEW, MORE = 2, 6
LONGEST_SECONDS = 900  # of one training; only a hang takes this long
# A rank whose waits are warnings, each of them printed. Before the model is loaded, since the loop sets up with it.
RANK = """
import sys, torch
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("warn")
from zerolora.train.__main__ import main
main()
"""
WAIT = re.compile(r"^(\S+?:\d+): UserWarning: called a synchronizing CUDA operation", re.MULTILINE)
"""A warning, by the line of Python that was at work. Source: c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync."""


def main() -> None:
    """Train twice, write."""
    options = parser(__doc__, "train_host_syncs.json").parse_args()
    result: dict[str, Any] = about(options.device) | {"model": options.model.stem, "steps": MORE - FEW}
    counted = {}
    with reference(options) as task:
        for steps in (FEW, MORE):
            train = training_settings() | {"max_steps": steps, "ranks_per_node": 1, "precision": options.precision}
            counted[steps] = waits(task.ours(f"ours-{steps}", train, {}, "zero0", "1"))
    write_json(options.output, result | of_a_step(counted[FEW], counted[MORE], MORE - FEW))


def waits(ours: Ours) -> Counter[str]:
    """Train once; return how often each line waited."""
    where = topology({}, 1, 1)
    arguments = ours.arguments()
    logs = arguments.index("--logs")
    del arguments[logs : logs + 2]
    command = [sys.executable, "-W", "always::UserWarning", "-c", RANK, *arguments]
    log = ours.folder / "rank.log"
    with log.open("wb") as file:
        variables = os.environ | environment_of(ours.task.device) | QUIET | where.environment(0)
        kept = [where.listener.fileno()] if where.listener else []
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, pass_fds=kept)
    (code,) = wait([process], LONGEST_SECONDS)
    if code != 0:
        raise SystemExit(f"training ended with exit code {code}: {last_line(log)}")
    return counted_in(log.read_text(encoding="utf-8", errors="replace"))


def counted_in(text: str) -> Counter[str]:
    """Return how often each line waited, from the warnings in a log; files by their last two parts."""
    return Counter("/".join(Path(line).parts[-2:]) for line in WAIT.findall(text))


def of_a_step(few: Counter[str], more: Counter[str], steps: int) -> dict[str, Any]:
    """Return the waits of a step, and of each line; lines that wait once in a run cancel."""
    lines = {line: (more[line] - few[line]) / steps for line in more if more[line] != few[line]}
    return {
        "waits_of_a_step": sum(lines.values()),
        "lines": dict(sorted(lines.items(), key=lambda each: -each[1])),
        "waits_of_a_run": {"few": sum(few.values()), "more": sum(more.values())},
    }


if __name__ == "__main__":
    main()
