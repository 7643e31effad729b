"""Converts a model of a published layout to a Llama, once: config, tensors and tokenizer.

model/llama_layouts.py lists these models, and what each tensor becomes. Numbers are moved, not computed, except for the
head of Baichuan2, whose rows are normalized in fp32 and rounded to their stored type.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zerolora.errors import UserError, shown
from zerolora.fetch.sentencepiece_tokenizer import TOKENIZER_FILES, convert_tokenizer
from zerolora.files import as_json
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.llama_layouts import Cut, has_layout, layout_of
from zerolora.model.manifest import model_files
from zerolora.model.weight_files import WEIGHT_INDEX, WEIGHTS, weight_files
from zerolora.tensor_file import StoredTensor, read_header, write_one_by_one

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "F16", "BF16")
_NOT_COPIED = {foreign.CONFIG, WEIGHT_INDEX, *TOKENIZER_FILES}


def needs_conversion(directory: Path) -> bool:
    """Return whether the model in a directory has a layout that is converted."""
    return (directory / foreign.CONFIG).is_file() and has_layout(foreign.model_config(directory))


def convert_settings(source: Path, target: Path) -> None:
    """Write the small files of the Llama that the model in `source` is to the directory `target`.

    Raises UserError if the model or its tokenizer cannot be converted exactly.
    """
    path = source / foreign.CONFIG
    foreign.check_model(source)
    layout = layout_of(foreign.model_config(source), path)
    target.mkdir(parents=True, exist_ok=True)
    (target / foreign.CONFIG).write_text(as_json(layout.config), encoding="utf-8")
    for each in source.iterdir():
        if each.is_file() and each.suffix != ".py" and each.name not in _NOT_COPIED and not each.match(WEIGHTS):
            shutil.copyfile(each, target / each.name)
    convert_tokenizer(source, target)


def convert(source: Path, target: Path) -> None:
    """Write the model in `source` to the directory `target` as a Llama; one tensor at a time is in memory."""
    config = foreign.model_config(source)
    layout = layout_of(config, source / foreign.CONFIG)
    model_files(source)  # refuses links out of the model
    convert_settings(source, target)
    where: dict[str, str] = {}
    for path in weight_files(source):
        entries = []
        for stored in read_header(path).tensors.values():
            if stored.kind not in FLOATS:
                raise UserError(
                    f"{path}: {shown(stored.name)} is stored as {stored.kind}, and weights of one of "
                    f"{', '.join(FLOATS)} are expected; take the model as it was before it was converted"
                )
            for part in layout.parts(stored.name, stored.shape):
                if part.name in where:
                    raise UserError(f"{path}: {shown(stored.name)} and another tensor are both {part.name}; keep one")
                where[part.name] = path.name
                entries.append((part.name, stored.kind, part.shape, _maker(stored, part.cut)))
        write_one_by_one(entries, target / path.name)
    if (source / WEIGHT_INDEX).is_file():
        index = {"metadata": {}, "weight_map": where}
        (target / WEIGHT_INDEX).write_text(as_json(index), encoding="utf-8")
    LOGGER.info("converted a model of type %s to a Llama", config["model_type"])


def _maker(stored: StoredTensor, cut: Cut) -> "Callable[[], list[torch.Tensor]]":
    return lambda: [cut(stored.read())]
