"""What tests/budget.py says of files that cost another amount than their entries say."""

from budget import ENOUGH, faults

ENTRIES = {f"file{number}": 30.0 for number in range(ENOUGH)}


def test_a_slower_machine_is_no_fault() -> None:
    assert faults({name: 3 * entry for name, entry in ENTRIES.items()}, ENTRIES) == []


def test_one_file_that_became_expensive_is_named() -> None:
    costs = {name: 1.5 * entry for name, entry in ENTRIES.items()} | {"file3": 120.0}
    assert faults(costs, ENTRIES) == ["file3: 80 CPU-seconds where tests/budget.json says 30"]


def test_of_few_files_none_is_slow_because_of_the_machine() -> None:
    assert faults({"file1": 70.0}, ENTRIES) == ["file1: 70 CPU-seconds where tests/budget.json says 30"]
    assert faults({"new": 70.0, "file1": 31.0}, ENTRIES) == []
