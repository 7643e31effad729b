"""Measure what `strategy: auto` gives away: the chosen configuration against the fastest one it could have chosen.

    .venv/bin/python benchmarks/choice.py

Probes this machine, predicts every configuration with choose(), and trains with each that is predicted to fit, as
train/rank.py does: model and engine are built again, one step warms up, then the median seconds of --steps optimizer
steps are seconds, each from a barrier to the end of the slowest rank. Every strategy has its own processes, as ZeRO-3
replaces torch's linear() for good; strategies, and configurations within them, are shuffled by --seed. Among hundreds
of noisy medians the fastest is partly luck, and the speed of the machine drifts. So the first round only picks
finalists, its fastest and the chosen one. Each later round measures all finalists in turn and gives a ratio of the
chosen one to the best; the result is the median ratio. A configuration that fails or hangs has a row with its error.

Nothing is downloaded: a model is its config.json with random weights. Ranks are the machine's GPUs, or two on CPU. By
default, rows are those of the reference task (57 tokens, 22 of them supervised, global batch 8, the adapter of
config/config.yaml) and the model is SmolLM2-135M with 2 of its 30 layers, as all are alike: 144 configurations in a
quarter of an hour on two free cores. On GPUs use a larger model:

    .venv/bin/python benchmarks/choice.py --model config/recipes/models/llama-3-8b.json --layers 0 \\
        --length 2048 --packed 4 --global-batch 32 --output benchmarks/results/choice_gpu.json

Writes benchmarks/results/choice.json: predicted and measured seconds of every configuration, the throughput of the
chosen one over that of the best (1 - regret), and the rank correlation of prediction and measurement (Spearman).
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed
from measuring import RESULTS, last_line, machine, parser_of, random_model, wait

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import RenderSettings, TrainingPlan, TrainSettings, UsefulFlops
from zerolora.data.prepared_rows import IGNORED
from zerolora.files import read_json, write_json
from zerolora.memory.row_statistics import RowStatistics
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.candidates import Candidate, Choice, Planning
from zerolora.planner.choice import choose
from zerolora.planner.render import rendered, training_choice
from zerolora.planner.run_hardware import hardware_of, target_of
from zerolora.planner.zero_json import ZeroJson
from zerolora.probe.probe import probe
from zerolora.train.adapter import adapt
from zerolora.train.engines import engine_class
from zerolora.train.engines.engine import DTYPES, Engine
from zerolora.train.feed import PackedRow, collate
from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology
from zerolora.train.loss import token_losses
from zerolora.train.rank import claim_device

MODEL = Path("config/recipes/models/smollm2-135m.json")
OPTIONS = ("length", "supervised", "packed", "global_batch", "steps", "rounds", "limit", "seed")
FINALISTS = 6
FINAL_STEPS = 3  # times as many steps in the later rounds
LONGEST_SECONDS = 600  # of a configuration; only a hang takes this long
SUMMARY = ("measured", "failed", "spearman", "ratio", "chosen", "best", "minutes")


@dataclass(eq=False)
class Tried:
    """A configuration with its medians, or its error."""

    candidate: Candidate
    chosen: bool
    medians: list[float] = field(default_factory=list)
    """Seconds of a step, one median a round; finalists have more than one."""
    error: str | None = None

    @property
    def seconds(self) -> float:
        """The median of the rounds after the first, which only picked the finalists; without them that of the first."""
        return statistics.median(self.medians[1:] or self.medians)


def main() -> None:
    """Probe, predict, measure, compare."""
    options = _options()
    if options.measure:
        measure(options.measure)
        return
    started, load = time.monotonic(), round(os.getloadavg()[0], 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = torch.cuda.device_count() or options.ranks
    draw = random.Random(options.seed)  # noqa: S311 (an order, no secret)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_model(options.model, DTYPES[precision_of(device)], folder / "model", options.layers, options.seed)
        shape = read_model_spec(folder / "model")
        probe(folder / "probe.json", device, ranks)
        probed = read_json(folder / "probe.json", "zerolora probe")
        settings, train = settings_of(device, ranks, options.global_batch, probed)
        rows = packed_rows(options, shape.vocabulary)
        candidates = choose(Planning(shape, settings, rows_of(rows), hardware_of(settings)[0]))
        values = to_try(candidates, options.limit, draw)
        task = {
            "model": str(folder / "model"), "train": train, "ranks": ranks,
            "rows": rows, "packing": options.packed > 1,
        }  # fmt: skip
        about = {
            "machine": machine(),
            "load_average_before": load,
            "probe": probed,
            "model": {"config": options.model.name, "layers": shape.layers, "parameters": shape.parameters},
            "ranks": ranks,
            "precision": settings.precision,
            **{name: getattr(options, name) for name in OPTIONS},
            "considered": len(candidates),
            "rejected": sum(each.fault is not None for each in candidates),
        }
        measured = values
        for number in range(1 + options.rounds):
            steps = options.steps * (FINAL_STEPS if number else 1)
            measure_all(measured, {**task, "steps": steps}, settings, draw, folder)
            measured = finalists(values) if number == 0 else measured
            minutes = round((time.monotonic() - started) / 60, 1)
            result = {**about, "minutes": minutes, **compared(values, options.global_batch * options.length)}
            write_json(options.output, result)
            print(f"round {number + 1}:", {name: result[name] for name in SUMMARY}, flush=True)


# Configurations


def precision_of(device: str) -> str:
    """Return the precision that `precision: auto` selects on this machine."""
    if device == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def settings_of(
    device: str, ranks: int, global_batch: int, probed: dict[str, Any]
) -> tuple[RenderSettings, dict[str, Any]]:
    """Return the settings of render, with every choice left open, and those of train."""
    run = resolve(load(Path("config/config.yaml"))).model_dump(mode="json")["runs"]["default"]
    here = {"device": device, "nodes": 1, "ranks_per_node": ranks, "global_batch": global_batch}
    left_open = {"strategy": "auto", "micro_batch": None, "activation_checkpointing": None, "attention": None}
    render = {
        **run["render"], **here, **left_open, "user_config": None, "nvme": None, "precision": precision_of(device),
        "gpu_memory": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
        "host_memory": psutil.virtual_memory().total, "hardware": {"probe": probed, "disk": "nvme"},
    }  # fmt: skip
    return RenderSettings.model_validate(render), {**run["train"], **here}


def packed_rows(arguments: argparse.Namespace, vocabulary: int) -> list[PackedRow]:
    """Return a global batch of equally long packed rows of random tokens; the last ones of each row are supervised."""
    draw = np.random.default_rng(arguments.seed)
    return [
        [
            drawn_row(draw.integers(vocabulary, size=len(part)).tolist(), arguments.supervised)
            for part in np.array_split(np.arange(arguments.length), arguments.packed)
        ]
        for _ in range(arguments.global_batch)
    ]


def drawn_row(tokens: list[int], supervised: float) -> dict[str, Any]:
    """Return tokens as a row whose last share is supervised."""
    prompt = min(len(tokens) - 1, round(len(tokens) * (1 - supervised)))
    return {"input_ids": tokens, "labels": [IGNORED] * prompt + tokens[prompt:], "source": 0}


def rows_of(rows: list[PackedRow]) -> RowStatistics:
    """Return the statistics of the rows that choose() reads."""
    length = sum(len(row["input_ids"]) for row in rows[0])
    lengths = [len(row["input_ids"]) for packed in rows for row in packed]
    supervised = [sum(label != IGNORED for row in packed for label in row["labels"][1:]) for packed in rows]
    return RowStatistics(
        packing=len(rows[0]) > 1,
        longest_packed_row=length,
        most_supervised=max(supervised),
        packed_rows=len(rows),
        tokens=len(rows) * length,
        supervised_tokens=sum(supervised),
        mean_row_of_a_token=sum(each**2 for each in lengths) / sum(lengths),
        validation_rows=0,
    )


def to_try(candidates: list[Candidate], limit: int | None, draw: random.Random) -> list[Tried]:
    """Return the candidates that fit, the chosen one first; with a limit, it and a random sample of the others."""
    chosen, *others = [Tried(each, number == 0) for number, each in enumerate(candidates) if each.fault is None]
    return [chosen, *(others if limit is None else draw.sample(others, min(len(others), limit - 1)))]


def finalists(tried: list[Tried]) -> list[Tried]:
    """Return the fastest of the first round, and the chosen one."""
    ended = sorted((each for each in tried if each.error is None), key=lambda each: each.seconds)
    return ended[:FINALISTS] + [each for each in ended[FINALISTS:] if each.chosen]


# Measuring


def measure_all(
    tried: list[Tried], task: dict[str, Any], settings: RenderSettings, draw: random.Random, folder: Path
) -> None:
    """Add a median to every configuration, strategy by strategy, or its error."""
    strategies = sorted({each.candidate.choice.strategy for each in tried})
    for strategy in draw.sample(strategies, len(strategies)):
        pending = [each for each in tried if each.candidate.choice.strategy == strategy]
        draw.shuffle(pending)
        started, count = time.monotonic(), len(pending)
        while pending:
            configs = [engine_and_choice(each.candidate.choice, settings).as_json() for each in pending]
            medians, error = launched({**task, "configs": configs}, folder)
            for each, median in zip(pending, medians, strict=False):
                each.medians.append(median)
            if error:
                pending[len(medians)].error = error
            pending = pending[len(medians) + 1 :] if error else []
        print(f"{strategy}: {count} configurations in {time.monotonic() - started:.0f} s", flush=True)


def engine_and_choice(choice: Choice, settings: RenderSettings) -> ZeroJson:
    """Return the zero.json of a choice, without the FLOPs, which only telemetry reads."""
    flops = UsefulFlops(token=0, squared_token=0, supervised_token=0, peak=None)
    chosen = training_choice(choice, settings.precision, flops)
    options, _ = rendered(choice, target_of(settings), settings.gradient_clipping)
    return ZeroJson(options=options, choice=chosen)


def launched(task: dict[str, Any], folder: Path) -> tuple[list[float], str | None]:
    """Run the ranks over a task's configurations; return the medians until the first that failed, and its error."""
    answers, device = folder / "answers", task["train"]["device"]
    answers.write_text("")
    write_json(folder / "task.json", {**task, "answers": str(answers)})
    command = [sys.executable, __file__, "--measure", str(folder / "task.json")]
    # As launcher.py starts training.
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    own |= CPU_MALLOC | {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    where = topology({}, 1, task["ranks"])
    processes: list[subprocess.Popen[bytes]] = []
    for rank in where.ranks:
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(where.start(rank, command, {**os.environ, **own}, log))
    codes = wait(processes, look=lambda: time.time() - answers.stat().st_mtime > LONGEST_SECONDS)
    medians = [json.loads(line) for line in answers.read_text().splitlines()]
    if len(medians) == len(task["configs"]):
        return medians, None
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return medians, f"no answer within {LONGEST_SECONDS} s"
    return medians, last_line(folder / f"rank{failed}.log") or f"exit code {codes[failed]}"


def measure(path: Path) -> None:
    """Run a rank: train with each configuration of a task, all of one strategy, and write a line for each."""
    task = read_json(path, "choice.py")
    settings = TrainSettings.model_validate(task["train"])
    plans = [(TrainingPlan.of(settings, config.choice), config) for config in map(ZeroJson.of, task["configs"])]
    plan, config = plans[0]
    device = claim_device(plan)
    engine_class(plan.engine).connect(config, device)
    for plan, config in plans:
        seconds = median_seconds(task, plan, config, device)
        if torch.distributed.get_rank() == 0:
            with Path(task["answers"]).open("a") as answers:
                answers.write(f"{seconds}\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def median_seconds(task: dict[str, Any], plan: TrainingPlan, config: ZeroJson, device: torch.device) -> float:
    """Return the median seconds of a step with one configuration; its memory is freed afterwards."""
    rank, world, size = torch.distributed.get_rank(), torch.distributed.get_world_size(), plan.micro_batch
    mine = task["rows"][rank::world]
    micro_batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    engine = engine_class(plan.engine)(adapt(Path(task["model"]), plan, config, device), config, plan, device)
    engine.train()
    seconds = [step_seconds(engine, micro_batches, task["packing"], device) for _ in range(1 + task["steps"])]
    release(engine)
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(seconds[1:])


def release(engine: Engine) -> None:
    """Close an engine and free what DeepSpeed 0.19 keeps."""
    engine.close()
    # Stage 3's parameters stay referenced: without this, a rank's share of the model is never freed.
    for parameter in engine.module.parameters():
        for share in (getattr(parameter, name, None) for name in ("ds_tensor", "ds_secondary_tensor")):
            if share is not None:
                share.data = torch.empty(0, dtype=share.dtype, device=share.device)
    # DeepSpeed asserts that hpZ's group is created once in a process.
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups:
        vars(groups)["_ZERO_PARAM_INTRA_PARALLEL_GROUP"] = None


def step_seconds(engine: Any, micro_batches: list[list[PackedRow]], packing: bool, device: torch.device) -> float:
    """Take one optimizer step as train/rank.py does; return the seconds of the slowest rank."""
    tokens = sum(len(row["input_ids"]) for rows in micro_batches for packed in rows for row in packed)
    torch.distributed.barrier()
    _settle(device)
    started = time.perf_counter()
    for rows in micro_batches:
        loss = token_losses(engine, collate(rows, packing, device)).sum()
        engine.backward(loss * (engine.divisor / tokens))
        engine.step()
        loss.detach().cpu()
    _settle(device)
    seconds = torch.tensor(time.perf_counter() - started, device=device)
    torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    return seconds.item()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Comparing


def compared(tried: list[Tried], tokens: int) -> dict[str, Any]:
    """Return the chosen and the best configuration, the ratio of their throughputs (None if the chosen one failed), the
    rank correlation, measured over predicted seconds by strategy, and all configurations, the fastest first. `tokens`
    are those of a step."""
    most = max(len(each.medians) for each in tried)  # finalists come before others, which have one median
    ended = sorted((each for each in tried if each.medians), key=lambda each: (len(each.medians) < most, each.seconds))
    failed = [each for each in tried if not each.medians]
    chosen = next((each for each in ended if each.chosen and len(each.medians) == most), None)
    by_strategy: dict[str, list[float]] = {}
    for each in ended:
        by_strategy.setdefault(each.candidate.choice.strategy, []).append(each.seconds / each.candidate.seconds)
    return {
        "measured": len(ended),
        "failed": len(failed),
        "ratio": ratio(chosen, ended[0]) if chosen else None,
        "spearman": spearman([each.candidate.seconds for each in ended], [each.seconds for each in ended]),
        "measured_over_predicted": {name: statistics.median(values) for name, values in by_strategy.items()},
        "chosen": row_of(next(each for each in tried if each.chosen), tokens),
        "best": row_of(ended[0], tokens),
        "rows": [row_of(each, tokens) for each in [*ended, *failed]],
    }


def ratio(chosen: Tried, best: Tried) -> float:
    """Return the throughput of `chosen` over that of `best`: the median of the later rounds' ratios."""
    rounds = list(zip(best.medians, chosen.medians, strict=True))
    return statistics.median(one / other for one, other in rounds[1:] or rounds)


def row_of(tried: Tried, tokens: int) -> dict[str, Any]:
    """Return a configuration as JSON."""
    choice, predicted = tried.candidate.choice, tried.candidate.seconds
    return {
        "strategy": choice.strategy,
        "micro_batch": choice.micro_batch,
        "accumulation": choice.accumulation,
        "activation_checkpointing": choice.activation_checkpointing,
        "attention": choice.attention,
        "live_parameters": choice.buckets.live,
        "predicted_seconds": predicted,
        "predicted_terms": {name: value for name, value in tried.candidate.cost.terms.items() if value},
        "predicted_tokens_per_second": tokens / predicted,
        "medians": tried.medians,
        "seconds": tried.seconds if tried.medians else None,
        "tokens_per_second": tokens / tried.seconds if tried.medians else None,
        "chosen": tried.chosen,
        "error": tried.error,
    }


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the rank correlation of two lists, equal values sharing a rank; None if all values of a list are equal."""
    if min(len(set(one)), len(set(other))) < 2:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json, or a directory with one")
    parser.add_argument("--layers", type=int, default=2, help="layers of it; 0: all")
    parser.add_argument("--ranks", type=int, default=2, help="without a GPU")
    parser.add_argument("--length", type=int, default=57, help="tokens of a packed row")
    parser.add_argument("--packed", type=int, default=1, help="rows of a packed row; 1: no packing")
    parser.add_argument("--supervised", type=float, default=0.385, help="share of a row's tokens")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one to warm up; finalists: 3 times")
    parser.add_argument("--rounds", type=int, default=7, help="of finalists, after the first of all")
    parser.add_argument("--limit", type=int, help="measure so many configurations, a random sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "choice.json")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
