"""Converts a quantized checkpoint to bf16 (model/dequantized.py): once, to files, or each time that it is loaded.

Whether the result is the model is then checked as for any other base (model/base_check.py).
"""

import functools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zerolora.compat.transformers_patches import stored_names
from zerolora.errors import UserError
from zerolora.fetch.weight_store import link
from zerolora.files import as_json, write_json
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.dequantized import (
    FROM,
    MARK,
    QUANTIZATION,
    DequantizedTensor,
    bf16_files,
    index_of,
    read_checkpoint,
)
from zerolora.model.manifest import SMALL_FILES, model_files
from zerolora.model.quantized.checkpoint import Checkpoint, Stated, spans
from zerolora.model.quantized.formats import FORMATS
from zerolora.model.stored_quantization import check_not_left, quantization_configs
from zerolora.model.weight_files import SINGLE, WEIGHT_INDEX, weight_files
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile, write_one_by_one
from zerolora.units import byte_size

if TYPE_CHECKING:
    import torch

TYPE = "bfloat16"
RESERVE = 2**28
"""Bytes to leave free on the disk."""


def is_quantized(directory: Path) -> bool:
    """Return whether the config.json in a directory states one quantization, in a format that is converted."""
    path = directory / foreign.CONFIG
    stated = [*quantization_configs(foreign.config_file(path)).values()] if path.is_file() else []
    return len(stated) == 1 and stated[0].get("quant_method") in FORMATS


def convert_settings(source: Path, target: Path) -> None:
    """Write the small files of the model in bf16 to the directory `target`.

    Raises UserError if its quantization_config states what is not converted.
    """
    stated = _stated(source)
    FORMATS[stated.values["quant_method"]](Checkpoint(stated, {}))
    config = dict(foreign.config_file(source / foreign.CONFIG))
    (key,) = quantization_configs(config)
    if key:
        config[key] = {name: value for name, value in config[key].items() if name != QUANTIZATION}
    else:
        del config[QUANTIZATION]
    for name in config.keys() & {"dtype", "torch_dtype"}:
        config[name] = TYPE
    target.mkdir(parents=True, exist_ok=True)
    (target / foreign.CONFIG).write_text(as_json(config), encoding="utf-8")
    for each in source.iterdir():
        if each.is_file() and SMALL_FILES.fullmatch(each.name) and each.name not in (foreign.CONFIG, WEIGHT_INDEX):
            shutil.copyfile(each, target / each.name)


def convert(source: Path, target: Path) -> None:
    """Write the model in `source` to the directory `target` in bf16; files of weights that are there are kept.

    Raises UserError if a tensor is none that the format has, a weight is not finite, or the disk has too little space.
    """
    checkpoint, files, _ = _read(source, target)
    left = [file for file in files if not (target / file.path.name).is_file()]
    _check_space(source, target, left)
    for file in left:
        unfinished = target / f".{file.path.name}"
        entries = (
            (each.name, each.kind, each.shape, functools.partial(_blocks, each)) for each in file.tensors.values()
        )
        write_one_by_one(entries, unfinished, {FROM: (file.metadata or {})[FROM]})
        unfinished.replace(target / file.path.name)
    if (source / WEIGHT_INDEX).is_file():
        (target / WEIGHT_INDEX).write_text(as_json(index_of(files)), encoding="utf-8")
    method = checkpoint.stated.values["quant_method"]
    LOGGER.info("converted %d weights from %s to bf16", len(checkpoint.weights), method)


def keep(source: Path, target: Path) -> None:
    """Write the model in `source` to the directory `target` so that its files of weights, which are linked, are
    converted to bf16 each time that they are loaded.

    Raises UserError as `convert`, whose checks of all numbers are made here.
    """
    checkpoint, files, left_out = _read(source, target)
    for file in files:
        for tensor in file.tensors.values():
            if isinstance(tensor, DequantizedTensor):
                for _ in tensor.blocks():
                    pass
    write_json(target / MARK, {QUANTIZATION: checkpoint.stated.values, "left_out": sorted(left_out)})
    for path in weight_files(source):
        if not (target / path.name).exists():
            link(path.resolve(), target / path.name)
    if (source / WEIGHT_INDEX).is_file():
        shutil.copyfile(source / WEIGHT_INDEX, target / WEIGHT_INDEX)


def keep_settings(source: Path, target: Path) -> None:
    """Write the small files of `keep`. Raises UserError as `convert_settings`."""
    convert_settings(source, target)
    write_json(target / MARK, {QUANTIZATION: _stated(source).values, "left_out": []})


def _read(source: Path, target: Path) -> tuple[Checkpoint, list[TensorFile], set[str]]:
    """Return a checkpoint, its files in bf16, and the tensors that they leave out, and write the small files to
    `target`."""
    check_not_left(source)
    model_files(source)  # refuses links out of the model
    checkpoint = read_checkpoint(source, _stated(source))
    convert_settings(source, target)
    left_out = _zero_biases(checkpoint, target)
    files = bf16_files(checkpoint, left_out)
    if not (source / WEIGHT_INDEX).is_file():
        assert [file.path.name for file in files] == [SINGLE]
    return checkpoint, files, left_out


def _stated(source: Path) -> Stated:
    path = source / foreign.CONFIG
    ((key, values),) = quantization_configs(foreign.config_file(path)).items()
    return Stated(path, values, f"{key}.{QUANTIZATION}" if key else QUANTIZATION)


def _zero_biases(checkpoint: Checkpoint, target: Path) -> set[str]:
    """Return the biases of converted modules that are zero, and that the class of the config.json in `target` does not
    have: AutoGPTQ stores one for every module."""
    modules = {weight.name.removesuffix(".weight") for weight in checkpoint.weights}
    zero = [
        each
        for name, each in checkpoint.stored.items()
        if name.endswith(".bias") and name.removesuffix(".bias") in modules and not bool(each.read().any())
    ]
    names = stored_names(built_on_meta(config_of(target))) if zero else None
    return {each.name for each in zero if names and names.of_model(each.name)[0] not in names.shapes}


def _blocks(stored: StoredTensor) -> "Iterator[torch.Tensor]":
    """Yield the numbers of a tensor, some at a time."""
    if isinstance(stored, DequantizedTensor):
        yield from stored.blocks()
    elif not stored.shape:
        yield stored.read()
    else:
        rows = stored.shape[0]
        yield from stored.in_turn(spans(rows, stored.nbytes // max(rows, 1) // TYPES[stored.kind][1]))


def _check_space(source: Path, target: Path, files: Iterable[TensorFile]) -> None:
    """Raise UserError if the disk cannot hold what is still to be written."""
    need = sum(each.nbytes for file in files for each in file.tensors.values())
    free = shutil.disk_usage(target).free
    if need + RESERVE > free:
        raise UserError(
            f"{source}: takes {byte_size(need)} in bf16, and {byte_size(free)} are free in {target.parent}; free "
            f"{byte_size(need + RESERVE - free)} there"
        )
