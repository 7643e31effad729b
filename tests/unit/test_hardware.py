"""Named hardware: tables from datasheets, and the rates that a training step reaches."""

import math
from typing import Any

import pytest
from conftest import refusal

from zerolora.errors import UserError
from zerolora.planner.hardware import (
    DISKS,
    GPUS,
    HOST_LINKS,
    LINK_SHARE,
    MATMUL_SHARE,
    NETWORKS,
    NODE_LINKS,
    PEER_SHARE,
    named,
)
from zerolora.planner.run_hardware import checked, measured

MEASURED: dict[str, float | None] = {"kernel_seconds": 9e-6, "host_adamw_parameters_per_second_per_thread": 1.6e8}
MEASURED |= {
    "matmul_fp32_flops_per_second": 8e10,
    "matmul_16bit_flops_per_second": 4e11,
    "memory_bytes_per_second": 2e10,
}
MEASURED |= {"host_to_device_bytes_per_second": None, "device_to_host_bytes_per_second": None}
MEASURED |= {"node_all_reduce_bytes_per_second": 9e8, "node_all_gather_bytes_per_second": 8e8}
MEASURED |= {"network_all_reduce_bytes_per_second": None, "network_all_gather_bytes_per_second": None}
MEASURED |= {"node_latency_seconds": 3e-4, "network_latency_seconds": None}
PROBE: dict[str, Any] = {"device": "cpu", "nodes": 1, "ranks_per_node": 2, "precision_16bit": "bf16"}
PROBE |= {"threads_per_rank": 3}
PROBE |= {"hardware": {"name": "a CPU"}, "measured": MEASURED}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_figures_of_a_gpu_are_plausible(gpu: Any) -> None:
    """These ratios catch sparse figures and wrong units."""
    assert 1.9 <= gpu.half / gpu.single <= 29  # GeForce with fp32 accumulation to B200
    assert 70 <= gpu.half / gpu.bandwidth <= 420
    assert 0.9 * gpu.nominal <= gpu.usable < gpu.nominal  # error correction costs an A6000 and an L4 a twelfth
    assert 7.0 <= gpu.capability <= 12.0


def test_dense_matrix_rates_follow_from_cores_and_clocks() -> None:
    """FLOP/s = 2 x multiply-adds of a matrix core and clock x cores x clock (NVIDIA's A100 and H100 white papers)."""
    assert GPUS["V100-32GB"].half == pytest.approx(2 * 64 * 640 * 1.53e9, rel=0.01)
    assert GPUS["A100-80GB-SXM"].half == pytest.approx(2 * 256 * 432 * 1.41e9, rel=0.01)
    assert GPUS["H100-SXM"].half == pytest.approx(2 * 512 * 528 * 1.83e9, rel=0.01)


def test_links_double_with_each_generation() -> None:
    for older, newer in (("pcie3", "pcie4"), ("pcie4", "pcie5"), ("nvlink2", "nvlink3"), ("nvlink4", "nvlink5")):
        assert NODE_LINKS[newer].bandwidth == 2 * NODE_LINKS[older].bandwidth
    assert NETWORKS["100gbe"].bandwidth == 12.5e9
    assert NETWORKS["infiniband-ndr"].bandwidth == NETWORKS["400gbe"].bandwidth
    assert NETWORKS["infiniband-ndr"].latency < NETWORKS["400gbe"].latency
    assert all(disk.write <= disk.read for disk in DISKS.values())


