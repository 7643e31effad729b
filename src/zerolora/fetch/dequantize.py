"""Converts a quantized checkpoint to bf16, once: config, and weights a block at a time.

A format (quantized/) says which stored tensors a weight is made of, and its values in fp32, which are rounded once.
Tensors of floats are copied. Each stored tensor is used exactly once, or the checkpoint is refused; whether the result
is the model is then checked as for any other base (model/base_check.py).
"""

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.compat.transformers_patches import stored_names
from zerolora.errors import UserError, shown
from zerolora.fetch.quantized import fp8, gptq, llm_compressor, mxfp4
from zerolora.fetch.quantized.checkpoint import ACTIVATIONS, FLOATS, INSTEAD, Checkpoint, Stated, Weight, spans
from zerolora.files import as_json
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.manifest import SMALL_FILES, model_files
from zerolora.model.stored_quantization import CONVERTED, QUANTIZATION, check_not_left, quantization_configs
from zerolora.model.weight_files import SINGLE, WEIGHT_INDEX, weight_files
from zerolora.tensor_file import TYPES, StoredTensor, read_header, write_one_by_one
from zerolora.units import byte_size

if TYPE_CHECKING:
    import torch

FORMATS: Mapping[str, Callable[[Checkpoint], None]] = {
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
    "mxfp4": mxfp4.read,
    "compressed-tensors": llm_compressor.read,
    "gptq": gptq.read,
    "awq": gptq.read_awq,
}
"""By quant_method; stored_quantization.CONVERTED names them too."""
KIND, TYPE = "BF16", "bfloat16"
FROM = "dequantized_from"
"""Key of the metadata of a converted file: the quantization_config that its weights had."""
RESERVE = 2**28
"""Bytes to leave free on the disk."""
Entry = tuple[str, str, tuple[int, ...], "Callable[[], Iterable[torch.Tensor]]"]


def is_quantized(directory: Path) -> bool:
    """Return whether the config.json in a directory states one quantization, in a format that is converted."""
    path = directory / foreign.CONFIG
    stated = [*quantization_configs(foreign.config_file(path)).values()] if path.is_file() else []
    return len(stated) == 1 and stated[0].get("quant_method") in CONVERTED


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
    check_not_left(source)
    model_files(source)  # refuses links out of the model
    checkpoint = read_checkpoint(source)
    convert_settings(source, target)
    files = _entries(source, checkpoint, _zero_biases(checkpoint, target))
    left = {name: entries for name, entries in files.items() if not (target / name).is_file()}
    _check_space(source, target, left)
    stated = {FROM: json.dumps(checkpoint.stated.values, sort_keys=True)}
    for name, entries in left.items():
        unfinished = target / f".{name}"
        write_one_by_one(entries, unfinished, stated)
        unfinished.replace(target / name)
    if (source / WEIGHT_INDEX).is_file():
        where = {entry[0]: name for name, entries in files.items() for entry in entries}
        total = sum((target / name).stat().st_size for name in files)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / WEIGHT_INDEX).write_text(as_json(index), encoding="utf-8")
    method = checkpoint.stated.values["quant_method"]
    LOGGER.info("converted %d weights from %s to bf16", len(checkpoint.weights), method)


def read_checkpoint(source: Path) -> Checkpoint:
    """Return the weights of a quantized checkpoint, from its config and the headers of its files."""
    stated = _stated(source)
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(source):
        for name, each in read_header(path).tensors.items():
            if name in stored:
                raise UserError(f"{path}: {shown(name)} is in {stored[name].path.name} too; keep one")
            stored[name] = each
    result = Checkpoint(stated, stored)
    FORMATS[stated.values["quant_method"]](result)
    return result


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


def _entries(source: Path, checkpoint: Checkpoint, left_out: set[str]) -> dict[str, list[Entry]]:
    """Return what to write, by file: each weight in the file of its codes, without tensors that are `left_out`.

    Raises UserError for a tensor that is neither a float nor a part of exactly one weight, and for two of one name.
    """
    used: dict[str, str] = {}
    for weight in checkpoint.weights:
        for each in weight.stored:
            assert each.name not in used, f"{each.name} is of {used[each.name]} and of {weight.name}"
            used[each.name] = weight.name
    made = {weight.stored[0].name: weight for weight in checkpoint.weights}
    result: dict[str, list[Entry]] = {}
    names: dict[str, str] = {}
    for name, each in checkpoint.stored.items():
        if name in made:
            entry: Entry = (made[name].name, KIND, made[name].shape, functools.partial(_rounded, made[name]))
        elif name in used or name in left_out or name.endswith(ACTIVATIONS):
            continue
        elif each.kind in FLOATS:
            entry = (name, each.kind, each.shape, functools.partial(_copied, each))
        else:
            raise UserError(
                f"{each.path}: {shown(name)} is stored as {each.kind}, and no weight of "
                f"{checkpoint.stated.values['quant_method']} has such a tensor; {INSTEAD}"
            )
        if (first := names.setdefault(entry[0], name)) != name:
            raise UserError(f"{each.path}: {shown(first)} and {shown(name)} are both {entry[0]}; keep one")
        result.setdefault(each.path.name, []).append(entry)
    if not checkpoint.weights:
        raise UserError(
            f"{checkpoint.stated.path}: {checkpoint.stated.key} states "
            f"{checkpoint.stated.values['quant_method']}, and no tensor of the files is; {INSTEAD}"
        )
    if not (source / WEIGHT_INDEX).is_file():
        assert result.keys() == {SINGLE}
    return result


def _rounded(weight: Weight) -> "Iterator[torch.Tensor]":
    """Yield a weight in bf16. Raises UserError if a number of it is not finite."""
    import torch

    for block in weight.blocks():
        rounded = block.to(torch.bfloat16)
        # The sum of finite numbers may be infinite, and takes a tenth of the time.
        if not bool(rounded.sum(dtype=torch.float32).isfinite()) and not bool(rounded.isfinite().all()):
            raise UserError(
                f"{weight.stored[0].path}: {shown(weight.stored[0].name)} has a number that is not finite; {INSTEAD}"
            )
        yield rounded


def _copied(stored: StoredTensor) -> "Iterator[torch.Tensor]":
    if not stored.shape:
        yield stored.read()
        return
    rows = stored.shape[0]
    for first, last in spans(rows, stored.nbytes // max(rows, 1) // TYPES[stored.kind][1]):
        yield stored.read(first, last)


def _check_space(source: Path, target: Path, files: Mapping[str, list[Entry]]) -> None:
    """Raise UserError if the disk cannot hold what is still to be written."""
    need = sum(TYPES[kind][1] * math.prod(shape) for each in files.values() for _, kind, shape, _ in each)
    free = shutil.disk_usage(target).free
    if need + RESERVE > free:
        raise UserError(
            f"{source}: takes {byte_size(need)} in bf16, and {byte_size(free)} are free in {target.parent}; free "
            f"{byte_size(need + RESERVE - free)} there"
        )


def origin(directory: Path) -> Any:
    """Return the quantization_config of the checkpoint that the weights of a directory were converted from; None if
    they were not."""
    metadata = (read_header(path).metadata for path in weight_files(directory))
    found = next((each[FROM] for each in metadata if each and FROM in each), None)
    return None if found is None else json.loads(found)
