"""Reads a model's spec from its config.json.

The families in model/families/ are counted without torch. Any other architecture is built by transformers on the meta
device, which takes some seconds and no memory.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST
from zerolora.model import foreign
from zerolora.model.dequantized import is_dequantized_on_load, kept_quantization
from zerolora.model.families import FAMILIES
from zerolora.model.families.keys import Keys
from zerolora.model.foreign import config_file
from zerolora.model.llama_layouts import has_layout, layout_of
from zerolora.model.manifest import is_weight
from zerolora.model.meta_device import count_on_meta_device
from zerolora.model.spec import SIZES, ModelSpec, fault_of_sizes

ALWAYS = ("layers", "hidden", "vocabulary")
"""Sizes that are needed also where the layers are traced from the model's class."""


def read_model_spec(path: Path) -> ModelSpec:
    """Return the spec of the model in directory `path`, or of a config.json under any name that ends in .json.

    Raises UserError if the file is missing, broken or incomplete, or if the model's memory cannot be traced.
    """
    where = _config_file(path)
    spec = from_config(config_file(where, "fetch the model again, or give the path of its config.json"), where)
    if fault := fault_of_sizes(spec, ALWAYS if spec.config else tuple(SIZES)):
        raise UserError(f"{where}: {fault}; estimate a model of another architecture")
    if spec.experts and not spec.experts_per_token and not spec.config:
        raise UserError(
            f"{where}: does not say how many of its {spec.experts} experts a token has; estimate a model of another "
            "architecture"
        )
    if spec.heads % spec.key_heads:
        raise UserError(
            f"{where}: {spec.key_heads} key-value heads for {spec.heads} attention heads; use a num_key_value_heads "
            f"that divides {spec.heads}"
        )
    return _on_load(spec, where.parent) if is_dequantized_on_load(where.parent) else spec


def _on_load(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Return the spec with the quantization and, of an output of fetch, the bytes of a model's files of weights."""
    path = directory / MANIFEST
    files = foreign.manifest(path, "zerolora stage fetch")["files"] if path.is_file() else {}
    size = sum(file["bytes"] for name, file in files.items() if is_weight(name))
    return replace(spec, stored_as=str(kept_quantization(directory)["quant_method"]), stored_bytes=size)


def _config_file(path: Path) -> Path:
    """Return the path of the config.json of a directory or file. Raises UserError if it is missing or no .json file."""
    where = path / "config.json" if path.is_dir() else path
    remedy = "give the path of a model's directory or of its config.json"
    if where.is_dir():
        raise UserError(f"{where}: is a directory; {remedy}")
    if where.suffix != ".json":
        if where.exists():
            raise UserError(f"{where}: is not a config.json; {remedy}")
        where /= "config.json"
    if not where.is_file():
        raise UserError(f"{where}: there is no such file; `zerolora stage fetch` writes it, or {remedy}")
    return where


def from_config(config: Any, where: Path) -> ModelSpec:
    """Return the spec of the content of the config.json `where`."""
    if not isinstance(config, dict):
        raise UserError(f"{where}: holds {shown(config)}; use a JSON object, as a model's config.json is")
    if has_layout(config):
        config = layout_of(config, where).config
    family = config.get("model_type")
    if not isinstance(family, str):
        seen = f"model_type is {shown(family)}" if "model_type" in config else "has no model_type"
        raise UserError(f"{where}: {seen}; give the architecture's name, such as llama, or fetch the model again")
    # families/ does not count the optional cross-attention of some classes.
    if family not in FAMILIES or config.get("add_cross_attention"):
        spec = count_on_meta_device(config, where)
    else:
        spec = FAMILIES[family](Keys(config, where, family))
    stored = config.get("quantization_config")
    return replace(spec, stored_as=str(stored.get("quant_method", ""))) if isinstance(stored, dict) else spec
