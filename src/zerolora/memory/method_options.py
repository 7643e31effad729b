"""A training method from the command's options."""

from dataclasses import fields
from typing import Any

from zerolora.errors import UserError
from zerolora.methods.method import Method
from zerolora.methods.registry import METHODS, create

OF_4_BITS = ("quantization_block", "double_quantization")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Weights of a block that can be quantized together (bitsandbytes/backends)."""
LARGEST_RANK = 10**9


def method_of_options(name: str, **given: Any) -> Method:
    """Return a method with the settings that were given. Raises UserError for one that it does not have, or whose value
    none can have."""
    given = {key: value for key, value in given.items() if value is not None and value != []}
    known = {field.name for field in fields(METHODS[name])} if name in METHODS else set(given)
    for key in given.keys() - known:
        raise UserError(f"{_option(key)}: {name} has no such setting; remove it")
    if given.get("quantization") == "int8":
        _check_int8(name, given)
    if given.get("quantization_block", BLOCKS[0]) not in BLOCKS:
        raise UserError(
            f"--quantization-block {given['quantization_block']}: write one of {', '.join(map(str, BLOCKS))}"
        )
    if given.get("dropout") == 1:
        raise UserError("--lora-dropout 1: nothing would be left to train; write less than 1")
    if given.get("targets", "all-linear") != "all-linear":
        given["targets"] = _names("targets", given["targets"])
    if "modules_to_save" in given:
        given["modules_to_save"] = _names("modules_to_save", given["modules_to_save"])
    if "rank_pattern" in given:
        given["rank_pattern"] = _ranks(given["rank_pattern"])
    return create(name, **given)


def _option(key: str) -> str:
    """Return the option of a setting of a method."""
    return f"--{'lora-' if key in ('r', 'targets', 'dropout') else ''}{key.replace('_', '-')}"


def _check_int8(name: str, given: dict[str, Any]) -> None:
    """Raise UserError for what weights of 8 bits cannot have."""
    if METHODS[name](**{"quantization": "int8"}).unpacks:
        raise UserError(
            f"--quantization int8: {name} needs the norms of unpacked weights, which peft cannot compute of int8 ones; "
            "write nf4, or --method qlora"
        )
    for key in OF_4_BITS:
        if key in given:
            raise UserError(f"{_option(key)}: weights of int8 have one constant for each output; remove it")


def _names(key: str, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if "" in names:
        raise UserError(f"{_option(key)} {text!r}: a name is empty; write names with one comma between")
    return names


def _ranks(texts: list[str]) -> tuple[tuple[str, int], ...]:
    ranks: dict[str, int] = {}
    for text in texts:
        name, _, r = text.rpartition("=")
        if not (name and r.isascii() and r.isdigit() and 1 <= int(r[:10]) <= LARGEST_RANK):
            raise UserError(f"--rank-pattern {text:.60}: write a module and its rank, as in q_proj=16")
        if name in ranks:
            raise UserError(f"--rank-pattern {text:.60}: {name} has rank {ranks[name]} already; write it once")
        ranks[name] = int(r)
    return tuple(ranks.items())
