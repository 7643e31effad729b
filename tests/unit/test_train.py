"""Pieces of training: schedule, order of the data, loss, adapter gate, places of ranks."""

import re
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from training_plan import training_plan

from zerolora.config.method_sections import Lora
from zerolora.config.settings import TrainSettings
from zerolora.data.packing_plan import CHUNK, PackingPlan, open_plan, write_plan
from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError
from zerolora.methods.lora import LoraMethod
from zerolora.strategies import STRATEGIES
from zerolora.train.adapter import expected_tensors, faults_of
from zerolora.train.engines import engine_class, names
from zerolora.train.feed import Batches, collate
from zerolora.train.launch import rendezvous
from zerolora.train.launch.topology import first_host, topology
from zerolora.train.loop import Totals
from zerolora.train.loss import make_chunked, token_losses
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.schedule import learning_rate
from zerolora.types import EngineName

BATCH: dict[str, Any] = {"global_batch": 4, "epochs": 2, "seed": 0}


def rows_of(count: int) -> Any:
    """Return rows of two and three tokens, the first of them context."""
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
    """Return a plan that joins rows by so many."""
    starts = [*range(0, count, together), count]
    return PackingPlan(np.array(starts), np.arange(count, dtype=np.int32))


def seen(batches: Batches, step: int) -> list[int]:
    """Return the first tokens of the rows of a step, which name the rows."""
    micro_batches, _ = batches.at(step)
    return [row["input_ids"][0] for micro_batch in micro_batches for packed in micro_batch for row in packed]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_rises_to_its_peak_and_ends_low(schedule: str) -> None:
    settings = training_plan(learning_rate=2.0, warmup_ratio=0.1, schedule=schedule)
    rates = [learning_rate(settings, step, 50) for step in range(50)]
    assert rates[0] == pytest.approx(2.0 / 5)
    assert max(rates) == 2.0 == rates[5]
    assert all(rate > 0 for rate in rates)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == 2.0 if schedule == "constant" else rates[-1] < 0.1


@given(
    st.integers(12, 60),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]),
    st.integers(0, 9),
    st.integers(1, 3),
)
def test_the_order_of_rows_depends_on_seed_and_global_batch_alone(
    count: int, ways: tuple[int, int], seed: int, together: int
) -> None:
    """However a global batch is dealt out to ranks and micro-batches, it holds the same rows."""
    ranks, micro_batch = ways
    rows, plan = rows_of(count), plan_of(count, together)
    settings = training_plan(**{**BATCH, "seed": seed, "micro_batch": micro_batch})
    alone = Batches(rows, plan, training_plan(**{**BATCH, "seed": seed}), 0, 1)
    parts = [Batches(rows, plan, settings, rank, ranks) for rank in range(ranks)]
    for step in range(alone.steps):
        assert all(part.at(step)[1] == alone.at(step)[1] for part in parts)
        assert sorted(row for part in parts for row in seen(part, step)) == sorted(seen(alone, step))


@pytest.mark.parametrize("together", [1, 2])
def test_an_epoch_sees_every_row_once(together: int) -> None:
    batches = Batches(rows_of(8), plan_of(8, together), training_plan(**{**BATCH, "epochs": 1}), 0, 1)
    assert sorted(row for step in range(batches.steps) for row in seen(batches, step)) == list(range(8))
    assert batches.tokens_until(batches.steps) == 4 * 2 + 4 * 3
    assert batches.supervised_tokens == 4 * 1 + 4 * 2
    assert batches.tokens_by_source(2) == [4 * 2, 4 * 3]
    assert batches.supervised_by_source(2) == [4 * 1, 4 * 2]


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    long, short = (
        Batches(rows_of(60), plan_of(60), training_plan(**{**BATCH, "max_steps": steps}), 0, 1) for steps in (None, 7)
    )
    assert short.steps == 7
    assert [seen(short, step) for step in range(7)] == [seen(long, step) for step in range(7)]


