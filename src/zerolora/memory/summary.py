"""The text around the table of `zerolora memory`: the model, the assumptions, and what fits."""

import textwrap
from dataclasses import fields
from typing import Any

from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.errors import printable
from zerolora.memory.estimate import Capacity
from zerolora.memory.reserve import with_headroom
from zerolora.memory.search import nearest, remedy
from zerolora.memory.table import WIDTH
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.method import Method
from zerolora.model.spec import ModelSpec
from zerolora.units import counted, gib

LABEL = 12  # columns of a line's label
LOSSES = {
    "full": "logits of all positions",
    "supervised": "logits of supervised positions only",
    "fused": "logits of supervised positions, a chunk at a time",
}


def head(name: str, model: ModelSpec, spec: TrainingSpec, capacity: Capacity, gpu: str | None) -> str:
    """Return the lines above the table: the model, its parameters and the assumptions."""
    parameters, method = spec.parameters(model), spec.method
    share = parameters.trained / (parameters.trained + parameters.frozen)
    mixture = (
        f", {model.active_parameters:,} of them for a token ({model.experts_per_token} of {model.experts} experts)"
        if model.experts and model.experts_per_token
        else ""
    )
    kept = "only each layer's input is saved" if spec.activation_checkpointing else "off"
    kept += ", on the host" if spec.offloads_inputs else ""
    supervised = f" ({spec.logits:,} of a row)" if spec.logits else ""
    model_of_gpu = f" ({gpu})" if gpu else ""
    kernels = f"; kernels of liger-kernel for {', '.join(spec.kernels)}" if spec.kernels else ""
    sharing = f"shared by {spec.sequence_parallel:,} GPUs" if spec.sequence_parallel > 1 else "a GPU"
    assert capacity.gpu
    source = "its config.json" if model.counted == "config.json" else model.counted
    return "\n".join(
        [
            line("model", f"{name}: {model.family}, {model.parameters:,} parameters{mixture}"),
            line("", f"{model.layers} layers, counted from {source}"),
            line(
                "trained",
                f"{parameters.trained:,} parameters, {share:.2%}, by {described(method)}; {parameters.frozen:,} frozen",
            ),
            line(
                "hardware",
                f"{counted(spec.nodes, 'node')} with {counted(spec.ranks_per_node, 'GPU')}{model_of_gpu} of "
                f"{gib(capacity.gpu)} and {gib(capacity.host)} of host memory",
            ),
            line(
                "step",
                f"{spec.micro_batch:,} x {spec.length:,} tokens {sharing}, {spec.accumulation:,} times; "
                f"{spec.precision}; {spec.optimizer.name}; "
                f"attention {spec.attention}{' with a mask' if spec.masked else ''}; "
                f"activation checkpointing: {kept}; loss {spec.loss}: {LOSSES[spec.loss]}{supervised}{kernels}"
                f"{objective(spec)}",
            ),
            line(
                "counted",
                "weights, gradients, optimizer states, activations, logits, the engine's buffers; the reserve stands "
                "for CUDA's context, NCCL, fragmentation and workspaces of kernels, which are not predicted",
            ),
        ]
    )


def objective(spec: TrainingSpec) -> str:
    """Return the objective and what a step does for it, if it is not next-token loss."""
    result = "" if spec.objective.name == "sft" else f"; objective {spec.objective.name}"
    if len(spec.objective.texts) > 1:
        result += ", whose row is a pair, with the tokens of both sequences"
    if spec.objective.forwards_before:
        result += ", with a forward pass before the step"
    return result


def described(method: Method) -> str:
    """Return a method's name and its settings, without empty ones."""
    values = {field.name.replace("_", " "): getattr(method, field.name) for field in fields(method)}
    settings = [f"{name} {_shown(value)}" for name, value in values.items() if value and value != DEFAULT_INIT]
    return f"{method.name} ({', '.join(settings)})" if settings else method.name


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return "on" if value is True else str(value)
    return " ".join("=".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)


