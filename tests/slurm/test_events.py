"""What clusters do to jobs, on a real Slurm: one training suffers it all, and ends as the undisturbed one.

Each event is a test. They share the training, since every start of it on two nodes takes twenty CPU-seconds; after each
it must resume from a checkpoint, and at the end its adapter, losses and metrics are those of the undisturbed training.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from cluster_project import ClusterProject
from conftest import Project, begun
from engines import edit_config

from zerolora.log import attempts
from zerolora.train.checkpoint.format import CorruptCheckpoint, header

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

MERGED = "results/default/merged/manifest.json"
TRAIN = "rule_train_wildcards_default"
# Long enough for all that happens; some of it costs what was trained since the last checkpoint.
LONG = {"train.epochs": 500, "train.max_steps": 320, "train.checkpoint_steps": 10, "train.micro_batch": 2}
RETRIES = 12
SECONDS_OF_WARNING = 120  # as profiles/slurm has it
Disturbance = Callable[["Disturbed"], None]


class Disturbed:
    """A training job that runs, and the Snakemake that waits for it."""

    def __init__(self, project: ClusterProject) -> None:
        self.project, self.cluster = project, project.cluster
        self.said = project.directory / "said.txt"
        self.said.write_text("")
        self.failed_in: str | None = None
        """The event after which nothing can be said of the training."""
        self.snakemake = self.start()
        self.save(10)

    def start(self) -> "subprocess.Popen[bytes]":
        """Start Snakemake in a group of processes of its own, as a shell does."""
        command = ("snakemake", "--profile", "profiles/slurm", "--retries", str(RETRIES), MERGED)
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

    def save(self, step: int) -> None:
        """Wait until a step is saved, and note the job that does it."""
        self.cluster.wait(lambda: self.step() >= step, f"training saves step {step}", 240)
        self.job = self.project.jobs(TRAIN)[-1]

    def go_on(self, starts: int) -> None:
        """Wait until training has started more often than so many times, and continues from a checkpoint."""
        said = re.compile(r"resuming at step ([1-9]\d*) of")
        self.cluster.wait(lambda: len(self.logs()) > starts and said.search(self.logs()[-1]), "training continues", 240)
        match = said.search(self.logs()[-1])
        assert match
        self.save(int(match[1]) + 1)

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

    def logs(self) -> list[str]:
        """Return what each attempt printed, the first one's first."""
        log = self.project.directory / "results/logs/train/default.log"
        return [path.read_text() for path in attempts(log)]

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

    def hold(self) -> list[int]:
        """Stop all ranks, so that none loses its patience with another; return their process ids, as seen here."""
        return [self.stop_rank(rank) for rank in range(2)]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the training from going on meanwhile: its steps are to last for all events."""
        ranks = self.hold()
        yield
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)

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
    here = Project(project.directory)  # the local profile: nothing before training is what is tested
    here.snakemake("results/default/zero.json")
    here.run("zerolora", "weights", "--model", "resources/models/tiny", "--weights", "resources/weights/tiny")
    return project


@pytest.fixture(scope="module")
def profile(prepared: ClusterProject) -> dict[str, Any]:
    """Return the profile as the site of the undisturbed run has it."""
    return prepared.profile()


@pytest.fixture(scope="module")
def undisturbed(prepared: ClusterProject, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of the undisturbed run: two tasks on this machine, which take themselves for those of a job."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    command = prepared.training(folder, 2, 1, **{key.removeprefix("train."): value for key, value in LONG.items()})
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [begun(*command, directory=prepared.directory, SLURM_PROCID=str(task), **job) for task in range(2)]
    assert [task.wait() for task in tasks] == [0, 0], [task.errors() for task in tasks]
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    names = ("adapter/adapter_model.safetensors", "metrics/train.json", "metrics/loss.csv")
    return {name: (folder / name).read_bytes() for name in names}


def cancelled(disturbed: Disturbed) -> None:
    disturbed.stop_rank(1)  # it makes no step meanwhile; whom Slurm ends it lets continue
    disturbed.cluster.run("scancel", disturbed.job)
    # Cancelled by the user, so it is the user who goes on.
    disturbed.snakemake.wait()
    disturbed.again()


def rank_killed(disturbed: Disturbed) -> None:
    """It takes the job down, and is named on the screen with the logs to read."""
    rank = disturbed.project.rank_process(1)
    assert rank
    assert b"\0GLOO_SOCKET_IFNAME=eth0\0" in Path(f"/proc/{rank}/environ").read_bytes()
    os.kill(rank, signal.SIGKILL)
    disturbed.cluster.wait_job_state(disturbed.job, "FAILED", 60)
    log = f".snakemake/slurm_logs/rule_train/default/{disturbed.job}.log"
    said = disturbed.said.read_text
    disturbed.cluster.wait(lambda: log in said(), "Snakemake names the job's log", 60)
    for words in (said(), disturbed.logs()[-1]):
        assert "zerolora: rank 1 failed with signal SIGKILL" in words
    assert re.search(rf"log: \S*results/logs/train/default\.log, \S*{re.escape(log)}", said())


def node_lost(disturbed: Disturbed) -> None:
    """A job is submitted afterwards too, which fails where Snakemake asks accounting for its jobs."""
    disturbed.cluster.stop_node(disturbed.nodes()[-1])


def controller_away(disturbed: Disturbed) -> None:
    disturbed.cluster.stop_controller()
    at = disturbed.step()
    disturbed.cluster.wait(lambda: disturbed.step() > at, "training continues without the controller", 60)
    with disturbed.held():
        disturbed.cluster.start_controller()


def preempted(disturbed: Disturbed) -> None:
    disturbed.stop_rank(1)
    disturbed.cluster.run("srun", "--partition=urgent", "--nodes=3", "--exclusive", "sleep", "1", timeout=120)


def preempted_for_good(disturbed: Disturbed) -> None:
    """Slurm starts it no more; its place in the queue is Snakemake's to take again."""
    preempted(disturbed)
    assert disturbed.state() == "PREEMPTED"