def test_padding_and_spread_are_what_the_ranks_compute() -> None:
    rows, plan = rows_of(8), plan_of(8)
    batches = [
        Batches(rows, plan, training_plan(**{**BATCH, "epochs": 1, "micro_batch": 2}), rank, 2) for rank in range(2)
    ]
    positions = tokens = 0
    for step in range(batches[0].steps):
        for batch in batches:
            for micro_batch in batch.at(step)[0]:
                collated = collate(micro_batch, False, torch.device("cpu"))
                positions += collated["input_ids"].numel()
                tokens += int(collated["attention_mask"].sum())
    balance = batches[0].balance()
    assert balance["padding_share"] == pytest.approx(1 - tokens / positions, abs=1e-6)
    by_rank = [sum(len(row["input_ids"]) for m in b.at(0)[0] for p in m for row in p) for b in batches]
    assert balance["rank_tokens_spread_worst"] >= (max(by_rank) - min(by_rank)) / (sum(by_rank) / 2) - 1e-6


def test_the_longest_packed_row_comes_first() -> None:
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


def test_tokens_are_counted_as_they_are_seen() -> None:
    batches = Batches(rows_of(30), plan_of(30, 2), training_plan(**{**BATCH, "micro_batch": 2}), 0, 1)
    tokens = 0
    for step in range(batches.steps):
        micro_batches, _ = batches.at(step)
        tokens += sum(
            len(row["input_ids"]) for micro_batch in micro_batches for packed in micro_batch for row in packed
        )
        assert batches.tokens_until(step + 1) == tokens


def test_a_plan_of_other_data_is_refused() -> None:
    with pytest.raises(UserError, match="plan is of 8 rows, but the data has 9; run `zerolora pack` again"):
        Batches(rows_of(9), plan_of(8), training_plan(**BATCH), 0, 1)


def test_a_global_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UserError, match="global_batch is 100, but 2 epochs have only 16 rows"):
        Batches(rows_of(8), plan_of(8), training_plan(**{**BATCH, "global_batch": 100}), 0, 1)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=20))
