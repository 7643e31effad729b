"""What is chosen for ten clusters, and why an expert would choose it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import ROOT
from test_choice import MODELS, rows_of, settings_of

from zerolora.memory.predict import predict
from zerolora.memory.training_spec import RowStatistics, TrainingSpec
from zerolora.methods.registry import create
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.candidates import Candidate, Planning, step_work
from zerolora.planner.choice import choose
from zerolora.planner.cost import step_seconds
from zerolora.planner.hardware import GPUS, named
from zerolora.planner.run_hardware import link_of
from zerolora.strategies import STRATEGIES
from zerolora.units import GIB

sys.path.append(str(ROOT / "docs"))
import predictions

# Llama-3.1-405B's config.json, as that of 70B with these values.
LARGEST = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "num_hidden_layers": 126,
}
LORA: dict[str, Any] = {"name": "lora", "settings": {"r": 16}}
QLORA: dict[str, Any] = {"name": "qlora", "settings": {"r": 16}}
FULL: dict[str, Any] = {"name": "full", "settings": {}}


def chosen(
    folder: Path,
    model: str,
    gpu: str,
    gpus: int,
    method: dict[str, Any],
    length: int = 4096,
    nodes: int = 1,
    host: int = 1024,
    network: str = "infiniband-ndr",
    adapters: int = 1,
    link: str | None = None,
) -> Candidate:
    """Return the choice for `nodes` of `gpus` GPUs with `host` GiB each, with two rows a GPU in a step."""
    path = MODELS / f"{model}.json"
    if model == "llama-3.1-405b":
        path = folder / f"{model}.json"
        path.write_text(json.dumps(json.loads((MODELS / "llama-3-70b.json").read_text()) | LARGEST))
    precision = "bf16" if GPUS[gpu].supports_bf16 else "fp16"
    settings = settings_of(
        gpu_memory=GPUS[gpu].memory, compute_capability=GPUS[gpu].capability, host_memory=host * GIB, reserve=None,
        nodes=nodes, ranks_per_node=gpus, global_batch=2 * nodes * gpus, precision=precision, method=method,
    )  # fmt: skip
    rates = named(gpu, link or link_of(gpu), network, settings.precision, gpus, nodes, adapters)
    return choose(Planning(read_model_spec(path), settings, rows_of(length, packing=False), rates))[0]


@pytest.fixture
def choice(tmp_path: Path) -> Any:
    return lambda *arguments, **options: chosen(tmp_path, *arguments, **options)


def test_8b_on_one_card_of_24_gb(choice: Any) -> None:
    """16 GB of weights fit with checkpoints; in 4 bits without them, which is faster."""
    lora, qlora = (choice("llama-3-8b", "RTX-4090", 1, method, 2048, host=64) for method in (LORA, QLORA))
    assert lora.choice.strategy == qlora.choice.strategy == "ddp"
    assert lora.choice.activation_checkpointing and not qlora.choice.activation_checkpointing
    assert qlora.seconds < lora.seconds


def test_70b_in_4_bits_on_two_cards_of_24_gb(choice: Any) -> None:
    """19 GB of weights a card leave no room, so they are on the host: published with 107 GB (fsdp_qlora), here less."""
    actual = choice("llama-3-70b", "RTX-4090", 2, QLORA, 1024, host=128)
    assert actual.choice.strategy in ("zero3_offload", "fsdp_offload")
    assert actual.needed < 107e9


def test_70b_on_eight_cards_of_80_gb(choice: Any) -> None:
    """141 GB of weights are sharded; nothing need be offloaded."""
    assert choice("llama-3-70b", "A100-80GB-SXM", 8, LORA).choice.strategy in ("zero3", "fsdp")


def test_pcie_and_nvlink_differ(choice: Any) -> None:
    """Over PCIe a third of a step's time is gathers, and hiding them costs computation."""
    fast, slow = (choice("llama-3-70b", f"A100-80GB-{form}", 8, LORA) for form in ("SXM", "PCIe"))
    assert slow.seconds > 1.04 * fast.seconds
    assert slow.cost.hidden > 5 * fast.cost.hidden


def test_405b_on_four_nodes(choice: Any) -> None:
    """810 GB fit on no node, so all 32 GPUs share them, over InfiniBand."""
    actual = choice("llama-3.1-405b", "H100-SXM", 8, LORA, 2048, nodes=4, adapters=8, host=2048)
    assert actual.choice.strategy in ("zero3", "fsdp") and actual.choice.activation_checkpointing


