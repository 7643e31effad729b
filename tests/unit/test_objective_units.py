"""An objective of pairs, whose two terms have their own units: the same loss, gradient and metrics in any split of a
global batch; its refusals, and what it adds to memory and cost."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TINY_CONFIG
from datasets import Dataset
from test_cost import FOUR_NODES, LLAMA
from training_plan import training_plan

from zerolora.config.file import load
from zerolora.data.packing_plan import PackingPlan
from zerolora.errors import UserError
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.cost import step_seconds, useful_flops
from zerolora.strategies import STRATEGIES
from zerolora.train.feed import Batches, collate
from zerolora.train.loop import Totals
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.objective import AddedMemory, Objective, Values, by_sequence

PAIRS, TOKENS = 8, 30
SIDES = ("chosen", "rejected")


class Preference(Objective):
    """-log sigmoid of the difference of the answers' losses, plus the loss of the chosen one."""

    def sequences(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"input_ids": row[side], "labels": row[side], "source": row["source"]} for side in SIDES]

    def values(self, losses: torch.Tensor, batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        chosen, rejected = by_sequence(losses, batch).view(-1, 2).T
        sources, of_chosen = batch["sources"][::2], batch["sequence"] % 2 == 0
        return {
            "preference": Values(torch.nn.functional.softplus(chosen - rejected), sources),
            "sft": Values(losses[of_chosen], batch["source"][of_chosen]),
            "accuracy": Values((chosen < rejected).double(), sources),
        }


PREFERENCE = Preference(
    name="preference",
    order=1,
    units={"pair": None, "chosen token": "chosen_supervised"},
    terms={"preference": "pair", "sft": "chosen token"},
    metrics={"accuracy": "pair"},
    columns=SIDES,
    best="accuracy",
    highest=True,
)


def test_a_mean_of_rows_weighs_each_row_alike() -> None:
    objective = OBJECTIVES["sft"].configured({"mean": "row"})
    batch = {"sequence": torch.tensor([0, 0, 0, 1]), "sources": torch.tensor([4, 5])}
    values = objective.values(torch.tensor([1.0, 2.0, 3.0, 6.0]), batch, {})
    assert (values["loss"].each.tolist(), values["loss"].source.tolist()) == ([2.0, 6.0], [4, 5])
    assert (objective.units, objective.loss_unit, objective.by_token) == ({"row": None}, "per row", False)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Return pairs of two sources and several lengths; registers the objective of pairs as `sft`."""
    monkeypatch.setitem(OBJECTIVES, "sft", PREFERENCE)
    draw = np.random.default_rng(0)
    sides = {side: [draw.integers(0, TOKENS, 3 + (each * k) % 5).tolist() for each in range(PAIRS)]
             for k, side in enumerate(SIDES, 1)}  # fmt: skip
    supervised = {side: [len(ids) - 1 for ids in sides[side]] for side in SIDES}
    return Dataset.from_dict(
        {
            **sides,
            "length": [len(one) + len(other) for one, other in zip(*sides.values(), strict=True)],
            "supervised": [one + other for one, other in zip(*supervised.values(), strict=True)],
            "chosen_supervised": supervised["chosen"],
            "source": [each % 2 for each in range(PAIRS)],
        }
    )


def trained(rows: Dataset, together: int, ranks: int, micro_batch: int) -> tuple[Totals, torch.Tensor]:
    """Return totals and gradient of the first step, over all ranks; the model is a table of logits."""
    packing = PackingPlan(np.array([*range(0, PAIRS, together), PAIRS]), np.arange(PAIRS, dtype=np.int32))
    plan = training_plan(global_batch=PAIRS // together, micro_batch=micro_batch)
    table = torch.nn.Parameter(torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)))
    sums, totals = torch.zeros(()), None
    for rank in range(ranks):
        micro_batches, units = Batches(rows, packing, plan, rank, ranks).at(0)
        totals = Totals(PREFERENCE, units, 2, torch.device("cpu"))
        for micro_batch_rows in micro_batches:
            batch = collate(micro_batch_rows, True, torch.device("cpu"))
            logits = table[batch["input_ids"].flatten()[batch["supervised"]]]
            losses = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")
            totals.weighted(totals.add(PREFERENCE.values(losses, batch, {})), 1).backward()
        sums = sums + totals.sums
    assert totals is not None and table.grad is not None
    totals.sums = sums
    return totals, table.grad


@pytest.mark.parametrize(("together", "ranks", "micro_batch"), [(1, 2, 2), (1, 1, 8), (2, 2, 1), (4, 1, 1)])
def test_terms_are_means_over_their_units_in_any_split(
    pairs: Dataset, together: int, ranks: int, micro_batch: int
) -> None:
    expected, of_expected = trained(pairs, 1, 1, 1)
    assert expected.units == {"pair": PAIRS, "chosen token": sum(pairs["chosen_supervised"])}
    assert expected.loss == expected.means["preference"] + expected.means["sft"]
    assert 0 < expected.metrics["accuracy"] < 1
    actual, gradient = trained(pairs, together, ranks, micro_batch)
    assert actual.means == pytest.approx(expected.means, rel=1e-5)
    assert actual.by_source.tolist() == pytest.approx(expected.by_source.tolist(), rel=1e-5)
    assert actual.by_source.sum().item() / PAIRS == pytest.approx(actual.loss, rel=1e-5)
    assert torch.allclose(gradient, of_expected, rtol=1e-5, atol=1e-7)


def test_rows_without_its_columns_are_refused(pairs: Dataset) -> None:
    packing = PackingPlan(np.arange(PAIRS + 1), np.arange(PAIRS, dtype=np.int32))
    with pytest.raises(UserError, match=r"which reads chosen and chosen_supervised of each row"):
        Batches(pairs.remove_columns(["chosen", "chosen_supervised"]), packing, training_plan(), 0, 1)


def test_objective_memory_is_in_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model_spec(ROOT / "config/recipes/models/llama-3-8b.json")
    plain = TrainingSpec("zero2", LoraMethod(), 1, 8, 2, 4, 1024, True, "sdpa", "bf16", loss="fused", reserve=0)
    monkeypatch.setattr(Preference, "memory", lambda *_: AddedMemory(activations=1000, states=100, host=10))
    before, after = predict(model, plain), predict(model, replace(plain, objective=PREFERENCE))
    added = {name: after.phases[name] - before.phases[name] for name in ("forward", "loss", "backward", "optimizer")}
    assert added == {"forward": 100, "loss": 1100, "backward": 1100, "optimizer": 100}
    assert after.host["total"] - before.host["total"] == 10 * 8


def test_objective_memory_gets_supervised_tokens_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preference, "memory", lambda _, supervised, trained: AddedMemory(supervised, trained))
    plain = TrainingSpec("zero2", LoraMethod(), 1, 8, 2, 4, 1024, True, "sdpa", "bf16", objective=PREFERENCE)
    assert replace(plain, logits=100).added_by_objective(7) == AddedMemory(200, 7)
    assert plain.added_by_objective(7) == AddedMemory(2048, 7)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_extra_forward_pass_is_in_the_cost(strategy: str) -> None:
    work = replace(LLAMA, checkpointing=False)
    plain, before = (
        step_seconds(each, STRATEGIES[strategy], FOUR_NODES) for each in (work, replace(work, forwards_before=1))
    )
    assert before.forward == 2 * plain.forward
    assert before.backward == plain.backward
    gathers = [name for name in plain.moved if name.startswith("all_gather weights")]
    assert gathers == ["all_gather weights"] * (STRATEGIES[strategy].stage == 3)
    for name, sent in plain.moved.items():
        ratio = before.moved[name] / sent
        assert 1.45 < ratio < 1.6 if name in gathers else ratio == 1
    more = useful_flops(replace(work, forwards_before=1))
    assert more["supervised_token"] == 1.5 * useful_flops(work)["supervised_token"]


def test_sequence_parallel_is_refused_for_whole_row_losses(tmp_path: Path, pairs: Dataset) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    config["train"] |= {"ranks_per_node": 2, "sequence_parallel": 2}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=r"train\.sequence_parallel: 2 with objective sft, whose loss needs whole rows"):
        load(path)