def test_a_plan_comes_back_as_it_was_written(packed: list[list[int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_plan(Path(folder) / "train.arrow", packed)
        plan = open_plan(Path(folder) / "train.arrow")
        write_plan(Path(folder) / "again.arrow", plan)
        again = open_plan(Path(folder) / "again.arrow")
    actual = [plan.members[start:end].tolist() for start, end in pairwise(plan.starts)]
    assert actual == packed
    assert all(np.array_equal(one, other) for one, other in zip(plan, again, strict=True))
    assert plan.starts.dtype == np.dtype(np.int64) and plan.members.dtype == np.dtype(np.int32)


def test_a_large_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Larger than what is written at once, from lists and from a plan."""
    count = CHUNK + 3
    plan = PackingPlan(np.arange(0, 2 * count + 1, 2), np.arange(2 * count, dtype=np.int32)[::-1].copy())
    write_plan(tmp_path / "plan", plan)
    write_plan(tmp_path / "lists", ([row, row - 1] for row in range(2 * count - 1, 0, -2)))
    assert (tmp_path / "plan").read_bytes() == (tmp_path / "lists").read_bytes()
    actual = open_plan(tmp_path / "plan")
    assert all(np.array_equal(one, other) for one, other in zip(actual, plan, strict=True))


@pytest.mark.parametrize("kept", [0, 10, 200, -1, -8])
def test_a_torn_plan_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "train.arrow"
    write_plan(path, [[row] for row in range(100)])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"train\.arrow: is not a whole Arrow file .*run `zerolora pack` again"):
        open_plan(path)
    path.unlink()
    with pytest.raises(UserError, match="there is no such file; `zerolora pack` writes it"):
        open_plan(path)


def test_the_loss_is_transformers_own(tiny_model: Any) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    make_chunked(model)
    rows = [
        [{"input_ids": [5, 6, 7, 8, 9, 10], "labels": [IGNORED, IGNORED, IGNORED, 8, 9, 10], "source": 0}],
        [{"input_ids": [5, 6, 11, 12], "labels": [IGNORED, IGNORED, 11, 12], "source": 1}],
    ]
    batch = collate(rows, False, torch.device("cpu"))
    with torch.no_grad():
        totals = Totals(OBJECTIVES["sft"], {"supervised token": 5}, 2)
        totals.add(OBJECTIVES["sft"].values(token_losses(model, batch), batch, {}))
        labels = torch.tensor([[IGNORED, IGNORED, IGNORED, 8, 9, 10], [IGNORED, IGNORED, 11, 12, IGNORED, IGNORED]])
        theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    assert totals.by_source.sum().item() / 5 == pytest.approx(totals.loss, rel=1e-6)
    assert (totals.by_source > 0).all()
    assert totals.loss == pytest.approx(theirs.item(), rel=1e-5)


@pytest.fixture
def expected(tiny_model: Any) -> dict[str, torch.Size]:
    return expected_tensors(tiny_model, TrainSettings(device="cpu", lora=Lora(r=2, alpha=4.0)))


def test_the_gate_expects_two_factors_for_each_linear_module(expected: dict[str, torch.Size]) -> None:
    assert len(expected) == 2 * 7 * 2
    assert expected["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == torch.Size([2, 32])


@pytest.mark.parametrize("spoil", ["nothing", "missing", "empty", "shape", "nan", "zero", "stranger"])
def test_the_gate_lets_no_broken_adapter_through(expected: dict[str, torch.Size], spoil: str) -> None:
    actual = {name: torch.ones(shape) for name, shape in expected.items()}
    name = next(name for name in actual if "lora_B" in name)
    said = {
        "nothing": None,
        "missing": "is missing",
        "empty": "has shape [0]",
        "shape": "has shape [1]",
        "nan": "is not finite",
        "zero": "never trained",
        "stranger": "does not belong",
    }[spoil]
    match spoil:
        case "missing":
            del actual[name]
        case "empty":
            actual[name] = torch.empty(0)
        case "shape":
            actual[name] = torch.ones(1)
        case "nan":
            actual[name][0, 0] = float("nan")
        case "zero":
            actual[name].zero_()
        case "stranger":
            actual["other.weight"] = torch.ones(1)
    faults = faults_of(actual, expected, LoraMethod)
    assert len(faults) == (said is not None)
    assert said is None or said in faults[0]


def test_one_machine() -> None:
    where = topology({}, 1, 3)
    assert list(where.ranks) == [0, 1, 2]
    environment = where.environment(2)
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("2", "2", "3")
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    # Until the ranks have met, the port is theirs: of many runs on one machine, none meets another's.
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((where.address, int(environment["MASTER_PORT"])))


SLURM = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "node[03-05,9]"}


def test_a_slurm_task_for_each_node() -> None:
    where = topology(SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 2, 4)
    assert list(where.ranks) == [4, 5, 6, 7]
    assert (where.address, where.port) == ("node03", 24711)
    assert where.environment(5)["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("job", ["1", "31999", "67108863"])
def test_a_jobs_port_is_not_one_that_linux_gives_to_others(job: str) -> None:
    where = topology(SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2, 1)
    assert 1024 <= where.port < 32_768


def test_a_slurm_task_for_each_rank() -> None:
    where = topology(SLURM | {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8"}, 2, 4)
    assert list(where.ranks) == [6]
    assert where.environment(6)["LOCAL_RANK"] == "2"


def test_a_number_of_tasks_that_fits_nothing() -> None:
    with pytest.raises(UserError, match=r"srun started 3 tasks.*start 2 tasks \(one a node\) or 8"):
        topology(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}, 2, 4)


def test_several_nodes_without_srun() -> None:
    with pytest.raises(UserError, match="train.nodes is 2.*srun"):
        topology({"SLURM_JOB_ID": "4711"}, 2, 1)


def test_a_rank_that_somebody_else_started() -> None:
    where = topology({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, 2, 2)
    assert (list(where.ranks), where.address, where.port) == ([3], "head", 1234)
    with pytest.raises(UserError, match="WORLD_SIZE is 8"):
        topology({"RANK": "3", "WORLD_SIZE": "8"}, 2, 2)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[03,7]", "n03"),
        ("gpu-01-[2-4]", "gpu-01-2"),
        ("r1n[2-3]x,z", "r1n2x"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_every_engine_is_found_by_its_file() -> None:
    assert sorted(names()) == sorted(get_args(EngineName))
    for name in names():
        assert engine_class(name).__module__ == f"zerolora.train.engines.{name}"
        assert name in {strategy.engine for strategy in STRATEGIES.values()}


def test_ranks_exchange_no_pickles() -> None:
    """Unpickling executes what it receives, and neither the store nor a collective authenticates its sender."""
    forbidden = re.compile(r"object_list|gather_object|scatter_object|import pickle")
    package = Path(rendezvous.__file__).parents[2]
    sources = [*package.glob("train/**/*.py"), *package.glob("probe/*.py")]
    assert len(sources) > 20
    actual = [path.name for path in sources if forbidden.search(path.read_text(encoding="utf-8"))]
    assert actual == []