def test_named_hardware_has_the_reached_rates() -> None:
    hardware = named("H100-SXM", "nvlink4", "infiniband-ndr", "bf16", ranks_per_node=8, nodes=4, adapters=8)
    assert hardware.rate == 989e12 * MATMUL_SHARE
    assert hardware.node.bandwidth == 450e9 * LINK_SHARE
    assert hardware.network.bandwidth == 8 * 50e9 * LINK_SHARE
    assert hardware.host == HOST_LINKS["pcie4"]
    assert (hardware.ranks, hardware.cpu) == (32, False)
    assert named("H100-SXM", "nvlink4", "100gbe", "fp32", 8).rate == 67e12 * MATMUL_SHARE
    assert named("L40S", "pcie4", "100gbe", "bf16", 8).node.bandwidth == 31.5e9 * PEER_SHARE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "H1000"}, "GPU 'H1000' is not known; use one of V100-16GB, V100-32GB, T4, A10"),
        ({"node_link": "usb"}, "node link 'usb' is not known; use one of pcie3"),
        ({"network": "infiniband"}, "network 'infiniband' is not known; use one of 1gbe, 10gbe"),
        ({"host_link": "nvlink4"}, "host link 'nvlink4' is not known; use one of pcie3, pcie4, pcie5"),
        ({"disk": "tape"}, "disk 'tape' is not known; use one of sata-ssd"),
        ({"gpu": "T4"}, "precision is bf16, but T4 has compute capability 7.5, and bf16 begins at 8.0; use fp16"),
    ],
)
def test_unknown_name_is_refused_with_the_known_ones(change: dict[str, Any], message: str) -> None:
    names: dict[str, Any] = {"gpu": "L4", "node_link": "pcie4", "network": "10gbe", "precision": "bf16"}
    names["ranks_per_node"] = 2
    assert refusal(named, **(names | change)).startswith(message)


def test_probe_becomes_hardware_rates() -> None:
    hardware = measured(PROBE, "fp32")
    assert hardware.rate == 8e10
    assert measured(PROBE, "bf16").rate == 4e11
    assert hardware.node.bandwidth == 8e8  # the slower collective
    assert hardware.node.latency == 3e-4
    assert hardware.host.bandwidth == 1e10  # a copy reads and writes
    assert hardware.network.bandwidth == math.inf  # one node has no network
    assert (hardware.cpu, hardware.ranks_per_node, hardware.nodes) == (True, 2, 1)


def test_probe_of_gpus_has_the_host_link() -> None:
    both = {"host_to_device_bytes_per_second": 2.5e10, "device_to_host_bytes_per_second": 2e10}
    probe = PROBE | {"device": "cuda", "measured": MEASURED | both}
    assert measured(probe, "bf16").host.bandwidth == 2e10
    assert not measured(probe, "bf16").cpu


@pytest.mark.parametrize("value", [None, "x", "9", True, [], 0, -1, math.nan, math.inf, ...])
def test_invalid_measurement_is_named(value: Any) -> None:
    values = {name: each for name, each in (MEASURED | {"kernel_seconds": value}).items() if each is not ...}
    said = r"the probe is incomplete \(measured.kernel_seconds is .*run `zerolora probe` again"
    with pytest.raises(UserError, match=said):
        measured(PROBE | {"measured": values}, "fp32")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("measured", None),
        ("measured", []),
        ("device", "tpu"),
        ("nodes", 0),
        ("nodes", "x"),
        ("ranks_per_node", 1.5),
        ("hardware", None),
        ("precision_16bit", None),
    ],
)
def test_invalid_or_missing_value_of_a_probe_is_one_line(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"the probe is incomplete \({key} is "):
        checked(PROBE | {key: value})
    with pytest.raises(UserError, match=rf"the probe is incomplete \({key} is missing\)"):
        checked({name: each for name, each in PROBE.items() if name != key})


def test_missing_measurements_are_named() -> None:
    with pytest.raises(UserError, match="node_latency_seconds is null"):
        measured(PROBE | {"measured": MEASURED | {"node_latency_seconds": None}}, "fp32")
    with pytest.raises(UserError, match="no rate between a GPU and its host"):
        measured(PROBE | {"device": "cuda"}, "fp32")
    with pytest.raises(UserError, match="precision is fp16, but the probe measured bf16 and fp32"):
        measured(PROBE, "fp16")
