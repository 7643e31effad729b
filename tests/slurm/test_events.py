"""What clusters do to jobs, on a real Slurm: each ends with the adapter of undisturbed training."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from cluster import Cluster
from cluster_project import ClusterProject
from conftest import Project
from engines import edit_config

from zerolora.log import attempts
from zerolora.train.checkpoint.format import CorruptCheckpoint, header

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTER = "results/default/adapter"
TARGET = f"{ADAPTER}/manifest.json"
MERGED = "results/default/merged/manifest.json"
TRAIN = "rule_train_wildcards_default"
# Long enough to be disturbed; some of what is done to it costs what was trained since the last checkpoint.
LONG = {"train.epochs": 300, "train.max_steps": 600, "train.checkpoint_steps": 20, "train.micro_batch": 2}
SECONDS_OF_WARNING = 120  # as profiles/slurm has it
Disturbance = Callable[["Disturbed"], None]


class Disturbed:
    """A training job that runs, and the Snakemake that waits for it."""

    def __init__(self, project: ClusterProject, retries: int, target: str) -> None:
        self.project, self.cluster = project, project.cluster
        self.retries, self.target = retries, target
        self.said = project.directory / "said.txt"
        self.said.write_text("")
        self.snakemake = self.start()
        self.cluster.wait(lambda: self.step() >= 20, "training saves", 120)
        self.job = project.jobs(TRAIN)[-1]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start Snakemake in a group of processes of its own, as a shell does."""
        command = ("snakemake", "--profile", "profiles/slurm", "--retries", str(self.retries), self.target)
        with self.said.open("a") as said:
            return subprocess.Popen(
                self.cluster.command(*command, directory=self.project.directory),
                env=self.project.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                # Whoever runs the tests may have them ignore Ctrl-C, and with them all that they start.
                preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )

    def step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        files = sorted((self.project.directory / "work/checkpoints/default").glob("*/step-*.safetensors"))
        try:
            return int(header(files[-1])["step"]) if files else 0
        except CorruptCheckpoint:  # pruned a moment ago
            return 0

    def nodes(self) -> list[str]:
        """Return the nodes that the job runs on."""
        names = self.cluster.run("squeue", "-h", "-j", self.job, "-o", "%N").stdout.strip()
        return self.cluster.run("scontrol", "show", "hostnames", names).stdout.split() if names else []

    def state(self) -> str:
        """Return the job's state."""
        return self.cluster.job_state(self.job)

    def log(self) -> str:
        """Return what all attempts printed."""
        log = self.project.directory / "results/logs/train/default.log"
        return "".join(path.read_text() for path in attempts(log))

    def end_in(self, seconds: int) -> None:
        """Set the job's time limit so that it is reached then; Slurm looks every half minute."""
        now = self.cluster.run("date", f"--date={seconds} seconds", "+%Y-%m-%dT%H:%M:%S").stdout.strip()
        self.cluster.run("scontrol", "update", f"JobId={self.job}", f"EndTime={now}")

    def stop_rank(self, rank: int) -> int:
        """Keep a rank from going on, and with it all others; return its process id, as seen here."""
        process = self.project.rank_process(rank)
        assert process
        os.kill(process, signal.SIGSTOP)
        return process

    def again(self) -> None:
        """Start Snakemake again, as a user does who finds it gone."""
        self.snakemake.wait(timeout=180)
        self.project.run("snakemake", "--profile", "profiles/slurm", "--unlock")
        self.snakemake = self.start()


@pytest.fixture(scope="module")
def prepared(make_project: Callable[[str], Project], cluster: Cluster) -> ClusterProject:
    """Return a project in which all that comes before training is done."""
    project = ClusterProject(make_project("events"), cluster)
    edit_config(project, **LONG)
    project.snakemake("--until", "render")
    return project


@pytest.fixture(scope="module")
def profile(prepared: ClusterProject) -> dict[str, Any]:
    """Return the profile as the site of the undisturbed run has it."""
    return prepared.profile()


@pytest.fixture(scope="module")
def undisturbed(prepared: ClusterProject) -> dict[str, bytes]:
    """Return the files of the undisturbed run."""
    prepared.snakemake(TARGET)
    return files_of(prepared)


def files_of(project: ClusterProject) -> dict[str, bytes]:
    names = ("adapter/adapter_model.safetensors", "metrics/train.json", "metrics/loss.csv")
    return {name: (project.directory / "results/default" / name).read_bytes() for name in names}


def cancelled(disturbed: Disturbed) -> None:
    disturbed.cluster.run("scancel", disturbed.job)


def rank_killed(disturbed: Disturbed) -> None:
    rank = disturbed.project.rank_process(1)
    assert rank
    os.kill(rank, signal.SIGKILL)


def node_lost(disturbed: Disturbed) -> None:
    """A job is submitted afterwards too, which fails where Snakemake asks accounting for its jobs."""
    disturbed.cluster.stop_node(disturbed.nodes()[-1])


def controller_away(disturbed: Disturbed) -> None:
    disturbed.cluster.stop_controller()
    at = disturbed.step()
    disturbed.cluster.wait(lambda: disturbed.step() > at, "training goes on without the controller", 60)
    disturbed.cluster.start_controller()


def preempted(disturbed: Disturbed) -> None:
    disturbed.cluster.run("srun", "--partition=urgent", "--nodes=3", "--exclusive", "sleep", "1", timeout=120)


def preempted_for_good(disturbed: Disturbed) -> None:
    """Slurm starts it no more; its place in the queue is Snakemake's to take again."""
    preempted(disturbed)
    assert disturbed.state() == "PREEMPTED"


