"""Every optimizer in real training: as its library's own, by every engine that can hold its states, and resumed."""

import functools
import importlib
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from safetensors.torch import load_file

from zerolora.config.settings import TrainingPlan, TrainSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.machine import cpu_matmul
from zerolora.model.manifest import located
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.zero_json import ZeroJson
from zerolora.strategies import STRATEGIES as REGISTERED
from zerolora.strategies.strategy import Target
from zerolora.train.adapter import adapt
from zerolora.train.checkpoint.store import FINISHED
from zerolora.train.engines.engine import plain, trained
from zerolora.train.feed import Batches, collate
from zerolora.train.loss import token_losses
from zerolora.train.rank import read_plan
from zerolora.train.schedule import learning_rate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Factors of 4,096 elements and more, which have 8-bit states.
WIDE: dict[str, Any] = {"lora": {"r": 128, "plus_ratio": 4.0}, "weight_decay": 0.1, "learning_rate": 1e-3}
ADAPTER = "adapter/adapter_model.safetensors"


def _own(name: str) -> Callable[..., Any]:
    """Return the library's own class, with what training leaves at its default."""
    from transformers.optimization import Adafactor

    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    classes: dict[str, Callable[..., Any]] = {
        "adamw_8bit": bitsandbytes.optim.AdamW8bit,
        "lion": bitsandbytes.optim.Lion,
        "adafactor": functools.partial(Adafactor, scale_parameter=False, relative_step=False),
    }
    return classes[name]


def by_hand(bench: Bench, plan: TrainingPlan, config: ZeroJson) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by a plain loop around the library's own optimizer; return the losses and the adapter."""
    model = adapt(located(bench.folder / "w/tiny.json"), plan, config, torch.device("cpu"))
    adapter = trained(model)
    second = [parameter for name, parameter in adapter.items() if "lora_B" in name]
    first = [parameter for name, parameter in adapter.items() if "lora_B" not in name]
    optimizer = _own(plan.optimizer)([{"params": first}, {"params": second}], lr=1.0, weight_decay=plan.weight_decay)
    packing = open_plan(bench.folder / "unpacked/train.arrow")
    batches = Batches(open_split(bench.folder / "data", "train"), packing, plan, 0, 1)
    losses = []
    model.train()
    for step in range(batches.steps):
        micro_batches, units = batches.at(step)
        tokens = units["supervised token"]
        total = 0.0
        for rows in micro_batches:
            loss = token_losses(model, collate(rows, False, torch.device("cpu"))).sum()
            (loss * (1 / tokens)).backward()
            total += float(loss.detach())
        losses.append(total / tokens)
        torch.nn.utils.clip_grad_norm_(adapter.values(), config.engine.gradient_clipping)
        for group, ratio in zip(optimizer.param_groups, (1.0, plan.lora.plus_ratio), strict=True):
            group["lr"] = ratio * learning_rate(plan, step, batches.steps)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {plain(name): parameter.detach() for name, parameter in adapter.items()}


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion", "adafactor"])
def test_20_steps_are_those_of_the_librarys_own(bench: Bench, optimizer: str) -> None:
    """On one rank, in fp32. test_methods_train.py has torch's own; test_optimizers.py has torchao's, to the bit."""
    train = WIDE | {"optimizer": optimizer, "ranks_per_node": 1, "max_steps": 20, "epochs": 5, "warmup_steps": 4}
    run = bench.run(f"own-{optimizer}", "ddp", **train)
    settings = TrainSettings.model_validate(bench.resolved("ddp", **train)["runs"]["default"]["train"])
    plan, config = read_plan(settings, run / "zero.json")
    assert plan.optimizer == optimizer
    before = torch.get_float32_matmul_precision()
    cpu_matmul.choose()  # the same kernels round the same
    losses, adapter = by_hand(bench, plan, config)
    torch.set_float32_matmul_precision(before)
    assert len(losses) == 20
    assert metrics(run)["losses"] == pytest.approx(losses, rel=1e-6)
    actual = load_file(run / ADAPTER)
    whole = {name.replace(".default.", "."): tensor for name, tensor in adapter.items()}
    assert actual.keys() == whole.keys()
    for name, tensor in whole.items():
        assert (actual[name] - tensor).abs().max() <= 1e-6, name


# By optimizer: strategies, the first as reference. An engine holds the states of a tensor whole (stage 0, ddp), as its
# shard (stage 3, fsdp), or in one vector with others (stage 2, offloaded or not). Optimizers of one class divide these
# between them. Quantized states have other blocks where ranks hold other parts.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "lion": ("zero0", "zero2_offload", "ddp"),
    "adamw_8bit": ("zero0", "zero3", "fsdp"),
    "adafactor": ("zero0", "ddp"),
    "adamw_torch_8bit": ("zero0", "zero3"),
    "adamw_torch_4bit": ("zero2", "ddp", "fsdp"),
}
SAME = {"lion": ("zero2_offload", "ddp"), "adafactor": ("ddp",)}
BLOCKS = {"adamw_8bit": 1e-4, "adamw_torch_8bit": 1e-4, "adamw_torch_4bit": 1e-3}
"""What other blocks change in the losses of four steps; half of it was seen."""


