"""The releases of other libraries that the patches are for besides those of the lock, which every other test runs.

With ZEROLORA_TEST_RELEASES=1, since it installs each of them from the package index: Snakemake runs a folder, DeepSpeed
and Snakemake's Slurm executor pass their tests. Tried on 2026-11-27: Snakemake 9.24.0,
9.25.2, 9.26.1; on 2026-11-29: DeepSpeed 0.19.7, the executor 2.7.1.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, OTHER_RELEASES, ROOT, write_rows

from zerolora.compat.versions import VERSIONS
from zerolora.errors import install_command

pytestmark = [pytest.mark.slow]  # whole runs

TESTED, SERIES = VERSIONS["snakemake"]
TESTS = {
    "deepspeed": [
        "tests/unit/test_compat.py",
        *(f"tests/train/test_{name}.py" for name in ("training", "resume", "fp16", "nvme", "preferences_train")),
    ],
    "snakemake-executor-plugin-slurm": ["tests/slurm"],
}
"""Those of each library's patches."""
on_request = pytest.mark.skipif(
    "ZEROLORA_TEST_RELEASES" not in os.environ, reason="installs releases: ZEROLORA_TEST_RELEASES=1"
)
MESSAGE = "snakemake {version} is installed, but zerolora.compat (explain_system_errors) is written for {tested}"


def environment(*packages: Path) -> dict[str, str]:
    others = ("SNAKEMAKE_", "DVC_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PYTHONPATH": os.pathsep.join(map(str, packages)), "OMP_NUM_THREADS": "1", "PATH": path}


def install(requirement: str, folder: Path) -> None:
    """Install a release into a folder of its own."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-build-isolation")
    subprocess.run([*pip, "--target", folder, requirement], check=True)


def pretend_release(folder: Path) -> None:
    """Write metadata of a release that does not exist."""
    metadata = folder / "snakemake-9.99.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: snakemake\nVersion: 9.99.0\n")


@on_request
@pytest.mark.parametrize("series", SERIES)
def test_a_release_runs_a_folder(series: str, tmp_path: Path, tiny_model: Path) -> None:
    install(f"snakemake=={series}.*", tmp_path / "site")
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


@on_request
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("library", "release"), [(library, release) for library in TESTS for release in VERSIONS[library][1]]
)
def test_a_release_passes_the_tests_of_its_library(library: str, release: str, tmp_path: Path) -> None:
    install(f"{library}=={release}", tmp_path / "site")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "2", *TESTS[library]],
        cwd=ROOT,
        env=environment(tmp_path / "site", ROOT / "src") | {OTHER_RELEASES: str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]


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
