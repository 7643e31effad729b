"""What each kind of item measures: one function a kind, called in a process of its own (benchmarks/gpu.py).

Each returns `{"predicted": …, "measured": …}`: what this project's planner says, and what the machine did; `predicted`
is None where nothing is predicted. Bytes, seconds, tokens, FLOP/s. Raises Failed where nothing could be measured.
Everything of zerolora's training and of the other benchmarks is called from here.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_kinds.drawn import config_of, write_model
from zerolora.files import read_json

if TYPE_CHECKING:
    from zerolora.train.training_plan import TrainingPlan

ROOT = Path(__file__).resolve().parents[2]
Settings = dict[str, Any]
Result = dict[str, Any]
RANKS = 1  # NCCL refuses two ranks on one GPU
LOOK_SECONDS = 0.05  # between two looks at a process's memory


class Failed(Exception):
    """Nothing was measured; the text says why."""


@dataclass(frozen=True)
class Context:
    """Where an item runs."""

    device: str
    """cuda or cpu."""
    folder: Path
    """Empty, for whatever the item writes; deleted afterwards."""
    probed: Path
    """The result file of the item `probe`, which may be missing."""

    @property
    def precision(self) -> str:
        """What is trained in, unless an item says otherwise."""
        return "bf16" if self.device == "cuda" else "fp32"


# --- the device ---


def probe(_: Settings, where: Context) -> Result:
    """Measure the device's rates; predicted are those of its datasheet, at the planner's shares of nominal."""
    from zerolora.planner.datasheets import NETWORKS, NODE_LINKS, named
    from zerolora.probe.probe import probe as probe_device

    output = where.folder / "probe.json"
    probe_device(output, where.device, RANKS)
    found = read_json(output, "zerolora probe")
    gpu, predicted = gpu_named(found["hardware"]["name"]), None
    if gpu:
        hardware = named(gpu, next(iter(NODE_LINKS)), next(iter(NETWORKS)), "bf16", RANKS)
        predicted = {
            "gpu": gpu,
            "matmul_16bit_flops_per_second": hardware.rate,
            "memory_bytes_per_second": hardware.memory_bandwidth,
        }
    return {"predicted": predicted, "measured": found}


def gpu_named(name: str) -> str | None:
    """Return the planner's name of a GPU from what its driver calls it, None if it is in no table."""
    from zerolora.planner.datasheets import GPUS

    known = [each for each in GPUS if each.split("-")[0] in name.replace(" ", "-").split("-")]
    return known[0] if known else None


def probed_or_new(where: Context) -> Settings:
    """Return the probe of an earlier item, or a new one."""
    if where.probed.is_file():
        earlier = read_json(where.probed, "gpu.py")
        if "measured" in earlier:
            return dict(earlier["measured"])
    return dict(probe({}, where)["measured"])


# --- memory ---


def memory(asked: Settings, where: Context) -> Result:
    """Hold predicted against measured memory of one configuration at several lengths, a row alone and at the shortest
    length four together."""
    lengths = asked["lengths"]
    batches = [batch_of(1, length, asked["method"]) for length in lengths]
    batches.append(batch_of(4, lengths[0], asked["method"]))
    rows = measured_rows(asked, batches, where)
    if not any("error" in row for row in rows):
        raise Failed(next((row[why] for row in rows for why in ("failed", "skipped") if why in row), "no row"))
    return split(rows)


def reserve(asked: Settings, where: Context) -> Result:
    """Measure what a GPU holds beside torch's tensors: CUDA's context, NCCL, and the allocator's unused share."""
    from dataclasses import replace

    from benchmarks.memory import measure
    from zerolora.memory import reserve as assumed

    predicted, parts = {}, {}
    for strategy in asked["strategies"]:
        configuration = {
            "model": asked["model"], "strategy": strategy, "method": "lora", "checkpointing": True,
            "attention": "flash", "precision": where.precision,
        }  # fmt: skip
        batch = batch_of(1, asked["length"], "lora")
        (row,) = measured_rows(configuration, [batch], where)
        if "error" not in row:
            raise Failed(row.get("failed") or row["skipped"])
        spec = measure.spec_of({**configuration, "ranks": RANKS, "device": where.device}, batch)
        predicted[strategy] = assumed.shares(replace(spec, reserve=None), row.get("gpu_allocated", 0))
        parts[strategy] = reserve_of(row)
    return {"predicted": predicted, "measured": parts}


