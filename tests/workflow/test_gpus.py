"""Snakemake, with a pretended number of GPUs: jobs that need the same one never overlap, and each gets its own."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import Project
from engines import Asker, edit_config
from receipts import Receipt, parse

from zerolora.files import sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUNS = ("one", "two", "three")
ADAPTERS = [f"results/{run}/adapter/manifest.json" for run in RUNS]
# A job of every other rule that computes on a GPU, for the run that is trained already.
OTHERS = {
    "evaluate_base": "results/base/rows/evaluate.json",
    "evaluate": "results/default/metrics/evaluate.json",
    "task_base": "results/base/rows/tasks/more.json",
    "task": "results/default/tasks/more.json",
    "judge": "results/default/judge/judge.json",
    "export_target": "results/default/export/vllm_adapter/manifest.json",
}
# Without a driver, every GPU counts as usable.
PRETENDED = """

def fault(gpus: int = 1, otherwise: str = "") -> None:
    return None


def driver_library() -> None:
    return None
"""
# In the place of on_gpus: it calls on_gpus with another command than the stage's, which notes that it has its GPUs for
# half a second, so that others would meet it, and fails.
STEP = """#!/bin/sh
each=$1 nodes=$2 granted=$3
shift 3
exec workflow/scripts/assigned "$each" "$nodes" "$granted" sh -c '
for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do mkdir "busy/$gpu" || echo "overlap $2" >> used; done
echo "$CUDA_VISIBLE_DEVICES $2" >> used
sleep 0.5
for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do rmdir "busy/$gpu"; done
exit 1' "$@"
"""


@pytest.fixture(scope="module")
def project(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project of a finished run and of three more, of one GPU each, whose configuration is chosen."""
    project = copy_finished("gpus")
    edit_config(
        project,
        **{
            "hardware": {"device": "cuda", "gpus_per_node": 4, "gpu_memory": "80GiB", "compute_capability": 8.0},
            "runs": {"default": {"dataset": "rows"}}
            | {run: {"dataset": "rows", "train": {"seed": seed}} for seed, run in enumerate(RUNS, start=1)},
            "tasks": {"rows": {"more": {"path": "rows.json"}}},
            "evaluate.engine": "vllm",
        },
    )
    devices = project.directory / "src/zerolora/machine/devices.py"
    devices.write_text(devices.read_text(encoding="utf-8") + PRETENDED, encoding="utf-8")
    scripts = project.directory / "workflow/scripts"
    (scripts / "on_gpus").rename(scripts / "assigned")
    (scripts / "on_gpus").write_text(STEP, encoding="utf-8")
    (scripts / "on_gpus").chmod(0o755)
    (project.directory / "busy").mkdir()
    project.snakemake(*(f"results/{run}/zero.json" for run in RUNS), "results/tasks/more.jsonl")
    take_as_of_today(project)
    return project


def take_as_of_today(project: Project) -> None:
    """Have the receipts of the finished run say that it was made with today's config, from the files that are there."""
    with Asker(project) as asker:
        today = asker.settings()
    for path in (project.directory / "results/receipts").iterdir():
        receipt = parse(path.read_text(encoding="utf-8"))
        if receipt is None or path.stem not in today:
            continue
        inputs, outputs = ({file: sha256(project.directory / file) for file in files} for files in receipt[1:])
        device = {name: "cuda" for name in receipt.params if name == "device"}
        receipt = Receipt(receipt.params | today[path.stem] | device, inputs, outputs)
        path.unlink()  # a link into DVC's cache
        path.write_text(json.dumps(receipt._asdict() | {"sha256": receipt.digest}), encoding="utf-8")


