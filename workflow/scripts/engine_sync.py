"""Keep the two engines of one mind: what DVC knows to be right Snakemake takes over, and the other way round.

Snakemake judges by its own records (`.snakemake/`), DVC by the hashes in `dvc.lock`. After `dvc pull`, `dvc checkout`
or a restored run, DVC is right and Snakemake has not heard of it: `import_dvc_state` tells it. After `snakemake`, it is
the other way round: `commit_dvc_state` tells DVC. Neither runs a stage.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
# The dvc.lock that Snakemake's records were last brought into line with.
AGREED = Path(".snakemake/agreed-dvc-lock.sha256")
# Sizes and dates of the source files at that time.
AGREED_SOURCES = Path(".snakemake/agreed-sources.sha256")
SOURCES = (Path("src/zerolora"), Path("workflow/rules"))  # of the stage resolve in dvc.yaml
RESOLVED = Path("results/config.json")
NAMED_FILES = ("config/deepspeed", "config/hardware")  # as config.py has them
TARGET_RULES = ("all", "default")


def put_commands_on_path() -> None:
    """Put the commands that rules call on PATH: they lie beside the Python that runs Snakemake."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def own_json_files() -> list[str]:
    """Return the JSON files that a config can name: DeepSpeed's of the user's own, and measured hardware."""
    return sorted(str(path) for folder in NAMED_FILES for path in Path(folder).glob("*.json"))


def import_dvc_state() -> None:
    """Let Snakemake take over the stages that DVC says are up to date, if dvc.lock changed since the last time.

    A stage is taken over if it and every stage before it is clean in `dvc status`.
    """
    if _quiet() or not LOCK.exists():
        return
    _commit_remarks()
    if _agreed():
        return
    from dvc.exceptions import DvcException

    try:
        targets = _clean_targets()
    except DvcException as error:
        print(f"not taken over from DVC: {error}", file=sys.stderr)
        return
    if targets:
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--touch",
            "--forceall",
            "--cores",
            "1",
            "--quiet",
            "all",
        ]
        result = subprocess.run(
            [*command, "--", *targets],
            env={**_without_profile(), "ZEROLORA_ADOPTING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            print(f"not taken over from DVC: {lines[-1] if lines else 'no reason given'}", file=sys.stderr)
            return
    _agree()


def _commit_remarks() -> None:
    """Let DVC take over edits of the source that leave every code fingerprint as it was: remarks, docstrings, layout.

    DVC sees the files of the stage resolve, not what they mean; Snakemake sees fingerprints, and has nothing to run.
    """
    if AGREED_SOURCES.is_file() and AGREED_SOURCES.read_text(encoding="utf-8") == _stamp_of_sources():
        return
    from zerolora.fingerprint import fingerprints

    try:
        known = json.loads(RESOLVED.read_text(encoding="utf-8"))["code"]
    except (OSError, ValueError, KeyError):
        return
    if known != fingerprints():
        return
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    agreed = _agreed()
    try:
        with Repo() as repo:
            changes = repo.status(["resolve"]).get("resolve", [])
            if changes and all(
                isinstance(change, dict) and set(change.get("changed deps", {None})) <= {str(path) for path in SOURCES}
                for change in changes
            ):
                repo.commit("resolve", force=True)
    except DvcException as error:
        print(f"the edited source files are not recorded in DVC: {error}", file=sys.stderr)
        return
    if agreed:
        _agree()
    else:
        AGREED_SOURCES.parent.mkdir(exist_ok=True)
        AGREED_SOURCES.write_text(_stamp_of_sources(), encoding="utf-8")


def _stamp_of_sources() -> str:
    files = sorted(
        path for folder in SOURCES for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def commit_dvc_state(workflow: Any) -> None:
    """Let DVC record the outputs of every job of a workflow that ended well.

    Only jobs of this DAG count: they are up to date, which nobody knows of other results that lie around.
    """
    if _quiet() or not PIPELINE.exists() or workflow.touch:
        return
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.ERROR)  # it tells of each entry of dvc.lock that it updates
    names = {_stage_of(job) for job in workflow.dag.jobs if job.rule.name not in TARGET_RULES}
    try:
        with Repo() as repo:
            known = {stage.addressing for stage in repo.index.stages}
            changed = repo.status([name for name in names if name in known])
            for name in changed:
                repo.commit(name, force=True)
    except DvcException as error:
        print(f"not recorded in DVC: {error}; run `dvc commit` when that is mended", file=sys.stderr)
        return
    _agree()


def unsettle() -> None:
    """Forget the agreement when jobs begin to run: until they end well, Snakemake's records may be ahead of DVC's."""
    if "ZEROLORA_ADOPTING" not in os.environ:
        AGREED.unlink(missing_ok=True)


def _without_profile() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"}


def _quiet() -> bool:
    """Tell whether this Snakemake runs inside `dvc repro` or inside `import_dvc_state`, or DVC is not set up."""
    return "DVC_STAGE" in os.environ or "ZEROLORA_ADOPTING" in os.environ or not Path(".dvc").is_dir()


def _clean_targets() -> list[str]:
    from dvc.repo import Repo
    from networkx import descendants

    with Repo() as repo:
        graph = repo.index.graph
        recorded = yaml.safe_load(LOCK.read_text(encoding="utf-8")).get("stages", {})
        changed = set(repo.status())
        dirty = {stage for stage in graph if stage.addressing in changed or stage.name not in recorded}
        # An edge leads from a stage to those it depends on.
        clean = [stage for stage in graph if stage not in dirty and not descendants(graph, stage) & dirty]
        return [stage.cmd.split()[-1] for stage in clean]


def _stage_of(job: Any) -> str:
    """Return the DVC stage of a Snakemake job, as in train@default."""
    wildcards = job.wildcards_dict
    if not wildcards:
        return job.rule.name
    (value,) = wildcards.values()
    if job.rule.name == "fetch":
        source = yaml.safe_load(Path("config/config.yaml").read_text(encoding="utf-8"))["fetch"]
        group = next(name for name, models in source.items() if value in (models or {}))
        return f"fetch_{group}@{value}"
    return f"{job.rule.name}@{value}"


def _agreed() -> bool:
    return AGREED.is_file() and AGREED.read_text(encoding="utf-8") == _digest()


def _agree() -> None:
    AGREED.parent.mkdir(exist_ok=True)
    AGREED.write_text(_digest(), encoding="utf-8")
    AGREED_SOURCES.write_text(_stamp_of_sources(), encoding="utf-8")


def _digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()
