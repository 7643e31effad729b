"""Recipes: configs with a README in config/recipes/, for `zerolora init` to copy."""

import os
import re
from pathlib import Path

from zerolora.config.file import publish
from zerolora.errors import UserError, printable, shown
from zerolora.files import write_text
from zerolora.workflow_files import ROOT

FOLDER = Path("config/recipes")
SCHEMA = re.compile(r"^# yaml-language-server: \$schema=.*\n", re.M)
PRESET = re.compile(r"config/(?:deepspeed|hardware|judge|templates)/[\w.-]+")
"""Files of the project that a recipe's config may name."""
SCHEMA_FILE = Path("workflow/schemas/config.schema.json")


def find(start: Path) -> Path:
    """Return config/recipes of the project around `start`, or of the one zerolora is installed from.

    Raises UserError if neither exists.
    """
    for project in (start, *start.parents, ROOT):
        if next((project / FOLDER).glob("*/config.yaml"), None):
            return project / FOLDER
    raise UserError(f"{start}: no {FOLDER}/ here or above; run `zerolora init` inside a copy of the project")


def summaries(folder: Path) -> dict[str, str]:
    """Return the first sentence of each recipe's README, by the recipe's name."""
    return {path.parent.name: _summary(path.parent / "README.md") for path in sorted(folder.glob("*/config.yaml"))}


def listed(folder: Path) -> str:
    """Return name and summary of each recipe, one per line."""
    result = summaries(folder)
    width = max(map(len, result))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in result.items())


def config_of(name: str, folder: Path) -> Path:
    """Return the config of a recipe. Raises UserError if there is no such recipe."""
    if name not in summaries(folder):
        raise UserError(f"--recipe: {shown(name)} is not a recipe; use one of\n{listed(folder)}")
    return folder / name / "config.yaml"


def write_recipe(name: str, folder: Path, output: Path, force: bool) -> None:
    """Write the config of a recipe to `output`.

    Raises UserError if there is no such recipe, or if `output` exists and `force` is not set.
    """
    source = config_of(name, folder)
    if output.exists() and not force:
        raise UserError(f"{output}: exists; pass --force to replace it, or another --output")
    project = folder.parents[1].resolve()
    text = source.read_text(encoding="utf-8")
    rows = [str(FOLDER / name / path.name) for path in sorted((folder / name).glob("*.jsonl"))]
    for preset in (*PRESET.findall(text), *rows):  # outside a checkout there are none
        if not Path(preset).exists() and (project / preset).is_file():
            write_text(Path(preset), (project / preset).read_text(encoding="utf-8"))
    line = schema_line(output)
    publish(output, SCHEMA.sub(lambda _: line, text))


def schema_line(output: Path) -> str:
    """Return the comment by which editors find the JSON Schema of a config: relative in a project that has one, else
    that of the installed package."""
    folder = output.resolve().parent
    project = next((each for each in (folder, *folder.parents) if (each / SCHEMA_FILE).is_file()), None)
    schema = os.path.relpath(project / SCHEMA_FILE, folder) if project else str(ROOT / SCHEMA_FILE)
    return f"# yaml-language-server: $schema={printable(schema)}\n"


def _summary(readme: Path) -> str:
    """Return the first sentence after the heading."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    paragraph = " ".join(text.partition("\n\n")[2].split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s|:\s", paragraph)[0].rstrip(".")
