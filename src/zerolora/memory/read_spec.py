"""Reads a model's spec from its config.json.

The families in memory/families/ are counted from the file, without torch. Any other architecture is built by
transformers on the meta device, which takes no memory but some seconds, and counted there.
"""

from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import read_json
from zerolora.memory.families import FAMILIES
from zerolora.memory.families.keys import Keys
from zerolora.memory.meta_device import count_on_meta_device
from zerolora.memory.model_spec import ModelSpec


def read_model_spec(path: Path) -> ModelSpec:
    """Return the spec of the model in directory `path`, or of a config.json under any name that ends in .json.

    Raises UserError if the file is missing, broken or incomplete.
    """
    where = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
    return from_config(read_json(where, "zerolora fetch"), where)


def from_config(config: Any, where: Path) -> ModelSpec:
    """Return the spec of a config.json's content; `where` names the file in messages."""
    if not isinstance(config, dict):
        raise UserError(f"{where}: holds {shown(config)}; write a JSON object, as a model's config.json is")
    family = config.get("model_type")
    if not isinstance(family, str):
        seen = f"model_type is {shown(family)}" if "model_type" in config else "has no model_type"
        raise UserError(f"{where}: {seen}; write the architecture's name, such as llama, or fetch the model again")
    # No family's function counts the cross-attention that some classes add on request.
    if family not in FAMILIES or config.get("add_cross_attention"):
        return count_on_meta_device(config, where)
    return FAMILIES[family](Keys(config, where, family))
