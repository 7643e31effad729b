"""The mistakes in a user's DeepSpeed JSON that do not depend on the run."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zerolora.errors import printable, shown
from zerolora.planner.deepspeed_keys import (
    DATA_TYPES,
    HONOURED,
    OF_TRAINING,
    OFFLOADS,
    OLD_NAMES,
    REDUCTIONS,
    REFUSED,
    SECTIONS,
    STAGE_3,
    TOP_LEVEL,
    ZERO,
    ZERO_KEYS,
    ZERO_REFUSED,
    ZERO_RENAMED,
    ZERO_SECTIONS,
    JsonKey,
)
from zerolora.strategies.strategy import Placement

LARGEST = 2**63 - 1  # a size is a 64-bit integer in torch
AUTO = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes with an "auto", as in transformers' Trainer."""
LEFT_TO_TRAINING = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
"""Keys that are omitted if "auto"."""
OF_STAGE_3 = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
"""Keys that DeepSpeed ignores in other stages."""
HPZ_OFF = {"zero_hpz_partition_size": 1}
ALIKE = 0.75  # difflib ratio from which a name counts as a misspelling
WANTED = {
    "flag": "true or false",
    "size": "a whole number from 0 to 2**63 - 1",
    "number": "a number",
    "share": "a number from 0 to 1",
    "text": "text",
    "texts": "a list of texts",
}


class Fault(NamedTuple):
    """A mistake in a JSON."""

    at: tuple[str, ...]
    """Path of its key."""
    text: str


def faults(user: Any) -> Iterator[Fault]:
    """Yield a JSON's mistakes that do not depend on the run: unknown keys at every level, types, contradictions."""
    for fault in _faults(user):
        yield Fault(fault.at, printable(fault.text))


def _faults(user: Any) -> Iterator[Fault]:
    if not isinstance(user, dict) or not isinstance(user.get(ZERO, {}), dict):
        yield Fault((ZERO,), f"is not a DeepSpeed config; use an object with a {ZERO} object")
        return
    if not any(key in TOP_LEVEL or _alike(key) for key in user):
        keys = ", ".join(shown(key) for key in list(user)[:3]) or "no key"
        remedy = f"put it in {ZERO}" if any(key in ZERO_KEYS for key in user) else f"use an object with {ZERO}"
        yield Fault((), f"is not a DeepSpeed config: it has {keys}; {remedy}")
        return
    zero = user.get(ZERO, {})
    wrong = [*_top(user), *_in_zero(zero)]
    yield from wrong
    if all(
        isinstance(user.get(key, {}), dict) and user.get(key, {}).get("enabled") is True for key in ("bf16", "fp16")
    ):
        yield Fault(
            ("fp16", "enabled"),
            "bf16.enabled and fp16.enabled are both true; set one, or none: training's precision wins",
        )
    if not wrong:
        yield from _contradictions(zero)


def is_off(value: Any) -> bool:
    """Return whether a value is empty, disables its key, or leaves it to training."""
    if isinstance(value, dict):
        enabled = value.get("enabled")
        return (
            not value or enabled is False or enabled == "auto" or all(each in (None, False) for each in value.values())
        )
    return value in (None, False, 0, [], "")


def _top(user: dict[str, Any]) -> Iterator[Fault]:
    for key, value in user.items():
        if key in SECTIONS:
            yield from _section((key,), value, SECTIONS[key])
        elif key in OF_TRAINING:
            if value not in (None, "auto"):
                yield from _value((key,), value, OF_TRAINING[key])
        elif key in HONOURED:
            yield from _honoured(key, value)
        elif key in REFUSED:
            if not is_off(value):
                yield Fault((key,), f"{key} is not run: {REFUSED[key]}; remove it")
        elif key not in TOP_LEVEL and not key.startswith("_"):  # _comment and alike are nobody's keys
            yield _unknown_top(key)
    for old, new in OLD_NAMES.items():
        if old in user and not is_off(user[old]):
            yield Fault((old,), f"{old} is an old name; use {new}")
    for key, wanted in REDUCTIONS.items():
        if user.get(key, wanted) != wanted:
            yield Fault((key,), f"{key} is {shown(user[key])}; gradients are averaged: use {wanted}")


def _honoured(key: str, value: Any) -> Iterator[Fault]:
    wrong = list(_value((key,), value, HONOURED[key]))
    yield from wrong
    if not wrong and key.endswith("communication_data_type") and value is not None and value.lower() not in DATA_TYPES:
        yield Fault((key,), f"{key} is {shown(value)}; use one of {', '.join(DATA_TYPES)}")


