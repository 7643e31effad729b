"""From a run's settings to the hardware that the cost model reads."""

from dataclasses import replace
from typing import Any

from zerolora.errors import UserError
from zerolora.planner.hardware import DISKS, GPUS, KERNEL_SECONDS, Hardware, Link, measured, named

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

# A core of a server CPU of this decade: two 8-wide fp32 multiply-adds a cycle at 2.5 GHz, half of which a matrix
# product reaches; a few bytes a cycle from memory. An assumption: `zerolora probe` measures it.
CPU_RATE, CPU_MEMORY, CPU_ADAM = 4e10, 5e9, 1.5e8


def hardware_of(settings: dict[str, Any]) -> tuple[Hardware, str]:
    """Return the hardware of a run's render settings, and where its figures come from.

    Raises UserError for a name that is in no table, or a probe that does not fit the run.
    """
    given, precision = settings["hardware"], settings["precision"]
    nodes, ranks_per_node = settings["nodes"], settings["ranks_per_node"]
    if given["probe"]:
        _check_probe(given["probe"], settings)
        found = measured(given["probe"], precision, given["disk"])
        return replace(found, gpus_per_node=ranks_per_node, nodes=nodes), "measured by zerolora probe"
    if settings["device"] == "cpu":
        return unmeasured_cpu(ranks_per_node, nodes, given["disk"]), "assumed: no hardware.probe is named"
    gpu = given["gpu"] or typical(given["compute_capability"])
    found = named(
        gpu,
        given["node_link"] or link_of(gpu),
        given["network"],
        precision,
        ranks_per_node,
        nodes,
        given["network_adapters"],
        given["host_link"],
        given["disk"],
    )
    guessed = "" if given["gpu"] else f", guessed from compute capability {given['compute_capability']}"
    return found, f"datasheet of {gpu}{guessed}, {found.node.name} in a node, {found.network.name} between nodes"


def peak_of(settings: dict[str, Any]) -> float | None:
    """Return the matrix FLOP/s of a rank that training is held against: what a probe measured, or the datasheet of the
    GPU that is named; None for hardware that is guessed."""
    given, precision = settings["hardware"], settings["precision"]
    if given["probe"]:
        return measured(given["probe"], precision, given["disk"]).rate
    if settings["device"] == "cpu" or not given["gpu"]:
        return None
    device = GPUS[given["gpu"]]
    return device.single if precision == "fp32" else device.half


def _check_probe(probe: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise UserError if a probe was made for another device, or on too few ranks to have measured every link."""
    if not isinstance(probe, dict) or "measured" not in probe:
        raise UserError("hardware.probe is no file that zerolora probe wrote; run it again")
    if probe["device"] != settings["device"]:
        raise UserError(f"hardware.probe was made on {probe['device']}, but hardware.device is {settings['device']}")
    for key, option in (("ranks_per_node", f"--ranks {settings['ranks_per_node']}"), ("nodes", "on all nodes")):
        if probe[key] == 1 < settings[key]:
            raise UserError(f"hardware.probe measured 1 of train.{key}, which is {settings[key]}; probe {option}")


def typical(capability: float) -> str:
    """Return the GPU that is typical of a compute capability, or of the next lower one."""
    lower = [known for known in TYPICAL if known <= capability]
    return TYPICAL[max(lower, default=min(TYPICAL))]


def link_of(gpu: str) -> str:
    """Return the link between GPUs that a GPU's form implies: NVLink on SXM boards, else PCIe."""
    capability = GPUS[gpu].capability if gpu in GPUS else 0.0
    on_board = gpu.endswith("-SXM") or gpu.startswith(("V100", "H200", "B200"))
    return NVLINK[capability] if on_board and capability in NVLINK else "pcie4"


def unmeasured_cpu(ranks_per_node: int, nodes: int, disk: str) -> Hardware:
    """Return CPU ranks of which nothing is known: a core each, talking through memory and a 10 Gb/s network."""
    return Hardware(
        name="cpu",
        rate=CPU_RATE,
        memory_bandwidth=CPU_MEMORY,
        node=Link("memory", CPU_MEMORY / 4, 5e-5),
        network=Link("10gbe", 1.0e9, 5e-5),
        host=Link("memory", CPU_MEMORY / 2, 0.0),
        disk=DISKS[disk],
        cpu_adam=CPU_ADAM,
        kernel_seconds=KERNEL_SECONDS,
        gpus_per_node=ranks_per_node,
        nodes=nodes,
        cpu=True,
    )
