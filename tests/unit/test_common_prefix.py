"""Rows with a common prefix, computed once: losses and gradients of whole rows, unless model or settings forbid it."""

import itertools
from typing import Any

import pyarrow
import pytest
import torch
from preference_rows import pairs
from test_isolation import CPU, EACH_ROW, build, build_loud, with_adapter
from training_plan import training_plan

from zerolora.data import pack
from zerolora.data.prepared_rows import IGNORED
from zerolora.model.spec import FEWEST
from zerolora.train.common_prefix import Branches, Group, allowed, grouped
from zerolora.train.feed import collate, joined, prepared
from zerolora.train.isolation import shares_prefixes
from zerolora.train.loop import Totals
from zerolora.train.loss import token_losses
from zerolora.train.objectives import OBJECTIVES


def conversations() -> list[dict[str, Any]]:
    """Return rows of two data sources with a prefix each, and one row without; in one of them the prefix is trained."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(64, (count,), generator=draw).tolist()

    one, other = tokens(12), tokens(9)
    result = []
    for number, (prefix, rest) in enumerate([(one, 5), (other, 11), (one, 3), ([], 7), (other, 2), (one, 1)]):
        row = [*prefix, *tokens(rest)]
        first = 3 if number == 4 else max(1, len(prefix))
        result.append({"input_ids": row, "labels": [IGNORED] * first + row[first:], "source": number % 2})
    return result


def losses_and_gradients(model: Any, packed_rows: list[Any], prefixes: bool) -> tuple[Any, Any, dict[str, Any]]:
    model.zero_grad()
    batch = collate(packed_rows, True, CPU, prefixes)
    assert ("branches" in batch) == prefixes
    losses = token_losses(model, batch)
    (losses * (1 + batch["source"])).sum().backward()
    order = torch.argsort(batch["sequence"], stable=True)
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}
    return losses[order].detach(), batch["targets"][order], gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", [*sorted({*EACH_ROW} - {"lfm2"}), "opt"])
def test_losses_and_gradients_are_those_of_whole_rows(kind: str, checkpointing: bool) -> None:
    """A trained token of the prefix counts for each of its rows; rows of a packed row share a prefix too."""
    model = with_adapter(build_loud(kind, "flash")).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    rows = conversations()
    packed = [rows[:2], rows[2:5], rows[5:]]
    expected = losses_and_gradients(model, packed, prefixes=False)
    actual = losses_and_gradients(model, packed, prefixes=True)
    assert torch.equal(actual[1], expected[1])
    assert torch.allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, gradient in expected[2].items():
        assert torch.allclose(actual[2][name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item()), name


def test_a_prefix_is_computed_once_for_each_group() -> None:
    rows = conversations()
    batch = collate([rows[:3], rows[3:]], True, CPU, prefixes=True)
    assert batch["branches"] == [Branches(12, (5, 3, 1)), Branches(9, (11, 2)), Branches(0, (7,))]
    assert batch["lengths"] == [[12, 5, 3, 1, 9, 11, 2, 7]]
    assert batch["input_ids"].shape == batch["position_ids"].shape == (1, 12 + 9 + 9 + 13 + 7)
    assert batch["weights"].tolist() == [3] * 12 + [1] * 9 + [2] * 9 + [1] * 13 + [1] * 7
    assert batch["weights"].sum() == sum(len(row["input_ids"]) for row in rows)
    lengths = [12, 5, 3, 1, 9, 11, 2, 7]
    firsts = [0, 12, 12, 12, 0, 9, 9, 0]  # the position that each segment starts at
    positions = [first + at for first, length in zip(firsts, lengths, strict=True) for at in range(length)]
    assert batch["position_ids"][0].tolist() == positions
    assert batch["sequence"].tolist() == sorted(batch["sequence"].tolist())
    assert batch["sources"].tolist() == [row["source"] for row in rows]


def test_groups_compute_the_fewest_tokens() -> None:
    """Against all ways to cut the rows in order into groups."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(30):
        rows = [torch.randint(2, (14,), generator=draw).tolist() for _ in range(6)]
        rows = [[1] * (8 if number % 3 else 9) + row[: 3 + number] for number, row in enumerate(rows)]
        groups = grouped(rows)
        assert sorted(number for group in groups for number in group.rows) == list(range(6))
        order = sorted(range(6), key=rows.__getitem__)
        ways = (
            [order[start:end] for start, end in itertools.pairwise((0, *cuts, 6))]
            for count in range(6)
            for cuts in itertools.combinations(range(1, 6), count)
        )
        fewest = min(sum(computed([rows[number] for number in part]) for part in way) for way in ways)
        assert sum(computed([rows[number] for number in group.rows]) for group in groups) == fewest
        for prefix, members in groups:
            assert len({tuple(rows[number][:prefix]) for number in members}) == 1
            assert all(len(rows[number]) > prefix for number in members)