def reserve_of(row: Settings) -> dict[str, int]:
    """Return the parts of a row's reserve in bytes; on a CPU, which has none, what a rank held before its model."""
    if "gpu_in_use" not in row:
        return {"process": row["host_before"]}
    return {
        "context": row["gpu_context"],
        "communication": row["gpu_connected"] - row["gpu_context"],
        "allocator": row["gpu_reserved"] - row["gpu_allocated"],
        "libraries": row["gpu_in_use"] - row["gpu_reserved"] - row["gpu_connected"],
        "total": row["gpu_in_use"] - row["gpu_allocated"],
    }


def batch_of(micro_batch: int, length: int, method: str) -> Settings:
    """Return a batch as measure.py takes it: half of the tokens supervised; with all weights trained, transformers' own
    loss of all of them, since the head then has a gradient."""
    fused = method == "lora"
    return {
        "micro_batch": micro_batch, "length": length, "loss": "fused" if fused else "full",
        "logits": length // 2 if fused else 0, "masked": micro_batch > 1,
    }  # fmt: skip


def measured_rows(asked: Settings, batches: list[Settings], where: Context) -> list[Settings]:
    """Return a row of benchmarks/memory/measure.py for each batch."""
    import time

    from benchmarks.memory import measure

    config = where.folder / f"{asked['model']}.json"
    shutil.copyfile(config_of(asked["model"]), config)
    group = {
        **asked, "model": str(config.with_suffix("") if config.suffix == ".json" else config), "ranks": RANKS,
        "device": where.device, "batches": batches,
    }  # fmt: skip
    group.pop("lengths", None)
    (rows,) = measure.measured([group], time.monotonic() + measure.GROUP_SECONDS)
    return [{**row, "model": asked["model"]} for row in rows]


def split(rows: list[Settings]) -> Result:
    """Return rows as what was predicted of them and what was measured, each with what tells them apart."""
    case = ("micro_batch", "length", "loss", "masked")
    found = ("host_", "gpu_", "step_seconds", "error", "implied_reserve", "failed", "skipped")
    return {
        "predicted": [
            {**{name: row[name] for name in case}, "gpu": row["predicted_gpu"], "host": row["predicted_host"]}
            for row in rows
        ],
        "measured": [
            {name: value for name, value in row.items() if name in case or name.startswith(found)} for row in rows
        ],
    }


# --- speed ---


