"""Warnings about unhealthy runs, and the telemetry file."""

import math
from pathlib import Path
from typing import Any

import pytest

from zerolora.train.telemetry.health import QUIET, Health
from zerolora.train.telemetry.writer import COLUMNS, MEASURED, read, text

HEALTHY: dict[str, Any] = dict.fromkeys(COLUMNS)
HEALTHY |= {"loss": 1.0, "gradient_norm": 0.5, "tokens_per_second": 100.0, "seconds": 1.0, "data_seconds": 0.0}
HEALTHY |= {"forward_seconds": 0.3, "backward_seconds": 0.5, "communication_seconds": 0.1, "optimizer_seconds": 0.1}


def said(rows: list[dict[str, Any]]) -> list[str]:
    health = Health()
    result = [health.judge(HEALTHY | row | {"step": step}) for step, row in enumerate(rows, start=1)]
    assert sum(health.faults.values()) == sum(map(len, result))
    return [line for lines in result for line in lines]


@pytest.mark.parametrize(
    "rows",
    [
        [{"gradient_norm": 0.5 + step % 7, "tokens_per_second": 100.0 - step % 9} for step in range(300)],
        # One or two large gradients.
        [{}] * 20 + [{"gradient_norm": 50.0}] * 2 + [{}] * 20,
        # No norm: after an overflow in fp16, and from some engines without clipping.
        [{"gradient_norm": None}] * 60,
        # A short dip of the throughput, and a low one from the start.
        [{}] * 40 + [{"tokens_per_second": 10.0}] * 8 + [{}] * 40,
        [{"tokens_per_second": 1.0}] * 100,
    ],
    ids=["healthy", "few large gradients", "no norm", "short dip", "slow from the start"],
)
def test_no_warning(rows: list[dict[str, Any]]) -> None:
    assert said(rows) == []


def test_exploding_gradient_is_reported_once_with_a_remedy() -> None:
    actual = said([{}] * 20 + [{"gradient_norm": 50.0}] * 30)
    assert actual == [
        "step 23: the gradient's norm is 50, for 3 steps more than 10 times the usual 0.5; "
        "lower train.learning_rate, or train.gradient_clipping"
    ]


def test_lasting_fault_is_reported_again_later() -> None:
    actual = said([{}] * 20 + [{"gradient_norm": 50.0}] * (QUIET + 10))
    assert [line.split(":")[0] for line in actual] == ["step 23", f"step {23 + QUIET}"]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_infinite_gradient_is_reported_at_once(norm: float) -> None:
    assert said([{}, {"gradient_norm": norm}]) == [f"step 2: the gradient's norm is {norm}; lower train.learning_rate"]


def test_falling_throughput_is_reported_with_the_slower_part() -> None:
    slow = {"tokens_per_second": 50.0, "seconds": 2.0, "communication_seconds": 1.1}
    actual = said([{}] * 40 + [slow] * 40)
    assert actual == [
        "step 51: 50 tokens/s, after 100 before (medians of 20 steps): communication takes 1.1 s of a step, "
        "0.1 s before; see what else runs there, and docs/telemetry.md"
    ]


def line(step: int) -> dict[str, Any]:
    measured = {name: 0.5 for name in MEASURED if HEALTHY[name] is None}
    return HEALTHY | measured | {"step": step, "loss": 1 / 3, "tokens": 10, "communication_bytes": 2**40 + step}


def test_telemetry_lines_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.csv"
    path.write_text(text([line(1), line(2)]))
    assert read(path) == [line(1), line(2)]
    assert text(read(path)) == path.read_text()


@pytest.mark.parametrize("name", [*MEASURED, "loss", "gradient_norm"])
@pytest.mark.parametrize("damage", [b"\xff", b"1\xb55", b"", b"x", b"\x00", b"\n", b","])
def test_damaged_number_drops_only_its_line(tmp_path: Path, name: str, damage: bytes) -> None:
    path = tmp_path / "telemetry.csv"
    first, second, third = (text([line(step)], header=False).encode() for step in (1, 2, 3))
    cells = second.split(b",")
    cells[COLUMNS.index(name)] = damage
    path.write_bytes(text([]).encode() + first + b",".join(cells) + third)
    actual = read(path)
    assert [row for row in actual if row["step"] != 2] == [line(1), line(3)]
    assert all(row[each] is not None for row in actual for each in MEASURED)


def test_unmeasured_line_is_dropped(tmp_path: Path) -> None:
    """As for a step whose line was lost when its run resumed."""
    path = tmp_path / "telemetry.csv"
    path.write_text(text([dict.fromkeys(COLUMNS) | {"step": 1, "loss": 0.5}, line(2)]))
    assert read(path) == [line(2)]


def test_truncated_line_and_other_columns_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.csv"
    whole = text([line(1), line(2)])
    path.write_text(whole[:-3])
    assert read(path) == [line(1)]
    path.write_text(whole.replace("loss", "lost"))
    assert read(path) == []
    assert read(tmp_path / "nothing.csv") == []
