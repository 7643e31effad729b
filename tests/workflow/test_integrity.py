"""Damaged and missing outputs, killed runs, two runs at once: what `snakemake all` does, and what DVC records."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
from conftest import Project, project_environment
from engines import dvc_changed, edit_config, snakemake_ran, snakemake_would_run

from zerolora.config.resolve import PLANNED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SNAKEMAKE = ("snakemake", "--profile", "profiles/local", "all")
ADAPTER = "results/default/adapter/adapter_model.safetensors"
MERGED = "results/default/merged/model.safetensors"


def flip(path: Path) -> None:
    """Change one byte in place, as a disk does: the size stays, and so does a link to DVC's cache."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def replace(path: Path) -> None:
    """Write another content to a new file, as an editor does."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content.replace(b"0", b"1") + b"\n")


def truncate(path: Path) -> None:
    """Cut a file in half; it is a new file, so DVC's cache stays whole."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


# What is done to which file, the stage that wrote it, and DVC's output that holds it.
CHANGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    ADAPTER: (truncate, "train@default", "results/default/adapter"),
    "results/default/adapter/adapter_config.json": (replace, "train@default", "results/default/adapter"),
    MERGED: (truncate, "merge@default", "results/default/merged"),
    "results/data/rows/train.arrow": (truncate, "prepare@rows", "results/data/rows/train.arrow"),
    "results/default/packing/train.arrow": (truncate, "pack@default", "results/default/packing/train.arrow"),
    "results/default/metrics/loss.csv": (replace, "train@default", "results/default/metrics/loss.csv"),
    "results/default/metrics/evaluate.json": (replace, "evaluate@default", "results/default/metrics/evaluate.json"),
    "results/config.json": (replace, "resolve", "results/config.json"),
    "results/settings/runs/default.json": (replace, "resolve", "results/settings"),
    "results/default/report.html": (replace, "report@default", "results/default/report.html"),
}
MISSING = [
    ADAPTER,
    "results/default/merged",
    "results/data/rows/train.arrow",
    "results/default/packing/train.arrow",
    "results/default/metrics/loss.csv",
    "results/default/estimate.json",
]


