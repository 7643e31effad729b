"""The ranks of a step's tasks, and their GPUs, as a real srun numbers and divides them."""

import importlib
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import Cluster

from zerolora.compat.slurm_executor_patches import gpus_of_each_node

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(120)]

# Without a driver: the names in CUDA_VISIBLE_DEVICES stand for the GPUs.
TASK = """
import json, os
from zerolora.errors import UserError
from zerolora.machine.devices import visible_names
from zerolora.train.launch.topology import gpu_of_rank, topology

try:
    where = topology(os.environ, {nodes}, {ranks})
    names, gpus = visible_names() or [], []
    for rank in where.ranks if names else ():
        gpus.append(names[gpu_of_rank(where.environment(rank), len(names))])
    meeting = [where.address, where.port]
    print(json.dumps([os.environ["SLURMD_NODENAME"], [*where.ranks], gpus, meeting]))
except UserError as error:
    print(json.dumps(str(error)))
"""


def of_tasks(cluster: Cluster, nodes: int, ranks: int, *options: str) -> list[Any]:
    """Return what each task prints: its node, ranks, their GPUs and the rendezvous; or a refusal."""
    code = TASK.format(nodes=nodes, ranks=ranks)
    result = cluster.run("srun", "--immediate=20", *options, sys.executable, "-c", code)
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("nodes", "ranks", "options"),
    [
        (1, 1, "--ntasks=1"),
        (1, 2, "--ntasks=1 --gres=gpu:2"),
        (1, 2, "--ntasks=2 --gres=gpu:2"),
        (2, 2, "--ntasks=2 --gres=gpu:2"),
        (2, 2, "--ntasks=4 --ntasks-per-node=2 --gres=gpu:2"),
        (2, 2, "--ntasks=4 --ntasks-per-node=2 --gres=gpu:2 --distribution=cyclic"),
        (2, 2, "--ntasks=4 --ntasks-per-node=2 --gpus-per-task=1 --distribution=cyclic"),
        (2, 4, "--ntasks=8 --ntasks-per-node=4 --gres=gpu:4 --distribution=plane=2"),
    ],
)
def test_tasks_share_out_all_ranks_and_gpus(cluster: Cluster, nodes: int, ranks: int, options: str) -> None:
    tasks = of_tasks(cluster, nodes, ranks, f"--nodes={nodes}", *options.split())
    hosts = sorted({task[0] for task in tasks})
    assert len(hosts) == nodes
    on_host = {host: sorted(rank for task in tasks if task[0] == host for rank in task[1]) for host in hosts}
    assert on_host == {host: [*range(at * ranks, (at + 1) * ranks)] for at, host in enumerate(hosts)}, tasks
    gpus = ranks if "gpu" in options else 0
    for host in hosts:
        assert len({gpu for task in tasks if task[0] == host for gpu in task[2]}) == gpus, tasks
    if "--ntasks=1 " not in f"{options} ":
        assert len({tuple(task[3]) for task in tasks}) == 1 and tasks[0][3][0] == hosts[0]


def test_nodes_with_different_numbers_of_ranks_are_refused(cluster: Cluster) -> None:
    tasks = of_tasks(cluster, 2, 2, "--nodes=2", "--ntasks=4", "--distribution=plane=3")
    assert any("the config asks for 2 nodes x 2 ranks; start 4 tasks with --nodes=2" in str(task) for task in tasks)


class Resources(dict[str, Any]):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (2, 2)])
def test_a_training_has_one_task_and_its_gpus_on_each_node(
    cluster: Cluster, tmp_path: Path, nodes: int, ranks: int
) -> None:
    """The line with which Snakemake's executor submits the rule's resources, and the profile's srun in the job."""
    executor = importlib.import_module("snakemake_executor_plugin_slurm")
    gpus_of_each_node(executor)
    asked = {
        "nodes": nodes,
        "tasks": nodes,
        "tasks_per_gpu": 0,
        "gres": f"gpu:{ranks}",
        "gpu": ranks * nodes,
        "mpi": "",
    }
    resources = Resources(asked | {"mem_mb": 500, "request_gpus": ranks * nodes, "gpu_manufacturer": "nvidia"})
    job: Any = SimpleNamespace(resources=resources, threads=4 * ranks, name="train")
    names = {"run_uuid": "train", "slurm_logfile": "/dev/null", "comment_str": "train"}
    line = executor.get_submit_command(job, {**names, "account": "", "partition": "", "workdir": str(tmp_path)})
    line += executor.set_gres_string(job)
    assert "--gpus" not in line and "--ntasks" not in line
    task = "srun --label sh -c 'echo $SLURM_STEP_NUM_TASKS $CUDA_VISIBLE_DEVICES'"
    options = ("--wait", f"--output={tmp_path}/%j", "--wrap", task)
    job_id = cluster.run(*shlex.split(line), *options).stdout.strip().split(";")[0]
    tasks = sorted((tmp_path / job_id).read_text().splitlines())
    assert tasks == [f"{task}: {nodes} {','.join(map(str, range(ranks)))}" for task in range(nodes)]
    cluster.wait(lambda: cluster.sacct(job_id, "ReqTRES") != [""], "accounting has the job", 30)
    tres = cluster.sacct(job_id, "ReqTRES")[0].split(",")
    assert {f"node={nodes}", f"cpu={4 * ranks * nodes}", f"gres/gpu={ranks * nodes}"} <= set(tres)
