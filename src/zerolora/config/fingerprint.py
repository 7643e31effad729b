"""The code fingerprint of a stage: a hash of the code that can change its result under its settings.

It covers the syntax trees of all modules that the stage imports, directly or indirectly, their data files, and the
stage's rule, but only those registry entries that the settings choose (code.py). Comments, docstrings, formatting and
messages do not count. Snakemake compares it as a rule parameter, DVC as a value beside the stage's settings, training
as part of a run's fingerprint.
"""

import ast
import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolora.config.stages import ALL_STAGES, PLAIN, STAGES
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
# Or it is a table in a module: a call whose arguments are the entries, each with its name (entries.py).
TABLE_MARK = "entries_by_name"


Chosen = Mapping[str, Iterable[str]]
"""Names of the entries that the settings choose, by the registry's package or module. All entries of other registries
count."""


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
            modules = modules_of(stage, entries, self._modules)
            lines = sorted({line for module in modules for line in self._lines(module, set(modules), entries)})
            text = "".join(f"{line}\n" for line in lines) + self._rule_of(stage)
            self._known[key] = hashlib.sha256(text.encode()).hexdigest()
        return self._known[key]

    def save(self) -> None:
        """Cache the parsed modules for the next start."""
        self._modules.save()

    def _lines(self, module: str, counted: set[str], chosen: Chosen) -> Iterator[str]:
        """Yield a line for a module and for each chosen entry of its table: the digest of its code, and of each import
        the name and the digest of the imported module. Module names do not occur, so that moving a module changes no
        fingerprint."""
        for part in (self._modules[module], *_rows(self._modules[module], chosen.get(module))):
            imports = [
                [self._modules[source]["digest"] if source in counted else "", *names]
                for source, *names in part["names"]
            ]
            yield f"{part['digest']} {json.dumps(sorted(imports))}"
        if chosen.get(module) is None and (rows := self._modules[module]["rows"]):
            yield " ".join(rows)  # readers of the whole table may depend on its order

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
        for row in _rows(modules[name], (chosen or {}).get(name)):
            waiting += row["imports"]
        for package in modules[name]["registered"]:
            waiting += _entries(package, (chosen or {}).get(package))
    return sorted(seen)


def _rows(module: dict[str, Any], names: Iterable[str] | None) -> list[dict[str, Any]]:
    """Return the entries of a module's table with these names; all if `names` is None."""
    rows: dict[str, dict[str, Any]] = module["rows"]
    return [row for name, row in rows.items() if names is None or name in names]


def _entries(package: str, names: Iterable[str] | None) -> list[str]:
    """Return the modules of a registry's entries; all in its package if `names` is None."""
    if names is None:
        return _modules_in(package)
    return [f"{package}.{name.replace('-', '_')}" for name in names]


def left_out(module: str, kept: tuple[str, ...] = ()) -> bool:
    """Return whether LEFT_OUT has a module or a package around it that is not in `kept`."""
    parts = module.split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)] if module else [""]
    return any(head in LEFT_OUT and head not in kept for head in heads)


