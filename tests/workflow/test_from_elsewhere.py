"""Projects that are no checkout: a folder with a config, a model and rows, and the workflow from somewhere else."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import BIN, NO_WORKFLOW, ROOT, copy_tracked, served, write_rows
from test_other_releases import TESTED, pretend_release

pytestmark = [pytest.mark.slow]  # an installation, and whole runs

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel's installation, made without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_tracked(folder / "checkout")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    quiet = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "wheel", *quiet, "--wheel-dir", str(folder), str(folder / "checkout")], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", folder / "site", wheel], check=True
    )
    return folder / "site"


def runner(package: Path, directory: Path) -> Run:
    """Return a function that runs a command in a folder with this package, beside this environment's others."""
    others = ("SNAKEMAKE_", "DVC_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment |= {
        "PYTHONPATH": str(package),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }

    def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return ended(
            subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=600
            ),
            check,
        )

    return run


def ended(result: subprocess.CompletedProcess[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    """Return a command that has ended, with `check` well."""
    if check:
        assert result.returncode == 0, f"{result.args}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    shutil.copytree(tiny_model, tmp_path / "own/model")
    write_rows(tmp_path / "own/rows.json", 20)
    return tmp_path / "own"


# What init writes of the folder; its own start takes some seconds.
CONFIG: dict[str, Any] = {
    "hardware": {"device": "cpu", "host_memory": "8GiB"},
    "fetch": {"directory": {"model": {"path": "model", "license": "unknown"}}},
    "prepare": {
        "rows": {"model": "model", "path": "rows.json", "split": {"validation": 1, "test": 1}, "max_length": 64}
    },
    "render": {"strategy": "auto"},
    "train": {"ranks_per_node": 1},
    "runs": {"rows": {"dataset": "rows"}},
}
INIT = ("zerolora", "init", "--model", "model", "--data", "rows.json")
NO_DVC = "there is no dvc.yaml here: DVC records nothing of this run"


def test_the_example_of_the_workflow_catalog_is_planned(tmp_path: Path) -> None:
    """In a copy, since a plan writes into its folder."""
    copy_tracked(tmp_path / "checkout")
    options = ("-s", "workflow/Snakefile", "--profile", "profiles/local", "--directory", ".test", "--dry-run", "all")
    planned = runner(tmp_path / "checkout/src", tmp_path / "checkout")("snakemake", *options).stdout
    assert re.search(r"^ +1  train  ", planned, re.MULTILINE)


def write_config(folder: Path) -> None:
    (folder / "config").mkdir()
    (folder / "config/config.yaml").write_text(yaml.safe_dump(CONFIG))


def test_an_installed_package_runs_a_folder(installed: Path, folder: Path) -> None:
    """And `--report` and `--archive` of the finished run need no profile."""
    run = runner(installed, folder)
    where = run(sys.executable, "-c", "import zerolora.workflow_files as files; print(files.ROOT)").stdout
    assert where.startswith(str(installed))
    assert "train with `zerolora run`" in run(*INIT).stderr
    first = run("zerolora", "run")
    assert first.stderr.count(NO_DVC) == 1
    trained = json.loads((folder / "results/rows/metrics/train.json").read_text())
    page = (folder / "results/rows/report.html").read_text()
    assert trained["steps"] == 12 and "zerolora run results/rows/report.html" in page
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == [
        *("config", "model", "resources", "results", "rows.json", "work")
    ]
    assert "Nothing to be done" in run("zerolora", "run").stderr
    accounted = "results/logs/train/rows/steps"
    assert (folder / accounted).read_text() == "finished\n"

    snakemake = ("snakemake", "--snakefile", str(installed / "zerolora/project/workflow/Snakefile"))
    run(*snakemake, "--report", "report.html")
    assert "Runs" in (folder / "report.html").read_text()
    run(*snakemake, "--cores", "1", "--archive", "project.tar.gz")
    with tarfile.open(folder / "project.tar.gz") as archive:
        assert {"rows.json", "model/model.safetensors"} <= set(archive.getnames())


def test_another_snakemake_is_refused_with_the_pip_command(installed: Path, folder: Path) -> None:
    """There is no `make` beside an installed package."""
    write_config(folder)
    pretend_release(folder / "site")
    environment = os.environ | {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{installed}"}
    command = [sys.executable, "-m", "zerolora", "run"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode and "Traceback" not in result.stderr
    assert last.startswith("snakemake 9.99.0 is installed")
    assert last.endswith(f"run `{sys.executable} -m pip install snakemake=={TESTED}`")


def test_a_recipe_brings_the_presets_that_it_names(installed: Path, folder: Path) -> None:
    runner(installed, folder)("zerolora", "init", "--recipe", "qwen2.5-14b-2x32gb")
    for preset in ("deepspeed/reference-stage2.json", "deepspeed/reference-stage3.json"):
        assert (folder / "config" / preset).read_bytes() == (ROOT / "config" / preset).read_bytes()


def test_a_checkout_runs_another_folder(folder: Path, tmp_path: Path) -> None:
    """By either Snakefile: what one has done, the other need not do."""
    write_config(folder)
    target = ("--profile", str(ROOT / "profiles/local"), "--directory", "own", "results/rows/adapter/manifest.json")
    result = ended(served("snakemake", "-s", str(ROOT / "workflow/Snakefile"), *target, directory=tmp_path))
    assert "train rows" in result.stderr and NO_DVC in result.stderr
    again = ended(served("snakemake", "-s", str(ROOT / "Snakefile"), *target, directory=tmp_path))
    assert "Nothing to be done" in again.stderr


MODULE = """
configfile: "own.yaml"

rule mine:
    default_target: True
    input:
        "tune/results/compare/table.md",
        "tune/results/settings/manifest.json",
        "copied.json",

module zerolora:
    snakefile: "{snakefile}"
    prefix: "tune"
    config: config["tuning"]

use rule * from zerolora as tuning_*

rule copy:
    input:
        "tune/results/second/summary.json",
    output:
        "copied.json",
    shell:
        "cp {{input}} {{output}}"
"""


def test_a_module_has_its_own_config_and_outputs_below_its_prefix(folder: Path) -> None:
    """Two runs, in the user's own Snakefile."""
    runs = {"first": {"dataset": "rows"}, "second": {"dataset": "rows", "train": {"learning_rate": "RATE"}}}
    config = CONFIG | {"runs": runs}
    text = yaml.safe_dump({"tuning": config}).replace("RATE", "3e-4")  # a text for YAML 1.1
    (folder / "own.yaml").write_text(text)
    (folder / "Snakefile").write_text(MODULE.format(snakefile=ROOT / "workflow/Snakefile"))
    result = ended(served("snakemake", "--cores", "2", directory=folder))
    assert "module zerolora: DVC records nothing of this run" in result.stderr
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == [
        *("Snakefile", "copied.json", "model", "own.yaml", "rows.json", "tune")
    ]
    settings = json.loads((folder / "tune/results/settings/runs/second.json").read_text())
    assert settings["runs"]["second"]["train"]["learning_rate"] == 3e-4
    assert (folder / "tune/results/first/report.html").is_file()
    assert "Nothing to be done" in ended(served("snakemake", "--cores", "2", directory=folder)).stderr


HUB = {"repository": "owner/name", "revision": "0" * 40, "license": "MIT"}
PACKAGE = {"package": "name", "version": "1.0", "license": "MIT", "files": {"rows.json": "0" * 64}}
BELOW = "is not below the prefix tune/; declare the module without a prefix"
REPLACED: dict[str, tuple[str, str, str]] = {
    "replace_prefix": (
        *('prefix: "tune"', 'replace_prefix: {{"results/": "out/"}}'),
        "module zerolora: replace_prefix has no effect on the folders of commands; use prefix",
    ),
    "no config": (
        *('config: config["tuning"]', ""),
        "module zerolora: has no config, so --config and --configfile do not reach it; set config: config",
    ),
    "a wrong value": ('config["tuning"]', 'config["tuning"] | dict(train=1)', "config of module zerolora: train: "),
}
UNMOVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "data of a hub": ("fetch", {"data": {"own": HUB | {"files": ["*.json"]}}}, "fetch.data: "),
    "data of a package": ("fetch", {"package_data": {"own": PACKAGE}}, "fetch.package_data: "),
    "an adapter of a hub": ("fetch", {"adapter": {"own": HUB}}, "fetch.adapter: "),
    "an adapter of another run": (
        *("continued", {"next": {"dataset": "rows", "train": {"from_adapter": "results/rows/adapter"}}}),
        "continued.next.train.from_adapter: results/rows/adapter ",
    ),
}


def refused(folder: Path, text: str, config: dict[str, Any]) -> str:
    """Return the line with which the plan of a user's Snakefile ends."""
    (folder / "own.yaml").write_text(yaml.safe_dump({"tuning": config}))
    (folder / "Snakefile").write_text(text.format(snakefile=ROOT / "workflow/Snakefile"))
    result = served("snakemake", "-n", "--config", "a1=1", directory=folder)
    assert result.returncode and "Traceback" not in result.stderr and not (folder / "tune").exists()
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("case", REPLACED)
def test_what_a_module_does_not_follow_is_refused(folder: Path, case: str) -> None:
    old, new, line = REPLACED[case]
    assert old in MODULE
    assert refused(folder, MODULE.replace(old, new), CONFIG).startswith(line)


@pytest.mark.parametrize("case", UNMOVED)
def test_a_path_that_a_prefix_does_not_move_is_refused(folder: Path, case: str) -> None:
    """Such a path is in the user's config, so it stays as it is, and the outputs of the module move."""
    section, values, line = UNMOVED[case]
    config = CONFIG | {section: CONFIG.get(section, {}) | values}
    assert refused(folder, MODULE, config) == f"module zerolora: {line}{BELOW}"


# As `snakedeploy deploy-workflow` writes it.
DEPLOYED = """
from snakemake.utils import min_version


min_version("6.10.0")


configfile: "config/config.yaml"


# declare https://github.com/owner/name as a module
module zerolora:
    snakefile:
        {snakefile}
    config:
        config


# use all rules from https://github.com/owner/name
use rule * from zerolora
"""


def test_a_deployed_workflow_runs_with_the_installed_package(installed: Path, folder: Path) -> None:
    """From a commit of a repository, whose scripts are no files."""
    repository = folder.parent / "repository"
    copy_tracked(repository, without=NO_WORKFLOW)
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "all"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    run = runner(installed, folder)
    write_config(folder)
    (folder / "workflow").mkdir()
    source = f'gitfile("{repository}", path="workflow/Snakefile", tag="v1")'
    (folder / "workflow/Snakefile").write_text(DEPLOYED.format(snakefile=source))
    run("snakemake", "--cores", "2", "results/rows/adapter/manifest.json")
    assert json.loads((folder / "results/rows/metrics/train.json").read_text())["steps"] == 3
    planned = run("snakemake", "--cores", "2", "--dry-run")
    assert "compare" in planned.stdout + planned.stderr, "all is the default target"
