"""dvc.yaml lists, for each stage, the modules that it really runs."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

SOURCE = ROOT / "src"
# They carry settings, files and messages, and cannot change what a stage computes; config.py's values reach a stage
# through results/config.json.
PLUMBING = {
    f"src/zerolora/{name}.py"
    for name in ("__init__", "cli", "config", "config_messages", "data/progress", "errors", "files", "units", "words")
}
ENTRY = {
    "resolve": ["resolve", "config_file"],
    "fetch_package": ["fetch"],
    "fetch_hub": ["fetch"],
    "fetch_directory": ["fetch"],
    "fetch_data": ["fetch_data"],
    "prepare": ["data.prepare"],
    "pack": ["data.pack"],
    "estimate": ["memory.estimate"],
    "render": ["zero.render"],
    "train": ["train.launcher", "train.__main__"],
    "merge": ["merge.merge"],
    "evaluate_base": ["evaluate.evaluate"],
    "evaluate": ["evaluate.evaluate"],
    "report": ["report.report"],
}


def stages() -> dict[str, Any]:
    entries = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return {name: entry.get("do", entry) for name, entry in entries.items()}


def imported(path: Path) -> set[Path]:
    """Return the modules of the package that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zerolora"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("zerolora")]
        for name in names:
            candidate = (SOURCE / name.replace(".", "/")).with_suffix(".py")
            if candidate.is_file():
                found.add(candidate)
    return found


def closure(names: list[str]) -> set[str]:
    waiting = [SOURCE / "zerolora" / f"{name.replace('.', '/')}.py" for name in names]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += imported(path)
    return {path.relative_to(ROOT).as_posix() for path in seen} - PLUMBING


@pytest.mark.parametrize("stage", list(ENTRY))
def test_a_stage_depends_on_the_modules_it_imports(stage: str) -> None:
    listed = {path for path in stages()[stage]["deps"] if path.startswith("src/") and path.endswith(".py")}
    expected = closure(ENTRY[stage]) | ({"src/zerolora/config/schema.py"} if stage == "resolve" else set())
    assert listed == expected


@pytest.mark.parametrize("stage", list(ENTRY))
def test_a_stage_depends_on_its_rule_file(stage: str) -> None:
    rule = stages()[stage]["cmd"].split()[1]
    file = "evaluate" if rule == "evaluate_base" else rule
    assert f"workflow/rules/{file}.smk" in stages()[stage]["deps"]


def test_every_stage_is_known_here() -> None:
    assert set(stages()) == set(ENTRY)


@pytest.mark.parametrize(
    ("module", "lower"),
    [
        ("data", set()),
        ("train", {"data", "model"}),
        ("merge", {"model"}),
        ("evaluate", {"data"}),
        ("zero", {"memory"}),
        ("memory", set()),
    ],
)
def test_stages_meet_in_files_not_in_imports(module: str, lower: set[str]) -> None:
    parts = {"train", "merge", "evaluate", "report", "zero", "memory", "data", "model"}
    for path in (SOURCE / "zerolora" / module).glob("*.py"):
        used = {found.relative_to(SOURCE / "zerolora").parts[0] for found in imported(path)} & parts
        assert used <= lower | {module}, path
