"""Snakemake, with a pretended number of GPUs: jobs that need the same one never overlap, and each gets its own."""

from collections.abc import Callable

import pytest
from conftest import Project
from engines import edit_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUNS = ("one", "two", "three")
ADAPTERS = [f"results/{run}/adapter/manifest.json" for run in RUNS]
# Without a driver, every GPU counts as usable.
PRETENDED = """

def fault(gpus: int = 1) -> None:
    return None


def driver_library() -> None:
    return None
"""
# In the place of record_slurm_step: what the rule calls in it, but for training itself, which notes that it has its
# GPUs for half a second, so that others would meet it, and fails.
STEP = """#!/bin/sh
exec "$2" "$3" "$4" "$5" sh -c '
for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do mkdir "busy/$gpu" || echo overlap >> used; done
echo "$CUDA_VISIBLE_DEVICES" >> used
sleep 0.5
for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do rmdir "busy/$gpu"; done
exit 1'
"""


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project of three runs of one GPU each, of which all that comes before training is done."""
    project = make_project("gpus")
    edit_config(
        project,
        **{
            "hardware": {"device": "cuda", "gpus_per_node": 4, "gpu_memory": "80GiB", "compute_capability": 8.0},
            "runs": {run: {"dataset": "rows", "train": {"seed": seed}} for seed, run in enumerate(RUNS)},
        },
    )
    devices = project.directory / "src/zerolora/machine/devices.py"
    devices.write_text(devices.read_text(encoding="utf-8") + PRETENDED, encoding="utf-8")
    (project.directory / "workflow/scripts/record_slurm_step").write_text(STEP, encoding="utf-8")
    (project.directory / "busy").mkdir()
    project.snakemake(*(f"results/{run}/zero.json" for run in RUNS))
    return project


def trained(project: Project, visible: str, *options: str) -> tuple[list[str], str]:
    """Have all runs trained; return the GPUs that each had, and what was said."""
    used = project.directory / "used"
    used.unlink(missing_ok=True)
    result = project.run(
        *("snakemake", "--profile", "profiles/local", "--keep-going", *options, "--", *ADAPTERS),
        check=False,
        CUDA_VISIBLE_DEVICES=visible,
        TMPDIR=str(project.directory),
    )
    assert result.returncode
    said = result.stdout + result.stderr
    assert "waiting for" not in said, said  # Snakemake starts no job for which there is no GPU
    return used.read_text().split() if used.exists() else [], said


def test_three_runs_never_share_the_one_gpu_that_is_visible(project: Project) -> None:
    used, _ = trained(project, "5", "--cores", "3")
    assert used == ["5"] * 3


def test_runs_at_the_same_time_get_different_gpus(project: Project) -> None:
    used, _ = trained(project, "4,GPU-7f", "--cores", "3")
    assert len(used) == 3 and set(used) <= {"4", "GPU-7f"}


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
    assert used.is_file() and used.read_text().split() == ["3"] * 3 and "waiting for" not in said, said


def test_what_the_user_does_not_grant_is_refused(project: Project) -> None:
    """Snakemake alone would cap the request, and start all three."""
    used, said = trained(project, "0", "--resources", "gpu=0")
    assert not used and said.count("needs 1 GPU, and Snakemake may give it 0 (--resources gpu=0") >= 3
