"""Measure what `strategy: auto` gives away: the configuration that it takes, against the fastest that it could take.

    .venv/bin/python benchmarks/choice.py

Probes this machine, lets choose() predict every configuration, and then trains with each that it finds to fit, as
train/rank.py does: model and engine built again, one step to warm up, then the median seconds of --steps optimizer
steps, each from a barrier to the end of the slowest rank. Every strategy has processes of its own, as ZeRO-3 replaces
torch's linear() for good; strategies, and configurations within them, come in an order drawn from --seed. The fastest
of hundreds of noisy medians owes its place to luck, and a machine is not as fast now as in a minute. So the first round
only picks finalists, the fastest of it and the chosen one, and only the later rounds, in each of which all finalists
are measured one after the other, say which is best and what the chosen one reaches of it: in each round their ratio,
and of those the median. What fails or hangs is a row with its error.

Nothing is downloaded: a model is its config.json and weights are drawn. Ranks are the machine's GPUs, or two on CPU.
By default, rows are those of the reference task (57 tokens, 22 of them supervised, global batch 8, the adapter of
config/config.yaml) and the model is SmolLM2-135M with 2 of its 30 layers, as all are alike: 144 configurations in
a quarter of an hour on two free cores. GPUs want more to do:

    .venv/bin/python benchmarks/choice.py --model config/recipes/models/llama-3-8b.json --layers 0 \\
        --length 2048 --packed 4 --global-batch 32 --output benchmarks/results/choice_gpu.json

Writes benchmarks/results/choice.json: predicted and measured seconds of every configuration, the throughput of the
chosen one over that of the best (1 - regret), and how well prediction and measurement agree in rank (Spearman).
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed
from machine import machine
from transformers import AutoConfig, AutoModelForCausalLM

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import RenderSettings, TrainingPlan, TrainSettings, UsefulFlops
from zerolora.data.prepared_rows import IGNORED
from zerolora.files import read_json, write_json
from zerolora.memory.training_spec import RowStatistics
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

RESULT = Path("benchmarks/results/choice.json")
MODEL = Path("config/recipes/models/smollm2-135m.json")
ASKED = ("length", "supervised", "packed", "global_batch", "steps", "rounds", "limit", "seed")
FINALISTS = 6
FINAL_STEPS = 3  # times as many steps where the verdict is reached
CONFIGURATION = ("strategy", "micro_batch", "activation_checkpointing", "attention", "live_parameters")
LONGEST_SECONDS = 600  # without an answer: ranks hang
POLL_SECONDS = 0.2
SHOWN = 12


@dataclass(eq=False)
class Tried:
    """A configuration and what came of it."""

    candidate: Candidate
    chosen: bool
    medians: list[float] = field(default_factory=list)
    """Seconds of a step, one median a round; finalists have more than one."""
    error: str | None = None

    @property
    def seconds(self) -> float:
        """The median of the rounds after the first, which was for picking finalists; else that of the first."""
        return statistics.median(self.medians[1:] or self.medians)


def main() -> None:
    """Probe, predict, measure, compare."""
    arguments = _arguments()
    if arguments.measure:
        measure(arguments.measure)
        return
    started, load = time.monotonic(), round(os.getloadavg()[0], 1)  # of others: a busy machine measures nothing
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = torch.cuda.device_count() or arguments.ranks
    draw = random.Random(arguments.seed)  # noqa: S311 (an order, no secret)
    with tempfile.TemporaryDirectory() as folder:
        model = reduced(arguments, device, Path(folder) / "model")
        shape = read_model_spec(model)
        probe(Path(folder) / "probe.json", device, ranks)
        probed = read_json(Path(folder) / "probe.json", "zerolora probe")
        settings, train = settings_of(device, ranks, arguments.global_batch, probed)
        rows = packed_rows(arguments, shape.vocabulary)
        candidates = choose(Planning(shape, settings, rows_of(rows), hardware_of(settings)[0]))
        values = to_try(candidates, arguments.limit, draw)
        task = {
            "model": str(model), "train": train, "ranks": ranks,
            "rows": rows, "packing": arguments.packed > 1,
        }  # fmt: skip
        about = {
            "machine": machine(),
            "load_average_before": load,
            "probe": probed,
            "model": {"config": arguments.model.name, "layers": shape.layers, "parameters": shape.parameters},
            "ranks": ranks,
            "precision": settings.precision,
            **{name: getattr(arguments, name) for name in ASKED},
            "first_round_taken_up": arguments.first_round is not None,
            "considered": len(candidates),
            "rejected": sum(each.fault is not None for each in candidates),
        }
        measured = values
        if arguments.first_round:
            take_up(values, read_json(arguments.first_round, "choice.py")["rows"])
            measured = finalists(values)
        for number in range(1 if arguments.first_round else 0, 1 + arguments.rounds):
            steps = arguments.steps * (FINAL_STEPS if number else 1)
            measure_all(measured, {**task, "steps": steps}, settings, draw, Path(folder))
            measured = finalists(values) if number == 0 else measured
            minutes = round((time.monotonic() - started) / 60, 1)
            result = {**about, "minutes": minutes, **compared(values, arguments.global_batch * arguments.length)}
            write_json(arguments.output, result)
            print(f"round {number + 1}:\n{table(result)}", flush=True)


# What there is to choose from


def reduced(arguments: argparse.Namespace, device: str, directory: Path) -> Path:
    """Write a model of the first layers of a config.json, with weights that are drawn, and return its directory."""
    config = AutoConfig.from_pretrained(arguments.model)
    if arguments.layers:
        config.num_hidden_layers = arguments.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: arguments.layers]
    torch.manual_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[precision_of(device)])
    model.save_pretrained(directory)
    return directory


def precision_of(device: str) -> str:
    """Return what `precision: auto` stands for on this machine."""
    if device == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def settings_of(
    device: str, ranks: int, global_batch: int, probed: dict[str, Any]
) -> tuple[RenderSettings, dict[str, Any]]:
    """Return the settings of render, with all that can be chosen left open, and those of train."""
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
    """Return a global batch of equally long packed rows of drawn tokens, the last of each row's supervised."""
    draw = np.random.default_rng(arguments.seed)
    return [
        [
            drawn_row(draw.integers(vocabulary, size=len(part)).tolist(), arguments.supervised)
            for part in np.array_split(np.arange(arguments.length), arguments.packed)
        ]
        for _ in range(arguments.global_batch)
    ]