def warned_of_the_time_limit(disturbed: Disturbed) -> None:
    """It saves and ends by itself, before the limit."""
    at = disturbed.step()
    disturbed.stop_rank(1)
    disturbed.end_in(SECONDS_OF_WARNING + 30)
    disturbed.cluster.wait(lambda: disturbed.state() == "FAILED", "the job ends", 120)
    assert disturbed.step() > at
    assert "training stopped on request; run the same command to resume" in disturbed.logs()[-1]


def timed_out(disturbed: Disturbed) -> None:
    """Not warned, it has the seconds between SIGTERM and SIGKILL to save; if they are too few, its last checkpoint."""
    disturbed.stop_rank(1)
    disturbed.end_in(1)
    disturbed.cluster.wait(lambda: disturbed.state() == "TIMEOUT", "the job ends", 120)


def slurmd_killed(disturbed: Disturbed) -> None:
    """The node's ranks live on, unseen by Slurm, which takes the node for dead and starts the job elsewhere."""
    node, rank = disturbed.nodes()[-1], disturbed.stop_rank(1)
    disturbed.cluster.kill_slurmd(node)
    disturbed.cluster.wait(lambda: len(set(disturbed.nodes()) - {node}) == 2, "the job starts elsewhere", 120)
    # Where gloo does not notice that the other end of a connection has closed, its patience of 180 s ends the rank. The
    # job is suspended meanwhile: it would end before.
    disturbed.cluster.run("scontrol", "suspend", disturbed.job)
    os.kill(rank, signal.SIGCONT)
    try:
        disturbed.cluster.wait(lambda: not Path(f"/proc/{rank}").exists(), "what was left there ends", 240)
    finally:
        disturbed.cluster.run("scontrol", "resume", disturbed.job)


def network_cut(disturbed: Disturbed) -> None:
    """Nothing is lost but the way between two nodes: no connection breaks, no process ends."""
    one, other = disturbed.nodes()
    disturbed.cluster.cut(one, other)
    try:
        disturbed.cluster.wait(lambda: disturbed.state() == "FAILED", "the job fails", 180)
    finally:
        disturbed.cluster.reconnect(one, other)
    hangs = rf"zerolora: rank 1 on {other}, last in .*step \d+.*, has not responded for \d+ s; "
    waits = rf"rank 0 on {one} is in .*step \d+.*; run the same command to resume from its checkpoint"
    assert re.search(hangs + waits, disturbed.logs()[-1]), disturbed.logs()[-1]


def interrupted(disturbed: Disturbed) -> None:
    """Ctrl-C cancels the job, whatever Snakemake does at that moment. SIGTERM: test_screen.py."""
    disturbed.hold()
    os.killpg(disturbed.snakemake.pid, signal.SIGINT)
    disturbed.snakemake.wait(timeout=60)
    disturbed.cluster.wait_job_state(disturbed.job, "CANCELLED", 60)
    disturbed.again()


def snakemake_killed(disturbed: Disturbed) -> None:
    """The job continues by itself; a second one would find it at work."""
    os.killpg(disturbed.snakemake.pid, signal.SIGKILL)
    disturbed.cluster.wait_job_state(disturbed.job, "COMPLETED", 120)
    disturbed.again()