class _Modules:
    """The modules of the package, parsed only if the file changed: `{"digest", "imports", "names", "registered",
    "rows"}` of each."""

    def __init__(self) -> None:
        self.changed = False
        self._current: set[str] = set()
        self.entries: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self.entries = json.loads(CACHE.read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name in self._current:
            return dict(self.entries[name])
        path = file_of(name)
        assert path, f"no module zerolora.{name}"
        beside = _data_files(path)
        stamp = [[str(each), (stat := each.stat()).st_size, stat.st_mtime_ns] for each in (path, *beside)]
        entry = self.entries.get(name)
        if entry is None or entry["stamp"] != stamp or entry["format"] != FORMAT:
            content = _hash_of(path.read_bytes(), beside)
            if entry is None or entry["format"] != FORMAT or entry["content"] != content:
                entry = _parsed(name, path, beside)
            # A checkout or a copy has other timestamps but the same content.
            self.entries[name] = entry | {"stamp": stamp, "content": content, "format": FORMAT}
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


FORMAT = 9
"""Version of a cache entry."""


def _hash_of(code: bytes, beside: list[Path]) -> str:
    """Return the hash of a module's code and of the data files beside it."""
    digest = hashlib.sha256(code)
    for each in beside:
        digest.update(f"{each.name}\n".encode() + each.read_bytes())
    return digest.hexdigest()


def _parsed(name: str, path: Path, beside: list[Path]) -> dict[str, Any]:
    """Return the cache entry of a module: the digest of its code and data files without its imports of the package, the
    imported modules and names, its registries, and the same for each entry of its table."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports, registered = imports_of(tree, name, path), registered_packages(tree, name, path)
    names, calls = _taken_out(tree), _taken_rows(tree)
    outside = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    rows, own = {}, set[str]()
    for entry, call in calls.items():
        inside = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        used = [each for each in names if each[2] in inside]
        digest = _hash_of(_text(call).encode(), [])
        rows[entry] = {"digest": digest, "imports": [each[0] for each in used], "names": used}
        own |= inside - outside
    # Imports that only entries use count with them.
    kept = [each for each in names if each[2] not in own]
    unused = {each[0] for each in names} - {each[0] for each in kept}
    return {
        "digest": _hash_of(_dump(tree).encode(), beside),
        "imports": [each for each in imports if each not in unused],
        "names": kept,
        "registered": registered,
        "rows": rows,
    }


def _taken_rows(tree: ast.Module) -> dict[str, ast.Call]:
    """Remove the entries of a module's table from the tree and return them by name, without `about`, which is for the
    docs only."""
    rows: dict[str, ast.Call] = {}
    for table in ast.walk(tree):
        if not isinstance(table, ast.Call) or _called(table.func) != TABLE_MARK:
            continue
        for row in table.args:
            assert isinstance(row, ast.Call), f"an entry of a table is a call: {ast.unparse(row)}"
            known = {keyword.arg: keyword for keyword in row.keywords}
            assert "name" in known, f"an entry of a table has a name: {ast.unparse(row)}"
            row.keywords = [keyword for keyword in row.keywords if keyword.arg != "about"]
            rows[ast.literal_eval(known["name"].value)] = row
        table.args = []
    return rows


def _taken_out(tree: ast.Module) -> list[list[str]]:
    """Remove the imports of the package from the tree, since their order depends on module names, and return them as
    [module, name, name in the code]. For an imported module the name is empty."""
    result = set()
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if not isinstance(block, list):
                continue
            for node in [each for each in block if isinstance(each, ast.ImportFrom)]:
                head, _, module = (node.module or "").partition(".")
                if head != "zerolora":
                    continue
                for alias in node.names:
                    submodule = f"{module}.{alias.name}".lstrip(".")
                    known = alias.asname or alias.name
                    result.add((submodule, "", known) if file_of(submodule) else (module, alias.name, known))
                block.remove(node)
    return [list(each) for each in sorted(result)]


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
        if not isinstance(node, ast.Call) or _called(node.func).rpartition(".")[2] != REGISTRY_MARK:
            continue
        where = ast.unparse(node.args[0]) if node.args else ""
        package = f"zerolora.{name}" if where == "__path__" else aliases.get(where.removesuffix(".__path__"), "")
        head, _, rest = package.partition(".")
        assert where.endswith("__path__") and head == "zerolora", f"{path}: {where}: write the __path__ of a package"
        result.add(rest)
    return sorted(result)


def imports_of(tree: ast.Module, name: str, path: Path) -> list[str]:
    """Return the modules of the package, and the packages around them, that a module imports anywhere at run time."""
    values = set()
    for node in _run_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            values |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            values |= {alias.name for alias in node.names}
    result = set()
    for each in values | ({f"zerolora.{name}"} if name else set()):
        head, _, rest = each.partition(".")
        if head == "zerolora":
            parts = rest.split(".") if rest else []
            chain = [".".join(parts[:count]) for count in range(len(parts) + 1)]
            result |= {module for module in chain if file_of(module)}
    result.discard(name)
    return sorted(result)


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree, except those under `if TYPE_CHECKING`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        waiting += node.orelse if isinstance(node, ast.If) and checking else ast.iter_child_nodes(node)


def _is_bare_string(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _dump(tree: ast.Module) -> str:
    """Return a syntax tree as text, without docstrings, other bare strings, and the texts of errors, assertions, log
    lines and other messages. Modifies the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if _writes_message(node.func):
                _blank_texts(node)
        elif not isinstance(node, ast.expr):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list):
                    setattr(node, field, [each for each in block if not _is_bare_string(each)])
            if isinstance(node, ast.Assert):
                node.msg = None
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                _blank_texts(node.exc)
    return _text(tree)


