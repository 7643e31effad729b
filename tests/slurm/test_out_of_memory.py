"""Jobs that use more memory than they requested, on a Slurm whose nodes limit it by control groups."""

import re
from collections.abc import Callable, Iterator

import pytest
from cluster import Cluster, lacking_for_limits, missing, remove_memory_groups
from cluster_project import ClusterProject
from conftest import Project

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(
    make_project: Callable[[str], Project], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProject]:
    if lacking := missing():
        pytest.fail(f"no Slurm for tests/slurm: {lacking}; or leave them out: make test-no-slurm", pytrace=False)
    if lacking := lacking_for_limits():
        pytest.skip(f"no limits of memory: {lacking}")
    try:
        with Cluster(tmp_path_factory.mktemp("slurm"), limits_memory=True) as cluster:
            yield ClusterProject(make_project("memory"), cluster)
    finally:
        remove_memory_groups()


def test_a_stage_that_uses_too_much_memory_is_named(project: ClusterProject) -> None:
    """Snakemake alone needs more than this job requests."""
    options = ("--retries", "0", "--set-resources", "prepare:mem_mb=30")
    result = project.snakemake(*options, "--", "results/data/rows/manifest.json", check=False)
    (job,) = project.jobs("rule_prepare_wildcards_rows")
    assert result.returncode and project.cluster.job_state(job) == "OUT_OF_MEMORY"
    assert f"prepare-rows: job {job} used more memory than it requested" in result.stderr
    assert re.search(rf"failed after .*; job {job}: OUT_OF_MEMORY \(OutOfMemory\); log: ", result.stderr)


def test_a_training_that_uses_too_much_memory_is_named(project: ClusterProject) -> None:
    """Slurm gives the state to the step of its ranks, and to the job too if the kernel charged that."""
    profile = project.profile()
    profile["set-resources"]["train"]["mem_mb"] = 300
    project.write_profile(profile)
    result = project.snakemake("--retries", "0", "results/default/adapter/manifest.json", check=False)
    (job,) = project.jobs("rule_train_wildcards_default")
    assert result.returncode and project.cluster.job_state(job) in ("FAILED", "OUT_OF_MEMORY")
    assert ["OUT_OF_MEMORY"] in project.cluster.sacct_steps(job, "State")
    assert "failed with signal SIGKILL (out of memory?)" in result.stderr
