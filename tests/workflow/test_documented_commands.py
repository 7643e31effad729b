"""Every command that a document shows runs as it is shown, on a project with a tiny model, or says here why it cannot.

The tutorial's run in its order, with its edits; all others once, in the project that the tutorial leaves. About two
minutes, since the pipeline runs twice.
"""

import inspect
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import ROOT, Project
from documented import COMMANDS, Command
from engines import edit_config

from zerolora.cli import app
from zerolora.commands.stage_command import function_of
from zerolora.config.stages import ALL_STAGES
from zerolora.files import sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADAPTER = "results/default/adapter/adapter_model.safetensors"

ELSEWHERE = {
    r"zerolora memory": "tests/unit/test_docs.py runs it",
    r"zerolora chat": "reads what is typed; tests/workflow/test_chat.py runs it",
    r"zerolora serve": "runs until it is ended; tests/serving/test_serve.py runs it",
    r"make docs": "tests/unit/test_site.py builds the site",
    r"make TORCH=.*": "installs another torch: tests/unit/test_torch_install.py",
    r"python benchmarks/gpu.py .*--list": "tests/unit/test_gpu_benchmark.py runs it",
    r"zerolora init --recipe": "replaces the config; tests/unit/test_init.py runs it",
    r"zerolora init --model": "replaces the config; tests/unit/test_first_config.py runs it",
    r"zerolora search": "needs a search in the config; tests/workflow/test_searches.py runs it",
    r"zerolora bisect": "needs two commits that differ; tests/workflow/test_bisect.py runs it",
    r"results/data/mine/": "needs a data set of that name; tests/workflow/test_config_texts.py prepares one alone",
    r"results/samples/own": "needs a sample of that name; tests/workflow/test_rerun_matrix.py has one",
    r"zerolora check --config": "needs another config; tests/unit/test_check.py runs it",
    r"snakemake --profile profiles/(pbs|lsf|htcondor)": "needs an executor: tests/schedulers runs it",
    r"dvc (exp (run|apply|branch|remove)|queue)": "changes the project; tests/workflow/test_experiments.py runs it",
    r"dvc (params|metrics) diff copied": "needs these experiments; tests/workflow/test_experiments.py runs it",
    r"dvc (cache|config)": "moves the cache; tests/workflow/test_branches.py runs it",
    r"dvc (checkout --force|repro --single-item)": "prints nothing here; tests/workflow/test_branches.py runs it",
    r"git (merge|checkout) ": "needs two branches; tests/workflow/test_branches.py runs it",
    r"zerolora expand": "prints nothing; tests/workflow/test_branches.py runs it",
    r"dvc remote": "needs an S3 server; tests/workflow/test_s3_remote.py has one of its own",
    r"python tests/lint_workflow.py": "tests/workflow/test_engine_sync.py runs it",
    r"zerolora stage select": "needs a judge; tests/unit/test_select.py asks one",
    r"zerolora compare \w": "needs two runs; tests/unit/test_pair.py runs it",
    r"zerolora push .*--sign": "needs a key of SSH; tests/workflow/test_push.py makes one",
    r"zerolora (attest|verify .*--)": "needs a rebuild, or keys; tests/unit/test_evidence.py has some",
    r"zerolora rebuild": "trains again; tests/workflow/test_rebuild.py runs it",
    r"zerolora import": "needs a file of another tool; tests/unit/test_import.py runs it",
}
NOT_RUN = {
    r"make (test|lint|format)": "runs this test, or changes the tree; minutes",
    r"python -m pytest": "the tests themselves",
    r"python benchmarks/train/": "trains the 135M model for minutes",
    r"python tests/model_matrix.py": "takes minutes; tests/train/test_model_matrix.py runs the types of the page",
    r"python benchmarks/gpu.py .*--budget": "needs a GPU",
    r"snakemake --profile profiles/slurm all": "needs a Slurm: tests/slurm runs it",
    r"snakemake --profile profiles/hosts": "needs hosts: tests/launchers/test_hosts.py runs it",
    r"launcher=mpirun": "needs hosts: tests/launchers/test_launchers.py runs its launcher",
    r"pip install --no-deps .*executor-plugin": "installs what is not in the lock",
    r"dvc repro .*slurm": "needs a Slurm: tests/slurm runs it",
    r"sbatch": "needs a Slurm: tests/slurm runs it",
    r"srun": "needs a Slurm, and GPUs",
    r"apptainer": "needs Apptainer",
    r"make image": "needs root, and makes an image of gigabytes in minutes; tests/unit/test_image.py runs its refusals",
    r"python3.11 -m venv": "makes an environment of gigabytes",
    r"pip install (vllm|--no-deps llmcompressor|\.\[kernels\])": "installs what is not in the lock",
    r"pip install dvc-s3": "installs what is not in the lock; tests/s3/install does it elsewhere",
    r"hf auth login": "asks for a token",
    r"zerolora push .*OWNER/NAME": "needs a token of the hub; tests/workflow/test_push.py has a hub of its own",
    r"zerolora stage judge": "asks a judge that costs money; tests/unit/test_judge.py has one of its own",
    r"judge/judge.json|judge_all": "asks a judge that costs money; tests/unit/test_judge.py has one of its own",
}
"""Commands that cannot run here, as patterns of their words, with the reason. What is written right is checked."""