def speed(asked: Settings, where: Context) -> Result:
    """Train with what `strategy: auto` chooses; report tokens/s, and FLOP/s over those of matrix products (of_matmul)
    and over the datasheet's (mfu)."""
    from benchmarks import choice
    from zerolora.config.settings import TrainingChoice, TrainSettings
    from zerolora.machine.peak_memory import PeakMemory
    from zerolora.model.read_spec import read_model_spec
    from zerolora.planner.candidates import Planning, step_work
    from zerolora.planner.choice import choose
    from zerolora.planner.cost import useful_flops
    from zerolora.planner.datasheets import GPUS
    from zerolora.planner.run_hardware import hardware_of
    from zerolora.train.training_plan import TrainingPlan

    os.chdir(ROOT)  # choice.py reads config/config.yaml from there
    probed = probed_or_new(where)
    config = config_of(asked["model"])
    shape = read_model_spec(config)
    rows = choice.packed_rows(argparse.Namespace(**asked, seed=0, supervised=0.5), shape.vocabulary)
    statistics = choice.rows_of(rows)
    settings, train = choice.settings_of(where.device, RANKS, asked["global_batch"], probed)
    best = choose(Planning(shape, settings, statistics, hardware_of(settings)[0]))[0]
    zero = choice.engine_and_choice(best.choice, settings)
    directory = model_to_draw(config, where)
    plan = TrainingPlan.of(TrainSettings.model_validate(train), TrainingChoice.model_validate(zero.pop("zerolora")))
    device = become_rank(plan, zero)
    peak = PeakMemory(device)
    task = {
        "model": str(directory), "train": train, "ranks": RANKS, "rows": rows, "packing": asked["packed"] > 1,
        "steps": asked["steps"],
    }  # fmt: skip
    seconds = choice.median_seconds(task, plan, zero, device)
    flops = useful_flops(step_work(shape, best.spec, statistics))
    squared = sum(len(row["input_ids"]) ** 2 for packed in rows for row in packed)
    counts = {
        "token": statistics.tokens,
        "squared_token": squared,
        "supervised_token": statistics.supervised_tokens,
    }
    rate = sum(flops[name] * count for name, count in counts.items()) / seconds
    values = probed["measured"]
    matmul = values["matmul_fp32_flops_per_second" if where.precision == "fp32" else "matmul_16bit_flops_per_second"]
    gpu = gpu_named(probed["hardware"]["name"])
    measured = {
        "seconds": seconds, "tokens_per_second": statistics.tokens / seconds, "flops_per_second": rate,
        "of_matmul": rate / matmul, "mfu": rate / GPUS[gpu].half if gpu else None, "host_peak": peak.host(),
        "gpu_allocated": peak.gpu(),
        "gpu_reserved": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    }  # fmt: skip
    predicted = {
        "seconds": best.seconds, "tokens_per_second": statistics.tokens / best.seconds, "terms": best.cost.terms,
        "gpu": best.gpu, "host": best.host, "strategy": best.choice.strategy,
        "micro_batch": best.choice.micro_batch, "accumulation": best.choice.accumulation,
        "activation_checkpointing": best.choice.activation_checkpointing, "attention": best.choice.attention,
    }  # fmt: skip
    return {"predicted": predicted, "measured": measured}


def model_to_draw(config: Path, where: Context) -> Path:
    """Return a directory to load a model from: on a GPU its config.json only, as weights are drawn there."""
    directory = where.folder / "model"
    if where.device == "cpu":
        return write_model(str(config), directory, where.precision, "cpu")
    directory.mkdir()
    shutil.copyfile(config, directory / "config.json")
    return directory


def become_rank(plan: "TrainingPlan", zero: Settings) -> torch.device:
    """Make this process the only rank of a training; on a GPU, models that it loads get drawn weights."""
    from benchmarks.memory import measure
    from zerolora.train import base_model
    from zerolora.train.engines import engine_class
    from zerolora.train.launch.topology import topology
    from zerolora.train.rank import claim_device

    if plan.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        base_model.read = measure.random_on_device
    one = topology({}, 1, RANKS)
    os.environ |= one.environment(0)
    if one.listener:
        one.listener.detach()  # this process's own rendezvous takes the socket over
    device = claim_device(plan)
    engine_class(plan.engine).connect(zero, device)
    return device


def reference(asked: Settings, where: Context) -> Result:
    """Train the reference task as the published experiment did and as this project does, in turn."""
    from benchmarks.train import against_reference

    options = options_of(asked, where, micro_batch=4, max_length=64 if where.device == "cuda" else 128)
    task = against_reference.reference_task(where.folder, options.model, options, against_reference.VALIDATED)
    others = dict(list(against_reference.others_of(task, options).items())[: asked["ways"]])
    ours = against_reference.ours_of(task, options)
    runs = turns({"zerolora": ours.train, **others}, asked["rounds"])
    prompt, answer = against_reference.lengths(task.data)
    measured = against_reference.compared(runs, asked["warm_up"]) | {"padded_to": {"prompt": prompt, "answer": answer}}
    return {"predicted": {"rendered": ours.zero["zerolora"]}, "measured": measured}


