"""Reads the file that `zerolora probe` writes."""

import math
from collections.abc import Mapping
from typing import Any

from zerolora.errors import UserError
from zerolora.planner.datasheets import DISKS, known
from zerolora.planner.hardware import Disk, HardwareRates, Link
from zerolora.types import Precision


def measured(probe: Mapping[str, Any], precision: Precision, disk: str = "nvme") -> HardwareRates:
    """Return the rates that `zerolora probe` measured (probe/probe.py describes each value).

    Disks are not measured. Raises UserError if the probe has no rate for `precision`, or lacks a value.
    """
    try:
        return _from_probe(probe, precision, known("disk", disk, DISKS))
    except (KeyError, TypeError) as error:
        raise UserError(f"the probe is not whole ({error}); run `zerolora probe` again") from None


def _from_probe(probe: Mapping[str, Any], precision: Precision, disk: Disk) -> HardwareRates:
    values, cpu = probe["measured"], probe["device"] == "cpu"
    rate = values["matmul_fp32_flops_per_second" if precision == "fp32" else "matmul_16bit_flops_per_second"]
    if precision not in ("fp32", probe["precision_16bit"]):
        raise UserError(
            f"precision is {precision}, but the probe measured {probe['precision_16bit']} and fp32 on this machine; "
            "write one of them"
        )
    memory = float(values["memory_bytes_per_second"])
    # A copy reads and writes each byte.
    host = Link("memory", memory / 2, 0.0) if cpu else _slower_direction(values)
    return HardwareRates(
        name=str(probe["hardware"]["name"]),
        rate=float(rate),
        memory_bandwidth=memory,
        node=_measured_link("node", values),
        network=_measured_link("network", values),
        host=host,
        disk=disk,
        cpu_adam=float(values["cpu_adam_parameters_per_second"]),
        kernel_seconds=float(values["kernel_seconds"]),
        ranks_per_node=int(probe["ranks_per_node"]),
        nodes=int(probe["nodes"]),
        cpu=cpu,
    )


def _slower_direction(values: Mapping[str, Any]) -> Link:
    both = (values["host_to_device_bytes_per_second"], values["device_to_host_bytes_per_second"])
    return Link("host", float(min(both)), 0.0)


def _measured_link(where: str, values: Mapping[str, Any]) -> Link:
    """Return the slower of the two collectives. With one rank or one node nothing is sent."""
    both = [values[f"{where}_{collective}_bytes_per_second"] for collective in ("all_reduce", "all_gather")]
    if None in both:
        return Link("none", math.inf, 0.0)
    return Link(where, float(min(both)), float(values[f"{where}_latency_seconds"]))
