"""The code fingerprint: changes that count, changes that do not, and the cost of a start."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from pydantic import BaseModel

from zerolora import workflow_files
from zerolora.config import fingerprint, settings
from zerolora.config.stages import ON_REQUEST, PLAIN, STAGES
from zerolora.data.formats import FORMS
from zerolora.evaluate.tasks import TASKS
from zerolora.export.targets import TARGETS
from zerolora.methods.registry import METHODS as METHODS_BY_NAME
from zerolora.train.engines import names as engine_names

Change = tuple[str, str, str]  # file, old text, new text


class Copy:
    """A copy of the package and its rules, fingerprinted in a subprocess."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src/zerolora", folder / "src/zerolora", ignore=ignored)
        for name in ("rules", "scripts"):
            shutil.copytree(ROOT / "workflow" / name, folder / "workflow" / name, ignore=ignored)

    def run(self, code: str) -> str:
        """Return what Python prints with the copy's package."""
        environment = {"PYTHONPATH": str(self.folder / "src"), "PATH": ""}
        options: dict[str, Any] = {"cwd": self.folder, "env": environment, "capture_output": True, "text": True}
        return str(subprocess.run([sys.executable, "-c", code], check=True, **options).stdout)

    def fingerprints(self) -> dict[str, str]:
        code = "import json; from zerolora.config.fingerprint import fingerprints; print(json.dumps(fingerprints()))"
        return dict(json.loads(self.run(code)))

    @cached_property
    def unchanged(self) -> dict[str, str]:
        """The fingerprints of the unchanged package."""
        return self.fingerprints()

    def changed_by(self, *changes: Change) -> set[str]:
        """Return the stages whose fingerprint changes if `old` becomes `new` in each file, then undo the changes."""
        before = self.unchanged
        texts: dict[str, str] = {}
        for name, old, new in changes:
            text = (self.folder / name).read_text(encoding="utf-8")
            texts.setdefault(name, text)
            assert old in text
            (self.folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")
        after = self.fingerprints()
        for name, text in texts.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        return {stage for stage in before if before[stage] != after[stage]}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def test_parsed_files_are_cached_by_content(copy: Copy) -> None:
    """As in another checkout, with other modification times."""
    of_training = "from zerolora.config.fingerprint import of_stage; print(of_stage('train'))"
    before = copy.run(of_training)
    for path in (copy.folder / "src").rglob("*.py"):
        os.utime(path, (0, 0))
    assert copy.run(f"import ast; ast.parse = None; {of_training}") == before


ANSWERING = {"evaluate", "evaluate_base", "task", "task_base"}
COMPUTING = {"reference", "teacher", "train"}
METHODS = {"resolve", "estimate", "render", "merge", *COMPUTING, *ANSWERING}
SUMMARY = '"""The learning rate of each step."""\n'


NEUTRAL: list[Change] = [
    ("src/zerolora/train/schedule.py", SUMMARY, '"""Another docstring."""\n# a remark\n'),
    ("src/zerolora/train/schedule.py", "\ndef check(", "\n\n# a remark\ndef  check("),
    ("workflow/rules/train.smk", "rule train:\n", "# a remark\nrule train:\n"),
    ("workflow/rules/train.smk", '    threads: job("training_cores")\n', "    threads: 3\n"),
    ("workflow/rules/report.smk", '"results/logs/report/{run}.log"', '"results/logs/report/{run}.txt"'),
    ("src/zerolora/progress.py", "import sys\n", "import sys\n\nNAME = 1\n"),
    ("workflow/scripts/on_gpus", "export", "echo no GPU >&2\nexport"),
    ("workflow/scripts/record_slurm_step", "mkdir -p", "mkdir  -p"),
]


def test_remarks_docstrings_and_formatting_change_no_fingerprint(copy: Copy) -> None:
    changed = copy.changed_by(*NEUTRAL)
    assert not changed, [change for change in NEUTRAL if copy.changed_by(change)]
    assert copy.changed_by(("src/zerolora/config/schema.py", '"""Decoupled weight decay."""', '"""A rate."""')) <= {
        "resolve"
    }


@pytest.mark.parametrize(
    ("name", "old", "new", "stages"),
    [
        ("src/zerolora/train/schedule.py", SUMMARY, SUMMARY + "NUMBER = 1\n", {"train"}),
        ("src/zerolora/train/schedule.py", "UserError(", 'UserError("Read this. " + ', {"train"}),
        ("src/zerolora/data/packing.py", "\nimport ", "\nNUMBER = 1\nimport ", {"pack"}),
        ("src/zerolora/report/shell.html", "<html", "<html data-other", {"report", "compare"}),
        ("workflow/rules/train.smk", "stage train {wildcards.run}", "stage train {wildcards.run} ", {"train"}),
        ("workflow/scripts/accounting.py", "import json\n", "import json\n\nNUMBER = 1\n", {"report"}),
        ("src/zerolora/config/cross_checks.py", "\nfrom ", "\nNUMBER = 1\nfrom ", {"resolve"}),
        ("src/zerolora/methods/dora.py", "\nfrom ", "\nNUMBER = 1\nfrom ", {*METHODS, "sample"}),
        ("src/zerolora/machine/cpu_matmul.py", "SIZE = 256", "SIZE = 512", {*COMPUTING, *ANSWERING, "sample"}),
        (
            *("src/zerolora/data/formats/leaves.py", "\nWORDS = 3\n", "\nWORDS = 4\n"),
            {"resolve", "prepare", "task_rows", "sample"},
        ),
        ("src/zerolora/planner/deepspeed_keys.py", "data_efficiency", "data_inefficiency", {"resolve", "render"}),
        ("src/zerolora/memory/estimate.py", " // settings.sequence_parallel", "", {"estimate", "render", "sample"}),
        ("src/zerolora/data/prompt_formats.py", "### Input", "### Inputs", {"prepare"}),
    ],
)
def test_code_change_affects_exactly_its_stages(copy: Copy, name: str, old: str, new: str, stages: set[str]) -> None:
    assert copy.changed_by((name, old, new)) == stages


def test_registries_are_recognized_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "registry.py"
    for text in (
        "import pkgutil\nfrom zerolora import methods\npkgutil.iter_modules(methods.__path__)",
        "from pkgutil import iter_modules\nimport zerolora.methods\niter_modules(zerolora.methods.__path__)",
        "import pkgutil\nimport zerolora.methods as each\n[*pkgutil.iter_modules(each.__path__)]",
    ):
        assert fingerprint.registered_packages(ast.parse(text), "other.registry", path) == ["methods"]
    own = ast.parse("import pkgutil\nfor file in pkgutil.iter_modules(__path__): pass")
    assert fingerprint.registered_packages(own, "optimizers", path) == ["optimizers"]
    with pytest.raises(AssertionError, match="write the __path__ of a package"):
        fingerprint.registered_packages(ast.parse("pkgutil.iter_modules(names)"), "other", path)


@cache
def _modules_of_stages() -> list[set[str]]:
    fingerprint.fingerprints()  # parses each file once
    return [set(fingerprint.modules_of(stage)) for stage in STAGES]


def _registries() -> list[tuple[str, str]]:
    """Return (module, package) for every module that imports modules by computed names."""
    result = []
    for path in sorted(workflow_files.PACKAGE.rglob("*.py")):
        if path == workflow_files.PACKAGE / "registries.py":  # imports registries, and entries of other packages
            continue
        name = ".".join(path.relative_to(workflow_files.PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for argument in re.findall(r"import_module\(([^\"].*)", path.read_text(encoding="utf-8")):
            match = re.match(r'f"\{(?:(\w+)\.)?__name__\}\.', argument)
            assert match, f"{path}: {argument}: write the name of a package, as the other registries do"
            result.append((name, match[1] or name))
    return result


def test_registries_outside_and_inside_of_their_packages() -> None:
    assert {("methods.registry", "methods"), ("data.formats", "data.formats")} <= set(_registries())


@pytest.mark.parametrize(("registry", "package"), _registries())
def test_stage_with_a_registry_has_all_its_modules(registry: str, package: str) -> None:
    names = {path.stem for path in workflow_files.PACKAGE.joinpath(*package.split(".")).glob("*.py")} - {"__init__"}
    stages = [actual for actual in _modules_of_stages() if registry in actual]
    assert names
    assert stages or fingerprint.left_out(registry), f"no stage imports {registry}"
    for actual in stages:
        assert {each for name in names if not fingerprint.left_out(each := f"{package}.{name}")} <= actual


def test_a_new_module_needs_no_list(copy: Copy) -> None:
    before = copy.fingerprints()
    module, user = copy.folder / "src/zerolora/train/extra.py", copy.folder / "src/zerolora/train/schedule.py"
    text = user.read_text(encoding="utf-8")
    module.write_text("NUMBER = 1\n", encoding="utf-8")
    assert copy.fingerprints() == before, "a module that nothing imports"
    user.write_text(text + "\nfrom zerolora.train.extra import NUMBER\n", encoding="utf-8")
    imported = copy.fingerprints()
    module.write_text("NUMBER = 2\n", encoding="utf-8")
    other = copy.fingerprints()
    user.write_text(text, encoding="utf-8")
    module.unlink()
    assert {stage for stage in before if before[stage] != imported[stage]} == {"train"}
    assert {stage for stage in before if imported[stage] != other[stage]} == {"train"}


def test_moving_a_module_changes_the_fingerprint(copy: Copy) -> None:
    before = copy.fingerprints()
    old, new = (copy.folder / "src/zerolora" / name for name in ("train/order.py", "order_of_rows.py"))
    users = {path: text for path in new.parent.rglob("*.py") if "zerolora.train.order" in (text := path.read_text())}
    for path, text in users.items():
        path.write_text(text.replace("zerolora.train.order", "zerolora.order_of_rows"), encoding="utf-8")
    old.rename(new)
    after = copy.fingerprints()
    new.rename(old)
    for path, text in users.items():
        path.write_text(text, encoding="utf-8")
    assert {stage for stage in before if before[stage] != after[stage]} == COMPUTING


def test_a_name_from_another_module_changes_the_fingerprint(copy: Copy) -> None:
    """Even if that module was imported already, so that no code is added."""
    line = "from zerolora.methods.method import Update"
    change = ("src/zerolora/merge/stream.py", line, line.replace("methods.method", "methods.peft_format"))
    assert "merge" in copy.changed_by(change)


def test_omitted_scripts_exist_and_are_run_by_a_rule() -> None:
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "workflow/rules").glob("*.smk"))
    for name, reason in fingerprint.SCRIPTS_LEFT_OUT.items():
        assert (ROOT / "workflow/scripts" / name).is_file() and reason
        assert f'"$ZEROLORA_SCRIPTS/{name}" ' in rules


def test_settings_have_no_computed_properties() -> None:
    """Fingerprints omit `config`, whose values are compared; computed properties would not be compared."""
    for name, each in inspect.getmembers(settings, inspect.isclass):
        if issubclass(each, BaseModel):
            own = [key for key, value in vars(each).items() if isinstance(value, property | cached_property)]
            assert not own, f"{name}: {own}: compute it in a module of the stages"


def test_omitted_modules_exist_and_have_a_reason() -> None:
    for name, reason in fingerprint.LEFT_OUT.items():
        assert fingerprint.file_of(name), name
        assert reason


COUNTED = """
import ast
from zerolora.config.fingerprint import fingerprints
parse, parsed = ast.parse, []
def counted(text, *rest, **options):
    global parsed
    parsed += [] if options else [text]  # strings of rules are parsed with options
    return parse(text, *rest, **options)
ast.parse = counted
fingerprints()
print(len(parsed))
"""


def test_start_parses_only_changed_files(copy: Copy) -> None:
    copy.fingerprints()
    scripts = len(list((copy.folder / "workflow/scripts").glob("*.py")))
    assert int(copy.run(COUNTED)) <= scripts
    (copy.folder / "src/zerolora/train/schedule.py").touch()
    assert 1 <= int(copy.run(COUNTED)) <= 1 + scripts


def test_every_stage_has_its_rule_and_modules() -> None:
    for stage in (*STAGES.values(), *ON_REQUEST.values()):
        assert stage.rules == PLAIN or f" {stage.name}:" in (ROOT / f"workflow/rules/{stage.rules}.smk").read_text(
            encoding="utf-8"
        )
        for module in stage.modules:
            assert fingerprint.file_of(module), module


def test_only_chosen_registry_entries_count() -> None:
    modules = fingerprint.modules_of("train", {"methods": {"qdora"}})
    assert {"methods.qdora", "methods.qlora", "methods.dora", "train.engines.fsdp"} <= {*modules}
    assert not {"methods.ia3", "methods.full"} & {*modules}


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("methods", METHODS_BY_NAME),
        ("data.formats", FORMS),
        ("evaluate.tasks", TASKS),
        ("export.targets", TARGETS),
        ("train.engines", engine_names()),
    ],
)
def test_registry_entry_is_in_the_file_of_its_name(package: str, names: list[str]) -> None:
    for name in names:
        assert fingerprint.file_of(f"{package}.{name.replace('-', '_')}"), name


def test_training_reads_strategies_only_from_zero_json() -> None:
    """So the fingerprint of training contains no strategy."""
    assert not [name for name in fingerprint.modules_of("train") if name.split(".")[0] == "strategies"]
