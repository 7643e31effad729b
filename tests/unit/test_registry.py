"""Registries take entries of other packages, and refuse those that do not fit in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import made_up
import pytest
from conftest import ROOT

NAMES = {
    "methods": "narrow",
    "objectives": "hard_rows",
    "strategies": "zero3_whole_adapters",
    "optimizers": "lion_8bit",
    "tasks": "words",
    "formats": "quiz",
    "trackers": "jsonl",
    "targets": "bundle",
    "importers": "notes",
}


def ran(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with the package in a folder visible."""
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{folder}", "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def value(folder: Path, code: str) -> object:
    """Return what Python code prints as JSON."""
    actual = ran(folder, code)
    assert actual.returncode == 0, actual.stderr
    return json.loads(actual.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.install(tmp_path_factory.mktemp("installed"))


def test_every_registry_takes_an_entry(installed: Path) -> None:
    code = "import json; from zerolora.registries import REGISTRIES, entries\n"
    code += "print(json.dumps({group: [*entries(group)][-1] for group in REGISTRIES}))"
    assert value(installed, code) == NAMES


@pytest.mark.parametrize("point", [each for group in made_up.ENTRY_POINTS.values() for each in group.values()])
def test_each_module_can_be_imported_first(installed: Path, point: str) -> None:
    """As by a worker process that unpickles a function of it."""
    actual = ran(installed, f"import {point.partition(':')[0]}")
    assert actual.returncode == 0, actual.stderr


def test_names_and_sections_are_known_without_torch(installed: Path) -> None:
    code = "import sys; from zerolora.config.schema import Config; Config.model_json_schema(); "
    code += "from zerolora.registries import REGISTRIES, entries; [len(entries(group)) for group in REGISTRIES]; "
    assert value(installed, code + "print('true' if not {'torch', 'transformers'} & {*sys.modules} else 'false')")
    schema = "import json; from zerolora.config.schema import Config; print(json.dumps(Config.model_json_schema()))"
    kinds = value(installed, schema)["$defs"]  # type: ignore[index]
    assert {"narrow", "hard_rows"} <= kinds["Train"]["properties"].keys()
    assert kinds["HardRows"]["properties"]["sharpness"]["description"].startswith("Factor")
    assert "bundle" in kinds["Export"]["properties"]
    assert "narrow" in kinds["Train"]["properties"]["method"]["enum"]


FAULTY = [
    ("tasks", "sum", "made_up.words:TASK", "zerolora has an entry of that name"),
    ("tasks", "words", "made_up.missing:TASK", "cannot be imported"),
    ("tasks", "words", "made_up.quiz:FORM", "not an instance of zerolora.evaluate.tasks.task.Task"),
    ("methods", "words", "made_up.words:TASK", "not a subclass of zerolora.methods.method.Method"),
    ("tasks", "other", "made_up.words:TASK", "has the name words"),
    ("task", "words", "made_up.words:TASK", "there is no such group"),
    ("method_sections", "lora", "made_up.sections:Narrow", "there is a section of that name"),
    ("method_sections", "narrow", "made_up.words:TASK", "not a subclass of zerolora.config.section.Section"),
    ("methods", "narrow", "made_up.narrow:NarrowMethod", "has no entry point narrow"),
    ("targets", "bundle", "made_up.bundle:TARGET", "has no entry point bundle"),
]


@pytest.mark.parametrize(("group", "name", "target", "reason"), FAULTY)
def test_an_entry_that_does_not_fit_is_one_line(
    tmp_path: Path, group: str, name: str, target: str, reason: str
) -> None:
    folder = made_up.install(tmp_path, {f"zerolora.{group}": {name: target}})
    command = ["zerolora", "schema", "--output", str(tmp_path / "schema.json")]
    actual = ran(folder, f"import sys; sys.argv = {command}; from zerolora.cli import main; main()")
    (line,) = actual.stderr.splitlines()
    assert actual.returncode == 2
    assert re.search(rf"entry point {name} of zerolora.{group} in made-up 1.0: .*{reason}", line)


def test_one_name_in_two_packages_is_one_line(tmp_path: Path) -> None:
    points = {"zerolora.tasks": {"words": "made_up.words:TASK"}}
    folders = [made_up.install(tmp_path / name, points, name) for name in ("made-up", "other")]
    code = "from zerolora.evaluate.tasks import TASKS; [*TASKS]"
    actual = ran(Path(":".join(map(str, folders))), code)
    assert "in other 1.0: made-up has an entry of that name" in actual.stderr.splitlines()[-1]


CHOSEN = {"methods": ["lora"], "optimizers": ["adamw"], "train.objectives": ["sft"], "evaluate.tasks": []}


@pytest.mark.parametrize(
    ("change", "chosen", "same"),
    [
        ("code", {}, True),
        ("code", {"methods": ["narrow"]}, False),
        ("code", {"optimizers": ["lion_8bit"]}, False),
        ("remark", {"methods": ["narrow"]}, True),
        ("version", {"methods": ["narrow"]}, False),
        ("version", {}, True),
    ],
)
def test_the_fingerprint_covers_packages_of_chosen_entries(
    tmp_path: Path, change: str, chosen: dict[str, list[str]], same: bool
) -> None:
    folder = made_up.install(tmp_path)
    code = f"from zerolora.config.fingerprint import of_stage; print(of_stage('train', {CHOSEN | chosen}))"
    before = ran(folder, code).stdout
    module, metadata = folder / "made_up/narrow.py", folder / "made_up-1.0.dist-info/METADATA"
    if change == "version":
        metadata.write_text(metadata.read_text().replace("1.0", "1.1"))
    else:
        module.write_text(module.read_text() + {"code": "NUMBER = 1\n", "remark": "# A remark.\n"}[change])
    assert len(before) == 65
    assert (ran(folder, code).stdout == before) == same


def test_the_page_shows_the_package() -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    for path in made_up.SOURCE.glob("made_up/[!_]*.py"):
        assert f"`made_up/{path.name}`:\n\n```python\n{path.read_text(encoding='utf-8')}```\n" in page, path.name
    project = (made_up.SOURCE / "pyproject.toml").read_text(encoding="utf-8")
    assert f"```toml\n{project[project.index('[project.entry-points') :]}```" in page
