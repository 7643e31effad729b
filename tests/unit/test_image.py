"""envs/image, the script of the image, and what it refuses in one line before it makes anything."""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT


def refused(path: Path, archive: Path, **variables: str) -> str:
    """Return the line of the script, with the programs in `path` alone."""
    environment = {"PATH": str(path), **variables}
    command = ["/bin/sh", str(ROOT / "envs/image"), str(archive)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and not result.stdout
    (line,) = result.stderr.splitlines()
    return line.removeprefix("envs/image: ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder of programs, without buildah."""
    (tmp_path / "bin").mkdir()
    for name in ("dirname", "git", "id", "realpath"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    return tmp_path / "bin"


def test_a_missing_tool_is_named(path: Path, tmp_path: Path) -> None:
    line = refused(path, tmp_path / "image.tar")
    assert line == "buildah is missing; on Debian: sudo apt-get install buildah"
    assert refused(path, tmp_path / "image.tar", BASE="oci-archive:base.tar") == line
    assert not (tmp_path / "image.tar").exists()


def test_wrong_settings_are_refused(path: Path, tmp_path: Path) -> None:
    assert refused(path, tmp_path / "a", TORCH="rocm") == "TORCH=rocm is not a build; use cpu, cu12 or cu13"
    (tmp_path / "old.tar").write_text("old")
    assert refused(path, tmp_path / "old.tar") == f"{tmp_path}/old.tar exists; remove it, or name another file"
    assert (tmp_path / "old.tar").read_text() == "old"
    assert refused(path, tmp_path / "none/a") == f"{tmp_path}/none is not a folder; make it, or name another file"