def impatient(train: dict[str, Any]) -> None:
    """Do not wait long for ranks that hang."""
    train["launcher"] = train["launcher"].replace("--wait=60", "--wait=10") + ",ZEROLORA_PATIENCE=15"


def without_mercy(train: dict[str, Any]) -> None:
    """Preempt jobs for good, and do not warn of their time limit."""
    train["slurm_partition"] = "spare"
    train["slurm_extra"] = train["slurm_extra"].replace(f"--signal=USR1@{SECONDS_OF_WARNING} ", "")


# In the order in which they happen. Snakemake reads its profile when it starts, so that where it was interrupted and is
# started again it finds another site.
EVENTS: list[Disturbance] = [
    network_cut,
    interrupted,
    rank_killed,
    controller_away,
    preempted,
    node_lost,
    slurmd_killed,
    warned_of_the_time_limit,
    cancelled,
    preempted_for_good,
    timed_out,
]
FIRST_SITE = impatient
NEXT_SITE: dict[Disturbance, Callable[[dict[str, Any]], None]] = {
    interrupted: lambda train: None,
    cancelled: without_mercy,
}


QUEUED_AGAIN = "is in the queue again"
SAID: dict[Disturbance, str] = {
    cancelled: "was cancelled",
    preempted: QUEUED_AGAIN,
    node_lost: QUEUED_AGAIN,
    slurmd_killed: QUEUED_AGAIN,
    preempted_for_good: "was preempted",
    timed_out: "reached its time limit",
}
"""The words on the terminal after an event. A requeued job waits longer than Snakemake does between two checks."""


@pytest.fixture(scope="module")
def disturbed(prepared: ClusterProject, undisturbed: dict[str, bytes], profile: dict[str, Any]) -> Iterator[Disturbed]:
    """Return the training that all happens to."""
    settle(prepared, profile, FIRST_SITE)
    disturbed = Disturbed(prepared)
    yield disturbed
    repair(disturbed)


@pytest.mark.parametrize("event", EVENTS, ids=[event.__name__ for event in EVENTS])
def test_training_resumes_from_its_checkpoint_after(
    disturbed: Disturbed, profile: dict[str, Any], event: Disturbance
) -> None:
    assert not disturbed.failed_in, "nothing is known after what failed"
    disturbed.failed_in = event.__name__
    starts, said, job = len(disturbed.logs()), len(disturbed.said.read_text()), disturbed.job
    if event in NEXT_SITE:
        settle(disturbed.project, profile, NEXT_SITE[event])
    event(disturbed)
    if event is controller_away:
        assert len(disturbed.logs()) == starts
    else:
        disturbed.go_on(starts)
    if event in SAID:
        assert f"train-default: job {job} {SAID[event]}" in disturbed.said.read_text()[said:]
    with disturbed.held():
        disturbed.cluster.start_missing_nodes()
    disturbed.failed_in = None


def test_at_the_end_it_is_the_undisturbed_training(
    prepared: ClusterProject, disturbed: Disturbed, undisturbed: dict[str, bytes]
) -> None:
    """Its last event is the end of Snakemake itself."""
    assert not disturbed.failed_in
    snakemake_killed(disturbed)
    disturbed.snakemake.wait(timeout=240)
    assert disturbed.snakemake.returncode == 0, disturbed.said.read_text()[-6000:]
    actual = files_of(prepared.directory / "results/default")
    for name, content in undisturbed.items():
        assert actual[name] == content, name


def settle(project: ClusterProject, shipped: dict[str, Any], site: Callable[[dict[str, Any]], None]) -> None:
    """Write the profile of a site."""
    profile = json.loads(json.dumps(shipped))
    site(profile["set-resources"]["train"])
    profile["set-resources"]["train"]["runtime"] = 60  # a training that is held takes longer than predicted
    project.write_profile(profile)


def repair(disturbed: Disturbed) -> None:
    """Leave no job and no Snakemake behind, and all nodes up."""
    if disturbed.snakemake.poll() is None:
        os.killpg(disturbed.snakemake.pid, signal.SIGKILL)
        disturbed.snakemake.wait()
        disturbed.project.run("snakemake", "--profile", "profiles/slurm", "--unlock")
    for job in disturbed.project.jobs(TRAIN):
        if disturbed.cluster.job_state(job) in ("RUNNING", "PENDING"):
            disturbed.cluster.run("scancel", job)
    disturbed.cluster.start_missing_nodes()