def drawn_row(tokens: list[int], supervised: float) -> dict[str, Any]:
    """Return tokens as a row, of which a share is supervised."""
    prompt = min(len(tokens) - 1, round(len(tokens) * (1 - supervised)))
    return {"input_ids": tokens, "labels": [IGNORED] * prompt + tokens[prompt:], "source": 0}


def rows_of(rows: list[PackedRow]) -> RowStatistics:
    """Return what the choice reads of the rows."""
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
    """Return the candidates that fit, the chosen one first; with a limit, it and others by lot."""
    chosen, *others = [Tried(each, number == 0) for number, each in enumerate(candidates) if each.fault is None]
    return [chosen, *(others if limit is None else draw.sample(others, min(len(others), limit - 1)))]


def take_up(found: list[Tried], rows: list[dict[str, Any]]) -> None:
    """Give every configuration what an earlier result says of its first round."""
    earlier = {tuple(row[name] for name in CONFIGURATION): row for row in rows}
    for each in found:
        row = earlier[tuple(row_of(each, 1)[name] for name in CONFIGURATION)]
        each.medians, each.error = row["medians"][:1], row["error"]


def finalists(found: list[Tried]) -> list[Tried]:
    """Return the fastest, and the chosen one, after the first round."""
    ended = sorted((each for each in found if each.error is None), key=lambda each: each.seconds)
    return ended[:FINALISTS] + [each for each in ended[FINALISTS:] if each.chosen]


# Measuring


def measure_all(
    found: list[Tried], task: dict[str, Any], settings: RenderSettings, draw: random.Random, folder: Path
) -> None:
    """Add a median to every configuration, strategy by strategy; to one that fails, its error."""
    strategies = sorted({each.candidate.choice.strategy for each in found})
    for strategy in draw.sample(strategies, len(strategies)):
        pending = [each for each in found if each.candidate.choice.strategy == strategy]
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
    """Return what render writes for a choice, but for the FLOPs, which only telemetry reads."""
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
    try:
        for rank in where.ranks:
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(where.start(rank, command, {**os.environ, **own}, log))
        while any(each.poll() is None for each in processes) and not any(each.poll() for each in processes):
            if time.time() - answers.stat().st_mtime > LONGEST_SECONDS:
                break
            time.sleep(POLL_SECONDS)
    finally:
        codes = [each.poll() for each in processes]
        for each in processes:
            each.kill()
            each.wait()
    medians = [json.loads(line) for line in answers.read_text().splitlines()]
    if len(medians) == len(task["configs"]):
        return medians, None
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return medians, f"no answer within {LONGEST_SECONDS} s"
    lines = [line for line in (folder / f"rank{failed}.log").read_text(errors="replace").splitlines() if line.strip()]
    return medians, (lines or [f"exit code {codes[failed]}"])[-1][:300]


