r"""Measure the host memory of ranks of one node while they load a model, under every engine and stage.

    .venv/bin/python benchmarks/train/loading.py
    .venv/bin/python benchmarks/train/loading.py --model config/recipes/models/qwen2.5-7b.json --precision bf16
    .venv/bin/python benchmarks/train/loading.py --method qlora --ranks 2 --precision bf16 \
        --model benchmarks/train/llama-0.8b.json

Needs the base model: run `make run` first; for a config.json, weights are drawn at random. Ranks load as train/rank.py
does, from their start until the engine is ready; /proc/PID/smaps_rollup of each is read every --every seconds. Reports
the peak memory of all ranks together, shared pages counted once (Pss), and the most private memory of any rank
(Anonymous), which shows whether it holds the whole model, beside that of a process that only imports the libraries. On
a CPU the device's memory is included. Also reports the seconds of the slowest rank for reading and adapting the model,
and for its engine. Writes benchmarks/results/train_loading.json.

With --method qlora, strategies that shard weights read the base model twice: shard by shard, and whole, as they do for
methods that need it whole. Private memory is reported of each rank and stage, less what the rank had before it began to
read, beside the size of the whole base in 4 bits. Writes benchmarks/results/train_loading_quantized.json.
"""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contest import LONGEST_SECONDS, QUIET, TRAIN, Ours, about, parser, reference
from measuring import RESULTS, kernel_sizes, timed, wait

from zerolora.config.settings import TrainSettings
from zerolora.files import read_json, write_json
from zerolora.memory.states import BYTES
from zerolora.methods.registry import create
from zerolora.model.manifest import located
from zerolora.model.read_spec import read_model_spec
from zerolora.train import base_model
from zerolora.train.adapter import adapt
from zerolora.train.engines import engine_class
from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology
from zerolora.train.rank import claim_device, read_plan

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
STAGES = ("model", "engine")
SHARDING = ("zero3", "fsdp")  # with offload, a CPU has the same in the same memory
BENCHMARKS = Path(__file__).resolve().parents[1]
IMPORTS = """
import deepspeed, measuring, zerolora.train.rank
print(measuring.kernel_sizes("self", "smaps_rollup")["Anonymous"])
"""


def main() -> None:
    """Load under every strategy, write."""
    made = parser(__doc__, "train_loading.json")
    made.add_argument("--ranks", type=int, default=4, help="on a CPU possibly more than cores: they compute nothing")
    made.add_argument("--strategies", nargs="+", help=f"default: {' '.join(STRATEGIES)}; of qlora {' '.join(SHARDING)}")
    made.add_argument("--method", choices=("lora", "qlora"), default="lora")
    made.add_argument("--every", type=float, default=0.02, help="seconds between two samples")
    options = made.parse_args()
    quantized = options.method == "qlora"
    if quantized and options.output == RESULTS / "train_loading.json":
        options.output = RESULTS / "train_loading_quantized.json"
    with reference(options) as task:
        train = {
            **TRAIN, "max_steps": 1, "precision": options.precision, "ranks_per_node": options.ranks, "micro_batch": 1,
            "global_batch": options.ranks, "method": options.method,
        }  # fmt: skip
        values: dict[str, Any] = {}
        for strategy in options.strategies or (SHARDING if quantized else STRATEGIES):
            ours = task.ours(strategy, train, {}, strategy, "1")
            values[strategy] = both(ours, options.every) if quantized else peaks(ours, options.every)
            print(f"{strategy}: {values[strategy]}", flush=True)
        result = about(options.device) | {
            "model": options.model.stem, "method": options.method, "precision": options.precision,
            "ranks": options.ranks,
            "weights_bytes": sum(path.stat().st_size for path in task.model.glob("*.safetensors")),
            "libraries_anonymous_bytes": int(timed([sys.executable, "-c", IMPORTS], BENCHMARKS).stdout.split()[-1]),
            "strategies": values,
        }  # fmt: skip
        if quantized:
            base = create("qlora").parameters(read_model_spec(task.model), BYTES[options.precision])
            result |= {"quantized_bytes": base.frozen_bytes, "constants_bytes": base.constants}
    write_json(options.output, result)


def both(ours: Ours, every: float) -> dict[str, Any]:
    """Return the same of both ways to read a model that is quantized."""
    return {"shard_by_shard": peaks(ours, every), "whole": peaks(ours, every, whole=True)}


