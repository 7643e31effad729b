"""Reads the file that `zerolora probe` writes."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zerolora.errors import UserError, shown
from zerolora.planner.datasheets import DISKS, known
from zerolora.planner.hardware import Disk, HardwareRates, Link
from zerolora.types import Precision

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Measured(_Checked):
    """Null stands for what a machine has not: a way to a GPU, a second rank, a second node."""

    matmul_fp32_flops_per_second: Rate
    matmul_16bit_flops_per_second: Rate
    memory_bytes_per_second: Rate
    host_to_device_bytes_per_second: Rate | None
    device_to_host_bytes_per_second: Rate | None
    node_all_reduce_bytes_per_second: Rate | None
    node_all_gather_bytes_per_second: Rate | None
    node_latency_seconds: Rate | None
    network_all_reduce_bytes_per_second: Rate | None
    network_all_gather_bytes_per_second: Rate | None
    network_latency_seconds: Rate | None
    cpu_adam_parameters_per_second: Rate
    kernel_seconds: Rate


class _Machine(_Checked):
    name: str


class Probe(_Checked):
    """What planning reads of a probe's file; probe/probe.py says what each value is."""

    device: Literal["cpu", "cuda"]
    nodes: Count
    ranks_per_node: Count
    precision_16bit: str
    hardware: _Machine
    measured: _Measured


def checked(probe: Mapping[str, Any]) -> Probe:
    """Return a probe file's content as its class. Raises UserError, which names the key, if a value cannot be one."""
    try:
        return Probe.model_validate(probe)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        value = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}, {first['msg']}"
        raise UserError(f"the probe is incomplete ({key} {value}); run `zerolora probe` again") from None


def measured(probe: Mapping[str, Any], precision: Precision, disk: str = "nvme") -> HardwareRates:
    """Return the rates that `zerolora probe` measured (probe/probe.py describes each value).

    Disks are not measured. Raises UserError if the probe has no rate for `precision`, or lacks a value.
    """
    return _from_probe(checked(probe), precision, known("disk", disk, DISKS))


def _from_probe(probe: Probe, precision: Precision, disk: Disk) -> HardwareRates:
    values, cpu = probe.measured, probe.device == "cpu"
    if not cpu and None in (values.host_to_device_bytes_per_second, values.device_to_host_bytes_per_second):
        raise UserError(
            "the probe is incomplete (it has no rate between a GPU and its host); run `zerolora probe` again"
        )
    if precision not in ("fp32", probe.precision_16bit):
        raise UserError(
            f"precision is {precision}, but the probe measured {probe.precision_16bit} and fp32 on this machine; "
            "write one of them"
        )
    memory = values.memory_bytes_per_second
    return HardwareRates(
        name=probe.hardware.name,
        rate=values.matmul_fp32_flops_per_second if precision == "fp32" else values.matmul_16bit_flops_per_second,
        memory_bandwidth=memory,
        node=_link(
            "node",
            values.node_all_reduce_bytes_per_second,
            values.node_all_gather_bytes_per_second,
            values.node_latency_seconds,
        ),
        network=_link(
            "network",
            values.network_all_reduce_bytes_per_second,
            values.network_all_gather_bytes_per_second,
            values.network_latency_seconds,
        ),
        # A copy reads each byte and writes it.
        host=Link("memory", memory / 2, 0.0)
        if cpu
        else _link("host", values.host_to_device_bytes_per_second, values.device_to_host_bytes_per_second, 0.0),
        disk=disk,
        cpu_adam=values.cpu_adam_parameters_per_second,
        kernel_seconds=values.kernel_seconds,
        ranks_per_node=probe.ranks_per_node,
        nodes=probe.nodes,
        cpu=cpu,
    )


def _link(name: str, one: float | None, other: float | None, latency: float | None) -> Link:
    """Return the slower of two measurements. Where there was one rank or one node, nothing is ever sent."""
    if one is None or other is None:
        return Link("none", math.inf, 0.0)
    if latency is None:
        raise UserError(
            f"the probe is incomplete (measured.{name}_latency_seconds is null); run `zerolora probe` again"
        )
    return Link(name, min(one, other), latency)
