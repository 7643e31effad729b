"""The layout: imports run downwards, no two modules import each other, docs/architecture.md lists every module."""

import ast
import re
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import diagrams
import module_table

from zerolora import workflow_files
from zerolora.config import fingerprint

# From the top down: a package imports from lower rows and from itself, not from others in its row.
# The checks of the config call the planner's checks, so they and the reader of the file are above it. publish, imports
# and search read or check configs. `zerolora memory` uses the planner's GPU tables and fetch's models.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"chatting", "testing", "bisect", "rebuild"},
    {"memory.command", "check", "publish", "imports", "search", "first_config"},
    {
        "config.file",
        "config.cross_checks",
        "config.run_checks",
        "config.continued_checks",
        "config.selection_checks",
        "config.task_checks",
        "config.resolve",
        "config.runs_file",
    },
    {"sample", "select"},
    {"probe", "judge", "evidence"},
    {"report"},
    {"export"},
    {"evaluate"},
    {"fetch", "train", "merge"},
    {"data", "planner"},
    {"memory"},
    {"methods"},
    {"optimizers"},
    {"config.run_objectives"},
    {"train.objectives"},
    {"model"},
    {"compat"},
    {"config"},
    {"strategies"},
    {"machine"},
]
# Exceptions: modules of another package that a package may import.
SHARED = {"evaluate": {"export.adapter_limits"}, "train": {"evaluate.tasks"}}
BASE = len(LAYERS)


def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports at any depth of its code, without enclosing packages."""
    result = {}
    for path in workflow_files.PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(workflow_files.PACKAGE).with_suffix("").parts)
        name = name.removesuffix("__init__").rstrip(".")
        imported = set(fingerprint.imports_of(ast.parse(path.read_text(encoding="utf-8")), name, path))
        result[name] = {each for each in imported if each and not f"{name}.".startswith(f"{each}.")}
    return result


def layer(module: str) -> int:
    """Return the layer of the innermost package of a module."""
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


def test_imports_run_downwards() -> None:
    up = []
    for module, imported in graph().items():
        room = module.split(".")[0]
        for each in imported:
            other = each.split(".")[0]
            if other == room or layer(each) == layer(module) == BASE:
                continue
            if any(inner.startswith(f"{each}.") for inner in imported):
                continue  # an enclosing package
            if any(f"{reader}.".startswith(f"{each}.") for reader in SHARED.get(room, set())):
                continue
            if layer(each) <= layer(module):
                up.append(f"{module} imports {each}")
    assert up == []


def test_the_drawing_has_every_room_and_no_arrow_upwards() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    boxes, arrows = diagrams._read(text.split("```mermaid\n")[1].split("```")[0])
    rooms = {each.split(".")[0] for layer_ in LAYERS for each in layer_} - {"__main__"}
    named = re.compile(r"(\w+)(?:/|\.py|$)", re.MULTILINE)  # as in "cli.py, commands/: zerolora stage NAME", or alone
    drawn = {name: rooms & {*named.findall("\n".join(box.members or [box.label]))} for name, box in boxes.items()}
    assert rooms == set().union(*drawn.values())
    depths = {name: [layer(room) for room in own] for name, own in drawn.items()}
    depths["checked"] = [layer("config.file")]
    known = [arrow for arrow in arrows if arrow[0] != arrow[1] and all(depths[end] for end in arrow)]
    assert len(known) >= 10
    assert [arrow for arrow in known if max(depths[arrow[0]]) >= min(depths[arrow[1]])] == []


def test_every_module_is_listed() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = {path for room in module_table.rooms(text) for path in module_table.modules_of(room)}
    modules = {path for path in module_table.PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert modules - listed == set()


NO_MODELS = {"AutoConfig", "AutoTokenizer", "GenerationConfig", "PeftModel"}
LOAD_MODELS = {
    "model/load_model.py",
    *("fetch/model_sources.py", "export/opened.py"),  # from GGUF
    "testing.py",  # the model is the test's own
}
READ_HEADERS = {
    "model/dequantized.py",
    *("model/base_check.py", "model/stored_quantization.py"),  # what is published
    "fetch/llama_conversion.py",
}


def test_weights_are_read_in_one_place() -> None:
    """A base's files may be quantized: elsewhere its codes would be taken for weights (model/dequantized.py)."""
    loading, reading = set(), set()
    for path in workflow_files.PACKAGE.rglob("*.py"):
        called = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="from_pretrained")):
                    if ast.unparse(owner) not in NO_MODELS:
                        loading.add(path.relative_to(workflow_files.PACKAGE).as_posix())
                case ast.Call(func=ast.Name(id=name)):
                    called.add(name)
        if {"weight_files", "read_header"} <= called:
            reading.add(path.relative_to(workflow_files.PACKAGE).as_posix())
    assert (loading, reading) == (LOAD_MODELS, READ_HEADERS)