def test_every_class_of_optimizers_is_trained_on_every_engine_that_a_cpu_has_for_it() -> None:
    """An optimizer in the registry is in the table of this file; test_training.py trains adamw everywhere."""
    target = Target(device="cpu", precision="fp32", nodes=1, ranks_per_node=2, nvme=None)
    possible: dict[type, set[str]] = defaultdict(set)
    tested: dict[type, set[str]] = defaultdict(set)
    for name, optimizer in OPTIMIZERS.items():
        engines = {each.engine for each in REGISTERED.values() if not optimizer.conflict(each, target)}
        assert name in STRATEGIES or name == "adamw" or not engines, name
        possible[type(optimizer)] |= engines
        tested[type(optimizer)] |= {REGISTERED[each].engine for each in STRATEGIES.get(name, ())}
    del possible[type(OPTIMIZERS["adamw"])], tested[type(OPTIMIZERS["adamw"])]
    assert tested == possible


def of(bench: Bench, optimizer: str, strategy: str) -> Path:
    """Return a run of four steps on two ranks, made once."""
    name = f"{optimizer}-{strategy}"
    if not (bench.folder / name / "metrics").exists():
        bench.run(name, strategy, optimizer=optimizer, **WIDE, max_steps=4)
    return bench.folder / name


@pytest.mark.parametrize(
    ("optimizer", "strategy"), [(name, each) for name, strategies in STRATEGIES.items() for each in strategies[1:]]
)
def test_every_engine_that_can_learns_the_same(bench: Bench, optimizer: str, strategy: str) -> None:
    reference, run = of(bench, optimizer, STRATEGIES[optimizer][0]), of(bench, optimizer, strategy)
    same = strategy in SAME.get(optimizer, ())
    close = 1e-5 if same else BLOCKS[optimizer]
    actual, expected = metrics(run), metrics(reference)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=close)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=close)
    adapter, whole = load_file(run / ADAPTER), load_file(reference / ADAPTER)
    for name, tensor in whole.items():
        assert torch.allclose(adapter[name], tensor, rtol=1e-4, atol=1e-4 if same else 1e-2), name


def handed_on(bench: Bench, run: Path, name: str) -> None:
    """Give a run's checkpoints to another, as if it had been killed after its third step."""
    shutil.copytree(bench.folder / "checkpoints" / run.name, bench.folder / "checkpoints" / name)
    (folder,) = (bench.folder / "checkpoints" / name).glob("*/")
    (folder / "step-00000004.safetensors").unlink()
    (folder / FINISHED).unlink()


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("adamw_8bit", "zero3", "ddp"),
        ("adafactor", "ddp", "zero0"),
        ("adamw_torch_4bit", "fsdp", "zero2"),
    ],
)
def test_a_run_resumes_under_another_strategy(bench: Bench, optimizer: str, before: str, after: str) -> None:
    whole, name = of(bench, optimizer, before), f"{optimizer}-{before}-{after}"
    handed_on(bench, whole, name)
    result = bench.start(name, after, optimizer=optimizer, **WIDE, max_steps=4)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "resuming at step 3 of 4" in result.stderr
    close = 1e-5 if before == after else BLOCKS.get(optimizer, 1e-5)
    actual, expected = metrics(bench.folder / name), metrics(whole)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=close)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=close)


def test_torchaos_moments_resume_to_the_byte(bench: Bench) -> None:
    """Under the same strategy: a checkpoint's fp32 moments give the codes and scales back."""
    optimizer = "adamw_torch_8bit"
    whole = of(bench, optimizer, "zero3")
    handed_on(bench, whole, "moments-again")
    result = bench.start("moments-again", "zero3", optimizer=optimizer, **WIDE, max_steps=4)
    assert "resuming at step 3 of 4" in result.stderr, result.stderr[-2000:]
    assert (bench.folder / "moments-again" / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


def test_the_number_of_ranks_changes_nothing_for_lion(bench: Bench) -> None:
    """Four ranks of FSDP, some of which hold no row of a factor of rank 2, resumed by one."""
    small = WIDE | {"lora": {"r": 2}, "optimizer": "lion", "max_steps": 4}
    whole = bench.run("lion-four", "fsdp", ranks_per_node=4, **small)
    handed_on(bench, whole, "lion-one")
    result = bench.start("lion-one", "zero0", ranks_per_node=1, **small)
    assert "resuming at step 3 of 4" in result.stderr, result.stderr[-2000:]
    assert metrics(bench.folder / "lion-one")["losses"] == pytest.approx(metrics(whole)["losses"], rel=1e-5)


def test_another_optimizer_starts_over(bench: Bench) -> None:
    whole = of(bench, "lion", "zero0")
    handed_on(bench, whole, "other")
    result = bench.start("other", "zero0", optimizer="adamw", **WIDE, max_steps=1)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "train.optimizer was 'lion' and is 'adamw'" in result.stderr
    assert "training starts over" in result.stderr


def test_16_bits_train_and_resume(bench: Bench) -> None:
    """Stage 0 creates the states by a step of its own, which is undone."""
    optimizer = "adamw_torch_8bit"
    train = WIDE | {"optimizer": optimizer, "precision": "bf16", "max_steps": 4}
    whole = bench.run("bf16", "zero0", **train)
    assert metrics(whole)["losses"] == pytest.approx(metrics(of(bench, optimizer, "zero0"))["losses"], rel=2e-2)
    handed_on(bench, whole, "bf16-resumed")
    resumed = bench.run("bf16-resumed", "zero0", **train)
    assert metrics(resumed)["losses"] == pytest.approx(metrics(whole)["losses"], rel=1e-5)