def measure(path: Path) -> None:
    """Be a rank: train with each configuration of a task, and write a line for each. All are of one strategy."""
    task = read_json(path, "choice.py")
    settings = TrainSettings.model_validate(task["train"])
    plans = [(TrainingPlan.of(settings, config.choice), config) for config in map(ZeroJson.of, task["configs"])]
    plan, config = plans[0]
    device = claim_device(plan)
    engine_class(plan.engine).connect(config, device)
    for plan, config in plans:
        taken = median_seconds(task, plan, config, device)
        if torch.distributed.get_rank() == 0:
            with Path(task["answers"]).open("a") as answers:
                answers.write(f"{taken}\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def median_seconds(task: dict[str, Any], plan: TrainingPlan, config: ZeroJson, device: torch.device) -> float:
    """Return the median seconds of a step with one configuration; what it took is free again afterwards."""
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
    """Close an engine, and undo what DeepSpeed 0.19 leaves behind."""
    engine.close()
    # Something holds stage 3's parameters: without this, a rank's share of the model stays for ever.
    for parameter in engine.module.parameters():
        for share in (getattr(parameter, name, None) for name in ("ds_tensor", "ds_secondary_tensor")):
            if share is not None:
                share.data = torch.empty(0, dtype=share.dtype, device=share.device)
    # hpZ's group is made once a process, and asserts so.
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
    taken = torch.tensor(time.perf_counter() - started, device=device)
    torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
    return taken.item()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Comparing


def compared(found: list[Tried], tokens: int) -> dict[str, Any]:
    """Return the chosen and the best, their ratio, the rank correlation, measured over predicted by strategy, and all
    configurations, the fastest first; `tokens` are those of a step. The ratio is None if the chosen one failed."""
    most = max(len(each.medians) for each in found)  # finalists come before others, whose one median picked none
    ended = sorted((each for each in found if each.medians), key=lambda each: (len(each.medians) < most, each.seconds))
    failed = [each for each in found if not each.medians]
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
        "chosen": row_of(next(each for each in found if each.chosen), tokens),
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
    """Return the rank correlation of two lists, in which what is equal shares a rank; None if one says nothing."""
    if min(len(set(one)), len(set(other))) < 2:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def table(result: dict[str, Any]) -> str:
    """Return the fastest, the best of every strategy, and the chosen one, for people."""
    ended = [row for row in result["rows"] if row["seconds"]]
    best_of = {row["strategy"]: row for row in reversed(ended)}
    shown = [
        row for number, row in enumerate(ended) if number < SHOWN or row["chosen"] or row is best_of[row["strategy"]]
    ]
    chosen = f"{result['ratio']:.1%} of the best's throughput" if result["ratio"] else result["chosen"]["error"]
    agreement = "none" if result["spearman"] is None else f"{result['spearman']:.2f}"
    return "\n".join(
        [
            f"{'strategy':<24}{'micro-batch':>12}{'checkpointing':>14}{'attention':>10}{'live':>12}"
            f"{'predicted s':>13}{'measured s':>12}{'tokens/s':>10}",
            *map(_line, shown),
            *_errors(row for row in result["rows"] if row["error"]),
            f"{result['measured']} measured, {result['failed']} failed; rank correlation {agreement}; "
            f"auto's choice: {chosen}; {result['minutes']} minutes",
        ]
    )


def _line(row: dict[str, Any]) -> str:
    batch, saving = f"{row['micro_batch']} x {row['accumulation']}", "yes" if row["activation_checkpointing"] else "no"
    return (
        f"{row['strategy']:<24}{batch:>12}{saving:>14}{row['attention']:>10}{row['live_parameters']:>12,}"
        f"{row['predicted_seconds']:>13.4g}{row['seconds']:>12.4g}{row['tokens_per_second']:>10.0f}"
        f"{'  <- auto' if row['chosen'] else ''}"
    )


def _errors(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [f"{row['strategy']}, micro-batch {row['micro_batch']}: {row['error']}" for row in rows]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what `strategy: auto` gives away.")
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json, or a directory with one")
    parser.add_argument("--layers", type=int, default=2, help="layers of it; 0: all")
    parser.add_argument("--ranks", type=int, default=2, help="where there is no GPU")
    parser.add_argument("--length", type=int, default=57, help="tokens of a packed row")
    parser.add_argument("--packed", type=int, default=1, help="rows that share a packed row; 1: no packing")
    parser.add_argument("--supervised", type=float, default=0.385, help="share of a row's tokens")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one to warm up; finalists: 3 times")
    parser.add_argument("--rounds", type=int, default=7, help="of finalists, after the first of all")
    parser.add_argument("--first-round", type=Path, help="a result whose first round is taken up, not measured again")
    parser.add_argument("--limit", type=int, help="measure so many configurations, drawn by lot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
