"""The code fingerprint of a stage: a hash of the code that can change its result under its settings.

It covers the syntax trees of all modules that the stage imports, directly or indirectly, their data files, and the
stage's rule, but only those registry entries that the settings choose (code.py). For an entry of another package it
covers that package and its version. Comments, docstrings and formatting do not count. Snakemake compares it as a rule
parameter, DVC as a value beside the stage's settings, training as part of a run's fingerprint.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolora.config.stages import ALL_STAGES, PLAIN, STAGES
from zerolora.files import stamp
from zerolora.registries import Outside, outside
from zerolora.workflow_files import PACKAGE, ROOT

RULES = ROOT / "workflow/rules"
CACHE = PACKAGE / "__pycache__" / "fingerprints.json"

LEFT_OUT: Mapping[str, str] = {
    "": "the package's own docstring",
    "model.base_check": "rejects a base that cannot be loaded; no value passes through it",
    "cli": "dispatches to a command and reports errors",
    "commands": "pass files and settings to the stages",
    "data.formats.mappings": "proposes settings, in messages and to `zerolora init`; no value passes through it",
    "config": "its values reach a stage as settings, which are compared by value; only resolve keeps it",
    "machine.devices": "rejects unusable GPUs and hides unused ones",
    "planner.machine_limits": "rejects what this machine cannot compute or compile",
    "errors": "messages",
    "evaluate.batches": "chooses which prompts share a batch; a loss depends on it by rounding alone",
    "files": "writes values unchanged",
    "model.foreign": "rejects invalid files; returns others unchanged",
    "probe.listed_trial": "rejects what cannot be trained or merged; no value passes through it",
    "probe.meta_trial": "rejects what cannot be trained or merged; no value passes through it",
    "imports": "no stage calls it",
    "json_file": "rejects invalid files; otherwise returns the result of json",
    "methods.adapter_check": "rejects an adapter that contradicts its config; no value passes through it",
    "progress": "displays progress",
    "log": "messages, and a status for display",
    "machine.parents": "ends a command together with its workflow engine",
    "machine.peak_memory": "reads the peak memory of a process",
    "train.launch.heartbeat": "kills hung ranks; no value passes through it",
    "train.telemetry.health": "warns of unhealthy runs",
    "train.telemetry.stopwatch": "reads the clock, and counts collectives",
    "train.telemetry.stragglers": "reports slow ranks",
    "train.telemetry.system_monitor": "reads the load of CPUs, memory and GPUs, and their energy",
    "train.telemetry.trackers": "passes telemetry to a tracker",
    "types": "names of types",
    "units": "bytes as text",
}
"""Modules and packages that cannot change a result, each with the reason. (The telemetry writer can: the report needs
the columns that it writes.)"""

SCRIPTS_LEFT_OUT: Mapping[str, str] = {
    "on_gpus": "chooses the GPUs of a job",
    "record_slurm_step": "records where a job runs",
}
"""Scripts of workflow/scripts that wrap a rule's command and cannot change its result, each with the reason."""

# Directives about where and when a rule runs, not about its result.
DIRECTIVES_LEFT_OUT = frozenset(
    {"benchmark", "conda", "container", "group", "localrule", "log", "message", "priority", "resources", "retries"}
    | {"threads"}
)
# A registry lists the modules of a package by file: they count for every importer of the registry.
REGISTRY_MARK = "iter_modules"
# It names the group of entry points by which other packages add entries (registries.py).
OPEN_MARK = "registered"

Chosen = Mapping[str, Iterable[str]]
"""Names of the entries that the settings choose, by the registry's package, or its module if it is a table in one, all
of whose own entries count. All entries of other registries count."""


def of_stage(stage: str, chosen: Chosen | None = None) -> str:
    """Return the hex fingerprint of a stage without its rule."""
    known = Fingerprints(rules=None)
    result = known.of(stage, chosen)
    known.save()
    return result


def fingerprints(stages: Iterable[str] | None = None) -> dict[str, str]:
    """Return the hex fingerprint of each stage, by default of all, independent of settings."""
    known = Fingerprints()
    result = {stage: known.of(stage) for stage in stages or STAGES}
    known.save()
    return result


class Fingerprints:
    """Computes fingerprints of stages under various settings. Unchanged modules are not parsed again."""

    def __init__(self, rules: Path | None = RULES) -> None:
        """`rules` is the directory of the rule files; None to leave rules out."""
        self._rules = rules
        self._modules = _Modules()
        self._known: dict[Any, str] = {}
        self._of_rules: dict[str, str] = {}

    def of(self, stage: str, chosen: Chosen | None = None) -> str:
        """Return the hex fingerprint of a stage."""
        entries = {package: frozenset(names) for package, names in (chosen or {}).items()}
        key = stage, frozenset(entries.items())
        if key not in self._known:
            names = modules_of(stage, entries, self._modules)
            modules = "".join(f"{name} {self._modules[name]['digest']}\n" for name in names)
            self._known[key] = hashlib.sha256(f"{modules}{self._rule_of(stage)}".encode()).hexdigest()
        return self._known[key]

    def save(self) -> None:
        """Cache the parsed modules for the next start."""
        self._modules.save()

    def _rule_of(self, stage: str) -> str:
        if self._rules is None or ALL_STAGES[stage].rules == PLAIN:
            return ""  # such a rule has no code, and both engines compare its files
        if stage not in self._of_rules:
            self._of_rules[stage] = _rule(self._rules / f"{ALL_STAGES[stage].rules}.smk", stage)
        return self._of_rules[stage]


