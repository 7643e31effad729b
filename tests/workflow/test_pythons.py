"""`make` installs the lock with each version of Python that the package names, and the result works.

Each installation downloads gigabytes and takes a quarter of an hour, so they run on request: `make test-pythons`.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

REQUESTED = "ZEROLORA_TEST_PYTHONS"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMED = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
TRIED = ("tests/unit/test_check.py", "tests/unit/test_formats.py", "tests/unit/test_render.py")


def test_named_versions_are_required() -> None:
    assert NAMED[0] == PROJECT["requires-python"].removeprefix(">=")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", NAMED)
def test_lock_installs_and_works(version: str, tmp_path: Path) -> None:
    if os.environ.get(REQUESTED) != "1":
        pytest.skip(f"takes a quarter of an hour and gigabytes: make test-pythons ({REQUESTED}=1)")
    interpreter = shutil.which(f"python{version}")
    if interpreter is None:
        pytest.skip(f"no python{version} on PATH")
    project = tmp_path / "project"
    subprocess.run(["git", "clone", "--quiet", ROOT, project], check=True)
    (tmp_path / "bin").mkdir()
    real = subprocess.run(
        [interpreter, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (tmp_path / "bin/python3").symlink_to(real)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    run("make", ".venv/installed")  # ends with pip check
    assert f"python     {version}." in run(".venv/bin/zerolora", "check")
    run(".venv/bin/snakemake", "--version")
    run(".venv/bin/dvc", "--version")
    run(".venv/bin/python", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TRIED)
