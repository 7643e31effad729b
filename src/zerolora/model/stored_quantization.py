"""Base models that are stored quantized: in bitsandbytes' 4 bits they are taken as they are; others are refused here.

Other FORMATS are converted to bf16 before they are read (dequantized.py).

Each quantized weight is stored as its codes, under the weight's name, and as constants: NAME.absmax, NAME.quant_map
and, if those are quantized too, NAME.nested_absmax and NAME.nested_quant_map. Its type and shape are JSON in the bytes
of NAME.quant_state.bitsandbytes__TYPE (bitsandbytes/functional.py, QuantState.as_dict).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, shown
from zerolora.json_file import decoded, parsed
from zerolora.json_kinds import JsonObject, Text, Whole, check
from zerolora.model import foreign
from zerolora.model.dequantized import QUANTIZATION
from zerolora.model.quantized.formats import FORMATS
from zerolora.model.weight_files import WEIGHTS, weight_files
from zerolora.tensor_file import StoredTensor, TensorFile, read_header

if TYPE_CHECKING:
    from zerolora.config.method_sections import Quantization

FOUR_BITS = ("nf4", "fp4")
BLOCK = 64
LONGEST = 1 << 16
"""Bytes of the JSON; real ones have some hundred."""
STATE = re.compile(rf"(.+)\.quant_state\.bitsandbytes__({'|'.join(FOUR_BITS)})")
CONSTANTS = ("absmax", "quant_map")
NESTED = ("nested_absmax", "nested_quant_map")
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PLAIN = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}
"""safetensors' types of weights, and of positions and masks beside them; each format of codes has one of the others."""
AGAIN = "fetch the model again"


class QuantState(JsonObject):
    """The JSON that bitsandbytes writes beside a weight."""

    quant_type: Text
    blocksize: Whole
    dtype: Text
    shape: list[Whole]


@dataclass(frozen=True)
class StoredQuantization:
    """The 4-bit quantization that a config.json states."""

    type: str
    """nf4 or fp4."""
    double: bool
    """Whether the constants are quantized too."""


def stored_quantization(directory: Path) -> StoredQuantization | None:
    """Return how the weights of a model directory are quantized; None if they are not.

    Raises UserError unless it is with bitsandbytes' 4 bits, or if no tensor of its files is quantized.
    """
    path = directory / foreign.CONFIG
    stated = quantization_configs(foreign.config_file(path))
    if not stated:
        return None
    check_not_left(directory)
    stored, method = stated.get("", {}), _methods(stated)[0]
    if len(stated) == 1 and stored.get("quant_method") == "bitsandbytes":
        type_, double = stored.get("bnb_4bit_quant_type", "fp4"), stored.get("bnb_4bit_use_double_quant", False)
        if stored.get("load_in_4bit") is True and type_ in FOUR_BITS and isinstance(double, bool):
            return StoredQuantization(type_, double)
    instead = "use the checkpoint in bf16, fp16 or fp32 that they were made of"
    if len(stated) == 1 and method in FORMATS:
        instead = f"name the checkpoint under `fetch`, which converts it to bf16, or {instead}"
    raise UserError(
        f"{path}: quantization_config: the weights are stored quantized ({shown(method)}), so that nothing trained "
        f"could be merged into them; {instead}, with method: qlora if it is to take fewer bits in training"
    )