def computed(rows: list[list[int]]) -> int:
    """Return the tokens computed of rows in a group."""
    most = min(map(len, rows)) - 1
    prefix = next((at for at in range(most) if len({row[at] for row in rows}) > 1), most)
    saved = (len(rows) - 1) * prefix if prefix >= FEWEST else 0
    return sum(map(len, rows)) - saved


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1] * 20], [Group(0, (0,))]),
        ([[1] * 20, [1] * 20], [Group(19, (0, 1))]),  # equal rows: a token is left of each
        ([[1] * FEWEST + [2], [1] * FEWEST + [3]], [Group(FEWEST, (0, 1))]),
        ([[1] * (FEWEST - 1) + [2], [1] * (FEWEST - 1) + [3]], [Group(0, (0,)), Group(0, (1,))]),
        ([[1], [1] * 20], [Group(0, (0,)), Group(0, (1,))]),
        ([[], [1] * 20, [1] * 30], [Group(0, (0,)), Group(19, (1, 2))]),
    ],
)
def test_groups_of_few_rows(rows: list[list[int]], expected: list[Group]) -> None:
    assert grouped(rows) == expected


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_common_prefix_of_all_rows_is_a_statistic(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "CHUNK", chunk)
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3]]

    def of(rows: list[list[int]]) -> int:
        return pack.common_prefix(pyarrow.table({"input_ids": rows}))

    assert of(rows) == 3
    assert of(rows[:2]) == 4
    assert of([*rows, [1, 7]]) == 1
    assert of([*rows, [8]]) == 0
    assert of(rows[:1]) == 5


def test_batch_without_a_common_prefix_is_as_before() -> None:
    rows = conversations()[2:4]
    batch = collate([[row] for row in rows], False, CPU, prefixes=True)
    assert "branches" not in batch
    assert batch["attention_mask"].sum() == sum(len(row["input_ids"]) for row in rows)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*sorted({*EACH_ROW} - {"lfm2"}), "opt"])
def test_model_with_plain_attention_shares_prefixes(kind: str, precision: torch.dtype) -> None:
    model = build(kind, "flash", precision)
    assert shares_prefixes(model, model.config, CPU)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_model_that_mixes_tokens_elsewhere_shares_none(precision: torch.dtype) -> None:
    """lfm2's convolution sees the end of the row before; other attention sees all of it."""
    convolution = build("lfm2", "flash", precision)
    assert not shares_prefixes(convolution, convolution.config, CPU)
    masked = build("llama", "sdpa", precision)
    assert not shares_prefixes(masked, masked.config, CPU)


def test_check_sees_a_wrong_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel that aligns the first query with the first key, so that the rest of a row sees too little."""
    model = build("llama", "flash")
    monkeypatch.setattr("zerolora.train.attention.lengths.seen", lambda states: list(states.split([8, 7, 9] * 4, 2)))
    assert not shares_prefixes(model, model.config, CPU)


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        ({}, {}, True),
        ({}, {"classifier_dropout": 0.1}, True),
        ({"attention": "sdpa"}, {}, False),
        ({"sequence_parallel": 2}, {}, False),
        ({"neftune_alpha": 5.0}, {}, False),
        ({}, {"attention_dropout": 0.1}, False),
        ({}, {"router_jitter_noise": 0.01}, False),
    ],
)
def test_settings_and_models_that_allow_it(changes: dict[str, Any], config: dict[str, Any], expected: bool) -> None:
    model = build("llama", "flash")
    for name, value in config.items():
        setattr(model.config, name, value)
    assert allowed(training_plan(**{"attention": "flash", **changes}), model) == expected


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, True), (0.05, False)])
def test_dropout_of_the_adapter_is_drawn_for_each_row(dropout: float, expected: bool) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama", "flash"), LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear"))
    assert allowed(training_plan(attention="flash"), model.get_base_model()) == expected


def test_numbers_of_an_objective_are_those_of_the_rows() -> None:
    rows = [{**row, "weight": float(number)} for number, row in enumerate(conversations())]
    batch = joined(rows, grouped([row["input_ids"] for row in rows]), CPU)
    assert batch["numbers"]["weight"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"), [("dpo", {}), ("simpo", {"sft_weight": 0.5}), ("orpo", {"prompt_loss": True})]
)
def test_the_prompt_of_a_pair_is_computed_once(name: str, settings: dict[str, Any], packed: bool) -> None:
    """The same losses, metrics and gradients as from whole sequences, from fewer tokens."""
    objective = OBJECTIVES[name].configured(settings)
    draw = torch.Generator().manual_seed(0)
    of = [tuple(torch.randint(64, (size,), generator=draw).tolist() for size in (20, 4 + n, 9 - n)) for n in range(4)]
    rows = prepared(pairs(of), objective)
    packed_rows = [objective.sequences(row) for row in rows]
    model = with_adapter(build_loud("llama", "flash")).train()
    units = {unit: int(sum(rows[column])) if column else len(rows) for unit, column in objective.units.items()}
    results = []
    for prefixes in (False, True):
        model.zero_grad()
        batch = collate(packed_rows, packed, CPU, prefixes)
        totals = Totals(objective, units, 2, CPU)
        totals.weighted(totals.add(objective.values(token_losses(model, batch), batch, {})), 1).backward()
        gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.requires_grad}
        results.append((batch["input_ids"].numel(), totals, gradients))
    (whole, expected, of_expected), (once, actual, of_actual) = results
    assert once == sum(map(len, itertools.chain(*of))) < 0.7 * whole
    assert actual.means == pytest.approx(expected.means, rel=1e-5, abs=1e-5)
    for key, gradient in of_expected.items():
        assert torch.allclose(of_actual[key], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item()), key
