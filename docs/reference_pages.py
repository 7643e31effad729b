"""The site's reference, as Markdown made from the code: settings, commands, registries; and the list of results.

docs/site_hooks.py calls it whenever the site is built, so no generated page is in the repository.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from module_table import ROOT, line_of

from zerolora.cli import app
from zerolora.config.schema import Config
from zerolora.units import GIB

REGISTRIES = {
    "Strategies": ("strategies", "strategies", "STRATEGIES", "`render.strategy`, besides `auto` and a DeepSpeed JSON"),
    "Methods": ("methods", "methods.registry", "TRAINABLE", "`train.method`"),
    "Optimizers": ("optimizers", "optimizers", "OPTIMIZERS", "`train.optimizer`"),
    "Objectives": ("train/objectives", "train.objectives", "OBJECTIVES", "`train.objective`"),
    "Forms of rows": ("data/formats", "data.formats", "FORMS", "`prepare.<name>.sources`, `format`"),
    "Prompt formats": (
        "data",
        "data.prompt_formats",
        "PROMPT_FORMATS",
        "`prepare.<name>.template`",
    ),
    "Evaluation tasks": ("evaluate/tasks", "evaluate.tasks", "TASKS", "`prepare.<name>.check` and `tasks`"),
    "Export targets": ("export/targets", "export.targets", "TARGETS", "`export.targets`"),
    "Trackers": ("train/telemetry", "train.telemetry.trackers", "TRACKERS", "`train.tracker`"),
}
"""Heading: folder, module and dictionary of a registry, and the settings that name its entries."""

INTERFACES = {
    "A strategy": "strategies.strategy.Strategy",
    "A method": "methods.method.TrainableMethod",
    "An optimizer": "optimizers.optimizer.Optimizer",
    "An objective": "train.objectives.objective.Objective",
    "A form of rows": "data.formats.form.Form",
    "A prompt format": "data.prompt_formats.PromptFormat",
    "An evaluation task": "evaluate.tasks.task.Task",
    "An export target": "export.targets.target.ExportTarget",
    "A tracker": "train.telemetry.trackers.Tracker",
    "A stage": "config.stages.Stage",
}
"""Heading, and the class that an extension makes an instance or a subclass of."""


def settings() -> str:
    """Return the page of all settings: each class of the config, from the JSON Schema that editors read."""
    schema = Config.model_json_schema()
    lines = [
        "# Every setting",
        "",
        "Made from the classes in `src/zerolora/config/schema.py` and the docstrings of their fields. "
        "[The config file](../config.md) has the same keys in the order of the file, with remarks.",
    ]
    for name, section in {"config.yaml": schema, **schema["$defs"]}.items():
        lines += ["", f"## {name}", "", _flat(section.get("description", "")), ""]
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        required = section.get("required", [])
        for key, value in section["properties"].items():
            default = "required" if key in required else _default(value.get("default"))
            cells = [f"`{key}`", _kind(value), default, _flat(value.get("description", ""))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _kind(value: dict[str, Any]) -> str:
    """Return the type of a value, with links to the classes."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "enum" in value or "const" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(each) for each in value["anyOf"]))
    if value.get("type") == "array":
        return f"list of {_kind(value.get('items', {}))}"
    if value.get("type") == "object":
        within = value.get("additionalProperties")
        return f"names, each with {_kind(within)}" if isinstance(within, dict) else "keys and values"
    return {"null": "none"}.get(str(value.get("type")), str(value.get("type", "any value")))


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return "its defaults" if value else "none"
    return "none" if value is None or value == [] else f"`{json.dumps(value)}`"


def commands() -> str:
    """Return the page of all commands with their options, from the help that typer shows."""
    lines = [
        "# Commands",
        "",
        "Made from the help of `zerolora` (`zerolora COMMAND --help`). The pipeline calls one for each stage; few are "
        "needed by hand: `memory`, `probe`, `show`, `merge`, `export`, `push`.",
    ]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        lines += ["", f"## zerolora {name}", "", _flat(command.help), ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for each in command.params:
            spelled = ", ".join(f"`{option}`" for option in [*each.opts, *each.secondary_opts])
            default = "required" if each.required else _shown(each.default)
            lines.append(f"| {spelled} | {default} | {_flat(getattr(each, 'help', None) or '')} |")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if default in (None, (), []):
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def registries() -> str:
    """Return the page of all names that settings accept, from the files that define them."""
    lines = [
        "# Names in the config",
        "",
        "Made from the registries: the text of an entry is from its table, or the first sentence of its file. "
        "How to add one: [extending](../extending.md).",
    ]
    for heading, (folder, _, _, where) in REGISTRIES.items():
        lines += ["", f"## {heading}", "", f"For {where}.", "", "| name | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in entries(heading, folder)]
    return "\n".join(lines) + "\n"


def entries(heading: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield each name of a registry with the text of its entry, or the first sentence of its file."""
    _, module, dictionary, _ = REGISTRIES[heading]
    for name, entry in getattr(importlib.import_module(f"zerolora.{module}"), dictionary).items():
        if text := getattr(entry, "about", ""):
            yield name, _flat(text)
            continue
        file = ROOT / "src/zerolora" / folder / f"{name.replace('-', '_').replace('.', '_')}.py"
        yield name, _flat(line_of(file).split(": ", 1)[1])


def interfaces() -> str:
    """Return the page of the interfaces of extensions; mkdocstrings adds the classes from their docstrings."""
    lines = [
        "# Interfaces",
        "",
        "The interfaces of new entries in a registry, from the docstrings of their base classes. "
        "[Extending](../extending.md) shows each with an example.",
    ]
    for heading, name in INTERFACES.items():
        lines += ["", f"## {heading}", "", f"::: zerolora.{name}"]
    return "\n".join(lines) + "\n"


def measurements() -> str:
    """Return the page of all results: file, date and hardware of each."""
    lines = [
        "# Results",
        "",
        "Every figure of these pages is in one of these files, which the scripts of [benchmarks](benchmarks.md) wrote; "
        "`tests/unit/test_docs.py` compares the pages with them. Pages without figures state what was not measured.",
        "",
        "| result | date | hardware | versions |",
        "|---|---|---|---|",
    ]
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        facts = machine_of(path)
        if facts:
            hardware = [f"{facts['cores']} cores ({facts['processor']})", f"{facts['memory_bytes'] / GIB:.0f} GiB"]
            hardware += facts["gpus"] or ["no GPU"]
            versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
            link = f"[{path.stem}](../benchmarks/results/{path.name})"
            lines.append(f"| {link} | {facts['date']} | {', '.join(hardware)} | {versions} |")
    return "\n".join(lines) + "\n"


def machine_of(path: Path) -> dict[str, Any]:
    """Return the machine of a result, {} for a file without one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return {}
    facts: dict[str, Any] = content.get("machine", content)
    return facts if "date" in facts else {}


def _flat(text: str) -> str:
    """Return a text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
