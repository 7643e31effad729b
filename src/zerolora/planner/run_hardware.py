"""The hardware of a run's settings: measured by `zerolora probe`, named, or assumed."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zerolora.config.schema import Hardware
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError, shown
from zerolora.methods.registry import create
from zerolora.planner.hardware import DISKS, GPUS, HOST_ADAMW, KERNEL_SECONDS, HardwareRates, Link, known, named
from zerolora.strategies.strategy import Target
from zerolora.types import Precision
from zerolora.units import GIB, parse_bytes

# By compute capability, for unnamed GPUs.
TYPICAL = {
    7.0: "V100-32GB",
    7.5: "T4",
    8.0: "A100-80GB-SXM",
    8.6: "A10",
    8.9: "L40S",
    9.0: "H100-SXM",
    10.0: "B200",
    12.0: "RTX-5090",
}
NVLINK = {7.0: "nvlink2", 8.0: "nvlink3", 9.0: "nvlink4", 10.0: "nvlink5"}

# A core of a current server CPU: two 8-wide fp32 multiply-adds per cycle at 2.5 GHz, half of it in a matrix product; a
# few bytes per cycle from memory. An assumption; `zerolora probe` measures it.
CPU_RATE, CPU_MEMORY = 4e10, 5e9


def hardware_of(settings: RenderSettings) -> tuple[HardwareRates, str]:
    """Return the hardware of a run, and the source of its figures.

    Raises UserError for an unknown name, or for a probe that does not match the run.
    """
    hardware = settings.hardware
    if hardware.probe:
        _check_probe(hardware.probe, settings)
        rates = measured(hardware.probe, settings.precision, hardware.disk)
        return (
            replace(rates, ranks_per_node=settings.ranks_per_node, nodes=settings.nodes),
            "measured by zerolora probe",
        )
    if settings.device == "cpu":
        rates = unmeasured_cpu(settings.ranks_per_node, settings.nodes, hardware.disk)
        return rates, "assumed: no hardware.probe is named; `zerolora probe` measures one"
    gpu = hardware.gpu or typical(hardware.compute_capability)
    rates = named(
        gpu,
        hardware.node_link or link_of(gpu),
        hardware.network,
        settings.precision,
        settings.ranks_per_node,
        settings.nodes,
        hardware.network_adapters,
        hardware.host_link,
        hardware.disk,
    )
    guessed = "" if hardware.gpu else f", guessed from compute capability {hardware.compute_capability}"
    return rates, f"datasheet of {gpu}{guessed}, {rates.node.name} in a node, {rates.network.name} between nodes"


def gpu_memory_of(hardware: Hardware) -> int | None:
    """Return the bytes of one GPU that a plan may count with: the config's, or those of a GPU by name. A datasheet's
    size stands for the GPU, of which torch reports less."""
    given = parse_bytes(hardware.gpu_memory) if hardware.gpu_memory else None
    named_gpu = GPUS.get(hardware.gpu or "") if hardware.device == "cuda" else None
    if named_gpu and (given is None or given >= named_gpu.nominal * GIB):
        return named_gpu.memory
    return given


def target_of(settings: RenderSettings) -> Target:
    """Return the hardware and types that a run's strategy must support."""
    method = create(settings.method.name, **settings.method.settings)
    return Target(
        device=settings.device,
        precision=settings.precision,
        nodes=settings.nodes,
        ranks_per_node=settings.ranks_per_node,
        nvme=settings.nvme,
        frozen_type=method.frozen_type,
        unpacks=method.unpacks,
    )


def peak_of(settings: RenderSettings) -> float | None:
    """Return a rank's peak matrix FLOP/s, the denominator of MFU: a probe's, or a named GPU's; None for assumed
    hardware."""
    hardware = settings.hardware
    if hardware.probe:
        return measured(hardware.probe, settings.precision, hardware.disk).rate
    if settings.device == "cpu" or not hardware.gpu:
        return None
    datasheet = GPUS[hardware.gpu]
    return datasheet.single if settings.precision == "fp32" else datasheet.half


def _check_probe(probe: dict[str, Any], settings: RenderSettings) -> None:
    """Raise UserError if a probe ran on another device, or with too few ranks to measure every link."""
    if not isinstance(probe, dict) or "measured" not in probe:
        raise UserError("hardware.probe is not a file of zerolora probe; run `zerolora probe` again")
    made = checked(probe)
    if made.device != settings.device:
        raise UserError(f"hardware.probe was made on {made.device}, but hardware.device is {settings.device}")
    wanted = {"ranks_per_node": settings.ranks_per_node, "nodes": settings.nodes}
    for key, option in (("ranks_per_node", f"--ranks {settings.ranks_per_node}"), ("nodes", "on all nodes")):
        if getattr(made, key) == 1 < wanted[key]:
            raise UserError(f"hardware.probe measured 1 of train.{key}, which is {wanted[key]}; probe {option}")


