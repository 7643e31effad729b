"""The command line: imports, errors, logs, help."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, TINY_CONFIG, served
from finished_run import FinishedRun
from typer.main import get_command

from zerolora.cli import app
from zerolora.commands.long_argument import argument_of, settings_of
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import FetchDirectory
from zerolora.fetch.models import fetch


def zerolora(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork of a warm process."""
    return served("zerolora", *arguments, directory=cwd, **environment)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [
        BIN / "zerolora",
        "stage",
        "resolve",
        "--config",
        tmp_path / "none.yaml",
        "--output",
        tmp_path / "out.json",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"zerolora: {tmp_path}/none.yaml: there is no such file; "
        "create it with `zerolora init --model DIRECTORY --data FILE`, or `--recipe NAME`"
    ]
    assert not (tmp_path / "out.json").exists()


def test_a_full_disk_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: both fail in the write itself."""
    rows = tmp_path / "reference.json"
    command = f"ulimit -f 8; exec {BIN}/zerolora reference --output {rows}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("zerolora: ") and "File too large" in line and "ulimit -f" in line, line
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    short = "from zerolora.config import recipes\ndef listed(folder): raise MemoryError('malloc of size 8')\n"
    result = served("zerolora", "init", directory=tmp_path, before=f"{short}recipes.find = listed")
    assert result.returncode == 2 and result.stderr.splitlines() == [
        "zerolora: not enough memory (malloc of size 8); give the job more, or raise its limit (`ulimit -v`)"
    ]


@pytest.mark.parametrize("system", ["short", "x" * 150_000, "'" * 40_000, "大" * 50_000])
def test_settings_of_any_length_reach_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """Through bash -c, as Snakemake starts a stage: the whole command is one argument."""
    monkeypatch.chdir(tmp_path)
    settings = {"system": system, "path": "rows.json"}
    argument = argument_of(settings)
    assert (argument == argument_of(dict(reversed(settings.items())))) and settings_of(argument) == settings
    assert argument != argument_of(settings | {"path": "other.json"})
    command = f"exec {BIN}/zerolora stage fetch --settings {shlex.quote(argument)} --weights w --output o"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    said = "Unable to extract tag using discriminator 'source'; pass the stage's entry of results/config.json"
    assert (result.returncode, result.stderr) == (2, f"zerolora: --settings: : {said}\n")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("@work/x.json", "work/x.json: there is no such file; run Snakemake again, which writes it"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2"),
    ],
)
def test_unreadable_settings_are_one_line(settings: str, said: str, tmp_path: Path) -> None:
    result = zerolora("stage", "fetch", "--settings", settings, "--weights", "w", "--output", "o", cwd=tmp_path)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith("zerolora: ") and "--settings" in line and said in line


@pytest.mark.parametrize(
    "way", ["raise UserError(text)", "raise OSError(2, 'gone', text)", "LOGGER.warning('%s', text)"]
)
def test_messages_escape_terminal_control_sequences(way: str) -> None:
    code = f"""
from zerolora import cli
from zerolora.errors import UserError
from zerolora.log import LOGGER
text = "data/\\x1b[31mred\\x1b]0;title\\x07.json: one\\nÄ 大"
def stage(**_):
    {way}
cli.app = stage
cli.main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.startswith("zerolora: data/\\x1b[31mred\\x1b]0;title\\x07.json: one\nzerolora: Ä 大")
    assert result.stderr.replace("\n", "").isprintable()


def test_commands_run_with_empty_standard_input(tmp_path: Path) -> None:
    code = "import sys; from zerolora import cli; cli.app = lambda **_: print([sys.stdin.read()]); cli.main()"
    result = subprocess.run([sys.executable, "-c", code], input="y\n", capture_output=True, text=True, check=True)
    assert result.stdout == "['']\n"


