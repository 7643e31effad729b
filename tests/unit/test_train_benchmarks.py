"""The training benchmarks in their smallest form, with a tiny model; speeds mean nothing here.

Their processes are forks (fork_server.py).
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import against_peers
import against_reference
import against_trl
import common_prefix
import compile as compiling
import contest
import limit
import methods
import opponents
import preference_peers
import pytest
import tables
import torch
import weak_scaling
from chat_rows import CHATML, write_chat
from conftest import ROOT, SERVERS, project_environment
from transformers import AutoTokenizer

from zerolora.data.prepared_rows import open_split
from zerolora.train import compiled_layers
from zerolora.train.compiled_layers import Compiled

Contest = Callable[..., dict[str, Any]]
FEW = ("--steps", "2", "--warm-up", "1", "--rounds", "1")
CHAT = ("--capacity", "512", "--longest", "30")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes started with sys.executable forks."""
    monkeypatch.setattr(sys, "executable", str(SERVERS.of(ROOT, project_environment(ROOT)).stand_ins / "python"))


@pytest.fixture
def contested(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Contest:
    """Return a function that runs a script, on one rank if it has the choice, and returns its result."""

    def call(script: ModuleType, *options: str) -> dict[str, Any]:
        for module in (against_trl, limit):
            monkeypatch.setattr(module, "ranks_of", lambda _: [1])
        wanted = ["--device", "cpu", "--model", str(tiny_model), "--output", str(tmp_path / "result.json")]
        monkeypatch.setattr(sys, "argv", ["script", *wanted, *FEW, *options])
        script.main()
        result = dict(json.loads((tmp_path / "result.json").read_text()))
        table = next(table for name, table in tables.TABLES.items() if name in str(script.__doc__))
        assert len(table(result).splitlines()) >= 3  # docs/speed.md can show it
        return result

    return call


def test_chat_set_is_mixed_and_deterministic(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_chat(tmp_path / name, 300)
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text()
    rows = [json.loads(line)["messages"] for line in (tmp_path / "one").read_text().splitlines()]
    words = [sum(len(message["content"].split()) for message in row) for row in rows]
    assert {len(row) for row in rows} == {2, 4, 6, 8, 10, 12}
    assert max(words) <= 600 and max(words) > 5 * sorted(words)[150]


def test_chat_template_has_generation_markers(tiny_model: Path) -> None:
    marked = against_trl.template(tiny_model)
    assert "{% generation %}" in marked and "SYSTEM" not in marked


def test_padding_keeps_supervised_tokens_aligned() -> None:
    row = {"input_ids": [7, 8, 9, 5, 6], "labels": [-100, -100, -100, 5, 6]}
    actual = opponents.padded(row, 4, 3)
    assert actual["input_ids"] == [7, 8, 9, 0, 5, 6, 0]
    assert actual["attention_mask"] == [1, 1, 1, 0, 1, 1, 0]
    assert actual["labels"] == [-100, -100, -100, -100, 5, 6, -100]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_trl_and_zerolora_train_the_same(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_trl, "ROWS", {"train": 20, "validation": 1, "test": 1})
    options = argparse.Namespace(device="cpu", precision="fp32", capacity=512, longest=30)
    task = against_trl.mixed_task(tmp_path, tiny_model, options)
    still = {**contest.TRAIN, "learning_rate": 1e-12}
    monkeypatch.setattr(against_trl, "TRAIN", still)
    # One epoch without changes of weights, a packed row a step: sums do not depend on the order.
    whole = argparse.Namespace(**vars(options), steps=-1, batch=1)
    theirs = against_trl.their_settings(task, whole)
    others = [theirs[name]() for name in theirs if "1 ranks" in name and "MKL" not in name]
    ours = task.ours(
        "ours", {**still, "ranks_per_node": 1, "global_batch": 1, "micro_batch": 1}, {"packing": True, "capacity": 512}
    ).train()
    assert len(others) == 2
    for each in [ours, *others]:
        assert sum(step.tokens for step in each.steps) == task.stats["train_tokens"]
        assert sum(step.supervised for step in each.steps) == task.stats["train_supervised_tokens"]
        assert contest.loss_mean(each.steps) == pytest.approx(contest.loss_mean(ours.steps), rel=1e-5)


def test_prefixes_computed_once_compute_less_for_the_same_results(
    contested: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_prefix, "LONGEST", 20)
    monkeypatch.setattr(common_prefix.cpu_matmul, "choose", lambda: True)  # of this process
    tasks = contested(common_prefix, "--system", "30", "--max-length", "128")["tasks"]
    assert {*tasks} == {"reference task", "system prompt", "system prompt, packed"}
    for each in tasks.values():
        assert each["largest_relative_difference_of_losses"] < 1e-5
        assert each["largest_relative_difference_of_gradients"] < 1e-4
        assert each["ratio"]["rounds"] and all(each["cpu_seconds"].values())
    chat = tasks["system prompt"]["positions"]
    assert chat["prefix once"] < chat["whole rows"]


def test_compiled_layers_are_compared_at_each_length(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that changes nothing; tests/train/test_compile.py has torch's."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: function)
    monkeypatch.setattr(compiling.cpu_matmul, "choose", lambda: True)  # of this process
    monkeypatch.setattr(compiling.padding, "step", 1)
    layers = Compiled()
    for module in (compiling, compiled_layers):
        monkeypatch.setattr(module, "compiled_layers", layers)
    case = tmp_path / "case.json"
    monkeypatch.setattr(sys, "argv", ["script", "--case", str(tiny_model), "--longest", "15", "--output", str(case)])
    compiling.main()
    actual = json.loads(case.read_text())
    assert len(actual["lengths"]) == actual["compiled_lengths"] > 1
    for each in actual["lengths"].values():
        assert all(each["cpu_seconds"].values()) and len(each["over_compiled"]["own code"]["rounds"]) == 5
    own, compiled = (actual["bytes_of_longest"][name] for name in (compiling.PADDED, compiling.COMPILED))
    assert own["saved"] == compiled["saved"] > 0
    assert own["peak"] == pytest.approx(compiled["peak"], rel=0.01) and own["peak"] > own["saved"]
    assert actual["largest_relative_difference_of_gradients"] == 0
    assert "| tiny |" in tables.TABLES["train_compile.json"]({"cases": {"tiny": actual}})


def test_a_step_of_a_peer_is_a_difference(tmp_path: Path) -> None:
    """Of the CPU seconds at the end of two epochs, of both ranks, compared by round."""
    options = argparse.Namespace(steps=2, rounds=2)
    for rank, more in enumerate((0.5, 1.0)):
        ends = [10.0, 20.0, 30.0, 30.0 + more, 30.0 + 2 * more]  # with the beginning of training, or without
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"cpu_seconds": ends[rank:]}))
    assert against_peers._trained(tmp_path, [], options).cpu_seconds == 1.5
    steps = [contest.Step(seconds=1.0, tokens=9, supervised=4, loss=2.0)]
    seconds = iter([2.0, 3.0, 8.0, 4.0])  # in the second round the peer is first
    trainings = dict.fromkeys(("zerolora", "peer"), lambda: against_peers.Trained(next(seconds), steps))
    first, actual = against_peers.rounds(trainings, options)
    assert first["over_ours"] == {"peer": 1.5}
    assert actual["cpu_seconds_a_step"]["zerolora"] == {"median": 3.0, "rounds": [2.0, 4.0]}
    assert actual["over_ours"] == {"peer": (1.5 + 2.0) / 2} and actual["mean_loss"] == {"zerolora": 2.0, "peer": 2.0}
    table = tables.TABLES["train_peers.json"]({"tasks": {"task": actual}})
    assert "| zerolora | 3.00 |" in table and "| peer | 5.50 (1.75) |" in table


