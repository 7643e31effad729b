"""Whatever has happened to a finished project, both engines end in agreement, and a plan says what a run does.

Each state is one copy of a finished project: Snakemake, DVC, git or a kill has done something to it. Then nothing is
left to do for either engine, and forced rules and other values are planned as they would run.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from conftest import Project
from engines import dvc_changed, dvc_ran, edit_config, snakemake_ran, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECEIPTS = Path("results/receipts")
CACHE = Path(".dvc/cache/files/md5")
CODE = Path("src/zerolora/evaluate/accept.py")
OTHER = "\n\nUNUSED = 1\n"


@pytest.fixture(scope="module")
def finished(copy_finished: Callable[[str], Project]) -> Project:
    project = copy_finished("receipts")
    project.commit("finished")
    return project


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    """Return a copy of the finished project, with its links into DVC's cache."""
    copy = Project(tmp_path / "copy")
    copy.config = deepcopy(finished.config)
    subprocess.run(["cp", "-a", str(finished.directory), str(copy.directory)], check=True)
    return copy


def settled(project: Project) -> None:
    """Run until nothing is to do, as a user does after what has happened."""
    project.snakemake("all")


def edited_by_snakemake(project: Project) -> None:
    edit_config(project, **{"report.examples": 1})
    assert snakemake_ran(project) == {"resolve", "report@default"}


def edited_by_dvc(project: Project) -> None:
    edit_config(project, **{"report.examples": 1})
    assert dvc_ran(project) == {"resolve", "report@default"}


def taken_back_by_dvc(project: Project) -> None:
    """DVC's run cache has what was made before."""
    edited_by_snakemake(project)
    edit_config(project, **{"report.examples": 2})
    assert dvc_ran(project) == set()


def taken_back_by_snakemake(project: Project) -> None:
    """The cache has it too, but dvc.lock names another receipt: the stage, of seconds, runs."""
    edited_by_snakemake(project)
    edit_config(project, **{"report.examples": 2})
    assert snakemake_ran(project) == {"resolve", "report@default"}


def checked_out(project: Project) -> None:
    edited_by_snakemake(project)
    project.commit("one example")
    project.run("workflow/scripts/checkout", "HEAD~1")


def pulled_in_a_clone(project: Project) -> None:
    edited_by_snakemake(project)
    project.run("dvc", "remote", "add", "--default", "store", str(project.directory.parent / "store"))
    project.commit("remote")
    project.run("dvc", "push")
    original = project.directory.rename(project.directory.with_name("original"))
    subprocess.run(["git", "clone", "--quiet", str(original), str(project.directory)], check=True)
    project.run("dvc", "pull")


def restored_one(project: Project) -> None:
    (project.directory / "results/default/usage.json").unlink()
    assert "restored from DVC's cache: results/default/usage.json\n" in project.snakemake("all").stderr


def restored_all(project: Project) -> None:
    shutil.rmtree(project.directory / "results")
    before = snakemake_would_run(project)
    assert before == set(), "a plan counts what a run restores"
    assert snakemake_ran(project) == set()


def without_a_receipt(project: Project) -> None:
    (project.directory / RECEIPTS / "train@default.json").unlink()
    assert snakemake_would_run(project) == snakemake_ran(project) == set()


def without_snakemakes_records(project: Project) -> None:
    shutil.rmtree(project.directory / ".snakemake")
    assert snakemake_ran(project) == set()


def failed_and_taken_back(project: Project) -> None:
    edit_config(project, **{"train.lora.targets": ["no_such_module"]})
    assert project.snakemake("all", check=False).returncode
    del project.config["train"]["lora"]["targets"]
    project.write_config(yaml.safe_dump(project.config, sort_keys=False))
    assert not {"train@default", "merge@default"} & snakemake_ran(project)


def failed_in_dvc_and_taken_back(project: Project) -> None:
    edit_config(project, **{"train.lora.targets": ["no_such_module"]})
    assert project.run("dvc", "repro", check=False).returncode
    del project.config["train"]["lora"]["targets"]
    project.write_config(yaml.safe_dump(project.config, sort_keys=False))
    assert dvc_ran(project) == set()


