"""Draws the figures and makes the tables of docs/choice.md and docs/scale.md from the project's models of memory and
time, when the site is built. All figures are predicted.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from module_table import ROOT

from zerolora.files import read_json
from zerolora.memory.method_options import method_of_options
from zerolora.memory.predict import Prediction, predict
from zerolora.memory.training_spec import RowStatistics, TrainingSpec
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import ModelSpec
from zerolora.planner import hardware as datasheets
from zerolora.planner.candidates import step_work
from zerolora.planner.cost import Cost, step_seconds
from zerolora.planner.run_hardware import link_of
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import StepWork
from zerolora.units import GIB

MARK = re.compile(r"(<!-- predicted: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#8172b3", "#ccb974", "#8c8c8c", "#dd8452", "#64b5cd")

GPU, NODE_LINK, NETWORK, GPUS, ADAPTERS = "H100-SXM", "nvlink4", "infiniband-ndr", 8, 8
LENGTH, RANK = 4096, 16
NODES = (1, 8, 64, 512)
SHARDING = ("ddp", "zero1", "zero2", "zero3", "zero3_hpz", "zero3_offload", "fsdp", "fsdp_hybrid")

# Failures of 16,384 H100 in 54 days of Llama 3's pre-training (arXiv 2407.21783, 3.3.4): 419 unplanned ones.
PUBLISHED_FAILURES, PUBLISHED_GPUS, PUBLISHED_HOURS = 419, 16_384, 54 * 24


FMS = "[fms-acceleration](https://github.com/foundation-model-stack/fms-acceleration/tree/main/scripts/benchmarks/refs)"
ETHERNET = "[Zhang](https://jingchaozhang.github.io/IB-vs-Ethernet-Fine-Tuning-at-Scale)"
ANSWER = "[fsdp_qlora](https://github.com/AnswerDotAI/fsdp_qlora/blob/main/benchmarks_03_2024.md)"


@dataclass(frozen=True)
class PublishedStep:
    """A step of a published training, with activation checkpointing and flash attention."""

    model: str
    method: str
    strategy: str
    gpu: str
    gpus: int
    rows: int
    """Rows of a GPU."""
    length: int
    seconds: float
    source: str
    nodes: int = 1
    network: float | None = None
    """Measured bytes/s between nodes."""


PUBLISHED_STEPS = [
    PublishedStep("mistral-7b", "lora", "ddp", "A100-80GB-PCIe", 1, 4, 4096, 4.51, FMS),
    PublishedStep("mistral-7b", "qlora", "ddp", "A100-80GB-PCIe", 1, 4, 4096, 4.66, FMS),
    PublishedStep("mistral-7b", "lora", "fsdp", "A100-80GB-PCIe", 2, 4, 4096, 4.79, FMS),
    PublishedStep("mistral-7b", "lora", "ddp", "L40S", 1, 2, 4096, 3.01, f"{FMS}, an L40"),
    PublishedStep("mistral-7b", "qlora", "ddp", "L40S", 1, 2, 4096, 3.25, f"{FMS}, an L40"),
    PublishedStep("mistral-7b", "lora", "fsdp", "L40S", 2, 2, 4096, 3.93, f"{FMS}, an L40"),
    PublishedStep("llama-2-7b", "lora", "ddp", "RTX-4090", 2, 4, 2048, 3.4, ANSWER),
    PublishedStep("llama-2-7b", "lora", "fsdp", "RTX-4090", 2, 6, 2048, 5.6, ANSWER),
    PublishedStep("llama-2-7b", "qlora", "fsdp", "RTX-4090", 2, 10, 2048, 9.1, ANSWER),
    PublishedStep("qwen2.5-7b", "full", "fsdp", "H100-SXM", 8, 2, 2048, 0.502, ETHERNET),
    PublishedStep("qwen2.5-7b", "full", "fsdp", "H100-SXM", 8, 2, 2048, 0.521, ETHERNET, 8, 392e9),
    PublishedStep("qwen2.5-7b", "full", "fsdp", "H100-SXM", 8, 2, 2048, 14.0, ETHERNET, 8, 3.19e9),
]
"""From steps or tokens/s of the sources. The form of the A100 is not published; its link is taken for PCIe."""


@dataclass(frozen=True)
class Planned:
    """One training with its predictions."""

    spec: TrainingSpec
    work: StepWork
    prediction: Prediction
    cost: Cost

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.spec.ranks * LENGTH / self.cost.total


@cache
def model_spec(name: str) -> ModelSpec:
    """Return the sizes of a model of config/recipes/models."""
    return read_model_spec(ROOT / f"config/recipes/models/{name}.json")


@cache
def planned(name: str, strategy: str, nodes: int, method: str = "lora") -> Planned:
    """Predict a training of a model under a strategy."""
    return predicted(name, strategy, method, datasheets.named(GPU, NODE_LINK, NETWORK, "bf16", GPUS, nodes, ADAPTERS))


def predicted_step(step: PublishedStep) -> float:
    """Return the predicted seconds of a published step."""
    rates = datasheets.named(step.gpu, link_of(step.gpu), NETWORK, "bf16", step.gpus, step.nodes)
    if step.network:
        rates = replace(rates, network=replace(rates.network, bandwidth=step.network))
    return predicted(step.model, step.strategy, step.method, rates, step.rows, step.length).cost.total


def predicted(
    name: str, strategy: str, method: str, hardware: datasheets.HardwareRates, rows: int = 1, length: int = LENGTH
) -> Planned:
    """Predict a training of rows of one length on given hardware."""
    model = model_spec(name)
    spec = TrainingSpec(
        strategy=strategy,
        method=method_of_options(method, **({"r": RANK} if method != "full" else {})),
        nodes=hardware.nodes,
        ranks_per_node=hardware.ranks_per_node,
        micro_batch=rows,
        accumulation=1,
        length=length,
        activation_checkpointing=True,
        attention="flash",
        precision="bf16",
        masked=False,
        loss="fused",
    )
    prediction = predict(model, spec)
    spec = replace(spec, buckets=prediction.buckets)
    statistics = RowStatistics(
        packing=False,
        longest_packed_row=length,
        most_supervised=length,
        packed_rows=1,
        tokens=length,
        supervised_tokens=length,
        mean_row_of_a_token=length,
        validation_rows=0,
    )
    work = step_work(model, spec, statistics)
    return Planned(spec, work, prediction, step_seconds(work, STRATEGIES[strategy], hardware))


# Tables


def table(head: Sequence[str], rows: Iterator[Sequence[str]] | list[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def communication_table() -> str:
    """Return the bytes that a rank sends in a step under each strategy, and the collectives."""

    def row(strategy: str) -> list[str]:
        sent = [planned("llama-3-8b", strategy, 2, method).cost.moved for method in ("lora", "full")]
        return [f"`{strategy}`", *(_bytes(sum(each.values())) for each in sent), ", ".join(sent[0])]

    return table(["strategy", "LoRA", "all weights", "collectives, for LoRA"], [row(name) for name in SHARDING])


def published_table() -> str:
    """Return the published steps beside the predictions."""

    def row(step: PublishedStep) -> list[str]:
        nodes = f"{step.nodes} x " if step.nodes > 1 else ""
        link = f", {step.network / 1e9:g} GB/s" if step.network else ""
        method = {"lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}[step.method]
        return [
            f"{step.model}, {method}, `{step.strategy}`",
            f"{nodes}{step.gpus} {step.gpu}{link}",
            f"{step.rows} x {step.length:,}",
            f"{step.seconds:.3g}",
            f"{predicted_step(step):.3g}",
            step.source,
        ]

    head = ["training", "GPUs", "rows of a GPU", "published, s", "predicted, s", "source"]
    return table(head, [row(step) for step in PUBLISHED_STEPS])


def scale_table(name: str, strategies: Sequence[str]) -> str:
    """Return memory, traffic and time of each strategy by the number of nodes."""

    def row(strategy: str, nodes: int) -> list[str]:
        here, one = planned(name, strategy, nodes), planned(name, strategy, 1)
        memory, host = here.prediction.gpu["total"], here.prediction.host["total"]
        return [
            f"`{strategy}`",
            str(nodes),
            f"{memory / GIB:.1f}" if memory <= datasheets.GPUS[GPU].memory else f"{memory / GIB:.1f}, does not fit",
            f"{host / GIB:.0f}",
            _bytes(sum(here.cost.moved.values())),
            f"{here.cost.total:.2f}",
            f"{here.cost.communication_network + here.cost.communication_node:.2f}",
            f"{here.tokens_per_second / nodes / one.tokens_per_second:.0%}",
        ]

    head = ["strategy", "nodes", "GPU, GiB", "host, GiB", "sent by a GPU a step", "step, s", "of it waiting, s"]
    return table([*head, "tokens/s of a node, over one node's"], [row(s, n) for s in strategies for n in NODES])


def around_table() -> str:
    """Return the quantities around a step by nodes: batch, files, reads, checkpoints, failures."""
    forked: Any = read_json(ROOT / "benchmarks/results/train_forked_ranks.json", "this script")
    node = forked["ranks"][str(GPUS)]["forked"]
    prediction = planned("llama-3-70b", "zero3_hpz", 1).prediction
    weights, checkpoint = prediction.disk["model"], prediction.disk["checkpoints"]

    def row(nodes: int) -> list[str]:
        gpus = nodes * GPUS
        hours = PUBLISHED_HOURS / PUBLISHED_FAILURES * PUBLISHED_GPUS / gpus
        return [
            str(nodes),
            f"{gpus:,}",
            f"{gpus * LENGTH / 1e6:.2f}M",
            f"{1e6 / gpus:,.0f}",
            f"{node['opened_files'] * nodes:,}",
            _bytes(weights * nodes),
            _bytes(checkpoint),
            f"{hours:,.0f} h",
        ]

    head = ["nodes", "GPUs", "tokens of a step", "steps in 1M rows", "files opened at start", "weights read"]
    return table([*head, "checkpoints kept", "a failure every"], [row(nodes) for nodes in NODES])


def _bytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"


TABLES: dict[str, Callable[[], str]] = {
    "communication": communication_table,
    "published": published_table,
    "scale_8b": lambda: scale_table("llama-3-8b", ("ddp", "zero2", "zero3", "fsdp", "fsdp_hybrid")),
    "scale_70b": lambda: scale_table("llama-3-70b", ("zero3", "zero3_hpz", "fsdp", "fsdp_hybrid")),
    "around": around_table,
}


# Figures

GROUPS = {
    "frozen weights": ("frozen_weights",),
    "trained weights and gradients": ("trained_weights", "gradients"),
    "optimizer states": ("master", "moments"),
    "gathered weights and buckets": ("buffers",),
    "logits": ("logits",),
    "activations": ("activations",),
    "reserve": ("reserve",),
}


def memory_figure() -> Figure:
    """Draw the memory of a GPU under each strategy, by term: LoRA and all weights."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, method, title in zip(panels, ("lora", "full"), (f"LoRA, r {RANK}", "all weights"), strict=True):
        left = [0.0] * len(SHARDING)
        for (label, terms), colour in zip(GROUPS.items(), COLOURS, strict=False):
            sizes = [
                sum(planned("llama-3-8b", name, 1, method).prediction.gpu.get(term, 0) for term in terms) / GIB
                for name in SHARDING
            ]
            axes.barh(SHARDING, sizes, left=left, label=label, color=colour)
            left = [before + size for before, size in zip(left, sizes, strict=True)]
        axes.axvline(datasheets.GPUS[GPU].memory / GIB, color="black", linestyle="--", linewidth=1)
        axes.invert_yaxis()
        axes.set_title(f"Llama-3-8B, {title}, one node of {GPUS} GPUs", fontsize=10, loc="left")
    panels[1].set_xlabel("predicted GiB of a GPU; dashed: 80 GiB")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def states_figure() -> Figure:
    """Draw the memory of the model's states by the number of GPUs: the curves of the ZeRO paper, and LoRA's."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    nodes = (1, 2, 4, 8, 16, 32, 64)
    for axes, method, title in zip(panels, ("full", "lora"), ("all weights", f"LoRA, r {RANK}"), strict=True):
        for name, colour in zip(("ddp", "zero1", "zero2", "zero3"), COLOURS, strict=False):
            states = [planned("llama-2-7b", name, each, method).prediction.gpu["model_states"] / GIB for each in nodes]
            axes.plot([each * GPUS for each in nodes], states, label=name, color=colour, marker="o", markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="GPUs")
        _plain_ticks(axes, [8, 64, 512])
        axes.set_title(f"Llama-2-7B, {title}", fontsize=10, loc="left")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("predicted GiB of states, a GPU")
    panels[0].legend(fontsize=8)
    return figure


def communication_figure() -> Figure:
    """Draw the bytes that a GPU sends in a step, for LoRA and all weights."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for shift, method, colour in ((-0.2, "lora", COLOURS[0]), (0.2, "full", COLOURS[6])):
        sizes = [sum(planned("llama-3-8b", name, 2, method).cost.moved.values()) / 1e9 for name in SHARDING]
        places = [index + shift for index in range(len(SHARDING))]
        axes.barh(
            places, sizes, height=0.4, label={"lora": f"LoRA, r {RANK}", "full": "all weights"}[method], color=colour
        )
    axes.set_yticks(range(len(SHARDING)), SHARDING)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="predicted GB that a GPU sends in a step")
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    axes.grid(alpha=0.3, axis="x")
    return figure


