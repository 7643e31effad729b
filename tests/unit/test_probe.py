"""The probe, measuring this machine with two gloo ranks."""

import json
import time
from pathlib import Path

import pytest
from conftest import ROOT, SERVERS, project_environment
from pretended_driver import PretendedDriver

from zerolora.errors import UserError
from zerolora.machine import devices
from zerolora.planner.cost import step_seconds
from zerolora.planner.run_hardware import measured
from zerolora.probe.probe import _nodes, probe
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import StepWork


def test_probe_of_two_ranks(tmp_path: Path) -> None:
    environment = project_environment(ROOT)
    server = SERVERS.of(ROOT, environment)
    started = time.monotonic()
    command = ["zerolora", "probe", "--output", "out/probe.json", "--device", "cpu", "--ranks", "2"]
    result = server.run(command, tmp_path, environment)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - started < 40
    actual = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert (actual["device"], actual["nodes"], actual["ranks_per_node"]) == ("cpu", 1, 2)
    assert actual["hardware"]["memory_bytes"] > 2**30
    assert {"torch", "deepspeed", "python"} <= set(actual["versions"])
    values = actual["measured"]
    # Wide bounds for any busy CPU; they catch a unit wrong by 1000.
    assert 1e9 < values["matmul_fp32_flops_per_second"] < 1e13
    assert 1e8 < values["matmul_16bit_flops_per_second"] < 1e14
    assert 5e8 < values["memory_bytes_per_second"] < 1e12
    assert 1e7 < values["node_all_reduce_bytes_per_second"] < 1e11
    assert 1e7 < values["node_all_gather_bytes_per_second"] < 1e11
    assert 1e-6 < values["node_latency_seconds"] < 0.1
    assert 1e6 < values["host_adamw_parameters_per_second_per_thread"] < 1e10
    assert 1e-7 < values["kernel_seconds"] < 1e-3
    absent = {name for name, value in values.items() if value is None}
    assert absent == {
        "host_to_device_bytes_per_second",
        "device_to_host_bytes_per_second",
        "network_all_reduce_bytes_per_second",
        "network_all_gather_bytes_per_second",
        "network_latency_seconds",
    }
    work = StepWork(
        256, 4, 2, 135_000_000, 2_500_000, 134_000_000, 211, 30, 576, 9, 64, 49152, 256, 0.3, False, "sdpa", 4
    )
    assert 0.1 < step_seconds(work, STRATEGIES["zero2"], measured(actual, "fp32")).total < 1000


def test_probe_of_one_rank_has_no_links(tmp_path: Path) -> None:
    probe(tmp_path / "probe.json", "cpu", 1)
    result = json.loads((tmp_path / "probe.json").read_text())
    assert result["measured"]["node_all_reduce_bytes_per_second"] is None
    assert measured(result, "fp32").ranks == 1


@pytest.mark.parametrize(
    ("device", "ranks", "message"),
    [
        ("tpu", 1, "device is 'tpu'; use cpu or cuda"),
        ("cpu", 0, "--ranks is 0; use 1 or more"),
        ("cuda", 9, "--device is cuda, but 9 GPUs are needed and 1 visible; ask for more"),
    ],
)
def test_missing_devices_are_refused(
    device: str, ranks: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(devices, "driver_library", lambda: PretendedDriver(9.0))
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    with pytest.raises(UserError, match=message):
        probe(tmp_path / "probe.json", device, ranks)
    assert list(tmp_path.iterdir()) == []


def test_directory_as_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory; give a file"):
        probe(tmp_path, "cpu", 1)


def test_failing_rank_says_why_and_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken" / "psutil.py").parent.mkdir()
    (tmp_path / "broken" / "psutil.py").write_text("raise ImportError('no psutil on this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with pytest.raises(
        UserError, match="(?s)rank 0 failed with exit code 1; its last lines:.*no psutil on this machine"
    ):
        probe(tmp_path / "probe.json", "cpu", 1)
    assert not (tmp_path / "probe.json").exists()


def test_nodes_are_counted_in_a_job_step() -> None:
    assert _nodes({"SLURM_NNODES": "4"}) == 1  # not in a job step
    assert _nodes({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}) == 2