def killed(project: Project) -> None:
    """As a kill leaves it: the job has begun, and half of its outputs are there."""
    (project.directory / RECEIPTS / "report@default.json").unlink()
    (project.directory / RECEIPTS / "report@default.json").write_text("{}")
    page = project.directory / "results/default/report.html"
    text = page.read_text()
    page.unlink()
    page.write_text(text[:100])
    assert snakemake_would_run(project) <= {"report@default", "accept@default", "compare"}
    settled(project)
    assert len(page.read_text()) > 1000


def other_values_then_none(project: Project) -> None:
    project.snakemake("all", "--config", "report={examples: 1}")
    assert "report@default" in dvc_changed(project)
    # What dvc.lock has of the config is restored, not made again.
    assert snakemake_ran(project) == set()


def with_changed_code_that_is_kept(project: Project) -> None:
    path = project.directory / CODE
    path.write_text(path.read_text() + OTHER)
    for name in ("merge/merge.py", "evaluate/evaluate.py"):
        path = project.directory / "src/zerolora" / name
        path.write_text(path.read_text() + OTHER)
    assert {"merge@default", "evaluate@default"} <= snakemake_would_run(project)
    said = project.run("zerolora", "keep", "default").stdout
    assert said.startswith("kept: ") and {"merge@default", "evaluate@default"} <= set(said[6:].strip().split(", "))
    assert snakemake_ran(project) <= {"resolve", "report@default", "accept@default", "compare"}
    page = (project.directory / "results/default/report.html").read_text()
    assert "kept, although their code has changed: merge, evaluate" in page
    table = (project.directory / "results/compare/table.md").read_text()
    assert "kept, although their code has changed: merge, evaluate" in table


def with_kept_code_that_is_taken_back(project: Project) -> None:
    with_changed_code_that_is_kept(project)
    for name in ("accept", "evaluate"):
        path = project.directory / f"src/zerolora/evaluate/{name}.py"
        path.write_text(path.read_text().removesuffix(OTHER))
    path = project.directory / "src/zerolora/merge/merge.py"
    path.write_text(path.read_text().removesuffix(OTHER))
    assert not {"merge@default", "evaluate@default"} & snakemake_ran(project)
    assert "kept" not in (project.directory / "results/compare/table.md").read_text()


def with_a_lost_cache(project: Project) -> None:
    shutil.rmtree(project.directory / CACHE)
    result = project.snakemake("all")
    assert "had lost some of its outputs, and has them again" in result.stderr
    assert "Nothing to be done" in result.stdout + result.stderr


def damaged_then_forced(project: Project) -> None:
    """The file is a link from DVC's cache, which is damaged with it."""
    path = project.directory / "results/default/report.html"
    path.chmod(0o644)
    os.truncate(path, 1000)
    assert project.snakemake("all", check=False).returncode == 1
    project.snakemake("all", "--forcerun", "report")
    assert path.stat().st_size > 1000


def touched(project: Project) -> None:
    for path in project.directory.rglob("*"):
        if path.is_file() and ".git" not in path.parts and ".dvc" not in path.parts:
            os.utime(path)
    assert snakemake_would_run(project) == snakemake_ran(project) == set()


def with_a_remark_in_the_code(project: Project) -> None:
    path = project.directory / CODE
    path.write_text(path.read_text() + "\n# A remark.\n")
    assert snakemake_ran(project) == {"resolve"}


