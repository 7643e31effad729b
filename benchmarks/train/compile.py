"""Compare training steps with compiled decoder layers (train.compile) and with the model's own code, on a CPU.

    .venv/bin/python benchmarks/train/compile.py

Each case is a model in a process of its own, with one thread, random weights, LoRA on all linear layers, an empty
compiler cache, and micro-batches of conversations (chat_rows.py), as training prepares, pads and reads them. In turn,
for each of the lengths to which train.compile pads: the model's own code on batches that are as long as their longest
row; the same on padded batches; compiled layers on padded batches. A step is the forward and backward pass of a
micro-batch; CPU seconds include child processes.

Compile seconds are those of the first step of each length, C++ compiler included, less a later one. Saved bytes
are those that the graph of the longest length holds after its forward pass, peak bytes the most that torch allocates
in its step; neither counts weights. Losses and gradients are compared at each length. Writes
benchmarks/results/train_compile.json.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from contest import QUIET, TRAIN, about, chat_task, model_of, parser
from measuring import ROOT, by_round, children_cpu_seconds, random_model, turns
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_layers import GradientCheckpointingLayer

from zerolora.config.settings import TrainingPlan, TrainSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.files import read_json, write_json
from zerolora.machine import cpu_matmul
from zerolora.model.manifest import located
from zerolora.model.padded_lengths import padded, step_of
from zerolora.train.adapter import adapt
from zerolora.train.compiled_layers import compiled_layers
from zerolora.train.feed import Batches, PackedRow, collate, padding
from zerolora.train.loss import token_losses

CPU = torch.device("cpu")
MODELS = ROOT / "config/recipes/models"
CASES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M, 6 layers": {"model": MODELS / "smollm2-135m.json", "layers": 6},
    "GPT-2, 4 layers": {"model": MODELS / "gpt2.json", "layers": 4},
    "Gemma 3 1B, 2 layers": {"model": MODELS / "gemma-3-1b.json", "layers": 2},
    "SmolLM2-135M, 6 layers, checkpointing": {
        "model": MODELS / "smollm2-135m.json", "layers": 6, "checkpointing": True,
    },
}  # fmt: skip
OWN, PADDED, COMPILED = "own code", "own code, padded", "compiled"
ROWS = 2  # of a micro-batch
CAPACITY = 256  # tokens


def main() -> None:
    """Measure each case in its own process, write."""
    made = parser(__doc__, "train_compile.json")
    made.add_argument("--cases", nargs="+", default=list(CASES), help="some of the cases, or models")
    made.add_argument("--longest", type=int, default=80, help="words of a conversation")
    made.add_argument("--case", help="measure this one in this process")
    options = made.parse_args()
    if options.case:
        write_json(options.output, measured(options.case, options))
        return
    result: dict[str, Any] = about("cpu") | {"rounds": options.rounds, "micro_batch": ROWS, "cases": {}}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as name:
            output = Path(name, "case.json")
            arguments = ["--case", case, "--output", str(output), "--rounds", str(options.rounds)]
            arguments += ["--longest", str(options.longest), "--tokenizer", str(options.tokenizer)]
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(Path(__file__).resolve()), *arguments]
            subprocess.run(command, check=True, env=os.environ | QUIET | caches)
            result["cases"][case] = read_json(output, "benchmarks/train/compile.py")
        write_json(options.output, result)


def measured(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a case."""
    torch.set_num_threads(1)
    cpu_matmul.choose()
    of_case = CASES.get(case, {"model": Path(case)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = {"activation_checkpointing": of_case.get("checkpointing", False)}
        model, plan, by_length = prepared(folder, of_case["model"], of_case.get("layers", 0), train, options)
        return {"attention": plan.attention, **figures(model, by_length, options.rounds)}


def prepared(
    folder: Path, model: Path, layers: int, train: dict[str, Any], options: argparse.Namespace
) -> tuple[Any, TrainingPlan, dict[int, list[list[PackedRow]]]]:
    """Return a model with compiled layers in training mode, its plan, and micro-batches by the length to which they are
    padded."""
    options.model, options.precision = model, "fp32"
    if layers:
        random_model(model, torch.float32, folder / "fewer", layers)
        options.model = folder / "fewer/config.json"
    directory = model_of(options, folder)
    counts = {"train": 120, "validation": 1, "test": 1}
    # A tokenizer of bytes makes more tokens of some words than fit.
    task = chat_task(folder, directory, "cpu", counts, CAPACITY, longest=options.longest, too_long="drop")
    wanted = {**TRAIN, "compile": True, "global_batch": ROWS, "micro_batch": ROWS, "precision": "fp32", **train}
    ours = task.ours("ours", wanted, {"packing": False}, strategy="ddp", threads="1")
    plan = TrainingPlan.of(TrainSettings.model_validate(ours.settings), ours.zero.choice)
    batches = Batches(open_split(task.data, "train"), open_plan(ours.folder / "packing/train.arrow"), plan, 0, 1)
    padding.step = step_of(read_json(ours.folder / "packing/stats.json", "zerolora stage pack")["longest_packed_row"])
    by_length: dict[int, list[list[PackedRow]]] = {}
    for step in range(batches.steps):
        rows_of_step = batches.at(step)[0][0]
        longest = max(len(row["input_ids"]) for packed in rows_of_step for row in packed)
        by_length.setdefault(padded(longest, padding.step), []).append(rows_of_step)
    made = adapt(located(task.folder / "weights/model.json"), plan, ours.zero, CPU)
    for name, value in made.named_parameters():
        if "lora_B" in name:  # zeros would hide the gradients of the first factors
            torch.nn.init.normal_(value, std=0.01)
    return made.train(), plan, dict(sorted(by_length.items()))


def figures(model: Any, by_length: dict[int, list[list[PackedRow]]], rounds: int) -> dict[str, Any]:
    """Return CPU seconds by length and variant, ratios, what compiling takes, memory and differences."""
    lengths: dict[str, Any] = {}
    compiling, differences, longest = 0.0, [], {}
    for length, micro_batches in by_length.items():
        exact, longer = (batch_of(micro_batches[0], step) for step in (1, padding.step))
        variants = {OWN: (exact, False), PADDED: (longer, False), COMPILED: (longer, True)}
        first = seconds_of(model, longer, True)
        differences.append(difference(model, longer))
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for name in turns(variants, rounds):
            seconds[name].append(seconds_of(model, *variants[name]))
        compiling += first - statistics.median(seconds[COMPILED])
        lengths[str(length)] = {
            "micro_batches_of_the_data": len(micro_batches),
            "cpu_seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "over_compiled": {name: ratio(seconds[name], seconds[COMPILED]) for name in (OWN, PADDED)},
        }
        print(f"{length} tokens: first {first:.1f} s, then {lengths[str(length)]['cpu_seconds']}", flush=True)
        longest = {name: bytes_of(model, longer, compiled) for name, (_, compiled) in list(variants.items())[1:]}
    return {
        "lengths": lengths,
        "epoch_cpu_seconds": {
            name: sum(each["micro_batches_of_the_data"] * each["cpu_seconds"][name] for each in lengths.values())
            for name in (OWN, PADDED, COMPILED)
        },
        "compile_cpu_seconds": compiling,
        **compiled_layers.summary(),
        "bytes_of_longest": longest,
        "largest_relative_difference_of_losses": max(loss for loss, _ in differences),
        "largest_relative_difference_of_gradients": max(gradient for _, gradient in differences),
    }


def batch_of(rows: list[PackedRow], step: int) -> dict[str, Any]:
    """Return a micro-batch whose length is a multiple of `step`."""
    usual, padding.step = padding.step, step
    batch = collate(rows, False, CPU)
    padding.step = usual
    return batch


def seconds_of(model: Any, batch: dict[str, Any], compiled: bool) -> float:
    """Return the CPU seconds of a step."""
    with contextlib.nullcontext() if compiled else own_layers(model):
        started = cpu_seconds()
        backward(model, batch)
        compiled_layers.after_step()
        return cpu_seconds() - started


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return time.process_time() + children_cpu_seconds()


@contextlib.contextmanager
def own_layers(model: Any) -> Iterator[None]:
    """Compute layers by the model's own code within the context."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    forwards = [layer.__dict__.pop("forward") for layer in layers]
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.__dict__["forward"] = forward


def backward(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Compute the gradients of a batch's mean loss, and return its losses."""
    model.zero_grad()
    losses = token_losses(model, batch)
    losses.mean().backward()
    return losses.detach()


def difference(model: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the largest difference of losses, over the mean loss, and of gradients, over each tensor's largest."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)  # for dropout, which compiled layers draw alike
        with contextlib.nullcontext() if compiled else own_layers(model):
            losses = backward(model, batch)
        results.append((losses, [value.grad.clone() for value in model.parameters() if value.grad is not None]))
    (one, expected), (other, actual) = results
    relative = ((a - b).abs().max() / a.abs().max() for a, b in zip(expected, actual, strict=True))
    return float((one - other).abs().max() / one.mean()), float(max(relative))


def bytes_of(model: Any, batch: dict[str, Any], compiled: bool) -> dict[str, int]:
    """Return the bytes that the graph of a step saves, and the most that torch allocates in it."""
    with contextlib.nullcontext() if compiled else own_layers(model):
        backward(model, batch)  # gradients exist
        return {"saved": saved_bytes(model, batch), "peak": peak_bytes(model, batch)}


def saved_bytes(model: Any, batch: dict[str, Any]) -> int:
    """Return the bytes of the storages that the graph of a forward pass saves, without weights and inputs."""
    others = [*model.parameters(), *model.buffers(), *(each for each in batch.values() if torch.is_tensor(each))]
    known = {tensor.untyped_storage()._cdata for tensor in others}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # alive, so that no address occurs twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = token_losses(model, batch)
    del losses
    return sum(storage.nbytes() for key, storage in saved.items() if key not in known)


def peak_bytes(model: Any, batch: dict[str, Any]) -> int:
    """Return the most bytes that torch's allocator holds in a step, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        backward(model, batch)
    result = profiled.profiler.kineto_results
    changes = [event for event in result.events() if event.name() == "[memory]"]
    live = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(live)


def ratio(own: list[float], compiled: list[float]) -> dict[str, Any]:
    """Return the seconds of the model's own code over those of compiled layers, by round, and their median."""
    return by_round([one / other for one, other in zip(own, compiled, strict=True)])


if __name__ == "__main__":
    main()
