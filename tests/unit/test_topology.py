"""Each process finds its ranks, and each rank its number on its node, in the launcher's own variables."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed

from zerolora.errors import UserError
from zerolora.log import TASKS
from zerolora.train.launch import launcher
from zerolora.train.launch.heartbeat import absent
from zerolora.train.launch.rendezvous import check_shared_by_none
from zerolora.train.launch.topology import LAUNCHERS, gpu_of_rank, hosts_of, topology

TORCHRUN = {
    **{"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "head", "MASTER_PORT": "1234"},
}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
    **{"MASTER_ADDR": "head", "MASTER_PORT": "1234"},
}


def test_topology_of_one_machine() -> None:
    where = topology({}, 1, 3)
    assert list(where.ranks) == [0, 1, 2]
    environment = where.environment(2)
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("2", "2", "3")
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    # The port stays bound until the rendezvous, so that runs on one machine never share one.
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((where.address, int(environment["MASTER_PORT"])))


SLURM = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "node[03-05,9]"}


@pytest.mark.parametrize(
    ("task", "tasks", "ranks", "rank", "local"), [(1, 2, [4, 5, 6, 7], 5, "1"), (6, 8, [6], 6, "2")]
)
def test_slurm_tasks_are_nodes_or_ranks(task: int, tasks: int, ranks: list[int], rank: int, local: str) -> None:
    where = topology(SLURM | {"SLURM_PROCID": str(task), "SLURM_STEP_NUM_TASKS": str(tasks)}, 2, 4)
    assert list(where.ranks) == ranks
    assert (where.address, where.port) == ("node03", 24711)
    assert where.environment(rank)["LOCAL_RANK"] == local


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}, r"3 tasks.*start 2 tasks \(one a node\) or 8"),
        ({"SLURM_JOB_ID": "4711"}, "train.nodes is 2.*srun"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "WORLD_SIZE is 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8, but train.ranks_per_node is 4"),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "3"}, r"mpirun started 3 tasks.*start 2 tasks \(one a node\) or 8"),
    ],
)
def test_other_numbers_of_processes_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        topology(environment, 2, 4)


@pytest.mark.parametrize("job", ["1", "31999", "67108863"])
def test_slurm_port_is_not_ephemeral(job: str) -> None:
    where = topology(SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2, 1)
    assert 1024 <= where.port < 32_768


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[03,7]", "n03"),
        ("gpu-01-[2-4]", "gpu-01-2"),
        ("r1n[2-3]x,z", "r1n2x"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert hosts_of(nodelist)[0] == host


def test_hosts_of_a_node_list() -> None:
    assert hosts_of("n[08-10,3],x1,r[1-2]n[0-1]") == (
        *("n08", "n09", "n10", "n3", "x1"),
        *("r1n0", "r1n1", "r2n0", "r2n1"),
    )


@pytest.mark.parametrize("nodelist", ["", "n[1-2", "n]", "n 1"])
def test_other_node_lists_are_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST is .*, which names no hosts"):
        hosts_of(nodelist)


@pytest.mark.parametrize(
    ("ranks", "each", "names", "text"),
    [
        ([1], 1, ["a", "b"], "rank 1 of b"),
        ([1], 2, [], "rank 1"),
        ([2, 4, 5, 6, 7], 4, ["a", "b"], "rank 2 of a; all ranks (4 to 7) of b"),
        ([4, 5], 4, ["a", "b"], "ranks 4, 5 of b"),
        ([2, 3], 2, [], "all ranks (2 to 3)"),
    ],
)
def test_missing_ranks_are_named_with_their_node(ranks: list[int], each: int, names: list[str], text: str) -> None:
    assert absent(ranks, each, names) == text


# Task 6 of 8 on two nodes: number 2 of the second node, under block distribution.
CYCLIC = {**SLURM, "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN,
        {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
        # A wrapper that exports RANK alone.
        {**MPIRUN, "RANK": "6", "WORLD_SIZE": "8"},
        # torchrun, which srun started once on each node.
        {**TORCHRUN, **SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
        MPIRUN,
        # mpirun, whose daemon on this node srun started.
        {**MPIRUN, **SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
        {**{"MV2_COMM_WORLD_RANK": "6", "MV2_COMM_WORLD_SIZE": "8"}, "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
        {
            **{"FLUX_TASK_RANK": "6", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "2"},
            **{"MASTER_ADDR": "head", "MASTER_PORT": "1234"},
        },
        {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
        CYCLIC,
    ],
)
def test_a_task_of_a_launcher_is_one_rank(environment: dict[str, str]) -> None:
    where = topology(environment, 2, 4)
    assert list(where.ranks) == [6]
    assert where.environment(6)["LOCAL_RANK"] == "2"
    assert (where.address, where.port) == ("node03", 24711) if environment is CYCLIC else ("head", 1234)


@pytest.mark.parametrize(
    ("task", "own"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "head"}, [4, 5, 6, 7]),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2", "MASTER_ADDR": "head"}, [0, 1, 2, 3]),
    ],
)
def test_a_task_of_a_launcher_is_one_node(task: dict[str, str], own: list[int]) -> None:
    where = topology(task, 2, 4)
    assert (list(where.ranks), where.port) == (own, 29500)


# Kubeflow's training operator: a PyTorchJob of two pods, without and with nprocPerNode; a TrainJob of two nodes.
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
PODS = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}
TRAIN_JOB = PODS | {"PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    "environment",
    [
        POD,
        {**POD, **PODS, "WORLD_SIZE": "8"},
        {**POD, **PODS, "PET_NPROC_PER_NODE": "1"},
        {**POD, **PODS, "PET_NPROC_PER_NODE": "auto"},
        TRAIN_JOB,
    ],
)
def test_a_pod_is_one_node(environment: dict[str, str]) -> None:
    where = topology(environment, 2, 4)
    assert (list(where.ranks), where.address, where.port) == ([4, 5, 6, 7], "head", 1234)


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "1"}, {"PET_NODE_RANK": "0", "PET_NNODES": "1"}])
def test_a_single_pod_starts_all_ranks(environment: dict[str, str]) -> None:
    where = topology(environment, 1, 2)
    assert list(where.ranks) == [0, 1] and where.listener


def test_torchrun_in_a_pod_starts_ranks() -> None:
    """It reads PET_* itself, and numbers the ranks."""
    assert list(topology({**TORCHRUN, **PODS}, 2, 4).ranks) == [6]


def test_pods_of_one_rank_are_ranks() -> None:
    for environment in (POD, {**POD, "LOCAL_RANK": "0"}):
        assert list(topology(environment, 2, 1).ranks) == [1]


def test_the_first_task_of_each_launcher_starts_the_log() -> None:
    numbers = [each.number for each in LAUNCHERS]
    assert sorted(TASKS) == sorted(["RANK", "PET_NODE_RANK", *numbers])


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PET_NODE_RANK", "SLURM_PROCID"])
def test_the_tasks_of_a_launcher_share_a_log(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    code = "import pathlib, sys; from zerolora.log import redirect; "
    code += "redirect(pathlib.Path(sys.argv[1])); print(sys.argv[2])"
    for number in "10":
        subprocess.run([sys.executable, "-c", code, log, number], env=os.environ | {name: number}, check=True)
    assert log.read_text() == "1\n0\n"


def test_tasks_of_pals_are_ranks() -> None:
    task = {"PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2", "PMI_RANK": "6", "PMI_SIZE": "8", "MASTER_ADDR": "head"}
    assert list(topology(task, 2, 4).ranks) == [6]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**POD, **PODS, "RANK": "0"}, "RANK is 0 but PET_NODE_RANK is 1, and LOCAL_RANK is not set; unset one"),
        (
            {**POD, **PODS, "PET_NNODES": "3"},
            "PET_NNODES is 3 and .* start it on 2 hosts, or .* nprocPerNode: 4",
        ),
        ({**POD, **PODS, "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE is '8'.* pods with nprocPerNode: 4"),
        ({**POD, **PODS, "WORLD_SIZE": "2"}, "WORLD_SIZE is '2', but the config asks for 2 nodes x 4 ranks"),
        ({**TRAIN_JOB, "PET_NNODES": "1:2"}, "PET_NNODES is '1:2', which is no number"),
        ({**TRAIN_JOB, "PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2 of 2 pods; they are 0 to 1"),
        ({**POD, "RANK": "2"}, "RANK is 2 of 2 pods; they are 0 to 1"),
        (PODS, "MASTER_ADDR, the host of rank 0, is not set"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is '1', but the launcher's number of tasks is not set; export RANK"),
        ({"PMI_RANK": "1"}, "PMI_RANK is '1', but the launcher's number of tasks is not set; export RANK"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID is '1', but the launcher's number of tasks is not set"),
    ],
)
def test_pods_that_contradict_the_config_and_uncounted_tasks_are_refused(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        topology(environment, 2, 4)
    assert "\n" not in str(refused.value)


def test_a_launcher_of_one_task_changes_nothing() -> None:
    """As a session or a job manager that starts everything by mpirun or srun does."""
    where = topology({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}, 1, 2)
    assert list(where.ranks) == [0, 1] and where.listener


@pytest.mark.parametrize(
    "distribution",
    [
        [(task // 4, task % 4) for task in range(8)],
        [(task % 2, task // 2) for task in range(8)],
        [(task // 2 % 2, task // 4 * 2 + task % 2) for task in range(8)],
    ],
    ids=["block", "cyclic", "plane"],
)
def test_ranks_of_a_node_are_consecutive_under_any_distribution(distribution: list[tuple[int, int]]) -> None:
    ranks = {}
    for task, (node, local) in enumerate(distribution):
        own = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        where = topology({**SLURM, **own, "SLURM_STEP_NUM_TASKS": "8"}, 2, 4)
        (rank,) = where.ranks
        ranks[rank] = (node, where.environment(rank)["LOCAL_RANK"])
    assert ranks == {rank: (rank // 4, str(rank % 4)) for rank in range(8)}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TORCHRUN, "LOCAL_RANK": "1"}, r"rank 6 is number 1 on its node \(LOCAL_RANK\), where 2 is expected"),
        ({**MPIRUN, **TORCHRUN, "LOCAL_RANK": "0"}, "LOCAL_RANK is 0 but OMPI_COMM_WORLD_LOCAL_RANK is 2; unset"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, r"number 3 on its node \(OMPI.*mpirun --map-by ppr:4:node"),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            r"task 1 is number 1 on its node .*, where 0 is expected: each node has 1, .*ppr:1:node",
        ),
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x', which is no number"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8 and WORLD_SIZE 8; ranks are 0 to 7"),
        ({**TORCHRUN, "MASTER_PORT": "auto"}, "MASTER_PORT is 'auto'"),
        ({"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "head"}, "RANK is set, but LOCAL_RANK"),
        ({"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, "MASTER_ADDR, the host of rank 0, is not set"),
        ({**CYCLIC, "SLURM_LOCALID": "4"}, "task 5 as number 4 of node 1 .*--nodes=2 --ntasks-per-node=4"),
        ({**CYCLIC, "SLURM_NODEID": "2"}, "number 2 of node 2 .*--nodes=2 --ntasks-per-node=4"),
        ({**CYCLIC, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "--nodes=2 --ntasks-per-node=1"),
    ],
)
def test_contradictions_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        topology(environment, 2, 4)
    assert "\n" not in str(refused.value)


def test_ranks_do_not_inherit_numbers_of_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed compares Open MPI's with LOCAL_RANK, which is 0 where a rank sees its own GPU alone."""
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert not [name for name in launcher.environment_of("cuda") if name.startswith("OMPI_")]