def test_7b_on_a_t4(choice: Any) -> None:
    """Of 16 GB torch has 14.56 GiB: 7B fit in 4 bits; 15 GiB of weights do not, and are on the host. fp16 needs
    DeepSpeed's loss scale."""
    assert choice("llama-2-7b", "T4", 1, QLORA, 1024, host=25).choice.strategy == "zero0"
    assert choice("llama-3-8b", "T4", 1, LORA, 1024, host=64).layout.parameters == "cpu"


def test_7b_on_eight_v100(choice: Any) -> None:
    """32 GB hold it whole; 16 GB hold it sharded, without the checkpoints that a whole one would need."""
    assert choice("llama-2-7b", "V100-32GB", 8, LORA, 2048).choice.strategy == "zero0"
    small = choice("llama-2-7b", "V100-16GB", 8, LORA, 2048)
    assert small.choice.strategy == "zero3" and not small.choice.activation_checkpointing


def test_70b_on_two_nodes_at_100_gbit(choice: Any) -> None:
    """Weights stay inside a node: zero3 over both would send 260 GB a step."""
    actual = choice("llama-3-70b", "A100-80GB-SXM", 8, LORA, nodes=2, network="100gbe")
    assert actual.layout.within_node and actual.cost.between_nodes < 1e9


def test_8b_on_two_nodes_at_1_gbit(choice: Any) -> None:
    """Only the adapter's gradients cross the network, while the last micro-batch goes backward."""
    actual = choice("llama-3-8b", "A100-80GB-SXM", 8, LORA, nodes=2, network="1gbe")
    assert actual.choice.strategy == "ddp" and actual.cost.between_nodes < 0.2e9


def test_all_weights_of_8b_on_two_nodes_at_1_gbit(choice: Any) -> None:
    """Gradients and weights are 32 GB, so no strategy takes less than five minutes; the least is sent once a step."""
    actual = choice("llama-3-8b", "A100-80GB-SXM", 8, FULL, nodes=2, network="1gbe")
    assert actual.choice.accumulation == 1 and actual.cost.between_nodes < 32e9
    assert actual.cost.communication_network > 0.9 * actual.seconds


def test_published_steps_are_predicted_within_a_third() -> None:
    """And what 4-bit weights, PCIe and Ethernet cost in them."""
    ratios = [predictions.predicted_step(step) / step.seconds for step in predictions.PUBLISHED_STEPS]
    assert all(0.75 < ratio < 1.34 for ratio in ratios), ratios
    for lora, qlora in ((0, 1), (3, 4)):  # on an A100 and an L40
        assert ratios[qlora] == pytest.approx(ratios[lora], rel=0.03)


MEASURED = {"gpu_memory_qwen2.5-0.5b": 0.42, "gpu_memory_alone_qwen2.5-0.5b": 0.49, "gpu_memory_qwen2.5-7b": 0.67}
"""Median of predicted over measured seconds of a step on an H200."""


@pytest.mark.parametrize("name", MEASURED)
def test_small_steps_on_an_h200_keep_their_error(name: str) -> None:
    """The host's work between kernels, which the model leaves out, is most of a step of one row."""
    rows = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["measured"]["rows"]
    ratios = []
    for row in rows:
        if "step_seconds" in row:
            rates = named("H200", link_of("H200"), "infiniband-ndr", "bf16", row["ranks"], 1)
            spec = TrainingSpec(
                strategy=row["strategy"],
                method=create("lora", r=8),
                nodes=1,
                ranks_per_node=row["ranks"],
                micro_batch=row["micro_batch"],
                accumulation=1,
                length=row["length"],
                activation_checkpointing=row["checkpointing"],
                attention=row["attention"],
                precision="bf16",
                masked=row["masked"],
                loss=row["loss"],
            )
            model = read_model_spec(MODELS / f"{row['model']}.json")
            spec = replace(spec, buckets=predict(model, spec).buckets)
            statistics = RowStatistics(
                packing=False,
                longest_packed_row=row["length"],
                most_supervised=row["logits"],
                packed_rows=1,
                tokens=row["length"],
                supervised_tokens=row["logits"],
                mean_row_of_a_token=row["length"],
                validation_rows=0,
            )
            cost = step_seconds(step_work(model, spec, statistics), STRATEGIES[row["strategy"]], rates)
            ratios.append(cost.total / median(row["step_seconds"]))
    assert median(ratios) == pytest.approx(MEASURED[name], rel=0.02)
