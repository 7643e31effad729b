"""The hardware that a run's settings describe: measured by a probe, named, or assumed by default."""

from dataclasses import replace
from typing import Any

from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.methods.registry import create
from zerolora.planner.datasheets import DISKS, GPUS, named
from zerolora.planner.hardware import KERNEL_SECONDS, HardwareRates, Link
from zerolora.planner.probe_file import checked, measured
from zerolora.strategies.strategy import Target

# By compute capability, for a GPU that is not named.
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

# A core of a current server CPU: two 8-wide fp32 multiply-adds a cycle at 2.5 GHz, half of which a matrix product
# reaches; a few bytes a cycle from memory. An assumption: `zerolora probe` measures it.
CPU_RATE, CPU_MEMORY, CPU_ADAM = 4e10, 5e9, 1.5e8


def hardware_of(settings: RenderSettings) -> tuple[HardwareRates, str]:
    """Return the hardware of a run, and the source of its figures.

    Raises UserError for an unknown name, or for a probe that does not match the run.
    """
    given = settings.hardware
    if given.probe:
        _check_probe(given.probe, settings)
        rates = measured(given.probe, settings.precision, given.disk)
        return (
            replace(rates, ranks_per_node=settings.ranks_per_node, nodes=settings.nodes),
            "measured by zerolora probe",
        )
    if settings.device == "cpu":
        rates = unmeasured_cpu(settings.ranks_per_node, settings.nodes, given.disk)
        return rates, "assumed: no hardware.probe is named"
    gpu = given.gpu or typical(given.compute_capability)
    rates = named(
        gpu,
        given.node_link or link_of(gpu),
        given.network,
        settings.precision,
        settings.ranks_per_node,
        settings.nodes,
        given.network_adapters,
        given.host_link,
        given.disk,
    )
    guessed = "" if given.gpu else f", guessed from compute capability {given.compute_capability}"
    return rates, f"datasheet of {gpu}{guessed}, {rates.node.name} in a node, {rates.network.name} between nodes"


def target_of(settings: RenderSettings) -> Target:
    """Return the target that a run's strategy must support."""
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
    """Return a rank's peak matrix FLOP/s, the denominator of MFU: measured by a probe, or from the datasheet of a named
    GPU; None for assumed hardware."""
    given = settings.hardware
    if given.probe:
        return measured(given.probe, settings.precision, given.disk).rate
    if settings.device == "cpu" or not given.gpu:
        return None
    datasheet = GPUS[given.gpu]
    return datasheet.single if settings.precision == "fp32" else datasheet.half


def _check_probe(probe: dict[str, Any], settings: RenderSettings) -> None:
    """Raise UserError if a probe was made on another device, or with too few ranks to measure every link."""
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
    """Return the link between GPUs that a GPU's form factor implies: NVLink on SXM boards, otherwise PCIe."""
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
        cpu_adam=CPU_ADAM,
        kernel_seconds=KERNEL_SECONDS,
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        cpu=True,
    )
