"""Parts of training: order of the data, loss, adapter check, topology of ranks, noise, early stopping."""

import itertools
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from training_plan import training_plan

from zerolora.config.method_sections import Lora
from zerolora.config.settings import TrainSettings
from zerolora.data.packing_plan import CHUNK, PackingPlan, open_plan, write_plan
from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError
from zerolora.machine import devices
from zerolora.methods.lora import LoraMethod
from zerolora.strategies import STRATEGIES
from zerolora.train.adapter import check_written, expected_tensors, faults_of
from zerolora.train.attention import lengths
from zerolora.train.engines import engine_class, names
from zerolora.train.feed import Batches, Feed, collate
from zerolora.train.launch import rendezvous
from zerolora.train.loop import Totals
from zerolora.train.loss import make_chunked, token_losses
from zerolora.train.module_forwards import add_noise
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.validation import Validations
from zerolora.types import EngineName

BATCH: dict[str, Any] = {"global_batch": 4, "epochs": 2, "seed": 0}


def rows_of(count: int) -> Any:
    """Return rows of two and three tokens; the first token is context."""
    ids = [[number, number + 1, number + 2][: 2 + number % 2] for number in range(count)]
    return Dataset.from_dict(
        {
            "input_ids": ids,
            "labels": [[IGNORED, *row[1:]] for row in ids],
            "length": [len(row) for row in ids],
            "supervised": [len(row) - 1 for row in ids],
            "source": [number % 2 for number in range(count)],
        }
    )


def plan_of(count: int, together: int = 1) -> PackingPlan:
    """Return a plan that packs `together` rows each."""
    starts = [*range(0, count, together), count]
    return PackingPlan(np.array(starts), np.arange(count, dtype=np.int32))


def seen(batches: Batches, step: int) -> list[int]:
    """Return the first tokens of the rows of a step, their numbers."""
    of_step = zip(batches.at(step)[0], batches.counts_at(step), strict=True)
    return [row["input_ids"][0] for rows, counts in of_step if counts for packed in rows for row in packed]


@given(
    st.integers(12, 60),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]),
    st.integers(0, 9),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=30)
def test_order_of_rows_depends_only_on_seed_and_global_batch(
    count: int, ways: tuple[int, int], seed: int, together: int, packed: bool
) -> None:
    """A global batch has the same rows for any ranks and micro-batches."""
    ranks, micro_batch = ways
    rows, plan = rows_of(count), plan_of(count, together)
    run = training_plan(**{**BATCH, "seed": seed, "micro_batch": micro_batch})
    alone = Batches(rows, plan, training_plan(**{**BATCH, "seed": seed}), 0, 1)
    parts = [Batches(rows, plan, run, rank, ranks, packed) for rank in range(ranks)]
    for step in range(alone.steps):
        assert all(part.at(step)[1] == alone.at(step)[1] for part in parts)
        assert sorted(row for part in parts for row in seen(part, step)) == sorted(seen(alone, step))


@pytest.mark.parametrize(("together", "count", "steps"), [(1, 8, 2), (2, 8, 1), (1, 9, 3), (2, 9, 2)])
def test_epoch_sees_every_row_once(together: int, count: int, steps: int) -> None:
    """The last step takes what is left, and the loss is the mean over its own tokens."""
    batches = Batches(rows_of(count), plan_of(count, together), training_plan(**{**BATCH, "epochs": 1}), 0, 1)
    assert batches.steps == steps
    rows = [row for step in range(batches.steps) for row in seen(batches, step)]
    assert sorted(rows) == list(range(count))
    for step in range(batches.steps):
        until = rows[: sum(len(seen(batches, each)) for each in range(step + 1))]
        assert batches.tokens_until(step + 1) == sum(2 + row % 2 for row in until)
        assert batches.at(step)[1] == {"supervised token": sum(1 + row % 2 for row in seen(batches, step))}
    odd = count // 2
    assert batches.supervised_tokens == (count - odd) * 1 + odd * 2
    assert batches.tokens_by_source(2) == [(count - odd) * 2, odd * 3]
    assert batches.supervised_by_source(2) == [(count - odd) * 1, odd * 2]


def test_shorter_run_is_a_prefix_of_a_longer_one() -> None:
    long, short = (
        Batches(rows_of(60), plan_of(60), training_plan(**{**BATCH, "max_steps": steps}), 0, 1) for steps in (None, 7)
    )
    assert short.steps == 7
    assert [seen(short, step) for step in range(7)] == [seen(long, step) for step in range(7)]