@pytest.mark.parametrize("change", [{"tokens": 10}, {"supervised": 5}, {"loss": 2.0001}])
def test_a_peer_that_trains_something_else_is_named(change: dict[str, Any]) -> None:
    step: dict[str, Any] = {"seconds": 1.0, "tokens": 9, "supervised": 4, "loss": 2.0}
    against_peers.check("peer", [contest.Step(**step)], [contest.Step(**step)])
    with pytest.raises(SystemExit, match="peer: "):
        against_peers.check("peer", [contest.Step(**step | change)], [contest.Step(**step)])


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_pairs_of_peers_are_ours(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's DPO has our tokens, our reference's log-probabilities and our losses. (Trains five times.)"""
    monkeypatch.setattr(preference_peers, "PAIRS", 16)
    wrong = AutoTokenizer.from_pretrained(tiny_model).encode("none", add_special_tokens=False)
    monkeypatch.setattr(preference_peers, "answer_batch", lambda _, __, prompts, *___: [wrong] * len(prompts))
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["script", "--model", str(tiny_model), "--rounds", "1", "--output", str(output)])
    preference_peers.main()
    result = json.loads(output.read_text())
    own, *others = result["contestants"].values()
    assert result["steps_of_an_epoch"] == 2 and len(others) == len(result["speed"]) == len(result["memory"]) == 3
    for each in others:
        assert each["losses"] == pytest.approx(own["losses"], rel=1e-3)
    assert own["losses"][0] > own["losses"][-1]
    table = tables.TABLES["preference_peers.json"](result)
    assert "| TRL, zerolora's matmul kernels, reference before training | " in table


def test_speed_and_memory_of_preferences_are_ratios_by_round() -> None:
    """Our pass of the reference is a part of our step, unless a peer's is not counted either."""
    change = {"losses": [math.log(2)], "first": {"chosen": -1.0, "rejected": -2.0}, "tokens": 9, "supervised": 4}
    made = iter([(2.0, 6, 1.0), (6.0, 8, 0.0), (4.0, 8, 0.0), (8.0, 10, 0.0), (9.0, 10, 0.0), (3.0, 6, 1.0)])

    def trained() -> preference_peers.Trained:
        seconds, peak, reference = next(made)
        return preference_peers.Trained(seconds, peak, reference_cpu_seconds=reference, **change)

    stored = f"peer, {preference_peers.STORED}"
    _, actual = preference_peers.rounds(dict.fromkeys(("zerolora", "peer", stored), trained), 2)
    assert actual["speed"]["peer"]["rounds"] == [6 / 3, 9 / 4] and actual["speed"][stored]["rounds"] == [4 / 2, 8 / 3]
    assert actual["memory"]["peer"] == {"median": (6 / 8 + 6 / 10) / 2, "rounds": [6 / 8, 6 / 10]}
    assert actual["contestants"]["zerolora"]["pairs_a_cpu_second"] == 8 / 3.5


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": 10}, "tokens 10 instead of 9"),
        ({"losses": [0.7, 0.5]}, "loss of the first step"),
        ({"losses": [math.log(2), 0.52]}, "mean loss of the second epoch"),
        ({"first": {"chosen": -1.0, "rejected": -2.001}}, "log-probability of rejected answers"),
    ],
)
def test_a_peer_with_other_pairs_is_named(change: dict[str, Any], what: str) -> None:
    first = {"chosen": -1.0, "rejected": -2.0}
    own = preference_peers.Trained(1.0, 1, 9, 4, [math.log(2), 0.5], first)
    preference_peers.check("peer", own, own)
    with pytest.raises(SystemExit, match=f"peer: {what}"):
        preference_peers.check("peer", own._replace(**change), own)