def warned_of_the_time_limit(disturbed: Disturbed) -> None:
    """It saves and ends by itself, before the limit."""
    at = disturbed.step()
    disturbed.stop_rank(1)  # or it would be done before Slurm looks; whom Slurm signals it lets go on
    disturbed.end_in(SECONDS_OF_WARNING + 30)
    disturbed.cluster.wait(lambda: disturbed.state() == "FAILED", "the job ends", 120)
    assert disturbed.step() > at
    assert "training was asked to stop; run the same command to go on" in disturbed.log()


def timed_out(disturbed: Disturbed) -> None:
    """Not warned, it has the seconds between SIGTERM and SIGKILL to save; if they do not do, its last checkpoint."""
    disturbed.stop_rank(1)
    disturbed.end_in(1)
    disturbed.cluster.wait(lambda: disturbed.state() == "TIMEOUT", "the job ends", 120)


def slurmd_killed(disturbed: Disturbed) -> None:
    """The node's ranks live on, unseen by Slurm, which takes the node for dead and starts the job elsewhere."""
    node, rank = disturbed.nodes()[-1], disturbed.stop_rank(1)  # or it would be done before Slurm sees
    disturbed.cluster.kill_slurmd(node)
    disturbed.cluster.wait(lambda: len(set(disturbed.nodes()) - {node}) == 2, "the job starts elsewhere", 120)
    os.kill(rank, signal.SIGCONT)


def network_cut(disturbed: Disturbed) -> None:
    """Nothing is lost but the way between two nodes: no connection breaks, no process ends."""
    one, other = disturbed.nodes()
    disturbed.cluster.cut(one, other)
    try:
        disturbed.cluster.wait(lambda: disturbed.state() == "FAILED", "the job fails", 180)
    finally:
        disturbed.cluster.mend(one, other)
    hangs = rf"zerolora: rank 1 on {other}, last in .*step \d+.*, has not been heard of for \d+ s; "
    waits = rf"rank 0 on {one} is in .*step \d+.*; run the same command to go on from its checkpoint"
    assert re.search(hangs + waits, disturbed.log()), disturbed.log()


def requeued(disturbed: Disturbed) -> None:
    disturbed.cluster.run("scontrol", "requeue", disturbed.job)


def interrupted(disturbed: Disturbed) -> None:
    disturbed.stop_rank(1)  # or it may be done before Snakemake has cancelled it
    os.killpg(disturbed.snakemake.pid, signal.SIGINT)
    disturbed.cluster.wait_job_state(disturbed.job, "CANCELLED", 60)
    disturbed.again()


def snakemake_killed(disturbed: Disturbed) -> None:
    """The job goes on by itself; a second one would find it at work."""
    os.killpg(disturbed.snakemake.pid, signal.SIGKILL)
    disturbed.cluster.wait_job_state(disturbed.job, "COMPLETED", 120)
    disturbed.again()


EVENTS: list[tuple[Disturbance, int]] = [
    (cancelled, 1),
    (rank_killed, 1),
    (node_lost, 1),
    (slurmd_killed, 0),
    (network_cut, 1),
    (controller_away, 0),
    (preempted, 0),
    (preempted_for_good, 1),
    (warned_of_the_time_limit, 1),
    (timed_out, 1),
    (requeued, 0),
    (interrupted, 0),
    (snakemake_killed, 0),
]


@pytest.mark.parametrize(("event", "retries"), EVENTS, ids=[event.__name__ for event, _ in EVENTS])
def test_it_ends_with_the_adapter_of_undisturbed_training(
    prepared: ClusterProject,
    profile: dict[str, Any],
    undisturbed: dict[str, bytes],
    event: Disturbance,
    retries: int,
) -> None:
    forget(prepared)
    prepared.write_profile(site(event, profile))
    disturbed = Disturbed(prepared, retries, MERGED if event is node_lost else TARGET)
    try:
        event(disturbed)
        disturbed.snakemake.wait(timeout=240)
    finally:
        mend(disturbed)
    assert disturbed.snakemake.returncode == 0, disturbed.said.read_text()[-6000:]
    found = files_of(prepared)
    for name, content in undisturbed.items():
        assert found[name] == content, name


def site(event: Disturbance, profile: dict[str, Any]) -> dict[str, Any]:
    """Return the profile of a site where an event is possible, or does not take long."""
    profile = json.loads(json.dumps(profile))
    train = profile["set-resources"]["train"]
    if event is preempted_for_good:
        train["slurm_partition"] = "spare"
    if event is network_cut:
        train["launcher"] = train["launcher"].replace("--wait=60", "--wait=10") + ",ZEROLORA_PATIENCE=15"
    if event is timed_out:
        train["slurm_extra"] = train["slurm_extra"].replace(f"--signal=USR1@{SECONDS_OF_WARNING} ", "")
    return profile


def forget(project: ClusterProject) -> None:
    """Take away what training made, outputs and checkpoints."""
    shutil.rmtree(project.directory / ADAPTER, ignore_errors=True)
    shutil.rmtree(project.directory / "work/checkpoints", ignore_errors=True)


def mend(disturbed: Disturbed) -> None:
    """Leave no job and no Snakemake behind, and all nodes up."""
    if disturbed.snakemake.poll() is None:
        os.killpg(disturbed.snakemake.pid, signal.SIGKILL)
        disturbed.snakemake.wait()
        disturbed.project.run("snakemake", "--profile", "profiles/slurm", "--unlock")
    for job in disturbed.project.jobs(TRAIN):
        if disturbed.cluster.job_state(job) in ("RUNNING", "PENDING"):
            disturbed.cluster.run("scancel", job)
    disturbed.cluster.start_missing_nodes()