def quantization_configs(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each quantization_config of a config.json by the key of the part of the model that has it, as text_config;
    the whole model's is under an empty name."""
    parts = {"": config} | {name: part for name, part in config.items() if isinstance(part, dict)}
    return {name: part[QUANTIZATION] for name, part in parts.items() if isinstance(part.get(QUANTIZATION), dict)}


def _methods(stated: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the methods that configs state, those of parts first."""
    return [stated[name].get("quant_method", "unnamed") for name in sorted(stated, reverse=True)]


def check_not_left(directory: Path) -> None:
    """Raise UserError if config.json states a quantization, and no tensor of the files is quantized."""
    path = directory / foreign.CONFIG
    if plain := _plain_types(directory):
        method = _methods(quantization_configs(foreign.config_file(path)))[0]
        raise UserError(
            f"{path}: quantization_config: states {shown(method)}, and every tensor of the files is {plain}: the key "
            "was left from another checkpoint, and libraries would follow it; delete it if these weights are not "
            "quantized while they compute, or use another checkpoint"
        )


def _plain_types(directory: Path) -> str:
    """Return the types of a directory's tensors if all are those of weights that are not quantized, else nothing."""
    files = [read_header(path) for path in weight_files(directory)] if any(directory.glob(WEIGHTS)) else []
    types = {each.kind for file in files for each in file.tensors.values()}
    return ", ".join(sorted(types)) if types <= PLAIN else ""


def check_mergeable(directory: Path) -> None:
    """Raise UserError if the weights of a model directory are stored quantized: nothing can be added to them."""
    if stored := stored_quantization(directory):
        raise UserError(
            f"{directory / foreign.CONFIG}: quantization_config: the weights are stored in 4 bits ({stored.type}), to "
            "which nothing can be added; merge into the checkpoint in bf16, fp16 or fp32 that they were made of"
        )


def check_trainable(stored: StoredQuantization | None, method: str, quantizes: bool, asked: "Quantization") -> None:
    """Raise UserError unless a run's method and train.quantization are those of stored weights."""
    if stored is None:
        return
    if not quantizes:
        raise UserError(
            f"train.method is {method}, and the base model is stored in 4 bits ({stored.type}); set method: qlora, "
            "or fetch the checkpoint in bf16, fp16 or fp32 that it was made of"
        )
    for key, here, there in (("type", asked.type, stored.type), ("double", asked.double, stored.double)):
        if here != there:
            raise UserError(
                f"train.quantization.{key} is {shown(here)}, and the base model is stored with {shown(there)}; set "
                f"{key}: {str(there).lower()}, or fetch the checkpoint that it was made of"
            )


def unpacked(directory: Path, files: Iterable[TensorFile]) -> list[TensorFile]:
    """Return headers in which each quantized weight is one tensor of its own shape and type, without constants.

    Raises UserError if a weight is quantized otherwise than config.json states, or lacks a part.
    """
    files = list(files)  # a broken header is refused before the config is read
    stored = stored_quantization(directory)
    if stored is None:
        return files
    every = {name: each for file in files for name, each in file.tensors.items()}
    result: dict[str, StoredTensor | None] = dict(every)
    for state in every.values():
        if match := STATE.fullmatch(state.name):
            weight, kind = match.groups()
            parts = [f"{weight}.{part}" for part in (*CONSTANTS, *(NESTED if stored.double else ()))]
            result |= dict.fromkeys((state.name, *parts))
            result[weight] = _weight(weight, kind, state, [weight, *parts], every, stored)
    kept = {name: each for name, each in result.items() if each is not None}
    return [replace(file, tensors={name: kept[name] for name in file.tensors if name in kept}) for file in files]


def _weight(
    name: str,
    kind: str,
    state: StoredTensor,
    parts: list[str],
    every: dict[str, StoredTensor],
    stored: StoredQuantization,
) -> StoredTensor:
    """Return a quantized weight as a tensor of its own shape and type, which has the place of its codes."""
    described = _described(state)
    nested = "nested_blocksize" in described
    if kind != stored.type or nested != stored.double:
        how = f"{kind}, with constants that are {'' if nested else 'not '}quantized"
        raise UserError(f"{state.path}: {name} is stored in {how}, which config.json does not state; {AGAIN}")
    if missing := [part for part in parts if part not in every]:
        raise UserError(f"{state.path}: {missing[0]} is in no file; {AGAIN}")
    codes, shape = every[name], tuple(described["shape"])
    if codes.nbytes != -(-math.prod(shape) // 2):
        raise UserError(f"{codes.path}: {name} has {codes.nbytes:,} bytes of codes for {list(shape)}; {AGAIN}")
    return replace(codes, kind=KINDS[described["dtype"]], shape=shape)


def packed_weights(files: Iterable[TensorFile]) -> list[str]:
    """Return the names of the quantized weights in files of 4-bit weights."""
    return sorted(match[1] for file in files for name in file.tensors if (match := STATE.fullmatch(name)))


def _described(state: StoredTensor) -> dict[str, Any]:
    """Return the JSON in the bytes of a tensor."""
    if state.nbytes > LONGEST:
        raise UserError(f"{state.path}: {state.name} has {state.nbytes:,} bytes; {AGAIN}")
    with state.path.open("rb") as file:
        file.seek(state.start)
        content = file.read(state.nbytes)
    result = parsed(state.path, decoded(state.path, content), AGAIN)
    check(result, QuantState, state.path, AGAIN)
    if result["dtype"] not in KINDS or result["blocksize"] != BLOCK:
        raise UserError(
            f"{state.path}: {state.name} has blocks of {result['blocksize']} and weights of {shown(result['dtype'])}; "
            f"only blocks of {BLOCK} of {', '.join(KINDS)} are read"
        )
    return result


def stored_precision(directory: Path) -> str | None:
    """Return the precision of a directory's weights before they were stored in 4 bits, as its first one has it; None
    if they are not."""
    files = (read_header(path) for path in weight_files(directory))
    states = (each for file in files for each in file.tensors.values() if STATE.fullmatch(each.name))
    state = next(states, None)
    return None if state is None else PRECISIONS[_described(state)["dtype"]]
