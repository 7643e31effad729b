"""The preference objectives: the same loss, gradient and metrics in any split of a global batch; the first step's
values; KTO's mismatched sequences; the config's rules."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import torch
import yaml
from conftest import TINY_CONFIG
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from training_plan import training_plan

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.data.packing_plan import PackingPlan
from zerolora.errors import UserError
from zerolora.train.feed import Batches, Feed, PackedRow, collate, prepared
from zerolora.train.loop import Totals
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.mismatched import mismatched, partners
from zerolora.train.objectives.objective import Objective

ROWS, TOKENS = 12, 30
CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo without SFT": {"sft_weight": 0.0},
    "dpo hinge": {"loss": "hinge"},
    "dpo robust": {"loss": "robust", "label_smoothing": 0.1},
    "dpo length-normalized": {"loss": "length_normalized", "beta": 2.0},
    "ipo": {},
    "ipo with SFT": {"sft_weight": 0.5},
    "simpo": {},
    "simpo with SFT": {"sft_weight": 0.5},
    "orpo": {},
    "orpo with the prompt": {"prompt_loss": True},
    "kto": {},
    "kto weighted": {"desirable_weight": 2.0, "undesirable_weight": 0.5},
}


def configured(variant: str) -> tuple[Any, Objective]:
    """Return a plan's settings and the objective of a variant."""
    name = variant.partition(" ")[0]
    plan = training_plan(objective=name, **{name: VARIANTS[variant]})
    return plan, OBJECTIVES[name].of(plan)


def rows_of(objective: Objective, count: int = ROWS) -> Dataset:
    of = preference_rows.texts(count, TOKENS)
    rows = preference_rows.pairs(of) if objective.rows == "pairs" else preference_rows.labelled(of)
    return prepared(rows, objective)


