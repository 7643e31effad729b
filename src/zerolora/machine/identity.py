"""The hardware and the libraries that compute, for results that hold only where both are the same."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from zerolora.machine import devices
from zerolora.types import Device


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def hardware(device: Device) -> dict[str, Any]:
    """Return processor, kernel, visible GPUs and driver; without GPUs for a run on a CPU. Does not load torch."""
    result: dict[str, Any] = {"processor": processor(), "system": platform.platform()}
    if device == "cpu":
        return result
    library = devices.driver_library()
    gpus = devices.visible(library) if library else []
    named = [] if isinstance(gpus, int) else [[gpu.name, *gpu.capability] for gpu in gpus]
    return {**result, "gpus": named, "driver": devices.driver_version()}


def computing(device: Device) -> dict[str, Any]:
    """Return what decides the rounding of a result: processor or GPUs, torch, and the kernels that it chooses. Imports
    torch."""
    import torch

    found = {name: value for name, value in hardware(device).items() if name != "system"}
    kernels = torch.backends.cpu.get_cpu_capability()
    if device != "cpu":
        kernels += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return {**found, "torch": torch.__version__, "kernels": kernels}


def versions() -> dict[str, str]:
    """Return the version of Python and of every installed package."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(installed.items()))}