def contest(asked: Settings, where: Context) -> Result:
    """Train conversations with TRL's SFTTrainer, or transformers' Trainer with peft, and with this project, in turn.
    Settings of each are tried once; the fastest of either takes part."""
    from benchmarks.train import against_trl

    options = options_of(asked, where, capacity=asked["capacity"], batch=asked["batch"], longest=asked["longest"])
    task = against_trl.chat_task(where.folder, options.model, options)
    ours = our_settings(task, options, asked["micro_batches"])
    theirs = trl_settings(task, options) if asked["opponent"] == "trl" else trainer_settings(task, options, asked)
    tried = {label: turns({label: run}, 1)[label][0] for label, run in {**ours, **theirs}.items()}
    rates = {label: run.tokens_per_second(asked["warm_up"]) for label, run in tried.items()}
    best, rival = (max(labels, key=rates.__getitem__) for labels in (ours, theirs))
    runs = turns({best: ours[best], rival: theirs[rival]}, asked["rounds"])
    found = against_trl.compared(best, runs[best], rival, runs[rival], asked["warm_up"])
    return {"predicted": None, "measured": {"tried": rates, **found}}


def our_settings(task: Any, options: argparse.Namespace, micro_batches: list[int]) -> dict[str, Callable[[], Any]]:
    """Return this project's ways to train conversations."""
    from benchmarks.train.contest import TRAIN

    train = {
        **TRAIN, "max_steps": options.steps, "global_batch": options.batch, "precision": options.precision,
        "ranks_per_node": RANKS,
    }  # fmt: skip
    pack = {"packing": True, "capacity": options.capacity}
    return {
        f"zerolora, micro-batch {micro}": task.ours(f"ours-{micro}", {**train, "micro_batch": micro}, pack).train
        for micro in micro_batches
    }


