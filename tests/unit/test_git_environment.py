"""The environment of git's commands in another repository."""

import subprocess
from pathlib import Path

import pytest

from zerolora.git_environment import git_environment
from zerolora.publish.run_crate import date_of_commit
from zerolora.report.provenance import commit


def test_a_hook_of_git_does_not_choose_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT_DIR and what else a hook, or `git -c`, sets; git finds the repository of the directory."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_CONFIG_PARAMETERS"):
        monkeypatch.setenv(name, str(tmp_path / "other"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "kept")
    environment = git_environment()
    assert environment["GIT_AUTHOR_NAME"] == "kept"
    for command in (("init", "--quiet"), ("rev-parse", "--absolute-git-dir")):
        done = subprocess.run(["git", *command], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(tmp_path / ".git")


def test_a_run_in_a_hook_has_the_commit_of_its_own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is another repository's; without git there is no commit."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for name in ("own", "other"):
        subprocess.run(["git", "init", "--quiet", str(tmp_path / name)], check=True)
        subprocess.run(
            ["git", *identity, "commit", "--quiet", "--allow-empty", "-m", name], cwd=tmp_path / name, check=True
        )
    monkeypatch.chdir(tmp_path / "own")
    own, day = commit(), date_of_commit()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    assert len(own) == 40 and (commit(), date_of_commit()) == (own, day)
    monkeypatch.setenv("PATH", "")
    assert (commit(), date_of_commit()) == ("not in a git repository", None)