LOG_METHODS = frozenset({"debug", "info", "warning", "error", "critical", "exception"})
MESSAGES = frozenset({"BadRow", "CorruptCheckpoint", "Fault"})
"""Classes and functions whose texts are only displayed: nothing computes with them, and of all results only
dropped.jsonl contains some. (Classes whose names end in Error need not be listed.)"""


def _writes_message(function: ast.expr) -> bool:
    """Return whether a call of this function creates an error, logs a line, or marks a text as a message."""
    name = _called(function)
    logs = name.startswith(("LOGGER.", "log.LOGGER.")) and name.rpartition(".")[2] in LOG_METHODS
    last = name.rpartition(".")[2]
    return logs or name in ("warnings.warn", "log.result", "result") or last.endswith("Error") or last in MESSAGES


def _called(function: ast.expr) -> str:
    """Return the dotted name of the called function; for an attribute of another expression, `.attribute`."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    names.append(function.id if isinstance(function, ast.Name) else "")
    return ".".join(reversed(names))


def _blank_texts(call: ast.Call) -> None:
    """Replace the arguments of a call that are literal texts by empty strings."""
    empty = ast.Constant("")
    call.args = [empty if _is_written_text(each) else each for each in call.args]
    for keyword in call.keywords:
        keyword.value = empty if _is_written_text(keyword.value) else keyword.value


def _is_written_text(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_written_text(left) or _is_written_text(right)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_written_text(body) and _is_written_text(orelse)
        case ast.Call(func=ast.Attribute(value=text, attr="format" | "join")):
            return _is_written_text(text)
        case _:
            return False


def _text(value: Any) -> str:
    """Return a node as text that does not depend on the version of Python: empty fields are left out, since versions
    differ in the fields of a node."""
    if isinstance(value, ast.AST):
        known = []
        for name in value._fields:
            inner = getattr(value, name, None)
            if inner is not None and inner != []:
                known.append(f"{name}={_text(inner)}")
        return f"{type(value).__name__}({', '.join(known)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _rule(path: Path, stage: str) -> str:
    """Return the tokens of a stage's rule without DIRECTIVES_LEFT_OUT, and the code of the scripts it calls."""
    tokens = _rule_tokens(path.read_text(encoding="utf-8"), stage)
    assert tokens, f"{path}: has no rule {stage}"
    for script in sorted(set(re.findall(r"ZEROLORA_SCRIPTS/([\w.]+)", " ".join(tokens))) - SCRIPTS_LEFT_OUT.keys()):
        file = path.parents[1] / "scripts" / script
        text = file.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        tokens.append(_dump(ast.parse(text)) if file.suffix == ".py" else "\n".join(lines))
    return "\n".join(tokens)


def _rule_tokens(text: str, stage: str) -> list[str]:
    """Return the tokens of a stage's rule without comments, line breaks and commas; adjacent strings are joined."""
    kept: list[str] = []
    strings = False
    depth, inside, skipped = 0, False, False
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    ]
    for number, token in enumerate(tokens):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            depth += 1 if token.type == tokenize.INDENT else -1
            continue
        following = tokens[number + 1].string if number + 1 < len(tokens) else ""
        if depth == 0:
            if token.string == "rule" and token.start[1] == 0:
                inside = following == stage
            continue
        if not inside:
            continue
        if depth == 1 and token.type == tokenize.NAME and following == ":":
            skipped = token.string in DIRECTIVES_LEFT_OUT
        if skipped or token.string == ",":
            continue
        if token.type == tokenize.STRING:
            value = ast.literal_eval(token.string)
            if strings:
                kept[-1] += value
            else:
                kept.append(value)
            strings = True
        else:
            kept.append(token.string)
            strings = False
    return kept
