"""The releases of Snakemake that the patches are for, each tried with a whole run.

With ZEROLORA_TEST_SNAKEMAKES=1, since it installs each of them from the package index. Tried on 2026-11-27: 9.24.0,
9.25.2, 9.26.1, and 9.27.1 of the lock, which every other test runs.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, write_rows

from zerolora.compat.versions import VERSIONS
from zerolora.errors import install_command

pytestmark = [pytest.mark.slow]  # whole runs

TESTED, SERIES = VERSIONS["snakemake"]
MESSAGE = "snakemake {version} is installed, but zerolora.compat (explain_system_errors) is written for {tested}"


def environment(*packages: Path) -> dict[str, str]:
    others = ("SNAKEMAKE_", "DVC_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PYTHONPATH": os.pathsep.join(map(str, packages)), "OMP_NUM_THREADS": "1", "PATH": path}


def pretend_release(folder: Path) -> None:
    """Write metadata of a release that does not exist."""
    metadata = folder / "snakemake-9.99.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: snakemake\nVersion: 9.99.0\n")


@pytest.mark.skipif(
    "ZEROLORA_TEST_SNAKEMAKES" not in os.environ, reason="installs releases: ZEROLORA_TEST_SNAKEMAKES=1"
)
@pytest.mark.parametrize("series", SERIES)
def test_a_release_runs_a_folder(series: str, tmp_path: Path, tiny_model: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target")
    subprocess.run([*pip, tmp_path / "site", f"snakemake=={series}.*"], check=True)
    folder = tmp_path / "own"
    shutil.copytree(tiny_model, folder / "model")
    write_rows(folder / "rows.json", 20)
    variables = environment(tmp_path / "site", ROOT / "src")
    for command in (["init", "--model", "model", "--data", "rows.json"], ["run"], ["run"]):
        result = subprocess.run(
            ["zerolora", *command], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
    assert "Nothing to be done" in result.stderr
    (log, *_) = sorted((folder / ".snakemake/log").iterdir())
    assert f"Snakemake version: {series}." in log.read_text()


def test_the_releases_are_those_of_the_page() -> None:
    page = (ROOT / "docs/own-data.md").read_text(encoding="utf-8")
    assert f"Tried: {', '.join(SERIES[:-1])} and {SERIES[-1]}," in page
    assert importlib.metadata.version("snakemake").startswith(f"{SERIES[-1]}.") and TESTED.startswith(f"{SERIES[-1]}.")
    assert f'min_version("{SERIES[0]}")' in (ROOT / "workflow/rules/common.smk").read_text(encoding="utf-8")


def test_another_release_is_refused_in_one_line(tmp_path: Path) -> None:
    """The installed Snakemake, under the metadata of another release, outside its checkout."""
    pretend_release(tmp_path / "site")
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "workflow/Snakefile"), "-n"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path / "site", ROOT / "src"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode and "Traceback" not in result.stdout + result.stderr
    last = result.stderr.strip().splitlines()[-1]
    remedy = f"run `make -C {ROOT}`, which installs envs/requirements.lock"
    assert last == f"{MESSAGE.format(version='9.99.0', tested=TESTED)}; {remedy}"


def test_another_python_than_that_of_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own = "`make`, which installs envs/requirements.lock"
    assert install_command("snakemake") == own
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert install_command("snakemake") == (
        f"{own} in .venv, and then the commands in {ROOT}/.venv/bin: this is {sys.executable}"
    )


def test_a_python_without_the_package_is_named(tmp_path: Path) -> None:
    """Snakemake of this environment, without the folder of the package on its path."""
    hide = "import runpy, sys; sys.modules['zerolora'] = None; sys.argv[0] = 'snakemake'; "
    run = "runpy.run_module('snakemake', run_name='__main__')"
    command = [sys.executable, "-c", hide + run, "-s", str(ROOT / "workflow/Snakefile"), "-n"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode and "Traceback" not in result.stdout + result.stderr
    assert f"zerolora is not installed for {sys.executable}" in result.stdout + result.stderr