def _unknown_top(key: str) -> Fault:
    if key in ZERO_KEYS or key in ZERO_SECTIONS:
        return Fault((key,), f"{shown(key)} is not a key of DeepSpeed's top level; put it in {ZERO}")
    near = _alike(key)
    remedy = f"use {near}" if near else "remove it"
    return Fault((key,), f"{shown(key)} is not a key of DeepSpeed, which ignores it; {remedy}")


def _alike(key: str) -> str | None:
    """Return the top-level key that a misspelled one resembles; None if there is none."""
    return next(iter(difflib.get_close_matches(key, sorted(TOP_LEVEL), 1, ALIKE)), None)


def _in_zero(zero: dict[str, Any]) -> Iterator[Fault]:
    for key, value in zero.items():
        at, name = (ZERO, key), f"{ZERO}.{key}"
        if key in ZERO_RENAMED:
            if not is_off(value):
                yield Fault(at, f"{name} is deprecated; use {ZERO_RENAMED[key]}")
        elif key in ZERO_REFUSED:
            if not is_off(value):
                yield Fault(at, f"{name} {ZERO_REFUSED[key]}")
        elif key in ZERO_SECTIONS:
            if value is not None or key not in OFFLOADS:
                yield from _section(at, value, ZERO_SECTIONS[key])
        elif key in ZERO_KEYS:
            if value != "auto" or not (_named(key) in AUTO or key in LEFT_TO_TRAINING):
                yield from _value(at, value, ZERO_KEYS[key])
        else:
            yield _unknown_in_zero(key)
    yield from _devices_and_names(zero)


def _devices_and_names(zero: dict[str, Any]) -> Iterator[Fault]:
    """Yield unknown offload devices, and keys under both of their names."""
    for key in OFFLOADS:
        section = zero.get(key)
        device = section.get("device", "none") if isinstance(section, dict) else "none"
        if isinstance(device, str) and device not in ("none", "cpu", "nvme"):
            yield Fault((ZERO, key, "device"), f"{ZERO}.{key}.device is {shown(device)}; use none, cpu or nvme")
    for key in STAGE_3:
        if key in zero and key.removeprefix("stage3_") in zero:
            yield Fault(
                (ZERO, key.removeprefix("stage3_")),
                f"{ZERO}.{key} appears twice, once without its prefix; keep one of the two",
            )


def _unknown_in_zero(key: str) -> Fault:
    at, name = (ZERO, key), f"{ZERO}.{key}"
    if key == "aio":
        return Fault(at, f"{name} belongs to the top level (DeepSpeed#2721); move it there")
    if key.startswith("mics_"):
        return Fault(
            at,
            f"{name} is of MiCS, which DeepSpeed 0.19.8 no longer has (DeepSpeed#8489); use "
            "zero_hpz_partition_size (hpZ), or render.strategy: fsdp_hybrid",
        )
    if key == "zeropp_loco_param":
        return Fault(at, f"{name} is of LoCo, which DeepSpeed 0.19.8 no longer has (DeepSpeed#8489); remove it")
    return Fault(at, f"{name} is not a key of DeepSpeed; {_nearest(key, {*ZERO_KEYS, *ZERO_SECTIONS, *ZERO_RENAMED})}")


def _named(key: str) -> str:
    """Return the name of a stage-3 key with its prefix."""
    return f"stage3_{key}" if f"stage3_{key}" in STAGE_3 else key


def _section(at: tuple[str, ...], values: Any, known: Mapping[str, JsonKey]) -> Iterator[Fault]:
    name = ".".join(at)
    if not isinstance(values, dict):
        yield Fault(at, f"{name} is {shown(values)}; use an object")
        return
    for key, value in values.items():
        if key not in known:
            yield Fault((*at, key), f"{name}.{key} is not a key of DeepSpeed; {_nearest(key, set(known))}")
        elif not (value == "auto" and (*at, key) in (("bf16", "enabled"), ("fp16", "enabled"))):
            yield from _value((*at, key), value, known[key])