@pytest.mark.parametrize("count", [8, 9, 11])
def test_padding_and_spread_match_the_ranks(count: int) -> None:
    rows, plan = rows_of(count), plan_of(count)
    batches = [
        Batches(rows, plan, training_plan(**{**BATCH, "epochs": 1, "micro_batch": 2}), rank, 2) for rank in range(2)
    ]
    positions = tokens = 0
    for step in range(batches[0].steps):
        for batch in batches:
            for micro_batch in itertools.compress(batch.at(step)[0], batch.counts_at(step)):
                collated = collate(micro_batch, False, torch.device("cpu"))
                positions += collated["input_ids"].numel()
                tokens += int(collated["attention_mask"].sum())
    balance = batches[0].balance()
    assert balance["padding_share"] == pytest.approx(1 - tokens / positions, abs=1e-6)
    by_rank = [sum(len(row["input_ids"]) for m in b.at(0)[0] for p in m for row in p) for b in batches]
    assert balance["rank_tokens_spread_worst"] >= (max(by_rank) - min(by_rank)) / (sum(by_rank) / 2) - 1e-6


class Copies(TorchDispatchMode):
    """Records whether the host waits for each copy to a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.waiting: list[bool] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device", "cpu")).type == "meta":
            self.waiting.append(not kwargs.get("non_blocking"))
        return function(*args, **kwargs)


def test_the_host_waits_for_no_copy_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a batch takes to the device comes from pinned memory."""
    pinned: list[int] = []
    empty = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, shape: Any, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made = empty(tensor, shape)
        pinned.append(made.data_ptr())
        return made

    monkeypatch.setattr(devices, "GPU", "meta")
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    row = {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3], "source": 0, "weight": 0.5}
    gpu = torch.device("meta")
    with Copies() as copies:
        batch = collate([[row, row]], True, gpu)
        lengths.set(batch["lengths"])
        ends, of_tokens = lengths.ends(1, 6, gpu), lengths.of_tokens(torch.empty(1, 6, 4, device=gpu))
    lengths.set(None)
    tensors = [*(each for each in batch.values() if isinstance(each, torch.Tensor)), *batch["numbers"].values()]
    tensors += [ends, of_tokens]
    assert {each.device.type for each in tensors} == {"meta"}
    assert copies.waiting == [False] * len(tensors) and len(pinned) == len(tensors) == 10


