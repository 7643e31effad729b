"""The training settings of a recipe, for another model, other rows and this machine."""

from pathlib import Path
from typing import Any

from zerolora.config import recipes
from zerolora.config.file import read_values
from zerolora.errors import UserError

SECTIONS = ("pack", "train")
OF_MACHINE = ("nodes", "ranks_per_node")
"""Keys of `train` that follow from the machine."""


def training_settings(recipe: str) -> dict[str, dict[str, Any]]:
    """Return `pack` and `train` of a recipe, without what follows from the machine.

    Raises UserError if there is no such recipe, or if a run of it has its own.
    """
    values = read_values(recipes.config_of(recipe, recipes.find(Path.cwd())))
    for name, run in values["runs"].items():
        for section in SECTIONS:
            if section in run:
                raise UserError(
                    f"--recipe {recipe}: its run {name} has its own {section}, so it has no training settings for "
                    "another model; pass --recipe alone, and change the config"
                )
    settings = {section: dict(values.get(section, {})) for section in SECTIONS}
    settings["train"] = {key: value for key, value in settings["train"].items() if key not in OF_MACHINE}
    return settings
