"""The settings of runs, which `resolve` writes to results/settings/runs/."""

from pathlib import Path
from typing import Any

from zerolora.config.compared import filled
from zerolora.config.settings import RunSettings
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_object

FOLDER = "settings"
"""Relative to the results directory."""


def run_names(results: Path) -> list[str]:
    """Return the names of all runs, sorted. Raises UserError if `resolve` has not run."""
    path = results / FOLDER / MANIFEST
    files = read_object(path, "zerolora stage resolve").get("files")
    if not isinstance(files, dict):
        raise UserError(f"{path}: was written by another version; run `zerolora stage resolve` again")
    return sorted(Path(file).stem for file in files if Path(file).parent.name == "runs")


def settings_of_run(results: Path, name: str) -> dict[str, Any]:
    """Return the settings of each stage of a run, with neutral values, which `resolve` does not write. Raises UserError
    if it has not run, or its file is broken."""
    path = results / FOLDER / f"runs/{name}.json"
    try:
        return filled(RunSettings, dict(read_object(path, "zerolora stage resolve")["runs"][name]))
    except (KeyError, TypeError):
        raise UserError(f"{path}: was written by another version; run `zerolora stage resolve` again") from None
