"""The config's section `hardware` for this machine."""

from typing import Any

import psutil

from zerolora.machine import devices


def hardware() -> dict[str, Any]:
    """Return the section: the visible GPUs if torch can use them, else the CPU; sizes rounded down."""
    memory = {"host_memory": f"{psutil.virtual_memory().total // 2**30}GiB"}
    library = devices.driver_library()
    gpus = devices.visible(library) if library else []
    if isinstance(gpus, int) or not gpus or devices.fault():
        return {"device": "cpu"} | memory
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    capability = min(gpu.capability for gpu in gpus)
    return {
        "device": "cuda", "gpus_per_node": len(gpus), "gpu_memory": f"{smallest.memory // 2**20}MiB",
        "compute_capability": float(devices.capability_text(capability)),
    } | memory  # fmt: skip
