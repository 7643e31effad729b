"""Real launchers on two hosts: each trains to the bytes of the plain start, in four to ten seconds of loading torch."""

import re
import subprocess
from pathlib import Path

import pytest
from bench import Bench
from hosts import NAMES, Hosts

pytestmark = [pytest.mark.launchers, pytest.mark.slow, pytest.mark.timeout(300)]

FILES = ("adapter/adapter_model.safetensors", "metrics/loss.csv")
TWO_HOSTS = {"nodes": 2, "ranks_per_node": 1}
ONE_HOST = {"nodes": 1, "ranks_per_node": 2}
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "-x", "PYTHONPATH")
DEEPSPEED = ("deepspeed", "--hostfile", "hostfile", "--no_python", "--no_local_rank")
HOSTFILE = "host1 slots=1\nhost2 slots=1\n"
LAUNCHERS = {
    "mpirun": ((*OPEN_MPI, "--host", "host1,host2", "-x", "MASTER_ADDR=host1"), TWO_HOSTS),
    "hydra": (("mpiexec.hydra", "-hosts", "host1,host2", "-ppn", "1", "-genv", "MASTER_ADDR", "host1"), TWO_HOSTS),
    "torchrun, one host": (("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "--"), ONE_HOST),
    "deepspeed": (DEEPSPEED, TWO_HOSTS),
}
TORCHRUN = ("torchrun", "--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "host1")


@pytest.fixture(scope="module")
def plain(bench: Bench) -> list[bytes]:
    """Return the files of a training that `zerolora stage train` alone starts."""
    return files_of(bench.run("plain"))


def files_of(run: Path) -> list[bytes]:
    return [(run / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_trains_to_the_bytes_of_the_plain_start(
    hosts: Hosts, bench: Bench, plain: list[bytes], name: str
) -> None:
    launcher, ranks = LAUNCHERS[name]
    (bench.folder / "hostfile").write_text(HOSTFILE)
    command = [*launcher, *bench.command(name.replace(", ", "-"), **ranks)]
    done = hosts.run("host1", *command, directory=bench.folder, environment=bench.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files_of(bench.folder / name.replace(", ", "-")) == plain


def test_torchrun_on_two_hosts_trains_to_the_bytes_of_the_plain_start(
    hosts: Hosts, bench: Bench, plain: list[bytes]
) -> None:
    training = bench.command("torchrun", **TWO_HOSTS)
    options = ("--no-python", "--")
    agents = [
        subprocess.Popen(
            hosts.command(name, *TORCHRUN, "--node-rank", str(number), *options, *training, directory=bench.folder),
            env=bench.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(NAMES)
    ]
    try:
        output = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert files_of(bench.folder / "torchrun") == plain


def test_without_master_addr_several_hosts_are_refused(hosts: Hosts, bench: Bench) -> None:
    """Open MPI names the host of mpirun, which need not be that of rank 0; MPICH names none."""
    command = [*OPEN_MPI, "--host", "host1,host2", *bench.command("nowhere", **TWO_HOSTS)]
    done = hosts.run("host1", *command, directory=bench.folder, environment=bench.environment)
    assert done.returncode
    assert "zerolora: train.nodes is 2, but MASTER_ADDR, the host of rank 0, is not set" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_that_does_not_arrive_is_named(hosts: Hosts, bench: Bench) -> None:
    """Started by hand on host1 alone, as if the launcher had not reached host2 yet; its patience of 6 s ends it."""
    command = bench.command("absent", **TWO_HOSTS)
    task = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "MASTER_ADDR": "host1", "ZEROLORA_NODES": "host1,host2"}
    environment = bench.environment | task | {"ZEROLORA_PATIENCE": "2"}
    done = hosts.run("host1", *command, directory=bench.folder, environment=environment)
    assert done.returncode == 2
    words = r"zerolora: rank 0 on host1 waits for rank 1 of host2 to come to host1 for \d+ s; .*"
    warned, ended = re.findall(words, done.stderr)[:2]
    assert re.search(r"training ends in \d s unless it recovers", warned), done.stderr
    assert "run the same command to resume" in ended, done.stderr
