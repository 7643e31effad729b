"""Measure the host memory of ranks of one node while they load a model, under every engine and stage.

    .venv/bin/python benchmarks/train/loading.py
    .venv/bin/python benchmarks/train/loading.py --model config/recipes/models/qwen2.5-7b.json --precision bf16

Needs the base model: run `make run` first; of a config.json the weights are drawn. Ranks load as train/rank.py does,
from their start until the engine stands, and each is looked at every --every seconds, in /proc/PID/smaps_rollup. Told
are, at their peaks: the memory that the ranks really take of the node together, where a page that several have counts
once (Pss); the most that any rank has to itself (Anonymous), which is what it would hold if it kept the whole model;
and what a rank has that only imports the libraries. On a CPU what is on the device counts too. Told besides are the
seconds of the slowest rank for reading and adapting the model, and for its engine. Writes
benchmarks/results/train_loading.json.
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

import torch
from against_reference import VALIDATED, reference_task
from contest import QUIET, RESULTS, TRAIN, Ours, about, add_options, model_of

from zerolora.config.settings import TrainSettings
from zerolora.files import read_json, write_json
from zerolora.model.manifest import located
from zerolora.train.adapter import adapt
from zerolora.train.engines import engine_class
from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology
from zerolora.train.rank import claim_device, read_plan

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


def peaks(ours: Ours, every: float) -> dict[str, float]:
    """Return the peaks of all ranks together (`node_bytes`) and of the rank with the most of its own, in bytes, and the
    seconds of the slowest rank until the model was adapted and until the engine stood."""
    request = ours.folder / "loading.json"
    weights = str(ours.task.folder / "weights/model.json")
    write_json(request, {"settings": ours.settings, "zero": str(ours.folder / "zero.json"), "weights": weights})
    command = [sys.executable, __file__, "--load", str(request)]
    own = {"OMP_NUM_THREADS": ours.threads}
    if ours.settings["device"] == "cpu":
        own |= CPU_MALLOC | {"DS_ACCELERATOR": "cpu"}
    where = topology({}, 1, ours.ranks)
    node = anonymous = 0
    with (ours.folder / "loading.log").open("wb") as log:
        processes = [where.start(rank, command, os.environ | QUIET | own, log) for rank in where.ranks]
        try:
            while any(each.poll() is None for each in processes) and not any(each.poll() for each in processes):
                ranks = [memory(each.pid) for each in processes]
                node = max(node, sum(each["Pss"] for each in ranks))
                anonymous = max(anonymous, *(each["Anonymous"] for each in ranks))
                time.sleep(every)
        finally:
            codes = [each.poll() for each in processes]
            for each in processes:
                each.kill()
                each.wait()
    if any(codes):
        raise SystemExit((ours.folder / "loading.log").read_text(errors="replace")[-2000:])
    seconds = [read_json(ours.folder / f"loaded{rank}.json", "loading.py") for rank in where.ranks]
    slowest = {name: max(each[name] for each in seconds) for name in seconds[0]}
    return {"node_bytes": node, "rank_anonymous_bytes": anonymous, **slowest}


def load(request: Path) -> None:
    """Be a rank: load as training does, and end."""
    asked = read_json(request, "loading.py")
    plan, config = read_plan(TrainSettings.model_validate(asked["settings"]), Path(asked["zero"]))
    device = claim_device(plan)
    engine_class(plan.engine).connect(config, device)
    torch.distributed.barrier()
    started = time.monotonic()
    model = adapt(located(Path(asked["weights"])), plan, config, device)
    adapted = time.monotonic()
    engine_class(plan.engine)(model, config, plan, device)
    torch.distributed.barrier()
    seconds = {"model_seconds": adapted - started, "engine_seconds": time.monotonic() - adapted}
    write_json(request.with_name(f"loaded{os.environ['RANK']}.json"), seconds)
    os._exit(0)  # as rank.py leaves


def memory(process: int) -> dict[str, int]:
    """Return what a process has now, in bytes; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return NOTHING | parsed(Path(f"/proc/{process}/smaps_rollup").read_text())
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
    parser.add_argument("--ranks", type=int, default=4, help="on a CPU more than cores will do: they compute nothing")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--every", type=float, default=0.02, help="seconds between two looks")
    return parser.parse_args()


if __name__ == "__main__":
    load(Path(sys.argv[2])) if sys.argv[1:2] == ["--load"] else main()
