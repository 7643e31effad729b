"""The layout: imports run down, no two modules import each other, docs/modules.md lists every module."""

import ast
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import module_table

from zerolora.config import fingerprint

# From the top down: a room imports from rooms further down, and from itself. Rooms of one row do not know each other.
# The rules of the config ask the planner what it would refuse, so they are above it, and so is what reads the file.
# `zerolora push` reads the config that a run was made of, `zerolora import` checks the config that it
# made, `zerolora search` the trials that it chose.
# `zerolora memory` takes GPUs by name and DeepSpeed JSONs, which the planner reads, and models that fetch reads.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"memory.command", "publish", "imports", "search"},
    {"config.file", "config.rules", "config.resolve"},
    {"probe", "judge"},
    {"report"},
    {"export"},
    {"evaluate"},
    {"fetch", "train", "merge"},
    {"data", "planner"},
    {"memory"},
    {"methods"},
    {"optimizers"},
    {"train.objectives"},
    {"model"},
    {"compat"},
    {"config"},
    {"strategies"},
    {"machine"},
]
# Modules of another room that a room may import all the same.
SHARED = {"evaluate": {"export.adapter_limits"}}
BASE = len(LAYERS)


def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, at any depth of its code, the packages around both left out."""
    result = {}
    for path in fingerprint.PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(fingerprint.PACKAGE).with_suffix("").parts)
        name = name.removesuffix("__init__").rstrip(".")
        imported = set(fingerprint.imports_of(ast.parse(path.read_text(encoding="utf-8")), name, path))
        result[name] = {each for each in imported if each and not f"{name}.".startswith(f"{each}.")}
    return result


def layer(module: str) -> int:
    """Return the layer of the innermost room that a module is in."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for number, rooms in enumerate(LAYERS):
            if ".".join(parts[:length]) in rooms:
                return number
    return BASE


def test_no_two_modules_import_each_other() -> None:
    try:
        list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' → '.join(error.args[1])}", pytrace=False)


def test_imports_run_down() -> None:
    up = []
    for module, imported in graph().items():
        room = module.split(".")[0]
        for each in imported:
            other = each.split(".")[0]
            if other == room or layer(each) == layer(module) == BASE:
                continue
            if any(inner.startswith(f"{each}.") for inner in imported):
                continue  # a package around what is imported
            if any(f"{reader}.".startswith(f"{each}.") for reader in SHARED.get(room, set())):
                continue
            if layer(each) <= layer(module):
                up.append(f"{module} imports {each}")
    assert up == []


def test_every_room_is_in_the_drawing() -> None:
    text = module_table.DOCUMENT.read_text(encoding="utf-8")
    listed = {path for room in module_table.rooms(text) for path in module_table.modules_of(room)}
    modules = {path for path in module_table.PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert modules - listed == set()
    assert module_table.written(text) == text, "run `make architecture`"


TEXT_OF_AN_ERROR = {"msg", "args", "strerror", "problem", "reason"}
TESTS_OF_A_TEXT = {"startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch"}


def _is_text_of(node: ast.AST, error: str) -> bool:
    """Tell whether an expression holds the text of the error that is called `error`."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in TEXT_OF_AN_ERROR:
                if name == error:
                    return True
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                if name == error:
                    return True
    return False


@pytest.mark.parametrize("folder", ["src", "workflow"])
def test_errors_are_told_apart_by_type_and_never_by_text(folder: str) -> None:
    """Texts change with the version of a library."""
    guilty = []
    for path in (ROOT / folder).rglob("*.py"):
        for handler in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
                continue
            for node in ast.walk(handler):
                match node:
                    case ast.Compare():
                        tests = True
                    case ast.Call(func=ast.Attribute(attr=method)):
                        tests = method in TESTS_OF_A_TEXT
                    case _:
                        continue
                if tests and _is_text_of(node, handler.name):
                    guilty.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not guilty


def test_no_two_classes_have_one_name() -> None:
    defined = [
        node.name
        for path in fingerprint.PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, count in Counter(defined).items() if count > 1] == []


def test_no_two_modules_have_one_name() -> None:
    """Each is named after its own thing, so that a name says which one is meant."""
    names = Counter(path.stem for path in fingerprint.PACKAGE.rglob("*.py") if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