@pytest.fixture(scope="module")
def finished(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project whose run has ended well. Tests work on copies of it."""
    project = copy_finished("integrity")
    assert dvc_changed(project) == set()
    return project


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    """Return a copy of the finished project, with its links into DVC's cache."""
    copy = Project(tmp_path / "copy")
    copy.config = deepcopy(finished.config)
    subprocess.run(["cp", "-a", str(finished.directory), str(copy.directory)], check=True)
    return copy


def run(project: Project, *options: str) -> tuple[int, str]:
    """Run the pipeline and return its exit code and what it said."""
    result = project.run(*SNAKEMAKE, *options, check=False)
    return result.returncode, result.stdout + result.stderr


def test_changed_outputs_stop_the_run_and_dvc_restores_them(project: Project) -> None:
    contents = {name: (project.directory / name).read_bytes() for name in CHANGES}
    lock = (project.directory / "dvc.lock").read_bytes()
    for name, (damage, _, _) in CHANGES.items():
        damage(project.directory / name)
    # A change of the config that reruns something else, which used to end well and record the damage.
    edit_config(project, **{"report.examples": 1})
    code, said = run(project)
    assert code == 1, said
    for name, (_, stage, output) in CHANGES.items():
        assert f"{name}: is not what {stage} wrote; `dvc checkout --force {output}` restores it" in said
    assert 'File "' not in said
    assert {stage for _, stage, _ in CHANGES.values()} <= dvc_changed(project)
    assert (project.directory / "dvc.lock").read_bytes() == lock
    # Editing one file makes it no better, and a dry run says so too.
    assert project.snakemake("--dry-run", "all", check=False).returncode == 1

    project.run("dvc", "checkout", "--force", *{output for _, _, output in CHANGES.values()})
    assert {name: (project.directory / name).read_bytes() for name in CHANGES} == contents
    assert snakemake_ran(project) == {"resolve", "report@default"}
    assert dvc_changed(project) == set()


def test_missing_outputs_come_back_from_dvcs_cache(project: Project) -> None:
    contents = {path: path.read_bytes() for path in (project.directory / "results").rglob("*") if path.is_file()}
    for name in MISSING:
        path = project.directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, said = run(project)
    assert code == 0, said
    assert re.search(r"restored from DVC's cache: 6 outputs of 5 stages", said), said
    assert "Nothing to be done" in said
    shutil.rmtree(project.directory / "results")
    code, said = run(project)
    assert code == 0, said
    assert re.search(r"restored from DVC's cache: \d+ outputs of 13 stages", said), said
    assert "Nothing to be done" in said
    assert {path: path.read_bytes() for path in contents if "/logs/" not in str(path)} == {
        path: content for path, content in contents.items() if "/logs/" not in str(path)
    }
    assert dvc_changed(project) == set()
    # What comes back from the cache is watched as if a job had written it.
    edit_config(project, **{"report.examples": 1})
    assert snakemake_would_run(project) == {"resolve", "report@default", "accept@default", "compare"}


def test_outputs_that_the_cache_lacks_are_made_again(project: Project) -> None:
    """The cache is damaged with the file where that was changed in place."""
    packed = project.directory / "results/default/packing/train.arrow"
    content = packed.read_bytes()
    flip(packed)
    code, said = run(project)
    assert code == 1, said
    assert (
        "results/default/packing/train.arrow: is not what pack@default wrote; delete it, and pack@default runs" in said
    )
    packed.unlink()
    result = project.snakemake("all")
    assert "train.arrow is missing and not in DVC's cache: pack@default runs again" in result.stderr
    assert packed.read_bytes() == content
    assert snakemake_would_run(project) == set()
    assert dvc_changed(project) == set()


def test_a_file_that_no_stage_wrote_is_not_recorded(project: Project) -> None:
    note = project.directory / "results/default/adapter/note.txt"
    note.write_text("mine")
    edit_config(project, **{"report.examples": 1})
    code, said = run(project)
    assert code == 1, said
    assert "adapter/note.txt: train@default did not write it; move it out of results/default/adapter" in said
    note.unlink()
    (project.directory / "results/default/adapter/.adapter_model.safetensors.host.1.tmp").write_text("half")
    assert snakemake_ran(project) == {"resolve", "report@default"}
    assert dvc_changed(project) == set()


def test_damaged_output_of_a_failed_run_is_reported(project: Project) -> None:
    """A failed run records nothing in DVC, so only the record of outputs has the files its jobs wrote."""
    page = project.directory / "src/zerolora/report/page.html"
    template = page.read_text()
    page.write_text("{% if %}")
    edit_config(project, **{"evaluate.max_new_tokens": 5, "report.examples": 1})
    code, said = run(project)
    assert code == 1, said
    assert "report" in said
    page.write_text(template)
    metrics = project.directory / "results/default/metrics/evaluate_resources.json"
    content = metrics.read_bytes()
    replace(metrics)
    code, said = run(project)
    assert code == 1, said
    assert "results/default/metrics/evaluate_resources.json: is not what evaluate@default wrote" in said
    metrics.unlink()
    metrics.write_bytes(content)
    assert snakemake_ran(project) == {"resolve", "report@default"}
    assert dvc_changed(project) == set()


def test_results_without_any_record_are_judged_by_dvc(project: Project) -> None:
    shutil.rmtree(project.directory / ".snakemake")
    truncate(project.directory / ADAPTER)
    code, said = run(project)
    assert code == 1, said
    assert f"{ADAPTER}: is not what train@default wrote" in said
    project.run("dvc", "checkout", "--force", "results/default/adapter")
    code, said = run(project)
    assert code == 0, said
    assert "Nothing to be done" in said


def test_damage_before_the_run_ends_is_not_recorded(project: Project) -> None:
    """By a later job, which writes to the new adapter's config."""
    rule, written = project.directory / "workflow/rules/report.smk", "results/default/adapter/adapter_config.json"
    last = "--lock {input.lock}"
    assert rule.read_text().count(last) == 1
    rule.write_text(rule.read_text().replace(last, f"{last} && printf x >> {written}"))
    edit_config(project, **{"train.learning_rate": 2e-2})
    _, said = run(project)
    assert f"not recorded in DVC: {written} is not what train@default wrote" in said
    assert "train@default" in dvc_changed(project)


def after(project: Project, stage: str, command: str) -> None:
    """Have the job of a stage end with a command."""
    rule = project.directory / f"workflow/rules/{stage}.smk"
    head, last, tail = rule.read_text().rpartition('"\n')
    assert last and not tail
    rule.write_text(f"{head} && {command}{last}")


@pytest.mark.parametrize(
    ("command", "said_of_it", "stages"),
    [
        (
            "sed -i 's/ examples: 1/ examples: 0/' config/config.yaml",
            "config/config.yaml was edited during",
            {"resolve"},
        ),
        (
            "echo >> envs/requirements.lock",
            "envs/requirements.lock has changed while report@default read",
            {"report@default"},
        ),
    ],
    ids=["config", "input"],
)
def test_edit_during_a_run_is_not_recorded(project: Project, command: str, said_of_it: str, stages: set[str]) -> None:
    """By the job of report, at its end. (Ten seconds each: a run of four stages.)"""
    edit_config(project, **{"report.examples": 1})
    after(project, "report", command)
    code, said = run(project)
    assert code == 0, said
    assert f"not recorded in DVC: {said_of_it}" in said
    assert "run the same command again" in said
    assert stages <= dvc_changed(project)
    if "config" in command:
        project.write_config()
        rule = project.directory / "workflow/rules/report.smk"
        rule.write_text(rule.read_text().replace(f" && {command}", ""))
        run(project)
        assert dvc_changed(project) == set()


def test_dvc_records_nothing_of_a_config_that_is_edited_meanwhile(project: Project) -> None:
    """By the job of resolve; then a stage after it sees other settings than resolve has written."""
    edit_config(project, **{"report.examples": 1})
    after(project, "resolve", "sed -i 's/ examples: 1/ examples: 0/' config/config.yaml")
    result = project.run("dvc", "repro", "resolve", check=False)
    assert "config/config.yaml was edited during the run; run `dvc repro` again" in result.stdout + result.stderr
    assert "resolve" in dvc_changed(project)
    report = ("workflow/scripts/rule", "report", "results/default/report.html")
    result = project.run(*report, DVC_STAGE="report@default", check=False)
    assert result.returncode != 0
    assert "was edited since resolve ran; run `dvc repro` again" in result.stdout + result.stderr
    result = project.run(
        *("zerolora", "stage", "resolve", "--config", "config/config.yaml", "--output", "work/config.json"),
        **{PLANNED: "other"},
        check=False,
    )
    assert "was edited since this run planned its jobs; run the same command again" in result.stderr
    assert not (project.directory / "work/config.json").exists()


def test_broken_records_count_as_none_and_a_lost_cache_entry_comes_back(project: Project) -> None:
    adapter = (project.directory / ADAPTER).read_bytes()
    for entry in (project.directory / ".dvc/cache/files/md5").rglob("*"):
        if entry.is_file() and entry.read_bytes() == adapter:
            entry.unlink()
    records = project.directory / ".snakemake"
    (records / "dvc-lock.json").write_bytes(b"\xff")
    (records / "hashes.json").write_text('{"rows.json": [[1, 2], 3]}')
    first, second, third, *_ = sorted((records / "metadata").iterdir())
    first.write_bytes(b"\xff")
    second.write_bytes(b"[1]")
    third.write_bytes(third.read_bytes()[:-9])
    receipt = project.directory / "results/receipts/train@default.json"
    text = receipt.read_text()
    receipt.unlink()
    receipt.write_text(text[:-9])
    code, said = run(project)
    assert code == 0, said
    assert "Traceback" not in said
    assert "train@default: DVC's cache had lost some of its outputs, and has them again" in said
    assert receipt.read_text() == text
    assert "Nothing to be done" in said
    assert dvc_changed(project) == set()
    lock = project.directory / "dvc.lock"
    lock.write_text(f"<<<<<<< HEAD\n{lock.read_text()}=======\n>>>>>>> other\n")
    code, said = run(project)
    assert code == 1, said
    assert "dvc.lock: has the conflict markers of a merge; `git checkout --ours dvc.lock` takes" in said


def test_a_lock_whose_owner_was_killed_is_taken_over(project: Project, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = project_environment(project.directory) | {"TMPDIR": str(temporary)}
    locks = project.directory / ".snakemake/locks"
    process = subprocess.Popen(
        [*SNAKEMAKE, "--forcerun", "report"],
        cwd=project.directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    give_up = time.monotonic() + 600
    while not (locks.is_dir() and any(locks.iterdir())) and time.monotonic() < give_up:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert any(locks.iterdir())
    assert list(temporary.glob("snakemake*"))
    # DVC's list of readers and writers, cut short by a kill.
    (project.directory / ".dvc/tmp/rwlock").write_text('{"read": {')
    result = project.run(*SNAKEMAKE, TMPDIR=str(temporary))
    assert f"process {process.pid} on" in result.stderr
    assert "was killed; its lock is taken over" in result.stderr
    assert not list(temporary.glob("snakemake*"))
    assert snakemake_would_run(project) == set()
    assert dvc_changed(project) == set()


def test_of_two_runs_that_start_together_one_runs(project: Project) -> None:
    processes = [
        subprocess.Popen(
            [*SNAKEMAKE, "--forcerun", "report"],
            cwd=project.directory,
            env=project_environment(project.directory),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], said
    winner, loser = sorted(range(2), key=lambda index: processes[index].returncode)
    assert f"another run works in this directory: process {processes[winner].pid} on" in said[loser]
    ran = "report default"
    assert ran in " ".join(said[winner].split())
    assert ran not in " ".join(said[loser].split())
    assert dvc_changed(project) == set()


def user_cache(tmp_path: Path) -> dict[str, str]:
    """Return variables with which DVC's cache of hashes is where a user has it, in the user's own cache."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "DVC_SITE_CACHE_DIR": ""}


def site_cache(directory: Path, environment: dict[str, str]) -> Path:
    """Return the directory that DVC uses when it is called in `directory`."""
    where = "from dvc.repo import Repo; print(Repo().site_cache_dir)"
    command = [sys.executable, "-c", where]
    done = subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, text=True)
    return (directory / done.stdout.strip()).resolve()


def test_nobody_else_can_write_dvcs_cache_of_hashes(project: Project, tmp_path: Path) -> None:
    """DVC unpickles what lies there, and makes its own directories writable for everyone."""
    clone = tmp_path / "clone"
    project.run("git", "clone", "--quiet", str(project.directory), str(clone))
    environment = project_environment(clone) | user_cache(tmp_path)
    # As a user types it, in a fresh clone, before any command of the project.
    subprocess.run(["dvc", "status"], cwd=clone, env=environment, check=True, capture_output=True)
    project.run(*SNAKEMAKE, **user_cache(tmp_path))
    private = tmp_path / "cache/zerolora/dvc"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert site_cache(clone, environment).is_relative_to(clone / ".cache/dvc")
    for directory in (project.directory, project.directory / "config"):
        assert site_cache(directory, environment).is_relative_to(private)
    for path in ((cache := clone / ".cache/dvc"), *cache.rglob("*")):
        assert not path.stat().st_mode & stat.S_IWOTH, path


def test_a_copied_project_opens_nothing_of_the_original(project: Project, tmp_path: Path) -> None:
    """By DVC alone, before any command of the project; the copy has the original's .dvc/config.local."""
    project.run(*SNAKEMAKE, **user_cache(tmp_path))
    copy = Project(tmp_path / "copied")
    shutil.copytree(project.directory, copy.directory, symlinks=True)
    assert str(project.directory) not in (copy.directory / ".dvc/config.local").read_text()
    before = listed(project.directory)
    copy.run("dvc", "status", **user_cache(tmp_path))
    assert listed(project.directory) == before
    both = (each.directory for each in (copy, project))
    ours, theirs = (site_cache(each, project_environment(each) | user_cache(tmp_path)) for each in both)
    assert ours != theirs and ours.parent == theirs.parent
    # A path of another user's, by either engine.
    for engine in (("dvc", "repro", "--single-item", "--force", "resolve"), SNAKEMAKE):
        (copy.directory / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {tmp_path}/other\n")
        copy.run(*engine, **user_cache(tmp_path))
        text = (copy.directory / ".dvc/config.local").read_text()
        assert f"site_cache_dir = {tmp_path}/cache/zerolora/dvc\n" in text and "other" not in text


def listed(directory: Path) -> dict[str, int]:
    """Return the files in a directory, and when each was changed."""
    return {str(path): path.lstat().st_mtime_ns for path in directory.rglob("*")}


def test_outputs_that_dvc_write_protects_are_made_again_without_rights_of_root(project: Project) -> None:
    """DVC's hard links are read-only; root may write them all the same, another user's Snakemake would refuse."""
    assert not (project.directory / "results/default/report.html").stat().st_mode & stat.S_IWUSR
    edit_config(project, **{"report.examples": 1})
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    project.run(*drop, *SNAKEMAKE)
    assert dvc_changed(project) == set()
