"""Energy by NVML's counter. The counter is a stand-in, for want of a GPU: its sums and refusals are tested."""

import pynvml
import pytest
import torch

from zerolora.train.telemetry import system_monitor
from zerolora.train.telemetry.system_monitor import EnergyMeter


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the millijoules that the stand-in tells, the next one first."""
    told: list[int] = []

    def total(handle: object) -> int:
        if not told:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return told.pop(0)

    monkeypatch.setattr(system_monitor, "_handle_of", lambda device: object())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", total)
    return told


def test_it_is_the_joules_since_the_line_before(counter: list[int]) -> None:
    counter += [5_000_000, 5_001_500, 5_004_000]
    meter = EnergyMeter(torch.device("cuda", 0))
    assert [meter.since_last(), meter.since_last()] == [1.5, 2.5]


def test_a_gpu_that_does_not_tell_it_leaves_the_cell_empty(counter: list[int]) -> None:
    meter = EnergyMeter(torch.device("cuda", 0))
    assert meter.since_last() is None
    counter += [1000]
    assert meter.since_last() is None  # since when is not known


def test_a_cpu_has_none() -> None:
    assert EnergyMeter(torch.device("cpu")).since_last() is None


def test_a_machine_without_the_drivers_library_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert system_monitor._handle_of(torch.device("cuda", 0)) is None