def modules_of(stage: str, chosen: Chosen | None = None, modules: "_Modules | None" = None) -> list[str]:
    """Return the modules that count for a stage, sorted: its imports without LEFT_OUT, and the chosen registry
    entries."""
    modules = modules or _Modules()
    kept = ALL_STAGES[stage].kept
    waiting, seen = list(ALL_STAGES[stage].modules), set()
    while waiting:
        name = waiting.pop()
        if name in seen or left_out(name, kept):
            continue
        seen.add(name)
        waiting += modules[name]["imports"]
        others = {point.name: point for group in modules[name]["groups"] for point in outside(group)}
        packages = modules[name]["registered"]
        for package in packages or ([name] if others else []):
            names = (chosen or {}).get(package)
            waiting += [_name_of(point) for each, point in others.items() if names is None or each in names]
            if package in packages:
                waiting += _entries(package, None if names is None else {*names} - others.keys())
    return sorted(seen)


def _entries(package: str, names: Iterable[str] | None) -> list[str]:
    """Return the modules of a registry's entries; all in its package if `names` is None."""
    if names is None:
        return _modules_in(package)
    return [f"{package}.{name.replace('-', '_')}" for name in names]


def _name_of(point: Outside) -> str:
    """Return the name of another package with its version, which no module of this package has."""
    return f"{point.package}=={point.version}"


def left_out(module: str, kept: tuple[str, ...] = ()) -> bool:
    """Return whether LEFT_OUT has a module or a package around it that is not in `kept`."""
    parts = module.split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)] if module else [""]
    return any(head in LEFT_OUT and head not in kept for head in heads)