def peaks(ours: Ours, every: float, whole: bool = False) -> dict[str, Any]:
    """Return the peak bytes of all ranks together (`node_bytes`) and of the rank with the most private memory, the
    seconds of the slowest rank for its model and for its engine, and of each rank the private bytes before it reads the
    model, and in excess of those: at most and at the end of reading and adapting the model, and of making the engine.
    """
    request = ours.folder / "loading.json"
    weights = str(ours.task.folder / "weights/model.json")
    paths = {"zero": str(ours.folder / "zero.json"), "weights": weights}
    write_json(request, {"settings": ours.settings, "whole": whole, **paths})
    command = [sys.executable, __file__, "--load", str(request)]
    own = {"OMP_NUM_THREADS": ours.threads}
    if ours.settings["device"] == "cpu":
        own |= CPU_MALLOC | {"DS_ACCELERATOR": "cpu"}
    where = topology({}, 1, ours.ranks)
    samples: list[tuple[int, int]] = []
    stages: list[dict[str, int]] = [dict.fromkeys(STAGES, 0) for _ in where.ranks]
    for name in (*STAGES, "loaded"):
        for marker in ours.folder.glob(f"{name}*.json"):
            marker.unlink()

    def sample() -> None:
        sizes = [kernel_sizes(each.pid, "smaps_rollup") for each in processes]
        samples.append((sum(each["Pss"] for each in sizes), max(each["Anonymous"] for each in sizes)))
        for rank, each in zip(where.ranks, sizes, strict=True):
            begun = [name for name in STAGES if (ours.folder / f"{name}{rank}.json").exists()]
            if begun:
                stages[rank][begun[-1]] = max(stages[rank][begun[-1]], each["Anonymous"])

    with (ours.folder / "loading.log").open("wb") as log:
        processes = [where.start(rank, command, os.environ | QUIET | own, log) for rank in where.ranks]
        codes = wait(processes, LONGEST_SECONDS, every, sample)
    if any(codes):
        raise SystemExit((ours.folder / "loading.log").read_text(errors="replace")[-2000:])
    node, anonymous = (max(each) for each in zip(*samples, strict=True))
    ends = [read_json(ours.folder / f"loaded{rank}.json", "loading.py") for rank in where.ranks]
    slowest = {name: max(each[name] for each in ends) for name in ("model_seconds", "engine_seconds")}
    ranks = []
    for rank, peak in zip(where.ranks, stages, strict=True):
        first, second = (read_json(ours.folder / f"{name}{rank}.json", "loading.py") for name in STAGES)
        before = first["anonymous_bytes"]
        ranks.append(
            {
                "before_bytes": before,
                "model_peak_bytes": peak["model"] - before,
                "model_end_bytes": second["anonymous_bytes"] - before,
                "engine_peak_bytes": peak["engine"] - before,
                "engine_end_bytes": ends[rank]["anonymous_bytes"] - before,
            }
        )
    return {"node_bytes": node, "rank_anonymous_bytes": anonymous, **slowest, "ranks": ranks}


def load(request: Path) -> None:
    """Run a rank: load as training does, and exit."""
    settings = read_json(request, "loading.py")
    plan, config = read_plan(TrainSettings.model_validate(settings["settings"]), Path(settings["zero"]))
    if settings["whole"]:
        vars(base_model)["loading_of"] = lambda *_: "whole"
    device = claim_device(plan)
    engine_class(plan.engine).connect(config, device)
    rank = int(os.environ["RANK"])
    begin(request, "model", rank)
    started = time.monotonic()
    model = adapt(located(Path(settings["weights"])), plan, config, device)
    seconds = {"model_seconds": time.monotonic() - started}
    begin(request, "engine", rank)
    adapted = time.monotonic()
    engine = engine_class(plan.engine)(model, config, plan, device)
    seconds["engine_seconds"] = time.monotonic() - adapted
    gc.collect()
    write_json(request.with_name(f"loaded{rank}.json"), seconds | private())
    torch.distributed.barrier()
    del engine
    os._exit(0)  # as rank.py exits


def begin(request: Path, stage: str, rank: int) -> None:
    """Mark the beginning of a stage, with the private memory until then, once all ranks are there."""
    gc.collect()
    torch.distributed.barrier()
    write_json(request.with_name(f"{stage}{rank}.json"), private())
    torch.distributed.barrier()


def private() -> dict[str, int]:
    """Return this process' private memory."""
    return {"anonymous_bytes": kernel_sizes("self", "smaps_rollup")["Anonymous"]}


if __name__ == "__main__":
    load(Path(sys.argv[2])) if sys.argv[1:2] == ["--load"] else main()
