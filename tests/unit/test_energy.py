"""Energy from NVML's counter, replaced by a stand-in."""

import pynvml
import pytest
import torch

from zerolora.train.telemetry import system_monitor
from zerolora.train.telemetry.system_monitor import EnergyMeter


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the queue of the stand-in's values in millijoules."""
    values: list[int] = []

    def total(handle: object) -> int:
        if not values:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return values.pop(0)

    monkeypatch.setattr(system_monitor, "_handle_of", lambda device: object())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", total)
    return values


def test_joules_since_the_last_line(counter: list[int]) -> None:
    counter += [5_000_000, 5_001_500, 5_004_000]
    meter = EnergyMeter(torch.device("cuda", 0))
    assert [meter.since_last(), meter.since_last()] == [1.5, 2.5]


def test_unsupported_gpu_gives_none(counter: list[int]) -> None:
    meter = EnergyMeter(torch.device("cuda", 0))
    assert meter.since_last() is None
    counter += [1000]
    assert meter.since_last() is None  # without a start


def test_cpu_gives_none() -> None:
    assert EnergyMeter(torch.device("cpu")).since_last() is None


def test_missing_driver_library_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert system_monitor._handle_of(torch.device("cuda", 0)) is None
