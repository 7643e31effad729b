"""The pretended cluster does what clusters do, so that what is tried on it means something."""

import os
import sys
from pathlib import Path

import pytest
from cluster import GPUS, NODES, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(120)]

# Whether slurmd of another node answers; the exit code of `timeout` is 124.
HEARS = ("timeout", "2", "bash", "-c", "exec 3<>/dev/tcp/$0/6818")


def test_every_node_is_a_machine_of_its_own(cluster: Cluster) -> None:
    assert sorted(cluster.run("srun", "--nodes=3", "hostname").stdout.split()) == list(NODES)
    addresses = cluster.run("srun", "--nodes=3", "ip", "-4", "-brief", "address", "show", "eth0").stdout.splitlines()
    assert len({line.split()[2] for line in addresses}) == 3


def test_slurm_hands_out_the_gpus_of_each_node(cluster: Cluster) -> None:
    result = cluster.run("srun", "--nodes=2", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES")
    assert result.stdout.split() == ["0,1", "0,1"]


def test_zerolora_check_reads_partitions_and_accounting(cluster: Cluster, tmp_path: Path) -> None:
    command = (str(Path(sys.executable).with_name("zerolora")), "check")
    done = cluster.run(*command, directory=tmp_path, environment={**os.environ, "COLUMNS": "300"})
    text = " ".join(done.stdout.split())
    each = f"{len(NODES)} nodes × {GPUS} GPUs"
    assert f"✓ Slurm normal: {each}; spare: {each}; urgent: {each}" in text, text
    assert "accounting" not in text  # sacct answers


def test_two_nodes_can_lose_each_other_and_meet_again(cluster: Cluster) -> None:
    cluster.cut("node1", "node2")
    try:
        assert cluster.on("node1", *HEARS, "node2").returncode == 124
        assert cluster.on("node2", *HEARS, "node1").returncode == 124
        assert cluster.on("node1", *HEARS, "node3").returncode == 0
    finally:
        cluster.reconnect("node1", "node2")
    assert cluster.on("node1", *HEARS, "node2").returncode == 0


def test_a_node_without_power_loses_its_processes_and_comes_back(cluster: Cluster) -> None:
    options = ("--nodelist=node3", "--output=/dev/null", "--wrap", "sleep 600")
    job = cluster.run("sbatch", "--parsable", *options).stdout.strip()
    cluster.wait_job_state(job, "RUNNING", 20)
    cluster.stop_node("node3")
    cluster.run("scancel", job)
    cluster.start_node("node3")
    cluster.wait_idle(60)
    assert cluster.run("srun", "--nodelist=node3", "hostname").stdout == "node3\n"


def test_a_job_outlives_the_controller(cluster: Cluster) -> None:
    job = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 3").stdout.strip()
    cluster.wait_job_state(job, "RUNNING", 20)
    cluster.stop_controller()
    cluster.start_controller()
    cluster.wait_job_state(job, "COMPLETED", 60)