def typical(capability: float | None) -> str:
    """Return a typical GPU of a compute capability, or of the next lower one."""
    lower = [each for each in TYPICAL if capability is not None and each <= capability]
    return TYPICAL[max(lower, default=min(TYPICAL))]


def link_of(gpu: str) -> str:
    """Return the link between GPUs by form factor: NVLink on SXM boards, otherwise PCIe."""
    capability = GPUS[gpu].capability if gpu in GPUS else 0.0
    on_board = gpu.endswith("-SXM") or gpu.startswith(("V100", "H200", "B200"))
    return NVLINK[capability] if on_board and capability in NVLINK else "pcie4"


def unmeasured_cpu(ranks_per_node: int, nodes: int, disk: str) -> HardwareRates:
    """Return assumed CPU ranks: one core each, connected by memory and a 10 Gb/s network."""
    return HardwareRates(
        name="cpu",
        rate=CPU_RATE,
        memory_bandwidth=CPU_MEMORY,
        node=Link("memory", CPU_MEMORY / 4, 5e-5),
        network=Link("10gbe", 1.0e9, 5e-5),
        host=Link("memory", CPU_MEMORY / 2, 0.0),
        disk=DISKS[disk],
        host_adamw=HOST_ADAMW,
        kernel_seconds=KERNEL_SECONDS,
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        cpu=True,
    )


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Measured(_Checked):
    """Null without a GPU, a second rank or a second node."""

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
    host_adamw_parameters_per_second_per_thread: Rate
    kernel_seconds: Rate


class _Machine(_Checked):
    name: str


class Probe(_Checked):
    """The values of a probe's file that planning reads; probe/probe.py describes them."""

    device: Literal["cpu", "cuda"]
    nodes: Count
    ranks_per_node: Count
    threads_per_rank: Count
    precision_16bit: str
    hardware: _Machine
    measured: _Measured


def checked(probe: Mapping[str, Any]) -> Probe:
    """Return a probe file's content as its class. Raises UserError, naming the key, for an invalid value."""
    try:
        return Probe.model_validate(probe)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        value = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}, {first['msg']}"
        raise UserError(f"the probe is incomplete ({key} {value}); run `zerolora probe` again") from None


def measured(probe: Mapping[str, Any], precision: Precision, disk: str = "nvme") -> HardwareRates:
    """Return the rates that `zerolora probe` measured; disks are not measured.

    Raises UserError if the probe has no rate for `precision`, or lacks a value.
    """
    file = checked(probe)
    values, cpu = file.measured, file.device == "cpu"
    to_device, to_host = values.host_to_device_bytes_per_second, values.device_to_host_bytes_per_second
    host = Link("memory", values.memory_bytes_per_second / 2, 0.0)  # a copy reads each byte and writes it
    if not cpu:
        if to_device is None or to_host is None:
            raise UserError(
                "the probe is incomplete (it has no rate between a GPU and its host); run `zerolora probe` again"
            )
        host = Link("host", min(to_device, to_host), 0.0)
    if precision not in ("fp32", file.precision_16bit):
        raise UserError(
            f"precision is {precision}, but the probe measured {file.precision_16bit} and fp32 on this machine; "
            "use one of them"
        )
    return HardwareRates(
        name=file.hardware.name,
        rate=values.matmul_fp32_flops_per_second if precision == "fp32" else values.matmul_16bit_flops_per_second,
        memory_bandwidth=values.memory_bytes_per_second,
        node=_link(values, "node"),
        network=_link(values, "network"),
        host=host,
        disk=known("disk", disk, DISKS),
        host_adamw=values.host_adamw_parameters_per_second_per_thread * file.threads_per_rank,
        kernel_seconds=values.kernel_seconds,
        ranks_per_node=file.ranks_per_node,
        nodes=file.nodes,
        cpu=cpu,
    )


def _link(values: _Measured, name: str) -> Link:
    """Return the slower of two measurements; with one rank or one node, where nothing is sent, an infinite rate."""
    bandwidths = [getattr(values, f"{name}_{each}_bytes_per_second") for each in ("all_reduce", "all_gather")]
    latency = getattr(values, f"{name}_latency_seconds")
    if None in bandwidths:
        return Link("none", math.inf, 0.0)
    if latency is None:
        raise UserError(
            f"the probe is incomplete (measured.{name}_latency_seconds is null); run `zerolora probe` again"
        )
    return Link(name, min(bandwidths), latency)
