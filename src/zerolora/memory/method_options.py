"""A training method from the options of `zerolora memory`."""

from dataclasses import fields
from typing import Any

from zerolora.errors import UserError
from zerolora.methods.method import Method
from zerolora.methods.registry import METHODS, create

OF_4_BITS = ("quantization_block", "double_quantization")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Valid weights per quantization constant (bitsandbytes/backends)."""
LARGEST_RANK = 10**9


def method_of_options(name: str, **options: Any) -> Method:
    """Return a method with the settings of options that are not None. Raises UserError for an invalid value, or a
    setting that the method lacks."""
    settings = {key: value for key, value in options.items() if value is not None and value != []}
    known = {field.name for field in fields(METHODS[name])} if name in METHODS else set(settings)
    for key in settings.keys() - known:
        raise UserError(f"{_option(key)}: {name} has no such setting; remove it")
    if settings.get("quantization") == "int8":
        _check_int8(name, settings)
    block = settings.get("quantization_block", BLOCKS[0])
    if block not in BLOCKS:
        raise UserError(f"--quantization-block {block}: use one of {', '.join(map(str, BLOCKS))}")
    if settings.get("dropout") == 1:
        raise UserError("--lora-dropout 1: leaves nothing to train; use less than 1")
    for key in ("targets", "modules_to_save"):
        if settings.get(key, "all-linear") != "all-linear":
            settings[key] = _names(key, settings[key])
    if "rank_pattern" in settings:
        settings["rank_pattern"] = _ranks(settings["rank_pattern"])
    return create(name, **settings)


def _option(key: str) -> str:
    return f"--{'lora-' if key in ('r', 'targets', 'dropout') else ''}{key.replace('_', '-')}"


def _check_int8(name: str, settings: dict[str, Any]) -> None:
    """Raise UserError for settings that int8 weights cannot have."""
    if METHODS[name](**{"quantization": "int8"}).unpacks:
        raise UserError(
            f"--quantization int8: {name} needs the norms of unpacked weights, which peft cannot compute of int8 ones; "
            "use nf4, or --method qlora"
        )
    for key in OF_4_BITS:
        if key in settings:
            raise UserError(f"{_option(key)}: weights of int8 have one constant for each output; remove it")


def _names(key: str, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if "" in names:
        raise UserError(f"{_option(key)} {text!r}: a name is empty; give names with one comma between")
    return names


def _ranks(texts: list[str]) -> tuple[tuple[str, int], ...]:
    ranks: dict[str, int] = {}
    for text in texts:
        name, _, r = text.rpartition("=")
        if not (name and r.isascii() and r.isdigit() and 1 <= int(r[:10]) <= LARGEST_RANK):
            raise UserError(f"--rank-pattern {text:.60}: give a module and its rank, as in q_proj=16")
        if name in ranks:
            raise UserError(f"--rank-pattern {text:.60}: {name} has rank {ranks[name]} already; give it once")
        ranks[name] = int(r)
    return tuple(ranks.items())