class _Modules:
    """The modules of the package, parsed only if a file changed: digest, imports, registered and groups of each.

    Another package is one module (`_name_of`).
    """

    def __init__(self) -> None:
        self.changed = False
        self._current: set[str] = set()
        self.entries: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self.entries = json.loads(CACHE.read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name in self._current:
            return dict(self.entries[name])
        package, other, _ = name.partition("==")
        path = None if other else file_of(name)
        assert path or other, f"no module zerolora.{name}"
        files = [path, *_data_files(path)] if path else _files_of(package)
        stamps = [[str(each), *(stamp(each) or ())] for each in files]
        entry = self.entries.get(name)
        if entry is None or entry["stamp"] != stamps or entry["format"] != FORMAT:
            content = _hash_of(b"", files)
            if entry is None or entry["format"] != FORMAT or entry["content"] != content:
                entry = _parsed(name, path, files[1:]) if path else _parsed_package(files)
            # A checkout or a copy has other timestamps but the same content.
            self.entries[name] = entry | {"stamp": stamps, "content": content, "format": FORMAT}
            self.changed = True
        self._current.add(name)
        return dict(self.entries[name])

    def save(self) -> None:
        """Write the cache, if its directory is writable."""
        if not self.changed:
            return
        beside = CACHE.with_name(f"{CACHE.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            CACHE.parent.mkdir(exist_ok=True)
            beside.write_text(json.dumps(self.entries), encoding="utf-8")
            beside.replace(CACHE)


FORMAT = 11
"""Version of a cache entry."""


def _hash_of(code: bytes, beside: list[Path]) -> str:
    """Return the hash of a module's code and of the data files beside it."""
    digest = hashlib.sha256(code)
    for each in beside:
        digest.update(f"{each.name}\n".encode() + each.read_bytes())
    return digest.hexdigest()


def _parsed(name: str, path: Path, beside: list[Path]) -> dict[str, Any]:
    """Return the cache entry of a module: the digest of its code and data files, its imports, and its registries."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        "digest": _hash_of(_text(tree).encode(), beside),
        "imports": imports_of(tree, name, path),
        "registered": registered_packages(tree, name, path),
        "groups": _groups(tree, path),
    }


def _parsed_package(files: list[Path]) -> dict[str, Any]:
    """Return the cache entry of another package: the digest of its files, and the modules of this one it imports."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files if path.suffix == ".py"]
    text = "".join(_text(tree) for tree in trees)
    return {
        "digest": _hash_of(text.encode(), [path for path in files if path.suffix != ".py"]),
        "imports": sorted({module for tree in trees for module in _modules_named(_imported(tree))}),
        "registered": [],
        "groups": [],
    }


def _files_of(package: str) -> list[Path]:
    """Return the files of another package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec, f"no package {package}"
    if spec.submodule_search_locations is None:
        return [Path(spec.origin or "")]
    files = (path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*"))
    return sorted(path for path in files if path.is_file() and path.suffix != ".pyc")


def file_of(module: str) -> Path | None:
    """Return the file of a module of the package, None if it does not exist. The package itself is `""`."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _data_files(module: Path) -> list[Path]:
    """Return the data files of a package if `module` is its `__init__.py`."""
    if module.name != "__init__.py":
        return []
    return sorted(
        path
        for path in module.parent.iterdir()
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "py.typed" and path.name[0] != "."
    )


def _modules_in(package: str) -> list[str]:
    prefix = f"{package}." if package else ""
    return sorted(
        f"{prefix}{each.stem if each.suffix else each.name}"
        for each in PACKAGE.joinpath(*package.split(".")).iterdir()
        if (each.suffix == ".py" and each.name != "__init__.py") or (each / "__init__.py").is_file()
    )


def registered_packages(tree: ast.Module, name: str, path: Path) -> list[str]:
    """Return the packages whose modules a module lists by file: its own, as in `pkgutil.iter_modules(__path__)`, or an
    imported one, as in `pkgutil.iter_modules(methods.__path__)`."""
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in _run_nodes(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    result = set()
    for node in _run_nodes(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != REGISTRY_MARK:
            continue
        where = ast.unparse(node.args[0]) if node.args else ""
        package = f"zerolora.{name}" if where == "__path__" else aliases.get(where.removesuffix(".__path__"), "")
        head, _, rest = package.partition(".")
        assert where.endswith("__path__") and head == "zerolora", f"{path}: {where}: write the __path__ of a package"
        result.add(rest)
    return sorted(result)


def _groups(tree: ast.Module, path: Path) -> list[str]:
    """Return the groups of entry points by which other packages add entries to a module's registry."""
    result = []
    for node in _run_nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == OPEN_MARK:
            assert node.args and isinstance(node.args[0], ast.Constant), f"{path}: write the group as a literal"
            result.append(str(node.args[0].value))
    return result


def imports_of(tree: ast.Module, name: str, path: Path) -> list[str]:
    """Return the modules of the package, and the packages around them, that a module imports anywhere at run time."""
    relative = [node for node in _run_nodes(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, f"{path}: relative import"
    return sorted(_modules_named(_imported(tree) | ({f"zerolora.{name}"} if name else set())) - {name})


def _imported(tree: ast.AST) -> set[str]:
    """Return what absolute imports name: modules, and names in them."""
    result = set()
    for node in _run_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            result |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return result


def _modules_named(imported: Iterable[str]) -> set[str]:
    """Return the modules of the package among imported names, and the packages around them."""
    result = set()
    for each in imported:
        head, _, rest = each.partition(".")
        if head == "zerolora":
            parts = rest.split(".") if rest else []
            chain = [".".join(parts[:count]) for count in range(len(parts) + 1)]
            result |= {module for module in chain if file_of(module)}
    return result


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree, except those under `if TYPE_CHECKING`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        waiting += node.orelse if isinstance(node, ast.If) and checking else ast.iter_child_nodes(node)


def _text(value: Any) -> str:
    """Return a syntax tree as text, without docstrings and other bare strings.

    Fields that are empty are left out, so the text does not depend on the version of Python: versions differ in the
    fields of a node.
    """
    if isinstance(value, ast.AST):
        fields = ((name, getattr(value, name, None)) for name in value._fields)
        known = [f"{name}={_text(inner)}" for name, inner in fields if inner is not None and inner != []]
        return f"{type(value).__name__}({', '.join(known)})"
    if isinstance(value, list):
        return f"[{', '.join(_text(each) for each in value if not _is_bare_string(each))}]"
    return repr(value)


def _is_bare_string(node: Any) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _rule(path: Path, stage: str) -> str:
    """Return the code of a stage's rule without DIRECTIVES_LEFT_OUT, and that of the scripts it calls."""
    code = _rule_lines(path.read_text(encoding="utf-8"), stage)
    assert code, f"{path}: has no rule {stage}"
    for script in sorted(set(re.findall(r"ZEROLORA_SCRIPTS/([\w.]+)", "\n".join(code))) - SCRIPTS_LEFT_OUT.keys()):
        file = path.parents[1] / "scripts" / script
        text = file.read_text(encoding="utf-8")
        code += [_text(ast.parse(text))] if file.suffix == ".py" else _lines(text)
    return "\n".join(code)


def _rule_lines(text: str, stage: str) -> list[str]:
    """Return the lines of a stage's rule, whose directives are indented by four spaces, as snakefmt writes them."""
    kept: list[str] = []
    inside = skipped = False
    for line in _lines(text):
        if not line.startswith(" "):
            inside = line == f"rule {stage}:"
        elif directive := re.match(r" {4}(\w+):", line):
            skipped = directive[1] in DIRECTIVES_LEFT_OUT
        if inside and not skipped:
            kept.append(line)
    return kept


def _lines(text: str) -> list[str]:
    """Return the lines that are neither empty nor a comment."""
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
