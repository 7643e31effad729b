"""What a figure was measured on: every result file carries it."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("torch", "transformers", "peft", "deepspeed")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Return date, processor, cores, memory in bytes, GPUs and the versions of packages."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
