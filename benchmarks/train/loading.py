"""Measure the host memory of ranks of one node while they load a model and make a first step, under every stage.

    .venv/bin/python benchmarks/train/loading.py
    .venv/bin/python benchmarks/train/loading.py --model config/recipes/models/qwen2.5-7b.json --precision bf16

Needs the base model: run `make run` first; of a config.json the weights are drawn. `zerolora train` makes one step of
one short row a rank; from its start on each rank is looked at every --every seconds, in /proc/PID/smaps_rollup. Told
are, at their peaks: the memory that the ranks really take of the node together, where a page that several have counts
once (Pss); the most that any rank has to itself (Anonymous), which is what it would hold if it kept the whole model;
and what a rank has that only imports the libraries. Writes benchmarks/results/train_loading.json.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from against_reference import VALIDATED, reference_task
from contest import QUIET, RESULTS, TRAIN, Ours, about, add_options, model_of, ranks_of

from zerolora.files import write_json

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
NOTHING = {"Pss": 0, "Anonymous": 0}
IMPORTS = "import deepspeed, zerolora.train.rank; print(open('/proc/self/smaps_rollup').read())"


def main() -> None:
    """Load under every strategy, write."""
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_of(options, folder)
        task = reference_task(folder, model, options, VALIDATED)
        train = {
            **TRAIN, "max_steps": 1, "precision": options.precision, "ranks_per_node": options.ranks, "micro_batch": 1,
            "global_batch": options.ranks,
        }  # fmt: skip
        found = {}
        for strategy in options.strategies:
            found[strategy] = peaks(task.ours(strategy, train, {}, strategy, "1"), options.every)
            print(f"{strategy}: {found[strategy]}", flush=True)
        result = about(options.device) | {
            "model": options.model.stem, "precision": options.precision, "ranks": options.ranks,
            "weights_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
            "libraries_anonymous_bytes": libraries(), "strategies": found,
        }  # fmt: skip
    write_json(options.output, result)


def peaks(ours: Ours, every: float) -> dict[str, int]:
    """Return the peaks of all ranks together (`node_bytes`) and of the rank with the most of its own, in bytes."""
    own = {"OMP_NUM_THREADS": ours.threads}
    process = subprocess.Popen(
        ours.command(), env=os.environ | QUIET | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    node = anonymous = 0
    while process.poll() is None:
        ranks = [memory(child) for child in psutil.Process(process.pid).children()]
        node = max(node, sum(each["Pss"] for each in ranks))
        anonymous = max(anonymous, *(each["Anonymous"] for each in ranks), 0)
        time.sleep(every)
    if process.returncode:
        raise SystemExit(process.communicate()[1][-2000:])
    return {"node_bytes": node, "rank_anonymous_bytes": anonymous}


def memory(process: psutil.Process) -> dict[str, int]:
    """Return what a process has now, in bytes; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return NOTHING | parsed(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
    return NOTHING


def parsed(rollup: str) -> dict[str, int]:
    """Return the figures of a smaps_rollup, in bytes."""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(Pss|Anonymous): +(\d+) kB", rollup, re.MULTILINE)}


def libraries() -> int:
    """Return the bytes that a process has to itself once it has imported what a rank imports."""
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    return parsed(found.stdout)["Anonymous"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "train_loading.json")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--ranks", type=int, default=ranks_of("cpu")[-1])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--every", type=float, default=0.02, help="seconds between two looks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