def scale_figure() -> Figure:
    """Draw the tokens/s of a node by the number of nodes, over those of one."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    nodes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    for axes, name, names in zip(
        panels,
        ("llama-3-8b", "llama-3-70b"),
        (("zero2", "zero3", "fsdp", "fsdp_hybrid"), ("zero3", "zero3_hpz", "fsdp", "fsdp_hybrid")),
        strict=True,
    ):
        for strategy in names:
            one = planned(name, strategy, 1).tokens_per_second
            shares = [planned(name, strategy, each).tokens_per_second / each / one for each in nodes]
            colour = COLOURS[("zero2", "zero3", "fsdp", "fsdp_hybrid", "zero3_hpz").index(strategy)]
            axes.plot(nodes, shares, label=strategy, color=colour, marker="o", markersize=3)
        axes.set(xscale="log", xlabel="nodes", ylim=(0, 1.05))
        _plain_ticks(axes, NODES)
        axes.set_title(name.title(), fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("predicted tokens/s of a node, over one's")
    return figure


def _plain_ticks(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


FIGURES: dict[str, Callable[[], Figure]] = {
    "memory": memory_figure,
    "states": states_figure,
    "communication": communication_figure,
    "scale": scale_figure,
}


def drawn(make: Callable[[], Figure]) -> str:
    """Return a figure as SVG with reproducible bytes."""
    with mpl.rc_context({"svg.hashsalt": "zerolora", "svg.fonttype": "none"}):
        file = io.StringIO()
        make().savefig(file, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def written(text: str) -> str:
    """Return a page with its predicted tables."""
    return MARK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)
