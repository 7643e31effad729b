"""The contests of training, each in its smallest form: with a tiny model, whose speed says nothing.

The processes that they start are forks (fork_server.py), but those whose memory is told by what they share.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import against_reference
import against_trl
import contest
import forked_ranks
import limit
import methods
import opponents
import pytest
import tables
import weak_scaling
from chat_rows import write_chat
from conftest import ROOT, SERVERS, project_environment

Contest = Callable[..., dict[str, Any]]
FEW = ("--steps", "2", "--warm-up", "1", "--rounds", "1")
CHAT = ("--capacity", "512", "--longest", "30")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what this process starts with its own interpreter be forks."""
    monkeypatch.setattr(sys, "executable", str(SERVERS.of(ROOT, project_environment(ROOT)).stand_ins / "python"))


@pytest.fixture
def held(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Contest:
    """Return a function that runs a script, on one rank where it may choose, and returns its result."""

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


def test_the_chat_set_is_mixed_and_always_the_same(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_chat(tmp_path / name, 300)
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text()
    rows = [json.loads(line)["messages"] for line in (tmp_path / "one").read_text().splitlines()]
    words = [sum(len(message["content"].split()) for message in row) for row in rows]
    assert {len(row) for row in rows} == {2, 4, 6, 8, 10, 12}
    assert max(words) <= 600 and max(words) > 5 * sorted(words)[150]


def test_the_template_with_marks_writes_the_same_text(tiny_model: Path) -> None:
    marked = against_trl.template(tiny_model)
    assert "{% generation %}" in marked and "SYSTEM" not in marked


def test_padding_keeps_every_token_where_it_is_learned() -> None:
    row = {"input_ids": [7, 8, 9, 5, 6], "labels": [-100, -100, -100, 5, 6]}
    actual = opponents.padded(row, 4, 3)
    assert actual["input_ids"] == [7, 8, 9, 0, 5, 6, 0]
    assert actual["attention_mask"] == [1, 1, 1, 0, 1, 1, 0]
    assert actual["labels"] == [-100, -100, -100, -100, 5, 6, -100]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_trl_and_ours_train_the_same(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_trl, "ROWS", {"train": 20, "validation": 1, "test": 1})
    options = argparse.Namespace(device="cpu", precision="fp32", capacity=512, longest=30)
    task = against_trl.chat_task(tmp_path, tiny_model, options)
    still = {**contest.TRAIN, "learning_rate": 1e-12}
    monkeypatch.setattr(against_trl, "TRAIN", still)
    # An epoch of both, in steps of a packed row, in which nothing changes: whatever the order, the sums are the same.
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


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_against_trl(held: Contest) -> None:
    result = held(against_trl, *CHAT)
    assert len(result["tried"]) == 4
    assert result["theirs"]["label"] in result["tried"] and result["ours"]["label"].startswith("zerolora")
    for side in ("ours", "theirs"):
        assert result[side]["peak_host_bytes"] > 2**28 and result[side]["tokens"] > 512
    assert result["speed"]["rounds"] and result["gpu_memory"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_against_the_reference(held: Contest) -> None:
    result = held(against_reference, "--ranks", "1", "--max-length", "128")
    contestants = result["contestants"]
    # The rows of a global batch are not the same ones, but as many, and almost as long.
    tokens = [actual["rounds"][0]["steps"][0]["tokens"] for actual in contestants.values()]
    assert max(tokens) < 1.1 * min(tokens)
    losses = [actual["rounds"][0]["steps"][0]["loss"] for actual in contestants.values()]
    assert max(losses) - min(losses) < 0.05
    assert result["padded_to"]["answer"] > 20  # of this tokenizer, with a token a byte
    assert contestants.keys() - result["speed"].keys() == {"zerolora"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_ratio_to_the_limit(held: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of matrix products that nobody measured: tests/unit/test_probe.py measures them."""
    monkeypatch.setattr(limit, "matmul_rate", lambda *_: 1e12)
    actual = held(limit, *CHAT, "--max-length", "128")["trainings"]
    assert len(actual) == 2
    for each in actual.values():
        assert 0 < each["ratio_to_matmul"] < 1 and 0 < each["overhead_share"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_weak_scaling_and_what_is_sent(held: Contest) -> None:
    actual = held(weak_scaling, "--max-length", "128", "--strategies", "ddp", "zero2", "fsdp")["strategies"]
    for each in actual.values():
        assert each["efficiency"] > 0
        assert each["counted_over_predicted"] == pytest.approx(1, abs=0.3)
    assert actual["ddp"]["bytes_counted"].keys() == {"all_reduce"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_forked_ranks_are_measured(held: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in the same way: two ranks that load by themselves take ten CPU-seconds, and strace takes a minute."""
    monkeypatch.setattr(forked_ranks, "separate", forked_ranks.forked)
    monkeypatch.setattr(shutil, "which", lambda _: "strace")
    monkeypatch.setattr(forked_ranks, "opened", lambda *_: 7)
    actual = held(forked_ranks, "--max-length", "128", "--ranks", "2")["ranks"]["2"]
    assert actual["same_adapter"]
    for way in ("forked", "separate"):
        assert 0 < actual[way]["first_step_seconds"] < actual[way]["wall_seconds"]
        assert actual[way]["pss_bytes"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_methods_cost(held: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", {name: methods.METHODS[name] for name in ("lora", "ia3")})
    actual = held(methods, "--max-length", "128", "--rounds", "1")["methods"]
    assert actual["lora"]["step_over_lora"] == 1
    assert actual["ia3"]["published_bytes"] < actual["lora"]["published_bytes"]
    for each in actual.values():
        assert each["peak_bytes"] > 2**27 and each["predicted_bytes"] > 2**27 and each["step_seconds"] > 0