def line(command: Command) -> str:
    """Return a command in the form that the patterns have: name, words, and then its variables."""
    return " ".join([*command.words, *(f"{name}={value}" for name, value in command.variables.items())])


def matching(command: Command, patterns: dict[str, str]) -> list[str]:
    return [pattern for pattern in patterns if re.search(pattern, line(command))]


TUTORIAL = [command for command in COMMANDS if command.page == "docs/tutorial.md"]
OTHERS: dict[str, Command] = {line(command): command for command in COMMANDS if command not in TUTORIAL}
CANNOT: dict[str, Command] = {text: command for text, command in OTHERS.items() if matching(command, NOT_RUN)}
RUN: dict[str, Command] = {
    text: command
    for text, command in OTHERS.items()
    if text not in CANNOT and not matching(command, ELSEWHERE) and text not in {line(each) for each in TUTORIAL}
}


def checkout_last(text: str) -> tuple[bool, str]:
    """Return the key by which commands are sorted: after `make checkout` the project has other results."""
    return "checkout" in text, text


def recipe(target: list[str]) -> list[list[str]]:
    """Return the commands that make would run, without those that install."""
    needed = (
        ".venv/installed",
        *(f"envs/{name}" for name in ("requirements.lock", "requirements.hashes", "cu12.hashes", "cu13.hashes")),
    )
    old = [f"--assume-old={path}" for path in (*needed, "pyproject.toml")]
    told = subprocess.run(["make", "--dry-run", *old, *target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.replace("\\\n", " ").splitlines()
    return [each.replace(".venv/bin/", "").split() for each in lines if "pip install" not in each]


def run(project: Project, command: Command) -> str:
    """Run a command in a project, in the names that a project has, and return what it said."""
    words = command.words
    if words[0] == "make":
        started = [each for each in recipe(words[1:]) if each[0] in ("snakemake", "workflow/scripts/checkout")]
        assert started, f"{line(command)} would start nothing: write its program into this test"
    else:
        started = [filled(project, words)]
    results = [project.run(*each, **command.variables) for each in started]
    return "\n".join(result.stdout + result.stderr for result in results)


def filled(project: Project, words: list[str]) -> list[str]:
    """Return the words of `zerolora merge` with this project's directories for what stands in capital letters."""
    if words[:2] != ["zerolora", "merge"]:
        return words
    output = project.directory.parent / f"merged-{len(words)}"
    names = {"--base": "model", "--adapter": "results/default/adapter", "--output": str(output)}
    return [
        names.get(before, word) if word.isupper() else word for before, word in zip(["", *words], words, strict=False)
    ]


@pytest.fixture(scope="module")
def tutorial(make_project: Callable[[str], Project]) -> tuple[Project, list[str]]:
    """Return a project in which every command of the tutorial has run, and what each said."""
    project = make_project("tutorial")
    edit_config(project, **{"export.targets": ["vllm_adapter"]})
    project.commit("a target to export")
    said = []
    for command in TUTORIAL:
        told = run(project, command)
        said.append(f"{told}\nadapter {sha256(project.directory / ADAPTER)}")
        if line(command).startswith("git commit"):
            edit_config(project, **{"train.learning_rate": 5e-3})
    return project, said


def test_tutorial_matches_the_output(tutorial: tuple[Project, list[str]]) -> None:
    said = dict(zip([f"{index} {line(each)}" for index, each in enumerate(TUTORIAL)], tutorial[1], strict=True))
    assert "accuracy" in said["0 make run"] and "accuracy" in said["1 zerolora show"]
    assert "Nothing to be done" in said["2 make run"]
    would = said["5 snakemake --dry-run all"]
    assert "train" in would and not re.search(r"^(local)?rule (fetch|prepare|evaluate_base):", would, re.M)
    assert "train" in said["6 make run"]
    assert "loss" in said["7 dvc metrics diff"]
    assert "Running stage 'train" not in said["9 dvc repro"]
    adapters = [text.rpartition("adapter ")[2] for text in said.values()]
    assert adapters[0] == adapters[5] == adapters[9] != adapters[6]
    assert "Nothing to be done" in said["10 snakemake --dry-run all"]
    pages = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert len(said) == len(TUTORIAL) == 11 and "learning_rate: 1.0e-3" in pages


ORDERED: list[str] = sorted(RUN, key=checkout_last)


@pytest.mark.parametrize("text", ORDERED)
def test_a_command_runs_as_it_is_shown(text: str, tutorial: tuple[Project, list[str]]) -> None:
    project, _ = tutorial
    if text.startswith("dvc push"):
        project.run("dvc", "remote", "add", "--default", "--local", "store", str(project.directory.parent / "store"))
    if text.startswith("make checkout"):
        project.run("git", "commit", "--quiet", "--allow-empty", "--message", "after the results")
    if text.startswith("dvc"):  # which only warns of a file that is not there
        assert [
            word for word in RUN[text].words if word[:8] == "results/" and not (project.directory / word).exists()
        ] == []
    said = run(project, RUN[text]).strip()
    assert said or text.startswith(("dvc metrics diff", "dvc params diff"))  # of results as committed


@pytest.mark.parametrize("pattern", [*NOT_RUN, *ELSEWHERE])
def test_a_reason_not_to_run_is_one_of_a_command_that_is_shown(pattern: str) -> None:
    assert any(re.search(pattern, text) for text in OTHERS)


@pytest.mark.parametrize("text", sorted(CANNOT))
def test_a_command_that_cannot_run_is_written_right(text: str, tutorial: tuple[Project, list[str]]) -> None:
    project, command = tutorial[0], CANNOT[text]
    words = [word for word in command.words if word != "srun"]
    program = Path(words[0]).name
    check_files(words)
    if program == "snakemake" and "judge" not in text:
        project.run(program, *words[1:], "--dry-run")
    elif program == "dvc":
        project.run(*words, "--dry")
    elif program == "make":
        assert recipe(words[1:])
    elif program == "zerolora":
        check_options(words[1:])
    elif program == "hf":
        project.run(str(Path(shutil.which("hf") or "hf")), *words[1:], "--help")
    elif program == "python" and words[1] != "-m":
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def check_files(words: list[str]) -> None:
    """Check that the files of the repository that a command names are there."""
    named = [word for word in words if re.match(r"(benchmarks|tests|profiles|envs)/.*\.\w+$", word)]
    assert [word for word in named if not (ROOT / word).exists() and word != "envs/zerolora.sif"] == []


def check_options(words: list[str]) -> None:
    """Check that a command of zerolora takes these words."""
    group: Any = typer.main.get_command(app)
    given = [{"JSON": "{}"}.get(word, word) for word in words[1:]]
    context = group.commands[words[0]].make_context(words[0], given)
    if words[0] == "stage":
        stage = ALL_STAGES[words[1]]
        parameters = inspect.signature(function_of(stage)).parameters
        assert {option[2:] for option in context.args[len(stage.wildcards) :: 2]} <= parameters.keys()
    else:
        assert context.args == []


def test_every_command_of_zerolora_that_a_sentence_names_exists() -> None:
    group: Any = typer.main.get_command(app)
    for page in {command.page for command in COMMANDS}:
        for name in re.findall(r"`zerolora ([a-z][a-z-]*)", (ROOT / page).read_text(encoding="utf-8")):
            assert name in group.commands, f"{page}: zerolora {name}"