def trl_settings(task: Any, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return TRL's ways, but for packing with sdpa, which computes all scores of a packed row."""
    from benchmarks.train import against_trl

    found = against_trl.their_settings(task, options)
    return {label: run for label, run in found.items() if f"{RANKS} ranks" in label and "packing, sdpa" not in label}


def trainer_settings(task: Any, options: argparse.Namespace, asked: Settings) -> dict[str, Callable[[], Any]]:
    """Return the way of transformers' Trainer with peft: padded batches of rows of like length."""
    import functools

    from benchmarks.train.contest import LORA, TRAIN, opponent

    mean = task.stats["train_tokens"] / task.stats["train_rows"]
    rows = asked["rows"]
    settings = {
        **TRAIN, "model": str(task.model), "data": str(task.data), "device": task.device,
        "precision": options.precision, "attention": "sdpa", "lora": LORA, "micro_batch": rows,
        "accumulation": max(1, round(options.batch * options.capacity / mean / rows)), "max_steps": options.steps,
        "gradient_checkpointing": False, "onednn": task.device == "cpu",
    }  # fmt: skip
    label = f"transformers' Trainer with peft, padding, micro-batch {rows}"
    return {label: functools.partial(opponent, "trainer", task.folder / "trainer", settings, RANKS)}


def options_of(asked: Settings, where: Context, **more: Any) -> argparse.Namespace:
    """Return the options that the contests of benchmarks/train read; the model is written with drawn weights."""
    model = write_model(asked["model"], where.folder / "drawn", where.precision, where.device)
    return argparse.Namespace(
        device=where.device, model=model, precision=where.precision, ranks=RANKS, steps=asked.get("steps", 1), **more
    )


def turns(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Return the runs of contestants that take turns. Raises Failed with the last line of one that failed."""
    from benchmarks.train.contest import take_turns

    try:
        return dict(take_turns(contestants, rounds))
    except SystemExit as ended:
        raise Failed(str(ended).strip().splitlines()[-1][:300]) from None


# --- losses, loading, start, choice ---


def precision(asked: Settings, where: Context) -> Result:
    """Train the same rows on a CPU in fp32 and on the device in other precisions; compare the losses of every step."""
    from benchmarks.train import against_reference

    model = write_model(asked["model"], where.folder / "drawn", "fp32", "cpu")
    losses = {}
    for device, kind in [("cpu", "fp32"), *((where.device, each) for each in asked["precisions"])]:
        label = f"{device} {kind}"
        folder = where.folder / label.replace(" ", "-")
        folder.mkdir()
        options = argparse.Namespace(device=device, max_length=128)
        task = against_reference.reference_task(folder, model, options, against_reference.VALIDATED)
        train = {
            **against_reference.TRAIN, "max_steps": asked["steps"], "precision": kind, "ranks_per_node": RANKS,
            "micro_batch": 4, "global_batch": 8, "activation_checkpointing": False,
        }  # fmt: skip
        run = turns({label: task.ours("ours", train, {}, "zero2").train}, 1)[label][0]
        losses[label] = [step.loss for step in run.steps]
    return {"predicted": None, "measured": {"losses": losses, "relative_difference": differences(losses, "cpu fp32")}}


def differences(losses: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Return mean and worst relative difference of each list from that of `base`."""
    found = {}
    for label in losses.keys() - {base}:
        each = [abs(one / other - 1) for one, other in zip(losses[label], losses[base], strict=True)]
        found[label] = {"mean": statistics.mean(each), "worst": max(each)}
    return found


def loading(asked: Settings, where: Context) -> Result:
    """Load a model from disk under several strategies: seconds, and the host's peak, beside the predicted one."""
    from benchmarks.train import against_reference
    from benchmarks.train import loading as benchmark

    options = options_of(asked, where, max_length=128)
    task = against_reference.reference_task(where.folder, options.model, options, against_reference.VALIDATED)
    train = {
        **against_reference.TRAIN, "max_steps": 1, "precision": where.precision, "ranks_per_node": RANKS,
        "micro_batch": 1, "global_batch": 1,
    }  # fmt: skip
    weights = sum(path.stat().st_size for path in options.model.glob("*.safetensors"))
    predicted, measured = {}, {}
    for strategy in asked["strategies"]:
        ours = task.ours(strategy, train, {}, strategy, "1")
        estimated = read_json(ours.folder / "estimate.json", "estimate")["strategies"]
        predicted[strategy] = next(each["host"] for each in estimated if each["strategy"] == strategy)
        try:
            found = benchmark.peaks(ours, LOOK_SECONDS)
        except SystemExit as ended:
            raise Failed(str(ended).strip().splitlines()[-1][:300]) from None
        measured[strategy] = {**found, "bytes_per_second": weights / (found["model_seconds"] + found["engine_seconds"])}
    return {"predicted": predicted, "measured": {"weights_bytes": weights, "strategies": measured}}


def start_up(asked: Settings, where: Context) -> Result:
    """Measure the seconds from the command to the first step (benchmarks/train/start_up.py)."""
    model = write_model(asked["model"], where.folder / "drawn", where.precision, where.device)
    command = ["--device", where.device, "--model", str(model), "--precision", where.precision, "--max-length", "128"]
    return {"predicted": None, "measured": script("train/start_up.py", [*command, "--rounds", asked["rounds"]], where)}


def choice(asked: Settings, where: Context) -> Result:
    """Train with configurations drawn by lot and with the chosen one (benchmarks/choice.py)."""
    names = ("layers", "length", "packed", "global_batch", "limit", "rounds", "steps")
    options = [text for name in names for text in (f"--{name.replace('_', '-')}", asked[name])]
    command = ["--model", config_of(asked["model"]), "--ranks", RANKS, *options]
    found = script("choice.py", command, where)
    predicted = {name: found[name] for name in ("considered", "rejected", "chosen")}
    return {"predicted": predicted, "measured": found}


def script(name: str, options: list[Any], where: Context) -> Result:
    """Return the result of another benchmark. Raises Failed with its last line if it fails."""
    output = where.folder / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / name, *options, "--output", output]
    ended = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Failed(([line for line in ended.stderr.splitlines() if line.strip()] or ["it said nothing"])[-1][:300])
    return dict(read_json(output, name))


KINDS: dict[str, Callable[[Settings, Context], Result]] = {
    each.__name__: each
    for each in (probe, memory, reserve, speed, reference, contest, precision, loading, start_up, choice)
}