def used_by(project: Project, visible: str, *arguments: str) -> tuple[list[list[str]], str]:
    """Have Snakemake make targets; return the GPUs and the command of each job, and the output."""
    used = project.directory / "used"
    used.unlink(missing_ok=True)
    result = project.run(
        *("snakemake", "--profile", "profiles/local", "--keep-going", *arguments),
        check=False,
        CUDA_VISIBLE_DEVICES=visible,
        TMPDIR=str(project.directory),
    )
    assert result.returncode
    said = result.stdout + result.stderr
    assert "waiting for" not in said, said  # Snakemake starts no job for which there is no GPU
    return [line.split() for line in used.read_text().splitlines()] if used.exists() else [], said


def test_jobs_of_every_rule_never_share_the_one_gpu_that_is_visible(project: Project) -> None:
    """Three trainings beside evaluations, tasks, a judge and an export that vLLM opens."""
    forced = ("--forcerun", *OTHERS)
    used, said = used_by(project, "5", "--cores", "4", *forced, "--", *ADAPTERS, *OTHERS.values())
    assert {each[0] for each in used} == {"5"}, (used, said)
    stages = [rule.removesuffix("_target") for rule in OTHERS] + ["train"] * 3
    assert sorted(log.split("/")[2] for _, log in used) == sorted(stages), (used, said)


def test_jobs_at_the_same_time_get_different_gpus(project: Project) -> None:
    used, _ = used_by(project, "4,GPU-7f", "--cores", "3", "--", *ADAPTERS)
    assert len(used) == 3 and {gpu for gpu, _ in used} <= {"4", "GPU-7f"}


# Starts a command as srun does on the one node of an allocation.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 exec "$@"
"""
ALLOCATION = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_MEM_PER_NODE": "16384"},
    "SLURM_RESTART_COUNT": "0",
}


def test_three_runs_of_an_allocation_never_share_its_one_gpu(project: Project) -> None:
    """The job's own script, with a stand-in for srun: the profile grants what Slurm gave the job, not what the config
    says that a node has."""
    srun = project.directory / "bin/srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(SRUN, encoding="utf-8")
    srun.chmod(0o755)
    used = project.directory / "used"
    used.unlink(missing_ok=True)
    script = (project.directory / "profiles/allocation/job.sbatch").read_text(encoding="utf-8")
    (project.directory / "job").write_text(script.replace("exec snakemake", "exec snakemake --keep-going"))
    result = project.run(
        *("sh", "-c", 'PATH="$PWD/bin:$PATH" exec sh job "$@"', "sh", *ADAPTERS),
        check=False,
        CUDA_VISIBLE_DEVICES="3",
        TMPDIR=str(project.directory),
        **ALLOCATION,
    )
    assert result.returncode
    said = result.stdout + result.stderr
    assert used.is_file() and "waiting for" not in said, said
    assert [line.split()[0] for line in used.read_text().splitlines()] == ["3"] * 3


@pytest.mark.parametrize("profile", ["local", "slurm"])
def test_a_dry_run_shows_what_each_executor_reads(project: Project, profile: str) -> None:
    options = ("--profile", f"profiles/{profile}", "--dry-run", "--verbose", "--cores", "8")
    said = project.run("snakemake", *options, ADAPTERS[0], "results/base/rows/evaluate.json").stdout
    for rule in ("train", "evaluate_base"):
        text = re.search(rf"^rule {rule}:\n((?:    .*\n)+)", said, re.MULTILINE)
        assert text and "    threads: 4\n" in text[1], said
        requested = dict(re.findall(r"(\w+)=([^,\n]*)", text[1].partition("    resources: ")[2]))
        assert requested.items() >= {"gpu": "1", "request_gpus": "1", "gpu_manufacturer": "nvidia"}.items()
        assert (requested["gres"], requested["node_gpus"]) == ("gpu:1", "1")


def test_what_the_user_does_not_grant_is_refused(project: Project) -> None:
    """Snakemake alone would cap the request, and start all three."""
    used, said = used_by(project, "0", "--cores", "3", "--resources", "gpu=0", "--", *ADAPTERS)
    assert not used and said.count("needs 1 GPU, and Snakemake may give it 0 (--resources gpu=0") >= 3
