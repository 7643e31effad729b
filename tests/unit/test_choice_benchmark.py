"""The benchmark of the choice: what it asks, how it compares, and what it does with what fails. It trains nothing."""

import argparse
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import choice as benchmark
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.candidates import Planning
from zerolora.planner.choice import choose
from zerolora.planner.run_hardware import unmeasured_cpu

ROWS = [[benchmark.drawn_row(list(range(57)), 0.385)]] * 8


def lot() -> random.Random:
    return random.Random(0)  # noqa: S311 (an order, no secret)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[benchmark.Tried]:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    settings, _ = benchmark.settings_of("cpu", 2, 8, {})
    hardware = unmeasured_cpu(2, 1, "nvme")
    found = choose(Planning(read_model_spec(benchmark.MODEL), settings, benchmark.rows_of(ROWS), hardware))
    return benchmark.to_try(found, None, lot())


def measured(tried: list[benchmark.Tried], seconds: list[float]) -> dict[str, Any]:
    for each, one in zip(tried, seconds, strict=False):
        each.medians.append(one)
    return benchmark.compared(tried[: len(seconds)], 456)


def test_rows_are_seen_as_pack_would_count_them() -> None:
    rows = benchmark.rows_of(ROWS)
    assert (rows.longest_packed_row, rows.tokens, rows.packing) == (57, 456, False)
    assert (rows.most_supervised, rows.supervised_tokens, rows.mean_row_of_a_token) == (22, 8 * 22, 57)


def test_packed_rows_have_the_length_asked_for() -> None:
    asked = argparse.Namespace(seed=0, length=100, packed=3, supervised=0.5, global_batch=2)
    rows = benchmark.packed_rows(asked, 1000)
    assert [sum(len(row["input_ids"]) for row in packed) for packed in rows] == [100, 100]
    assert benchmark.rows_of(rows).packing


def test_everything_that_can_run_here_is_tried_and_the_choice_is_among_it(tried: list[benchmark.Tried]) -> None:
    strategies = {each.candidate.choice.strategy for each in tried}
    assert not strategies & {"zero3_quantized", "zero3_nvme"}
    assert {"ddp", "zero0", "zero1", "zero2", "zero3", "zero3_offload", "fsdp"} <= strategies
    assert [each.chosen for each in tried].count(True) == 1
    limited = benchmark.to_try([each.candidate for each in tried], 5, lot())
    assert len(limited) == 5 and limited[0].chosen


def test_every_configuration_tried_can_be_rendered(tried: list[benchmark.Tried]) -> None:
    settings, _ = benchmark.settings_of("cpu", 2, 8, {})
    for each in tried:
        assert benchmark.engine_and_choice(each.candidate.choice, settings)["zerolora"]["micro_batch"]


def test_the_ratio_is_of_throughputs(tried: list[benchmark.Tried]) -> None:
    result = measured(tried, [2.0, 1.6, 4.0])
    assert result["ratio"] == pytest.approx(0.8)
    assert result["best"]["tokens_per_second"] == pytest.approx(456 / 1.6)
    assert [row["seconds"] for row in result["rows"]] == [1.6, 2.0, 4.0]


def test_the_first_round_picks_finalists_and_the_later_ones_judge(tried: list[benchmark.Tried]) -> None:
    measured(tried, [99.0, *(1.0 + number for number in range(len(tried) - 1))])
    chosen, lucky, best, *_ = tried
    again = benchmark.finalists(tried)
    assert again[:2] == [lucky, best] and again[-1] is chosen
    assert len(again) == benchmark.FINALISTS + 1
    rounds = {chosen: [2.0, 4.0, 6.0], lucky: [3.0, 9.0, 9.0], best: [1.0, 3.0, 9.0]}
    for each in again:
        each.medians += rounds.get(each, [50.0] * 3)
    result = benchmark.compared(tried, 456)
    assert result["best"]["seconds"] == 3.0 and result["chosen"]["seconds"] == 4.0
    assert result["ratio"] == 0.75  # of 1/2, 3/4 and 9/6, a pair a round
    assert [row["seconds"] for row in result["rows"]][:3] == [3.0, 4.0, 9.0]
    assert result["rows"][benchmark.FINALISTS + 1]["seconds"] == 1.0 + benchmark.FINALISTS  # no finalist, however fast


def test_a_first_round_can_be_taken_up(tried: list[benchmark.Tried]) -> None:
    rows = measured(tried, [1.0 + number for number in range(len(tried))])["rows"]
    expected = [each.medians for each in tried]
    for each in tried:
        each.medians = []
    benchmark.take_up(tried, [{**row, "medians": [*row["medians"], 0.1]} for row in rows])
    assert [each.medians for each in tried] == expected


def test_a_choice_that_fails_later_has_no_ratio(tried: list[benchmark.Tried]) -> None:
    measured(tried, [1.0, 2.0])
    tried[0].error = "hangs"
    tried[1].medians.append(2.0)
    assert benchmark.compared(tried[:2], 456)["ratio"] is None


def test_a_failure_is_a_row_and_others_go_on(tried: list[benchmark.Tried], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def second_fails(task: dict[str, Any], _: Path) -> tuple[list[float], str | None]:
        asked.append(len(task["configs"]))
        return ([1.0], "out of memory") if len(asked) == 1 else ([1.0] * len(task["configs"]), None)

    monkeypatch.setattr(benchmark, "launched", second_fails)
    same = [each for each in tried if each.candidate.choice.strategy == "zero0"]
    settings, _ = benchmark.settings_of("cpu", 2, 8, {})
    benchmark.measure_all(same, {}, settings, lot(), Path())
    assert asked == [len(same), len(same) - 2]
    assert [each.error for each in same].count("out of memory") == 1
    same[0].chosen = True
    result = benchmark.compared(same, 456)
    assert (result["measured"], result["failed"]) == (len(same) - 1, 1)
    assert result["rows"][-1]["error"] == "out of memory"


def test_rank_correlation() -> None:
    assert benchmark.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert benchmark.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert benchmark.spearman([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    assert benchmark.spearman([1, 1], [1, 2]) is None


def test_the_table_shows_the_choice_and_what_failed(tried: list[benchmark.Tried]) -> None:
    tried[2].error = "hangs"
    result = measured(tried, [2.0, 1.6])
    text = benchmark.table({**result, "rows": [*result["rows"], benchmark.row_of(tried[2], 456)], "minutes": 1})
    assert "<- auto" in text and "80.0%" in text and "hangs" in text
