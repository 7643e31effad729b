"""Measure the host memory of ranks of one node while they load a model, under every engine and stage.

    .venv/bin/python benchmarks/train/loading.py
    .venv/bin/python benchmarks/train/loading.py --model config/recipes/models/qwen2.5-7b.json --precision bf16
    .venv/bin/python benchmarks/train/loading.py --method qlora --ranks 2

Needs the base model: run `make run` first; for a config.json, weights are drawn at random. Ranks load as train/rank.py
does, from their start until the engine is ready; /proc/PID/smaps_rollup of each is read every --every seconds. Reports
the peak memory of all ranks together, shared pages counted once (Pss), and the most private memory of any rank
(Anonymous), which shows whether it holds the whole model, beside that of a process that only imports the libraries. On
a CPU the device's memory is included. Also reports the seconds of the slowest rank for reading and adapting the model,
and for its engine. Writes benchmarks/results/train_loading.json.

With --method qlora, strategies that shard weights read the base model twice: shard by shard, and whole, as they do for
methods that need it whole. Writes benchmarks/results/train_loading_quantized.json.
"""

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
from zerolora.model.manifest import located
from zerolora.train import base_model
from zerolora.train.adapter import adapt
from zerolora.train.engines import engine_class
from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology
from zerolora.train.rank import claim_device, read_plan

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
SHARDING = ("zero3", "zero3_offload", "fsdp", "fsdp_offload")
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
            "libraries_anonymous_bytes": int(timed([sys.executable, "-c", IMPORTS], BENCHMARKS).stdout),
            "strategies": values,
        }  # fmt: skip
    write_json(options.output, result)


def both(ours: Ours, every: float) -> dict[str, Any]:
    """Return the same of both ways to read a model that is quantized."""
    return {"shard_by_shard": peaks(ours, every), "whole": peaks(ours, every, whole=True)}


def peaks(ours: Ours, every: float, whole: bool = False) -> dict[str, float]:
    """Return the peak bytes of all ranks together (`node_bytes`) and of the rank with the most private memory, in total
    and before its engine, and the seconds of the slowest rank for its model and for its engine."""
    request = ours.folder / "loading.json"
    weights = str(ours.task.folder / "weights/model.json")
    paths = {"zero": str(ours.folder / "zero.json"), "weights": weights}
    write_json(request, {"settings": ours.settings, "whole": whole, **paths})
    command = [sys.executable, __file__, "--load", str(request)]
    own = {"OMP_NUM_THREADS": ours.threads}
    if ours.settings["device"] == "cpu":
        own |= CPU_MALLOC | {"DS_ACCELERATOR": "cpu"}
    where = topology({}, 1, ours.ranks)
    samples = [(0, 0, 0)]
    markers = [ours.folder / f"adapted{rank}" for rank in where.ranks]
    for marker in markers:
        marker.unlink(missing_ok=True)

    def sample() -> None:
        ranks = [kernel_sizes(each.pid, "smaps_rollup") for each in processes]
        anonymous = max(each["Anonymous"] for each in ranks)
        before = 0 if all(marker.exists() for marker in markers) else anonymous
        samples.append((sum(each["Pss"] for each in ranks), anonymous, before))

    with (ours.folder / "loading.log").open("wb") as log:
        processes = [where.start(rank, command, os.environ | QUIET | own, log) for rank in where.ranks]
        codes = wait(processes, LONGEST_SECONDS, every, sample)
    if any(codes):
        raise SystemExit((ours.folder / "loading.log").read_text(errors="replace")[-2000:])
    node, anonymous, before = (max(each) for each in zip(*samples, strict=True))
    seconds = [read_json(ours.folder / f"loaded{rank}.json", "loading.py") for rank in where.ranks]
    slowest = {name: max(each[name] for each in seconds) for name in seconds[0]}
    return {"node_bytes": node, "rank_anonymous_bytes": anonymous, "model_anonymous_bytes": before, **slowest}


def load(request: Path) -> None:
    """Run a rank: load as training does, and exit."""
    settings = read_json(request, "loading.py")
    plan, config = read_plan(TrainSettings.model_validate(settings["settings"]), Path(settings["zero"]))
    if settings["whole"]:
        vars(base_model)["loading_of"] = lambda *_: "whole"
    device = claim_device(plan)
    engine_class(plan.engine).connect(config, device)
    torch.distributed.barrier()
    started = time.monotonic()
    model = adapt(located(Path(settings["weights"])), plan, config, device)
    model_seconds = time.monotonic() - started
    request.with_name(f"adapted{os.environ['RANK']}").touch()
    torch.distributed.barrier()
    time.sleep(0.2)  # for a sample of its memory
    adapted = time.monotonic()
    engine_class(plan.engine)(model, config, plan, device)
    torch.distributed.barrier()
    seconds = {"model_seconds": model_seconds, "engine_seconds": time.monotonic() - adapted}
    write_json(request.with_name(f"loaded{os.environ['RANK']}.json"), seconds)
    os._exit(0)  # as rank.py exits


if __name__ == "__main__":
    load(Path(sys.argv[2])) if sys.argv[1:2] == ["--load"] else main()
