"""What the terminal says of jobs in a real Slurm's queue, from a refused request to the end, and of a Snakemake that is
told to end. One Snakemake has a job for each; the jobs do nothing but wait for the test."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import ACCOUNT, Cluster
from cluster_project import PROFILE, QUICK
from conftest import ROOT, project_environment

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

SNAKEFILE = """
from zerolora.compat.slurm_executor_patches import patch_slurm_executor

patch_slurm_executor()

REQUESTS = {
    "partition": {"slurm_partition": "nowhere"},
    "memory": {"mem_mb": 10**9},
    "account": {"slurm_account": "nobody"},
    "quality": {"qos": "gold"},
    "quote": {"slurm_extra": "--mail-user='a"},
    "option": {"slurm_extra": "--job-name=x"},
    "drained": {"slurm_extra": "--nodelist=node3"},
    "requeued": {},
    "late": {},
    "cancelled": {},
    "good": {},
    "crashed": {"mem_mb": 200},
}

rule all:
    default_target: True
    input: [f"{stage}.txt" for stage in REQUESTS], "pair-1.txt", "pair-2.txt"

for stage, request in REQUESTS.items():
    rule:
        name: stage
        output: f"{stage}.txt"
        log: f"logs/{stage}.log"
        retries: 0 if stage == "crashed" else 1
        resources: **request
        params: end="echo the last words; false" if stage == "crashed" else "true"
        shell: "until [ -e go-{rule} ]; do sleep 0.2; done; {params.end} > {output}"

# Two tasks of one array.
rule pair:
    output: "pair-{number}.txt"
    resources: slurm_extra="--nodelist=node3"
    shell: "touch {output}"
"""


RUNNING = ("requeued", "late", "cancelled", "good", "crashed")


class Screen:
    """A Snakemake that runs in a folder, and what it has printed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.said = cluster, folder, folder / "said.txt"
        command = cluster.command(sys.executable, str(QUICK), "--profile", "profile", directory=folder)
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                command, env=project_environment(ROOT), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def lines(self, stage: str) -> list[str]:
        """Return the lines about a stage, without times of day and padding."""
        text = re.sub(r"^\d\d:\d\d:\d\d  (\w+)(?: \S+)? {2,}", r"\1: ", self.said.read_text(), flags=re.MULTILINE)
        return [line.partition(": ")[2] for line in text.splitlines() if line.startswith(f"{stage}: ")]

    def wait(self, stage: str, pattern: str) -> re.Match[str]:
        """Wait for a line about a stage."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.said.read_text()
            return next(filter(None, (re.fullmatch(pattern, line) for line in self.lines(stage))), None)

        self.cluster.wait(lambda: found() is not None, f"the screen says of {stage}: {pattern}", 120)
        match = found()
        assert match
        return match

    def go(self, stage: str) -> None:
        """Let the jobs of a stage end."""
        (self.folder / f"go-{stage}").touch()


@pytest.fixture(scope="module")
def screen(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Screen]:
    """Return a Snakemake whose jobs are in all states, with node3 drained."""
    folder = tmp_path_factory.mktemp("screen")
    (folder / "Snakefile").write_text(SNAKEFILE)
    profile = yaml.safe_load((ROOT / PROFILE).read_text()) | {"keep-going": True}
    site = {"slurm_account": ACCOUNT, "mem_mb": 300, "runtime": 60, "slurm_partition": "normal"}
    profile["default-resources"] |= site
    del profile["set-threads"], profile["set-resources"]
    (folder / "profile").mkdir()
    (folder / "profile/config.yaml").write_text(yaml.safe_dump(profile))
    cluster.run("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=maintenance")
    screen = Screen(cluster, folder)
    running = {stage: screen.wait(stage, r"job (\d+) runs on .*")[1] for stage in RUNNING}
    now = cluster.run("date", "--date=1 second", "+%Y-%m-%dT%H:%M:%S").stdout.strip()
    cluster.run("scontrol", "update", f"JobId={running['late']}", f"EndTime={now}")
    cluster.run("scontrol", "requeue", running["requeued"])
    cluster.run("scancel", running["cancelled"])
    for stage in ("good", "crashed"):
        screen.go(stage)
    yield screen
    screen.process.kill()
    screen.process.wait()
    cluster.run("scancel", "--user=root", "--state=PENDING")
    cluster.run("scontrol", "update", "NodeName=node3", "State=RESUME")


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (
            "partition",
            "sbatch: invalid partition specified: nowhere; Batch job submission failed: Invalid partition name",
        ),
        (
            "memory",
            "sbatch: Memory specification can not be satisfied; Batch job submission failed: Requested node conf",
        ),
        ("account", "The given account nobody appears to be invalid. Available accounts: "),
        ("quality", "sbatch: Batch job submission failed: Invalid qos specification"),
        ("quote", "slurm_extra: --mail-user='a: No closing quotation"),
        ("option", "The --job-name option is not allowed in the 'slurm_extra' parameter. "),
    ],
    ids=["partition", "memory", "account", "quality", "quote", "option"],
)
def test_a_refused_request_is_one_line_with_its_reason_and_not_repeated(screen: Screen, stage: str, words: str) -> None:
    screen.wait(stage, "not submitted: .*")
    (line,) = screen.lines(stage)
    assert line.startswith(f"not submitted: {words}"), line


def test_a_job_that_waits_says_for_what(screen: Screen) -> None:
    """In Slurm's words; the tasks of an array in one line."""
    number = screen.wait("drained", r"job (\d+) waits: .*")[1]
    (reason,) = screen.cluster.run("squeue", "-h", "-j", number, "-o", "%r").stdout.splitlines()
    assert screen.lines("drained") == [f"submitted as job {number}", f"job {number} waits: {reason}"]
    array, *tasks = screen.wait("pair", r"submitted as job array (\d+): \1_1 (\d), \1_2 (\d)").groups()
    assert {*tasks} == {"1", "2"}
    screen.wait("pair", f"job {array} waits: {re.escape(reason)}")
    assert len(screen.lines("pair")) == 2


