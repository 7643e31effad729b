"""What the profiles of other schedulers submit: dry runs, and the commands that executors call, with stand-ins on PATH.

No real PBS, LSF or HTCondor is involved. The stand-in of `qsub` starts the job's script as PBS does, with the login
node's environment, so that a stage really runs as a job; that of `bsub` records its command line. Half of each test's
seconds are starts of Snakemake.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import BIN, ROOT, Project
from engines import edit_config
from package_folder import SCHEDULERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SCHEDULERS.missing() is not None, reason=SCHEDULERS.missing() or ""),
]

PROFILES = ("pbs", "lsf", "htcondor")
QSUB = """#!/bin/sh
printf '%s\\n' "$@" > qsub.arguments
for script in "$@"; do :; done
sh "$script" > qsub.log 2>&1
echo $? > qsub.code
echo 7.server
"""
QSTAT = """#!/bin/sh
printf 'Job Id: 7.server\\n    job_state = F\\n    Exit_status = %s\\n' "$(cat qsub.code)"
"""
BSUB = """#!/bin/sh
printf '%s\\n' "$@" > bsub.arguments
echo "no queue here" >&2
exit 1
"""
BADMIN = """#!/bin/sh
printf 'MBD configuration\\n LSB_SHAREDIR = %s\\n LSF_CONFDIR = %s\\n LSF_UNIT_FOR_LIMITS = MB\\n' "$PWD/lsf" "$PWD/lsf"
"""
LSCLUSTERS = """#!/bin/sh
printf 'CLUSTER_NAME\\ntests\\n'
"""
PLANNED = "results/default/zero.json"
ADAPTER = "results/default/adapter/manifest.json"


class Site(Project):  # type: ignore[misc]  # tests find conftest by pytest's path alone
    """A project on a machine with stand-ins for a scheduler's commands."""

    served = False  # other packages

    def __init__(self, project: Project) -> None:
        super().__init__(project.directory)
        self.tools = self.directory.parent / "tools"
        self.tools.mkdir()

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run snakemake with the executors and the stand-ins."""
        packages = f"{self.directory / 'src'}{os.pathsep}{SCHEDULERS.folder}"
        path = f"{self.tools}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
        return self.run("snakemake", *arguments, check=check, PYTHONPATH=packages, PATH=path)

    def stand_in(self, name: str, script: str) -> None:
        """Put a command on PATH."""
        (self.tools / name).write_text(script)
        (self.tools / name).chmod(0o755)


@pytest.fixture(scope="module")
def site(make_project: Callable[[str], Project]) -> Site:
    """Return a project of two GPUs a node on which all stages before training have run."""
    site = Site(make_project("site"))
    Project(site.directory).snakemake("results/data/rows/manifest.json")
    return site


@pytest.fixture
def on_gpus(site: Site) -> Any:
    """Return the site with a config that trains on two GPUs, planned."""
    gpu = {"device": "cuda", "gpus_per_node": 2, "gpu_memory": "80GiB", "compute_capability": 8.0}
    edit_config(site, **{"hardware": gpu | {"host_memory": "24GiB"}, "train.ranks_per_node": 2})
    Project(site.directory).snakemake(PLANNED)
    return site


def job_of(text: str, rule: str) -> str:
    """Return what a dry run prints of a rule's job."""
    job = re.search(rf"^rule {rule}:\n((?:    .*\n)+)", text, re.MULTILINE)
    assert job, text
    return job[1]


@pytest.mark.parametrize("name", PROFILES)
def test_a_dry_run_has_each_schedulers_resources(on_gpus: Site, name: str) -> None:
    text = on_gpus.snakemake("--profile", f"profiles/{name}", "--dry-run", "--verbose", ADAPTER).stdout
    requested = dict(re.findall(r"(\w+)=([^,\n]*)", job_of(text, "train").partition("    resources: ")[2]))
    memory = requested["mem_mb"]
    own = {
        "pbs": {"nodes": "1", "node_gpus": "2"},
        "lsf": {"lsf_extra": "-gpu num=2:j_exclusive=yes"},
        "htcondor": {"request_gpus": "2", "htcondor_request_mem_mb": memory, "getenv": "True"},
    }
    assert int(memory) > 400 and requested.items() >= own[name].items(), requested


def test_pbs_runs_a_stage_as_the_job_that_qsub_gets(site: Site) -> None:
    site.stand_in("qsub", QSUB)
    site.stand_in("qstat", QSTAT)
    done = site.snakemake("--profile", "profiles/pbs", "--forcerun", "prepare", "--", "results/data/rows/manifest.json")
    arguments = (site.directory / "qsub.arguments").read_text().splitlines()
    request = arguments[arguments.index("-l") + 1]
    assert re.fullmatch(r"select=1:ncpus=16:ngpus=0:mem=\d+mb", request), arguments
    assert [word for word in arguments if re.fullmatch(r"walltime=\d+:00", word)] and "zl-prepare" in arguments
    assert (site.directory / "qsub.code").read_text() == "0\n", (site.directory / "qsub.log").read_text()
    assert "prepare rows" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("qstat", "state"),
    [
        ("echo '    job_state = F'; echo '    Exit_status = 0'", "success"),
        ("echo '    job_state = F'; echo '    Exit_status = 271'", "failed"),
        ("echo '    job_state = R'", "running"),
        ("echo '    job_state = Q'", "running"),
        ("echo 'qstat: Unknown Job Id 7' >&2; exit 153", "failed"),
        ("echo 'Connection refused' >&2; exit 111", "running"),
    ],
)
def test_a_jobs_state_in_pbs(tmp_path: Path, qstat: str, state: str) -> None:
    (tmp_path / "qstat").write_text(f"#!/bin/sh\n{qstat}\n")
    (tmp_path / "qstat").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [ROOT / "profiles/pbs/status", "7"]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{state}\n"


def test_bsub_gets_the_gpus_of_a_training(on_gpus: Site) -> None:
    """The executor asks LSF for its configuration first."""
    for name, script in {"bsub": BSUB, "badmin": BADMIN, "lsclusters": LSCLUSTERS}.items():
        on_gpus.stand_in(name, script)
    parameters = on_gpus.directory / "lsf/lsbatch/tests/configdir/lsb.params"
    parameters.parent.mkdir(parents=True)
    parameters.write_text("DEFAULT_QUEUE = normal\n")
    profile = yaml.safe_load((on_gpus.directory / "profiles/lsf/config.yaml").read_text())
    options = ("--default-resources", *(f"{k}={v}" for k, v in profile["default-resources"].items()))
    done = on_gpus.snakemake(
        *("--profile", "profiles/lsf", "--retries", "0", *options, "lsf_project=lab", "lsf_queue=gpu"),
        *("--", ADAPTER),
        check=False,
    )
    assert done.returncode and "no queue here" in done.stdout + done.stderr
    arguments = (on_gpus.directory / "bsub.arguments").read_text().splitlines()
    assert arguments[arguments.index("-gpu") + 1] == "num=2:j_exclusive=yes", shlex.join(arguments)
    assert arguments[arguments.index("-P") + 1] == "lab" and "span[hosts=1]" in arguments, arguments