def _value(at: tuple[str, ...], value: Any, key: JsonKey) -> Iterator[Fault]:
    """Yield a fault if a value is not of its key's kind."""
    if value is None and key.optional:
        return
    right = {
        "flag": isinstance(value, bool),
        "size": _whole(value),
        "number": _number(value),
        "share": _number(value) and 0 <= value <= 1,
        "text": isinstance(value, str),
        "texts": isinstance(value, list) and all(isinstance(each, str) for each in value),
    }
    if right[key.kind]:
        return
    wanted = "the folder of a local disk" if at[-1] == "nvme_path" else WANTED[key.kind]
    seen = "null" if value is None else shown(value)
    remedy = "set its value" if value == "auto" else f"use {wanted}"
    yield Fault(at, f"{'.'.join(at)} is {seen}; {remedy}" + (", or remove it" if value is None else ""))


def _nearest(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), 1)
    return f"use {near[0]}" if near else "remove it"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return _number(value) and 0 <= value <= LARGEST and value == int(value)


def _contradictions(zero: dict[str, Any]) -> Iterator[Fault]:
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        yield Fault((ZERO, "stage"), f"{ZERO}.stage is {stage!r}; use 0, 1, 2 or 3")
        return
    yield from _impossible_offload(zero, stage)
    for key in OF_STAGE_3:
        if stage != 3 and zero.get(key) not in (None, False, 0) and zero[key] != HPZ_OFF.get(key):
            yield Fault(
                (ZERO, key), f"{ZERO}.{key} with stage {stage}, which DeepSpeed ignores; use stage 3 or remove it"
            )
    if zero.get("zero_quantized_gradients") and zero.get("reduce_scatter") is False:
        yield Fault(
            (ZERO, "reduce_scatter"),
            f"{ZERO}.reduce_scatter is false with zero_quantized_gradients, which needs it; set it to true",
        )
    if zero.get("reduce_bucket_size") == 0:
        yield Fault((ZERO, "reduce_bucket_size"), f"{ZERO}.reduce_bucket_size is 0; use 1 or more")
    if zero.get("legacy_stage1"):
        yield Fault((ZERO, "legacy_stage1"), f"{ZERO}.legacy_stage1 is true, which DeepSpeed no longer has; remove it")


def _impossible_offload(zero: dict[str, Any], stage: int) -> Iterator[Fault]:
    devices = {key: placement(zero, key) for key in OFFLOADS}
    for key, device in devices.items():
        at = (ZERO, key, "device")
        if device == "nvme" and stage != 3:
            # stage_1_and_2.py: any device but none is cpu_offload.
            yield Fault(
                at,
                f"{key}.device is nvme with stage {stage}, which DeepSpeed takes for cpu; use stage 3 or device cpu",
            )
        if device == "nvme" and not zero[key].get("nvme_path"):
            yield Fault(at, f"{key}.device is nvme without nvme_path (DeepSpeed#5124); give the folder of a local disk")
    names = ("stage3_prefetch_bucket_size", "prefetch_bucket_size")
    prefetch = next((zero[key] for key in names if key in zero), "not 0")
    if devices["offload_param"] == "nvme" and stage == 3 and prefetch != 0:
        # partitioned_param_swapper.py: "already assigned swap buffer id"
        yield Fault(
            (ZERO, next((name for name in names if name in zero), "offload_param")),
            f"offload_param.device is nvme and stage3_prefetch_bucket_size is {prefetch}, with which DeepSpeed reads "
            "frozen weights twice and fails; use 0",
        )
    if devices["offload_param"] != "gpu" and stage != 3:
        yield Fault(
            (ZERO, "offload_param"),
            f"offload_param with stage {stage}, where parameters are not sharded; use stage 3 or remove it",
        )
    if devices["offload_optimizer"] != "gpu" and stage == 0:
        yield Fault(
            (ZERO, "offload_optimizer"),
            "offload_optimizer with stage 0, which DeepSpeed ignores; use stage 1 or more, or remove it",
        )
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        yield Fault(
            (ZERO, "offload_optimizer", "super_offload"),
            "offload_optimizer.super_offload is true, and DeepSpeed's CPU Adam would replace train.optimizer; "
            "remove it",
        )
    if (zero.get("offload_optimizer") or {}).get("ratio", 1.0) != 1.0 and stage != 3:
        yield Fault(
            (ZERO, "offload_optimizer", "ratio"),
            f"offload_optimizer.ratio with stage {stage}; use stage 3 or remove it",
        )


def placement(zero: dict[str, Any], key: str) -> Placement:
    """Return the device of an offload section."""
    device: Any = (zero.get(key) or {}).get("device", "none")
    placed: Placement = "gpu" if device == "none" else device
    return placed


def hpz_ranks(zero: dict[str, Any]) -> int:
    """Return the ranks of hpZ's partition, which share weights."""
    return int(zero.get("zero_hpz_partition_size") or 1)