def test_rows_of_peers_are_ours(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's template, as that of the other peers, gives the tokens that we train on."""
    monkeypatch.setattr(against_peers, "LONGEST", 10)
    options = argparse.Namespace(model=tiny_model, system=10, steps=3)
    task = against_peers.chat_task(tmp_path, options)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    lines = (tmp_path / "rows/train.jsonl").read_text().splitlines()
    rows = open_split(task.data, "train")
    ours = {tuple(row) for row in rows["input_ids"]}
    lengths = []
    for line in lines:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False, chat_template=CHATML)
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        lengths.append(len(tokens))
        assert tokens in ours
    batches = sorted(sorted(lengths[start : start + 8]) for start in range(0, len(lengths), 8))
    assert len(batches) == 3 and [*itertools.chain(*batches)] == sorted(lengths)  # lengths of batches do not overlap


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_against_trl(contested: Contest) -> None:
    result = contested(against_trl, *CHAT)
    assert len(result["tried"]) == 4
    assert result["theirs"]["label"] in result["tried"] and result["ours"]["label"].startswith("zerolora")
    for side in ("ours", "theirs"):
        assert result[side]["peak_host_bytes"] > 2**28 and result[side]["tokens"] > 512
    assert result["speed"]["rounds"] and result["gpu_memory"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_both_are_compared_with_liger_and_without(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against_trl, "has_liger", lambda _: True)
    monkeypatch.setattr(against_trl, "ROWS", {"train": 20, "validation": 1, "test": 1})
    options = argparse.Namespace(device="cpu", precision="fp32", capacity=512, longest=30, batch=2, steps=2)
    task = against_trl.mixed_task(tmp_path, tiny_model, options)
    for labels in (against_trl.our_settings(task, options), against_trl.their_settings(task, options)):
        assert {label.endswith(against_trl.FUSED) for label in labels} == {True, False}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_against_the_reference(contested: Contest) -> None:
    result = contested(against_reference, "--ranks", "1", "--max-length", "128")
    contestants = result["contestants"]
    # Global batches differ, but have as many rows of about the same length.
    tokens = [actual["rounds"][0]["steps"][0]["tokens"] for actual in contestants.values()]
    assert max(tokens) < 1.1 * min(tokens)
    losses = [actual["rounds"][0]["steps"][0]["loss"] for actual in contestants.values()]
    assert max(losses) - min(losses) < 0.05
    assert result["padded_to"]["answer"] > 20  # a token a byte
    assert contestants.keys() - result["speed"].keys() == {"zerolora"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_ratio_to_the_limit(contested: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a fixed matmul rate; tests/unit/test_probe.py measures one."""
    monkeypatch.setattr(limit, "matmul_rate", lambda *_: 1e12)
    actual = contested(limit, *CHAT, "--max-length", "128")["trainings"]
    assert len(actual) == 2
    for each in actual.values():
        assert 0 < each["ratio_to_matmul"] < 1 and 0 < each["overhead_share"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_weak_scaling_counts_predicted_bytes(contested: Contest) -> None:
    actual = contested(weak_scaling, "--max-length", "128", "--strategies", "ddp", "zero2", "fsdp")["strategies"]
    for each in actual.values():
        assert each["efficiency"] > 0
        assert each["counted_over_predicted"] == pytest.approx(1, abs=0.3)
    assert actual["ddp"]["bytes_counted"].keys() == {"all_reduce"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_cost_of_methods(contested: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", {name: methods.METHODS[name] for name in ("lora", "ia3")})
    actual = contested(methods, "--max-length", "128", "--rounds", "1")["methods"]
    assert actual["lora"]["step_over_lora"] == 1
    assert actual["ia3"]["published_bytes"] < actual["lora"]["published_bytes"]
    for each in actual.values():
        assert each["peak_bytes"] > 2**27 and each["predicted_bytes"] > 2**27 and each["step_seconds"] > 0