def test_a_job_that_ran_has_slurms_times_for_both(screen: Screen) -> None:
    number, node = screen.wait("good", r"job (\d+) runs on (node[12])").groups()
    ran, waited = screen.wait("good", r"done in (\d+) s, (\d+) s in the queue  good.txt").groups()
    assert screen.cluster.sacct(number, "NodeList", "ElapsedRaw") == [node, ran]
    began, submitted = screen.cluster.run(
        "squeue", "-h", "-t", "all", "-j", number, "-o", "%S %V", environment={**os.environ, "SLURM_TIME_FORMAT": "%s"}
    ).stdout.split()
    assert int(began) - int(submitted) == int(waited)
    assert [line.partition(" ")[0] for line in screen.lines("good")] == ["submitted", "job", "done"]


def test_a_job_that_starts_again_says_so(screen: Screen) -> None:
    number = screen.wait("requeued", r"job (\d+) runs on .*")[1]
    screen.wait("requeued", f"job {number} is in the queue again: it lost a node, was preempted or requeued")
    began = f"job {number} runs on "
    screen.cluster.wait(
        lambda: sum(line.startswith(began) for line in screen.lines("requeued")) == 2, "the job starts again", 120
    )
    screen.go("requeued")
    screen.wait("requeued", "done in .* in the queue  requeued.txt")


def test_a_cancelled_job_is_not_submitted_again(screen: Screen) -> None:
    number = screen.wait("cancelled", r"job (\d+) runs on .*")[1]
    screen.wait("cancelled", f"failed after .*; job {number}: CANCELLED.*")
    words = f"job {number} was cancelled, so it is not submitted again; start Snakemake again to continue"
    assert screen.lines("cancelled")[2] == words and len(screen.lines("cancelled")) == 4


def test_a_job_that_fails_before_its_stage_shows_the_end_of_its_own_log(screen: Screen) -> None:
    screen.wait("crashed", r"failed after .*; job \d+: FAILED \(NonZeroExitCode\); log: .*")
    assert "  the last words\n" in screen.said.read_text()


def test_a_job_at_its_time_limit_is_submitted_again(screen: Screen) -> None:
    number = screen.wait("late", r"job (\d+) runs on .*")[1]
    screen.wait("late", f"job {number} reached its time limit")
    screen.go("late")
    screen.wait("late", rf"failed after .*; job {number}: TIMEOUT \(TimeLimit\); log: .*/{number}.log")
    screen.wait("late", "done in .* in the queue  late.txt")


def test_sigterm_cancels_what_is_in_the_queue_and_ends(screen: Screen) -> None:
    """Within seconds, since sites let SIGKILL follow. It is the last test: only jobs that wait for node3 are left."""
    drained = screen.wait("drained", r"submitted as job (\d+)")[1]
    array = screen.wait("pair", r"submitted as job array (\d+): .*")[1]
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(timeout=10) == 1
    said = screen.said.read_text()
    assert "Traceback" not in said and "Error" not in said, said
    listed = re.search(r"^jobs (.*) cancelled; run the same command to continue", said, re.MULTILINE)
    assert listed and {*listed[1].split(", ")} == {drained, f"{array}_1", f"{array}_2"}
    left = screen.cluster.run("squeue", "-h", "--array", "--states=PENDING,RUNNING", "-o", "%i").stdout.split()
    assert not {*left} & {*listed[1].split(", ")}