@pytest.mark.parametrize(
    ("imported", "said", "code"),
    [
        ("zerolora.fetch.ready", "", -signal.SIGINT),  # the first module
        ("typer", "", -signal.SIGINT),
        ("zerolora.first_config.pin", "zerolora: stopped by Ctrl-C; run the same command again\n", 130),
    ],
)
def test_ctrl_c_is_no_traceback_while_modules_are_imported(imported: str, said: str, code: int, tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {imported!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["pin"]
from zerolora.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.stderr, result.returncode) == (said, code)


def test_tasks_of_one_slurm_step_share_a_log(tmp_path: Path) -> None:
    """In any order, as they come; Snakemake has removed the log of an earlier run."""
    log = tmp_path / "x.log"
    for task in "102":
        missing = f"none{task}.yaml"
        zerolora("--log", str(log), "stage", "resolve", "--config", missing, "--output", "out.json", SLURM_PROCID=task)
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["none1.yaml:", "none0.yaml:", "none2.yaml:"]


LIGHT = """
import os, sys
from zerolora.cli import app
heavy = "torch transformers deepspeed datasets peft scipy pandas vl_convert xllamacpp".split()
for command, allowed in {commands!r}:
    child = os.fork()
    if not child:
        app(command, standalone_mode=False)
        loaded = [name for name in heavy if name not in allowed and sys.modules.get(name)]
        assert not loaded, (loaded, command)
        os._exit(0)
    assert not os.waitpid(child, 0)[1], command
"""


def test_light_stages_import_no_heavy_package(tmp_path: Path, tiny_model: Path) -> None:
    """Each command in a process of its own. Importing torch takes seconds, and some answer on a login node."""
    import yaml

    model = shutil.copytree(tiny_model, tmp_path / "model")
    rows = [{"instruction": "Add.", "input": f"{n} + {n}", "output": str(2 * n)} for n in range(24)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(TINY_CONFIG))
    resolved = resolve(load(tmp_path / "config.yaml")).model_dump(mode="json")
    run = resolved["runs"]["default"]
    done = FinishedRun(tmp_path / "finished")
    result = done.folder / "default"
    fetch(FetchDirectory(path=str(model), license="MIT"), tmp_path / "weights/tiny", tmp_path / "models/tiny")
    commands: list[tuple[list[str], list[str]]] = []

    def stage(line: str, settings: object = None, allowed: str = "") -> None:
        options = [] if settings is None else ["--settings", json.dumps(settings)]
        commands.append(([*shlex.split(line), *options], allowed.split()))

    stage("stage resolve --config config.yaml --output c.json")
    stage("weights --model models/tiny --weights weights/tiny")
    manifest = "--model models/tiny/manifest.json"
    stage(f"stage prepare {manifest} --output data --workers 2", resolved["prepare"]["rows"], "transformers")
    stage("stage pack --data data --output packing", run["pack"])
    stage("stage estimate --model models/tiny --packing packing --output e.json", run["estimate"])
    tried = "--model models/tiny --weights weights/tiny --data data"
    stage(f"stage render {tried} --estimate e.json --output z.json --reasons r.json", run["render"])
    planned = f"--estimate {result}/estimate.json --zero {result}/zero.json --reasons {result}/render.json"
    read = f"--model {done.folder}/model --data {done.folder}/data/reference --packing {result}/packing {planned}"
    lock = f"--lock {ROOT}/envs/requirements.lock --config {ROOT}/config/config.yaml"
    written = (
        "--usage usage.json --summary summary.json --timings timings.json --difference d.json "
        "--row rows/default.json --output page.html"
    )
    stage(
        f"stage report --run default {read} {lock} --base {done.folder}/base --results {result} {written}",
        {"strategy": "zero2"},
        "vl_convert",
    )
    stage("stage accept --difference d.json --output accepted.json", {"fail_if": None})
    stage("stage compare --rows rows --output compare", {"runs": {"default": {}}}, "vl_convert")
    stage("init")
    stage(f"import {ROOT}/config/deepspeed/reference-stage2.json --output imported.yaml")
    stage("memory --model models/tiny/config.json")
    stage("keys lora_rank")
    stage("--help")
    script = LIGHT.format(commands=commands)
    done_ = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done_.returncode == 0, done_.stderr
    assert json.loads((tmp_path / "z.json").read_text())["zero_optimization"]["stage"] == 2


def test_help_lists_every_command_with_its_first_sentence() -> None:
    text = zerolora("--help").stdout
    _, for_users, of_rules = re.split(r"\nCommands:|\nFor rules of Snakemake:", text)
    names = [re.findall(r"^  ([a-z-]+)  ", part, re.MULTILINE) for part in (for_users, of_rules)]
    assert sorted(names[0] + names[1]) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert {"init", "memory", "push"} <= set(names[0]) and set(names[1]) == {"stage", "weights", "merged-weights"}
    assert "..." not in text.partition("Commands:")[2]


def test_reference_command_writes_the_committed_data(tmp_path: Path) -> None:
    assert zerolora("reference", "--output", str(tmp_path / "rows.json")).returncode == 0
    assert (tmp_path / "rows.json").read_bytes() == (ROOT / "data/reference.json").read_bytes()
