"""The environment of git's commands in another repository."""

import subprocess
from pathlib import Path

import pytest

from zerolora.git_environment import git_environment


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
    monkeypatch.setenv("PATH", "")
    assert git_environment()["GIT_DIR"]