@pytest.mark.parametrize(("visible", "number"), [(4, "2"), (8, "2"), (1, "0")])
def test_a_rank_uses_its_own_gpu_or_the_only_one(visible: int, number: str) -> None:
    environment = topology(TORCHRUN, 2, 4).environment(6)
    assert gpu_of_rank(environment, visible) == int(number)
    assert environment["LOCAL_RANK"] == number


@pytest.mark.parametrize("visible", [0, 2, 3])
def test_a_rank_that_sees_a_part_of_the_gpus_is_refused(visible: int) -> None:
    with pytest.raises(UserError, match=rf"shows {visible} GPUs to rank 6, one of 4 on its node; .*gpus-per-task=1"):
        gpu_of_rank(topology(TORCHRUN, 2, 4).environment(6), visible)


@pytest.mark.parametrize(("gpus", "refused"), [(["a", "b", "c"], []), (["a", "b", "a"], [0, 2])])
def test_two_ranks_never_use_one_gpu(gpus: list[str], refused: list[int]) -> None:
    """As under `srun --gpus=1` with several tasks, which all see that GPU."""
    store, said = torch.distributed.HashStore(), {}

    def rank(number: int) -> None:
        try:
            check_shared_by_none(store, number, len(gpus), gpus[number])
        except UserError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=[number]) for number in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == refused
    assert all(text.startswith("ranks 0 and 2 use the same GPU") for text in said.values())


def test_torchruns_own_variables(tmp_path: Path) -> None:
    """The real torchrun; it loads torch, which takes seconds."""
    # A file for each rank: what two processes print at once is mixed.
    code = "import os, pathlib; from zerolora.train.launch.topology import topology; t = topology(os.environ, 1, 2); "
    code += "pathlib.Path(os.environ['RANK']).write_text(t.environment(t.ranks[0])['LOCAL_RANK'] + str(t.ranks.start))"
    torchrun = Path(sys.executable).with_name("torchrun")
    options = ["--standalone", "--no-python", "--nproc-per-node=2"]
    result = subprocess.run(
        [torchrun, *options, sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["00", "11"]