def losses_of(table: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return the losses of supervised tokens: the model is a table of logits by token and position."""
    positions = batch["position_ids"] if "position_ids" in batch else batch["attention_mask"].cumsum(1) - 1
    logits = table[batch["input_ids"].flatten(), positions.flatten()][batch["supervised"]]
    return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")


def trained(
    variant: str, together: int, ranks: int, micro_batch: int, packed: bool, places: int | None = None
) -> tuple[dict[str, float], Totals, torch.Tensor]:
    """Return the means before the step, totals and gradient of the first step, over all ranks; like a last global
    batch, it may have more `places` than rows."""
    plan, objective = configured(variant)
    rows = rows_of(objective)
    packing = PackingPlan(np.array([*range(0, ROWS, together), ROWS]), np.arange(ROWS, dtype=np.int32))
    plan = plan.model_copy(update={"global_batch": ROWS // together, "micro_batch": micro_batch})
    table = torch.nn.Parameter(torch.randn(TOKENS, 40, TOKENS, generator=torch.Generator().manual_seed(0)))
    feeds = [Feed(Batches(rows, packing, plan, rank, ranks, packed), packed, CPU) for rank in range(ranks)]
    for feed in feeds:
        feed.batches.global_batch = places or ROWS // together  # before the first step is assigned
    units = feeds[0].at(0)[1]
    before = dict.fromkeys(objective.before, 0.0)
    for feed in feeds:
        for packed_rows in itertools.compress(feed.batches.at(0, before=True)[0], feed.batches.counts_at(0)):
            with torch.no_grad():
                batch = collate(packed_rows, packed, CPU)
                for name, items in objective.values_before(losses_of(table, batch), batch).items():
                    before[name] += float(items.sum()) / units[objective.before[name]]
    totals = Totals(objective, units, 2, CPU)
    for feed in feeds:
        for packed_rows, counts in zip(feed.at(0)[0], feed.batches.counts_at(0), strict=True):
            batch = collate(packed_rows, packed, CPU)
            values = objective.values(losses_of(table, batch), batch, before)
            totals.weighted(totals.add(values, counts), float(counts)).backward()
    assert table.grad is not None
    return before, totals, table.grad


SPLITS: list[tuple[Any, ...]] = [
    *((1, 1, 12, True), (1, 2, 3, False), (1, 4, 1, True), (2, 3, 1, True), (3, 2, 2, True), (12, 1, 1, True)),
    *((1, 4, 2, False, 24), (1, 5, 1, True, 15), (2, 4, 1, True, 8)),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_split_gives_the_same_loss_gradient_and_metrics(variant: str) -> None:
    before, expected, of_expected = trained(variant, 1, 1, 1, False)
    assert math.isfinite(expected.loss) and of_expected.abs().max() > 1e-3
    assert len(expected.metrics) == len(expected.objective.metrics)
    for split in SPLITS:
        also_before, actual, gradient = trained(variant, *split)
        assert actual.units == expected.units
        assert also_before == pytest.approx(before, rel=1e-6)
        assert actual.means == pytest.approx(expected.means, rel=1e-5, abs=1e-9)
        assert actual.by_source.tolist() == pytest.approx(expected.by_source.tolist(), rel=1e-5)
        assert torch.allclose(gradient, of_expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", ["dpo", "ipo", "kto"])
def test_reference_columns_are_required(variant: str) -> None:
    plan, objective = configured(variant)
    of = preference_rows.texts(ROWS, TOKENS)
    bare = preference_rows.pairs(of, False) if objective.rows == "pairs" else preference_rows.labelled(of, False)
    packing = PackingPlan(np.arange(ROWS + 1), np.arange(ROWS, dtype=np.int32))
    with pytest.raises(UserError, match=r"which reads reference.* of each row.* add --reference"):
        Batches(prepared(bare, objective), packing, plan, 0, 1)


@pytest.mark.parametrize(
    ("of", "objective"), [("pairs", "sft"), ("labelled", "sft"), ("pairs", "kto"), ("labelled", "dpo")]
)
def test_rows_of_another_kind_are_refused(of: str, objective: str) -> None:
    rows = getattr(preference_rows, of)(preference_rows.texts(ROWS, TOKENS))
    packing = PackingPlan(np.arange(ROWS + 1), np.arange(ROWS, dtype=np.int32))
    with pytest.raises(UserError, match=rf"is {objective}, which learns from .*, but the prepared rows are {of};"):
        Batches(rows, packing, training_plan(objective=objective), 0, 1)


def values_at_start(variant: str) -> tuple[Totals, dict[str, float]]:
    """Return totals and means of a batch whose reference is the model itself."""
    _, objective = configured(variant)
    rows = rows_of(objective)
    table = torch.randn(TOKENS, 40, TOKENS, generator=torch.Generator().manual_seed(0))
    packed_rows: list[PackedRow] = [[each] for row in rows for each in objective.sequences(row)]
    batch = collate(packed_rows, False, CPU)
    losses = losses_of(table, batch)
    batch["numbers"]["reference"] = (
        -torch.zeros(len(packed_rows)).double().index_add(0, batch["sequence"], losses.double())
    )
    units = {unit: int(np.sum(rows[column])) if column else ROWS for unit, column in objective.units.items()}
    totals = Totals(objective, units, 2, CPU)
    totals.add(objective.values(losses, batch, dict.fromkeys(objective.before, 0.0)))
    return totals, {"nll": float(losses[batch["sequence"] % 2 == 0].mean())}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("dpo without SFT", math.log(2)),
        ("dpo hinge", 1.0),
        ("dpo robust", math.log(2)),
        ("dpo length-normalized", math.log(2)),
        ("ipo", 25.0),
        ("kto", 0.5),
    ],
)
def test_loss_of_an_unchanged_model(variant: str, expected: float) -> None:
    totals, others = values_at_start(variant)
    sft = others["nll"] if "sft" in totals.objective.terms else 0.0
    assert totals.loss == pytest.approx(expected + sft, rel=1e-6)
    assert all(abs(value) < 1e-9 for value in totals.metrics.values())


def values_of(variant: str, means: dict[str, float]) -> tuple[dict[str, Any], torch.Tensor, dict[str, Any]]:
    """Return terms and metrics of all rows, the losses of their supervised tokens, and the batch."""
    _, objective = configured(variant)
    table = torch.randn(TOKENS, 40, TOKENS, generator=torch.Generator().manual_seed(0))
    batch = collate([objective.sequences(row) for row in rows_of(objective)], True, CPU)
    losses = losses_of(table, batch)
    return objective.values(losses, batch, means), losses, batch


def test_a_negative_mean_change_counts_as_zero() -> None:
    (below, *_), (zero, *_), (above, *_) = (values_of("kto", {"kl": kl}) for kl in (-3.0, 0.0, 3.0))
    assert torch.equal(below["loss"].each, zero["loss"].each) and not torch.equal(above["loss"].each, zero["loss"].each)
    assert below["kl"].each.unique().tolist() == [0.0] and above["kl"].each.unique().tolist() == [3.0]


@pytest.mark.parametrize(("variant", "weight"), [("dpo", 1.0), ("ipo with SFT", 0.5), ("simpo with SFT", 0.5)])
def test_the_sft_term_has_its_weight(variant: str, weight: float) -> None:
    values, losses, batch = values_of(variant, {})
    assert torch.equal(values["sft"].each, weight * losses * (batch["sequence"] % 2 == 0))


def test_the_prompt_is_in_the_sft_term_alone() -> None:
    whole, *_ = values_of("orpo with the prompt", {})
    answers, *_ = values_of("orpo", {})
    rows = rows_of(OBJECTIVES["orpo"])
    assert int((whole["sft"].each != 0).sum()) == sum(len(row["input_ids"]) - 1 for row in rows)
    assert int((answers["sft"].each != 0).sum()) == sum(rows["chosen_supervised"])
    assert torch.allclose(whole["preference"].each, answers["preference"].each, rtol=1e-9)


def test_odds_are_exact_for_likely_and_unlikely_answers() -> None:
    from zerolora.train.objectives.orpo import _log_odds

    x = torch.tensor([-1e-12, -1e-3, -0.7, -5.0, -800.0, 0.0], dtype=torch.float64, requires_grad=True)
    odds = _log_odds(x)
    exact = [math.log(1e12), -1e-3 - math.log(-math.expm1(-1e-3)), -0.7 - math.log(1 - math.exp(-0.7))]
    assert odds[:3].tolist() == pytest.approx(exact, rel=1e-9)
    assert odds[4].item() == -800.0
    odds.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and odds.isfinite().all()


def test_terms_follow_the_weight_of_the_sft_term() -> None:
    assert {*OBJECTIVES["dpo"].terms} == {"preference", "sft"} and OBJECTIVES["dpo"].loss_unit == ""
    assert {*configured("dpo without SFT")[1].terms} == {"preference"}
    assert {*OBJECTIVES["simpo"].terms} == {"preference"} and OBJECTIVES["simpo"].loss_unit == "per pair"
    assert {*configured("simpo with SFT")[1].terms} == {"preference", "sft"}


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
@settings(max_examples=300, deadline=None)
def test_partner_is_the_last_row_before_with_another_prompt(prompts: list[int]) -> None:
    hashes = np.array(prompts, dtype=np.int64)
    if len({*prompts}) == 1:
        with pytest.raises(UserError, match=r"all \d+ labelled rows of a split have the same prompt"):
            partners(hashes)
        return
    expected = []
    for row in range(len(prompts)):
        other = (row - 1) % len(prompts)
        while prompts[other] == prompts[row]:
            other = (other - 1) % len(prompts)
        expected.append(other)
    assert partners(hashes).tolist() == expected


def test_an_empty_split_has_no_partners() -> None:
    assert partners(np.zeros(0, np.int64)).tolist() == []


def test_a_mismatched_sequence_has_the_prompt_and_the_other_answer() -> None:
    row = {"input_ids": [1, 2, 3], "labels": [-100, -100, 3], "prompt": 2}
    other = {"input_ids": [7, 8, 9, 5], "labels": [-100, 8, 9, -100], "prompt": 1}
    for longest, count in ((9, 5), (4, 4)):
        made = {name: each.tolist() for name, each in mismatched(row, other, longest).items()}
        assert made == {"input_ids": [1, 2, 8, 9, 5][:count], "labels": [-100, -100, 8, 9, -100][:count]}


def test_the_pass_before_sees_mismatched_sequences_and_the_step_its_own() -> None:
    plan, objective = configured("kto")
    rows = rows_of(objective)
    packing = PackingPlan(np.arange(ROWS + 1), np.arange(ROWS, dtype=np.int32))
    batches = Batches(rows, packing, plan, 0, 1)
    own, before = (batches.at(0, before=each)[0][0] for each in (False, True))
    longest = max(rows["length"])
    for packed, mixed in zip(own, before, strict=True):
        (number,) = [n for n, row in enumerate(rows) if row["input_ids"] == packed[0]["input_ids"].tolist()]
        other = rows[int(rows["partner"][number])]
        assert rows["prompt_hash"][number] != other["prompt_hash"]
        reference = {"reference": rows["reference_mismatched"][number]}
        np.testing.assert_equal(mixed[0], {**packed[0], **mismatched(rows[number], other, longest), **reference})


def test_sequences_of_a_pair_are_apart_without_packing() -> None:
    _, objective = configured("dpo")
    row = rows_of(objective)[0]
    batch = collate([objective.sequences(row)], False, CPU)
    assert batch["input_ids"].shape == (2, max(len(row["input_ids"]), len(row["rejected_input_ids"])))
    assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]), len(row["rejected_input_ids"])]
    assert batch["sequence"].unique().tolist() == [0, 1]


def loaded(tmp_path: Path, **train: Any) -> Any:
    config = copy.deepcopy(TINY_CONFIG)
    config["train"] |= train
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return resolve(load(path)).runs["default"]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"objective": "dpo", "lora": {"dropout": 0.1}}, r"train\.lora\.dropout: 0\.1 with objective dpo, whose"),
        ({"objective": "kto", "method": "vera", "vera": {"dropout": 0.1}}, r"train\.vera\.dropout: 0\.1 with obj"),
        ({"objective": "ipo", "neftune_alpha": 5.0}, r"train\.neftune_alpha: 5\.0 with objective ipo, whose"),
        (
            {"objective": "kto", "kto": {"desirable_weight": 0.0, "undesirable_weight": 0.0}},
            r"train\.kto\.desirable_weight: 0\.0, and so is undesirable_weight",
        ),
        ({"objective": "dpo", "dpo": {"loss": "robust"}}, r"train\.dpo\.label_smoothing: 0\.0 with loss robust"),
        ({"objective": "dpo", "dpo": {"label_smoothing": 0.1}}, r"label_smoothing: 0\.1 with loss sigmoid, which has"),
        ({"objective": "dpo", "dpo": {"loss": "robust", "label_smoothing": 0.5}}, r"less than 0\.5"),
        ({"objective": "orpo", "orpo": {"sft_weight": 1.0}}, r"train\.orpo\.sft_weight"),
    ],
)
def test_conflicting_settings_are_refused(tmp_path: Path, train: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, **train)


def test_dropout_without_a_reference_is_allowed(tmp_path: Path) -> None:
    run = loaded(tmp_path, objective="simpo", lora={"dropout": 0.1}, neftune_alpha=5.0, micro_batch=1)
    assert run.train.lora.dropout == 0.1


@pytest.mark.parametrize(
    ("objective", "rate"), [("sft", 2e-4), ("dpo", 5e-6), ("ipo", 5e-6), ("simpo", 5e-6), ("orpo", 5e-5), ("kto", 5e-6)]
)
def test_default_learning_rate_is_that_of_the_objective(tmp_path: Path, objective: str, rate: float) -> None:
    assert loaded(tmp_path, objective=objective, learning_rate=None).train.learning_rate == rate
    assert loaded(tmp_path, objective=objective, learning_rate=3e-3).train.learning_rate == 3e-3


def test_only_the_section_of_the_objective_changes_a_run(tmp_path: Path) -> None:
    plain = loaded(tmp_path, objective="dpo")
    assert loaded(tmp_path, objective="dpo", ipo={"beta": 0.5}, kto={"desirable_weight": 2.0}) == plain
    other = loaded(tmp_path, objective="dpo", dpo={"beta": 0.5})
    assert other.train.dpo.beta == 0.5 and other.report.objective_settings == {"beta": 0.5}
    assert other.estimate == plain.estimate and other.render == plain.render
    whole = loaded(tmp_path, objective="orpo", orpo={"prompt_loss": True, "beta": 0.5})
    assert whole.estimate.objective_settings == {"prompt_loss": True}