TEXT_OF_AN_ERROR = {"msg", "args", "strerror", "problem", "reason"}
TESTS_OF_A_TEXT = {"startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch"}


def _is_text_of(node: ast.AST, error: str) -> bool:
    """Return whether an expression contains the text of the exception named `error`."""
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
def test_errors_are_distinguished_by_type_not_text(folder: str) -> None:
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


PRINT = {
    "log.py": "say, which escapes",
    "cli.py": "the text of --help",
    "commands/user_commands.py": "chat, whose own function escapes for a terminal alone",
    "config/dvc_file.py": "a sentence of its own",
    "evaluate/vllm_worker.py": "a version, for the process that started it",
    "machine/host_task.py": "JSON, for the process that started it",
}
"""Modules that print on stdout themselves, and what."""


def test_texts_of_others_are_printed_by_one_function() -> None:
    """log.say, which escapes control characters. On stderr there are errors and warnings, which are escaped already."""
    guilty = set()
    for path in workflow_files.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="print"), args=[_, *_], keywords=words):
                    prints = not any(word.arg == "file" for word in words)
                case ast.Attribute(value=ast.Name(id="typer" | "click"), attr="echo" | "secho"):
                    prints = True
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="sys"), attr="stdout"), attr="write"):
                    prints = True
                case _:
                    continue
            if prints:
                guilty.add(path.relative_to(workflow_files.PACKAGE).as_posix())
    assert guilty == PRINT.keys()


ELEMENTS = re.compile(r"</(a|b|body|code|div|h\d|html|i|p|pre|script|span|style|t(able|body|d|h|head|r))>")


def test_html_is_written_by_templates_that_escape() -> None:
    """pages.environment escapes whatever a template prints, but for `Markup` of report/html.py."""
    guilty = set()
    for path in workflow_files.PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if ELEMENTS.search(text):
                    pass
                case ast.Import(names=[ast.alias(name="html"), *_]) | ast.ImportFrom(module="markupsafe"):
                    pass
                case _:
                    continue
            guilty.add(path.relative_to(workflow_files.PACKAGE).as_posix())
    assert guilty == {"pages.py", "report/html.py"}
    templates = list(workflow_files.PACKAGE.rglob("*.html"))
    assert len(templates) >= 5
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\| *safe|autoescape|xmlattr|=\{\{", text), path


LOADERS = {
    "model/architecture.py": "tokenizer_of, which bounds it",
    "model/prompt_format.py": "vocabulary, which bounds it",
    "model/manifest.py": "loads one to see whether it needs code, and encodes nothing",
    "fetch/model_sources.py": "converts the vocabulary of a GGUF file",
    "fetch/sentencepiece_tokenizer.py": "converts a vocabulary, within foreign.tokenizer_errors",
}
"""Modules that load tokenizers themselves."""


def test_tokenizers_are_loaded_by_one_function() -> None:
    """architecture.tokenizer_of: what it returns is bounded at every call (model/bounded_tokenizer.py)."""
    guilty = set()
    for path in workflow_files.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(
                    value=ast.Name(id="AutoTokenizer" | "Tokenizer"), attr="from_pretrained" | "from_file"
                ):
                    guilty.add(path.relative_to(workflow_files.PACKAGE).as_posix())
                case ast.Call(func=ast.Name(id="PreTrainedTokenizerFast")):
                    guilty.add(path.relative_to(workflow_files.PACKAGE).as_posix())
    assert guilty == LOADERS.keys()


def test_class_names_are_unique() -> None:
    defined = [
        node.name
        for path in workflow_files.PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, count in Counter(defined).items() if count > 1] == []


def test_module_names_are_unique() -> None:
    names = Counter(path.stem for path in workflow_files.PACKAGE.rglob("*.py") if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by name: of two alike, a worker that has imported one cannot collect the other."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_one_function_compares_devices_with_gpus() -> None:
    """devices.on_gpu, so that a fake GPU takes their branches (tests/cuda/fake_gpu.py)."""
    guilty = []
    for path in workflow_files.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Compare(left=ast.Attribute(attr="type"), comparators=[ast.Constant(value="cuda")]):
                    guilty.append(f"{path.relative_to(ROOT)}:{node.lineno}")
                case ast.Call(func=ast.Attribute(attr="device"), args=[ast.Constant(value="cuda"), *_]):
                    guilty.append(f"{path.relative_to(ROOT)}:{node.lineno}")
                case ast.Attribute(attr="is_cuda"):
                    guilty.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not guilty