def test_batches_built_ahead_are_those_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the last micro-batch of a step comes the first of the next, and after the last step none."""
    plan = training_plan(**{**BATCH, "accumulation": 2})
    batches, cpu = Batches(rows_of(24), plan_of(24), plan, 0, 1), torch.device("cpu")
    feed, made = Feed(batches, True, cpu), 0

    def collated(packed_rows: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        return collate(packed_rows, True, cpu)

    monkeypatch.setattr(feed, "collated", collated)
    for step in range(batches.steps):
        micro_batches, units = feed.at(step)
        np.testing.assert_equal((micro_batches, units), batches.at(step))
        for number, micro_batch in enumerate(micro_batches):
            before = made
            expected, actual = collate(micro_batch, True, cpu), feed.batch(step, number)
            assert made == before + (step == number == 0)  # the others are built already
            feed.build(step, number + 1)
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], expected[name]) for name in ("input_ids", "targets", "source"))
    assert made == sum(len(batches.at(step)[0]) for step in range(batches.steps))
    feed = Feed(batches, True, cpu)  # resumed at a later step
    assert torch.equal(feed.batch(3, 0)["input_ids"], collate(batches.at(3)[0][0], True, cpu)["input_ids"])


def test_longest_packed_row_comes_first() -> None:
    """Not the one of most attention work, [4, 3], which needs less memory."""
    lengths = [4, 3, *[2] * 22]
    rows = Dataset.from_dict(
        {"length": lengths, "supervised": [1] * 24, "source": [0] * 24}
        | dict.fromkeys(("input_ids", "labels"), lengths)
    )
    packed = [[0, 1], [2, 3, 4, 5], *[[row] for row in range(6, 24)]]
    plan = PackingPlan(np.cumsum([0, *map(len, packed)]), np.concatenate(packed).astype(np.int32))
    for seed in range(9):
        batches = Batches(rows, plan, training_plan(**{**BATCH, "seed": seed, "global_batch": 1}), 0, 1)
        assert batches.tokens_until(1) == 8


def test_plan_of_other_data_and_too_few_rows_are_refused() -> None:
    with pytest.raises(UserError, match="plan is of 8 rows, but the data has 9; run `zerolora stage pack` again"):
        Batches(rows_of(9), plan_of(8), training_plan(**BATCH), 0, 1)
    with pytest.raises(UserError, match="global_batch is 100, but 2 epochs have only 16 rows"):
        Batches(rows_of(8), plan_of(8), training_plan(**{**BATCH, "global_batch": 100}), 0, 1)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=20))
def test_plan_reads_back(packed: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_plan(Path(folder) / "train.arrow", packed)
        plan = open_plan(Path(folder) / "train.arrow")
        write_plan(Path(folder) / "again.arrow", plan)
        again = open_plan(Path(folder) / "again.arrow")
    actual = [plan.members[start:end].tolist() for start, end in itertools.pairwise(plan.starts)]
    assert actual == packed
    assert all(np.array_equal(one, other) for one, other in zip(plan, again, strict=True))
    assert plan.starts.dtype == np.dtype(np.int64) and plan.members.dtype == np.dtype(np.int32)


def test_large_plan_reads_back(tmp_path: Path) -> None:
    """Larger than one chunk, from lists and from a plan."""
    count = CHUNK + 3
    plan = PackingPlan(np.arange(0, 2 * count + 1, 2), np.arange(2 * count, dtype=np.int32)[::-1].copy())
    write_plan(tmp_path / "plan", plan)
    write_plan(tmp_path / "lists", ([row, row - 1] for row in range(2 * count - 1, 0, -2)))
    assert (tmp_path / "plan").read_bytes() == (tmp_path / "lists").read_bytes()
    actual = open_plan(tmp_path / "plan")
    assert all(np.array_equal(one, other) for one, other in zip(actual, plan, strict=True))


@pytest.mark.parametrize("length", [0, 10, 200, -1, -8])
def test_truncated_plan_is_named(tmp_path: Path, length: int) -> None:
    path = tmp_path / "train.arrow"
    write_plan(path, [[row] for row in range(100)])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=r"train\.arrow: is not a whole Arrow file .*run `zerolora stage pack` again"):
        open_plan(path)
    path.unlink()
    with pytest.raises(UserError, match="there is no such file; `zerolora stage pack` writes it"):
        open_plan(path)


def test_loss_matches_transformers(tiny_model: Any) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    make_chunked(model)
    rows = [
        [{"input_ids": [5, 6, 7, 8, 9, 10], "labels": [IGNORED, IGNORED, IGNORED, 8, 9, 10], "source": 0}],
        [{"input_ids": [5, 6, 11, 12], "labels": [IGNORED, IGNORED, 11, 12], "source": 1}],
    ]
    batch = collate(rows, False, torch.device("cpu"))
    with torch.no_grad():
        totals = Totals(OBJECTIVES["sft"], {"supervised token": 5}, 2, torch.device("cpu"))
        totals.add(OBJECTIVES["sft"].values(token_losses(model, batch), batch, {}))
        labels = torch.tensor([[IGNORED, IGNORED, IGNORED, 8, 9, 10], [IGNORED, IGNORED, 11, 12, IGNORED, IGNORED]])
        theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    assert totals.by_source.sum().item() / 5 == pytest.approx(totals.loss, rel=1e-6)
    assert (totals.by_source > 0).all()
    assert totals.loss == pytest.approx(theirs.item(), rel=1e-5)


@pytest.fixture
def expected(tiny_model: Any) -> dict[str, torch.Size]:
    return expected_tensors(tiny_model, TrainSettings(device="cpu", lora=Lora(r=2, alpha=4.0)))


def test_adapter_check_expects_two_factors_per_linear_module(expected: dict[str, torch.Size]) -> None:
    assert len(expected) == 2 * 7 * 2
    assert expected["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == torch.Size([2, 32])


BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor], str], object], str | None]] = {
    "nothing": (lambda *_: None, None),
    "missing": (lambda tensors, name: tensors.pop(name), "is missing"),
    "empty": (lambda tensors, name: tensors.update({name: torch.empty(0)}), "has shape [0]"),
    "shape": (lambda tensors, name: tensors.update({name: torch.ones(1)}), "has shape [1]"),
    "nan": (lambda tensors, name: tensors[name].view(-1)[:1].fill_(float("nan")), "is not finite"),
    "stranger": (lambda tensors, _: tensors.update({"other.weight": torch.ones(1)}), "does not belong"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_adapter_check_refuses_broken_adapters(expected: dict[str, torch.Size], case: str) -> None:
    change, message = BROKEN[case]
    actual = {name: torch.ones(shape) for name, shape in expected.items()}
    change(actual, next(name for name in actual if "lora_B" in name))
    faults = faults_of(actual, expected, LoraMethod)
    assert len(faults) == (message is not None)
    assert message is None or message in faults[0]


def test_a_part_that_was_never_trained_is_saved_and_named(
    expected: dict[str, torch.Size], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {name: torch.ones(shape) for name, shape in expected.items()}
    second = [name for name in tensors if "lora_B" in name]
    tensors[second[0]].zero_()
    save_file(tensors, tmp_path / "one.safetensors")
    check_written(tmp_path / "one.safetensors", expected, LoraMethod, None)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    assert caplog.messages == [f"the adapter of {module!r} is as training starts with it, so it was never trained"]
    for name in second:
        tensors[name].zero_()
    save_file(tensors, tmp_path / "all.safetensors")
    with pytest.raises(UserError, match="it is as training starts with it, so it was never trained; it was not saved"):
        check_written(tmp_path / "all.safetensors", expected, LoraMethod, None)


def test_engines_are_modules() -> None:
    assert sorted(names()) == sorted(get_args(EngineName))
    for name in names():
        assert engine_class(name).__module__ == f"zerolora.train.engines.{name}"
        assert name in {strategy.engine for strategy in STRATEGIES.values()}


def test_ranks_exchange_no_pickles() -> None:
    """Unpickling executes code, and neither the store nor collectives authenticate their peers."""
    forbidden = re.compile(r"object_list|gather_object|scatter_object|import pickle")
    package = Path(rendezvous.__file__).parents[2]
    sources = [*package.glob("train/**/*.py"), *package.glob("probe/*.py")]
    assert len(sources) > 20
    actual = [path.name for path in sources if forbidden.search(path.read_text(encoding="utf-8"))]
    assert actual == []


# --- noise, early stopping ---


ALPHA = 5.0


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 16)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table


def noise_of(of_rows: list[list[int]]) -> torch.Tensor:
    """Return the noise on a batch of packed rows: [packed rows, tokens, width]."""
    model = Embedding().train()
    ids = torch.zeros(len(of_rows), sum(of_rows[0]), dtype=torch.long)
    plain: torch.Tensor = model.table(ids)
    add_noise(model, ALPHA)
    lengths.set(of_rows)
    noisy: torch.Tensor = model.table(ids)
    assert torch.equal(model.eval().table(ids), plain)
    return (noisy - plain).detach()


def test_noise_depends_on_the_length_of_each_row() -> None:
    """Also in packed rows: a row of 4 tokens has ten times the noise of one of 400."""
    noise = noise_of([[4, 400], [400, 4]])
    for row, (begin, end) in ((0, (0, 4)), (1, (400, 404))):
        assert ALPHA / math.sqrt(4 * 16) * 0.8 < noise[row, begin:end].abs().max() <= ALPHA / math.sqrt(4 * 16)
    for row, (begin, end) in ((0, (4, 404)), (1, (0, 400))):
        assert ALPHA / math.sqrt(400 * 16) * 0.8 < noise[row, begin:end].abs().max() <= ALPHA / math.sqrt(400 * 16)


def validations(*losses: float, patience: int | None = None) -> Validations:
    result = Validations(training_plan(validation_steps=10, patience=patience), 100)
    for number, each in enumerate(losses, start=1):
        result.add(10 * number, {"loss": each})
    return result


@pytest.mark.parametrize(
    ("losses", "best", "exhausted"),
    [
        ((3.0, 2.0, 1.0), 30, False),
        ((3.0, 1.0, 2.0, 2.0), 20, True),
        ((1.0, 1.0, 1.0), 10, True),
        ((math.nan, 2.0, math.nan), 20, False),
        ((2.0, math.nan, math.nan), 10, True),
    ],
)
def test_best_is_the_first_of_the_lowest(losses: tuple[float, ...], best: int, exhausted: bool) -> None:
    result = validations(*losses, patience=2)
    assert (result.best_of_all[0], result.exhausted) == (best, exhausted)
    again = Validations(training_plan(validation_steps=10, patience=2), 100)
    again.restore(result.state(), {})
    assert (again.best_of_all[0], again.exhausted) == (best, exhausted)


def test_adapter_to_publish_has_a_finite_loss() -> None:
    for keep in ("best", "last"):
        result = Validations(training_plan(validation_steps=10, keep=keep), 100)
        result.check()
        for number, loss in enumerate((math.nan, 2.0, math.nan), start=1):
            result.add(10 * number, {"loss": loss})
        assert result.published == result.made[1 if keep == "best" else 2]
        if keep == "best":
            result.check()
            continue
        with pytest.raises(UserError, match=r"validation loss is nan at step 30; lower train\.learning_rate"):
            result.check()


def test_step_is_validated_once() -> None:
    result = validations(1.0)
    assert [step for step in range(31) if result.due(step)] == [20, 30]
    assert not validations().due(0)


@pytest.mark.parametrize(("interval", "steps", "due"), [(10, 25, [10, 20]), (0.25, 10, [3, 6, 9]), (0.5, 1, [1])])
def test_an_interval_below_one_is_a_share_of_all_steps(interval: float, steps: int, due: list[int]) -> None:
    validations = Validations(training_plan(validation_steps=interval), steps)
    assert [step for step in range(1, steps + 1) if validations.due(step)] == due