def notes(entries: list[dict[str, Any]]) -> list[str]:
    """Return each note of the entries once, with its strategies unless all have it."""
    result: dict[str, list[str]] = {}
    for entry in entries:
        for note in entry["notes"]:
            result.setdefault(note, []).append(entry["strategy"])
    return [
        line("note", note if len(names) == len(entries) else f"{', '.join(names)}: {note}")
        for note, names in result.items()
    ]


def verdict(
    entries: list[dict[str, Any]],
    faults: list[str | None],
    model: ModelSpec,
    specs: list[TrainingSpec],
    capacity: Capacity,
) -> str:
    """Return the strategies that fit and the largest term of the first one; or the nearest one, with a remedy.

    `faults` are the reasons why strategies cannot run on any capacity, None for those that can.
    """
    fitting = [entry for entry in entries if entry["fits"]]
    of = f"of {len(entries)} strateg{'ies' if len(entries) > 1 else 'y'}"
    if fitting:
        first = fitting[0]
        names = ", ".join(entry["strategy"] for entry in fitting)
        text = f"{len(fitting)} {of}: {names}. {_largest(first)} with {first['strategy']}"
        if len(fitting) > 1:
            text += ", which of these shards and moves least"
        return line("fits", text)
    index = nearest(entries, faults, capacity)
    entry = entries[index]
    text = f"none {of}. {entry['strategy']} comes nearest: {entry['why']}. {_largest(entry)}"
    return line("fits", f"{text}; {remedy(model, specs[index], capacity)}")


def reasons(entries: list[dict[str, Any]], faults: list[str | None], capacity: Capacity) -> list[str]:
    """Return a line for each reason, beside a GPU's memory, why strategies do not fit."""
    result: dict[str, list[str]] = {}
    for entry, fault in zip(entries, faults, strict=True):
        gpu, host = entry["gpu"]["total"], with_headroom(entry["host"]["needed"])
        if fault:
            result.setdefault(fault, []).append(entry["strategy"])
        elif host > capacity.host and (capacity.gpu is None or gpu <= capacity.gpu):
            why = f"more than a host's {gib(capacity.host)}, headroom included"
            result.setdefault(why, []).append(f"{entry['strategy']} ({gib(host)})")
    return [line("not", f"{', '.join(names)}: {why}") for why, names in result.items()]


def inference_lines(entries: list[dict[str, Any]]) -> list[str]:
    """Return the lines on evaluation and generation, if requested."""
    evaluation, generation = entries[0]["evaluation"], entries[0]["generation"]
    lines = []
    if evaluation:
        fitting = [entry["strategy"] for entry in entries if entry["evaluation"]["fits_in_training"]]
        names = "every strategy" if len(fitting) == len(entries) else ", ".join(fitting) or "no strategy"
        text = f"{evaluation['batch']:,} x {evaluation['length']:,} tokens: forward pass {gib(evaluation['working'])}"
        lines.append(line("evaluation", f"{text}; {_alone(evaluation)}; while training it fits with {names}"))
    if generation:
        text = (
            f"{generation['batch']:,} x ({generation['prompt']:,} + {generation['answer']:,}) tokens: key-value cache "
            f"{gib(generation['cache'])}, at the peak {gib(generation['working'])} more"
        )
        lines.append(line("generation", f"{text}; {_alone(generation)}"))
    return lines


def _alone(entry: dict[str, Any]) -> str:
    fits = "fits" if entry["fits"] else "does not fit"
    return f"the merged model alone, {gib(entry['weights'])} of weights, {fits} with {gib(entry['total'])}"


def line(label: str, text: str) -> str:
    """Return a text after its label, in lines of at most WIDTH columns."""
    return textwrap.fill(
        printable(text),
        WIDTH,
        initial_indent=f"{label:<{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_on_hyphens=False,
    )


def _largest(entry: dict[str, Any]) -> str:
    """Return a sentence on the largest term of an entry."""
    gpu, name = entry["gpu"], entry["dominates"]
    return f"{name.replace('_', ' ').capitalize()} are the most, {gib(gpu[name])} of {gib(gpu['total'])}"