def without_a_broken_receipt(project: Project) -> None:
    path = project.directory / RECEIPTS / "pack@default.json"
    text = path.read_text()
    path.unlink()
    path.write_text(text[: len(text) // 2])
    assert snakemake_ran(project) == set()
    assert path.read_text() == text


def with_a_damaged_receipt(project: Project) -> None:
    """Of a digest in it; the outputs are right."""
    path = project.directory / RECEIPTS / "pack@default.json"
    text = path.read_text()
    value = json.loads(text)
    value["outputs"]["results/default/packing/stats.json"] = "0" * 64
    path.unlink()
    path.write_text(json.dumps(value))
    assert snakemake_ran(project) == set()
    assert path.read_text() == text


def of_the_version_without_receipts(project: Project) -> None:
    """Neither dvc.lock nor the results have receipts, and the code of every stage has changed since."""
    lock = yaml.safe_load((project.directory / "dvc.lock").read_text())
    for stage in lock["stages"].values():
        stage["outs"] = [out for out in stage["outs"] if not out["path"].startswith(str(RECEIPTS))]
        for values in stage.get("params", {}).values():
            for key in values:
                if key.startswith("code."):
                    values[key] = "0" * 64
    (project.directory / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False))
    shutil.rmtree(project.directory / RECEIPTS)
    shutil.rmtree(project.directory / ".snakemake")
    adapter = project.directory / "results/default/adapter/adapter_model.safetensors"
    before = adapter.stat().st_mtime_ns
    said = project.run("zerolora", "keep").stdout
    assert "train@default" in said and "evaluate_base@rows" in said
    assert snakemake_ran(project) == {"resolve", "report@default", "accept@default", "compare"}
    assert adapter.stat().st_mtime_ns == before


STATES = [
    *(edited_by_snakemake, edited_by_dvc, taken_back_by_dvc, taken_back_by_snakemake, checked_out, pulled_in_a_clone),
    *(restored_one, restored_all, without_a_receipt, without_snakemakes_records, failed_and_taken_back),
    *(failed_in_dvc_and_taken_back, killed, other_values_then_none, with_changed_code_that_is_kept),
    *(with_kept_code_that_is_taken_back, with_a_lost_cache, damaged_then_forced, touched, with_a_remark_in_the_code),
    *(without_a_broken_receipt, with_a_damaged_receipt, of_the_version_without_receipts),
]


@pytest.mark.parametrize("reached", STATES, ids=lambda state: state.__name__)
def test_engines_agree(project: Project, reached: Callable[[Project], None]) -> None:
    """Six calls of an engine for each state, a second each."""
    reached(project)
    assert dvc_changed(project) == set()
    before = stamps(project)
    assert snakemake_would_run(project) == set()
    result = project.snakemake("all")
    assert "Nothing to be done" in result.stdout + result.stderr
    assert dvc_ran(project) == set()
    assert stamps(project) == before, "nothing to do, and nothing written"
    forced = project.snakemake("--dry-run", "--forcerun", "report", "--", "all")
    assert "  report  " in forced.stdout + forced.stderr
    other = project.snakemake("--dry-run", "all", "--config", "report={examples: 3}")
    assert "  report  " in other.stdout + other.stderr


def stamps(project: Project) -> dict[str, tuple[int, int]]:
    """Return times and inodes of all results and of what DVC records of them."""
    files = [project.directory / "dvc.lock", *(project.directory / "results").rglob("*")]
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_ino) for file in files if file.is_file()}


@pytest.mark.parametrize("days", [-400, 0], ids=["older", "same"])
def test_other_content_with_an_older_date_is_noticed(project: Project, days: int) -> None:
    """As `mv`, `cp -p`, `rsync -a` and `tar -x` bring it."""
    path = project.directory / "rows.json"
    date = path.stat().st_mtime + days * 86400
    rows = json.loads(path.read_text())
    path.write_text(json.dumps(rows[1:]))
    os.utime(path, (date, date))
    assert "prepare@rows" in dvc_changed(project)
    assert "prepare@rows" in snakemake_would_run(project)


def test_without_dvc_snakemake_decides_by_receipts(project: Project) -> None:
    shutil.rmtree(project.directory / ".dvc")
    (project.directory / "dvc.yaml").unlink()
    edit_config(project, **{"report.examples": 1})
    assert snakemake_ran(project) == {"resolve", "report@default"}
    assert snakemake_would_run(project) == set()
    (project.directory / "results/default/usage.json").unlink()
    assert "report@default" in snakemake_ran(project)


def test_dvc_is_not_asked_for_what_it_cannot_restore(project: Project) -> None:
    """Stages that it never had, and earlier settings of others: it takes minutes for a thousand runs."""
    edit_config(project, **{"runs.second": {"dataset": "rows", "train": {"seed": 2}}, "report.examples": 1})
    path = project.directory / "workflow/scripts/dvc_state.py"
    asked = "    from dvc.repo import Repo\n"
    assert asked in path.read_text()
    path.write_text(path.read_text().replace(asked, "    raise RuntimeError('DVC is asked')\n"))
    planned = project.snakemake("--dry-run", "results/second/adapter/manifest.json")
    assert "  train  " in planned.stdout + planned.stderr
