"""The user's DeepSpeed JSON: checked before anything runs, corrected, completed, and described as a strategy.

DeepSpeed reads its config after the model is loaded, and ignores many mistakes. Here each mistake is one line with
file, line and key before a job is submitted, and each value that training does not use is reported with its
replacement.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.errors import UserError
from zerolora.planner.deepspeed_keys import (
    LEFT_OUT,
    OFFLOADS,
    OLD_NAMES,
    REFUSED,
    SET_UNLESS_OFF,
    STAGE_3,
    ZERO,
    ZERO_RENAMED,
)
from zerolora.planner.user_faults import AUTO, Fault, faults, hpz_ranks, is_off, placement
from zerolora.strategies.deepspeed_zero import DeepSpeed, gradients_unquantized
from zerolora.strategies.strategy import Buckets, Strategy, Target
from zerolora.yaml_file import composed

# DeepSpeed's defaults, in elements.
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
}


Location = tuple[str, ...]
"""The keys that lead to a value."""


class UserLayout(NamedTuple):
    """A DeepSpeed JSON as a strategy."""

    strategy: DeepSpeed
    buckets: Buckets


class Correction(NamedTuple):
    """A value of a JSON that training does not use."""

    at: tuple[str, ...]
    value: Any
    instead: str


def check_user_config(path: str, user: Any, target: Target, key: str = "render.strategy") -> None:
    """Raise UserError, with a line for each mistake, if a JSON is invalid, in itself or on a run's `target`.

    Each line names the setting or option `key`, the file and, if the file is on this machine, the line.
    """
    mistakes = list(faults(user))
    if not mistakes:
        mistakes += _batch_faults(user, target.ranks)
        zero = corrected(user)[0].get(ZERO, {})
        nvme = next((zero[key]["nvme_path"] for key in OFFLOADS if (zero.get(key) or {}).get("nvme_path")), None)
        strategy = layout_of({ZERO: zero}).strategy
        layout = replace(strategy, quantized_gradients=False)  # below, at its own key
        if conflict := layout.conflict(replace(target, nvme=nvme)):
            mistakes.append(Fault((ZERO,), f"{strategy.name}: {conflict.problem}; {conflict.remedy}"))
        mistakes += _partition_faults(zero, strategy, target.ranks)
        sent = user.get("communication_data_type") or target.precision
        if strategy.quantized_gradients and (problem := gradients_unquantized(target, sent)):
            at = (ZERO, "zero_quantized_gradients")
            mistakes.append(Fault(at, f"{'.'.join(at)}: {problem}; remove it"))
    if mistakes:
        lines = lines_of(Path(path))
        where = [(path if (line := line_at(lines, each.at)) is None else f"{path}:{line}") for each in mistakes]
        raise UserError("\n".join(f"{key}: {at}: {each.text}" for at, each in zip(where, mistakes, strict=True)))


def corrected(user: dict[str, Any]) -> tuple[dict[str, Any], list[Correction]]:
    """Return a JSON without the values that training does not use, and their replacements.

    These values, which other tools' stock files contain, do not change training's result, are of an earlier version of
    DeepSpeed, or run badly.
    """
    corrections: list[Correction] = []
    result: dict[str, Any] = {}
    for key, value in user.items():
        if key in LEFT_OUT or key in REFUSED or key.startswith("_"):
            if key in LEFT_OUT and not is_off(value):
                corrections.append(Correction((key,), value, LEFT_OUT[key]))
            continue
        if key in OLD_NAMES and is_off(value):
            continue
        result[key] = dict(value) if isinstance(value, dict) else value
    for (section, key), why in SET_UNLESS_OFF.items():
        if isinstance(result.get(section), dict) and (value := result[section].pop(key, False)):
            corrections.append(Correction((section, key), value, why))
    zero = result.get(ZERO)
    if isinstance(zero, dict):
        # DeepSpeed refuses an old name beside the new one, whatever its value.
        zero = result[ZERO] = {
            key: value for key, value in zero.items() if key not in ZERO_RENAMED or not is_off(value)
        }
        for key, instead in _corrected_zero(zero):
            corrections.append(Correction((ZERO, key), zero.pop(key), instead))
    return result, corrections


def _corrected_zero(zero: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the keys of zero_optimization that are omitted, and their replacements."""
    result = []
    if zero.get("stage") == 3:
        for key in aliases("stage3_max_live_parameters"):
            if zero.get(key) == 0 and not isinstance(zero.get(key), bool):
                # partitioned_param_coordinator.py: the bound on what is fetched ahead
                result.append((key, f"{DEFAULTS['stage3_max_live_parameters']:,}, as with 0 nothing is fetched ahead"))
    if zero.get("stage") in (1, 2) and zero.get("round_robin_gradients") is True:
        # stage_1_and_2.py, link_hp_params: slices of the optimizer states are read in another order than stored.
        result.append(("round_robin_gradients", "false, as a resumed run would mix up the optimizer's states"))
    result += [
        (key, "an adapter is saved in training's own precision")
        for key in aliases("stage3_gather_16bit_weights_on_model_save")
        if zero.get(key) == "auto"
    ]
    return result


def filled(user: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Return a valid JSON as DeepSpeed gets it: corrected, with stage 0 by default, and with its stage-3 sizes of
    "auto" computed for a model of width `hidden`."""
    values = corrected(user)[0]
    # transformers/integrations/deepspeed.py, config_finalize
    sizes = zip(AUTO, (hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden), strict=True)
    known = {name: size for key, size in sizes for name in aliases(key)}
    zero = {"stage": 0, **values.get(ZERO, {})}
    return {**values, ZERO: {key: known[key] if value == "auto" else value for key, value in zero.items()}}


def layout_of(user: dict[str, Any]) -> UserLayout:
    """Return a JSON as a strategy and sizes, to be estimated like the named strategies.

    `user` is the result of `filled`; a remaining "auto" is DeepSpeed's default.
    """
    zero = user.get(ZERO, {})
    stage = zero.get("stage", 0)
    strategy = DeepSpeed(
        name="your JSON",
        about="",
        sharded="",
        costs="",
        stage=stage,
        optimizer=placement(zero, "offload_optimizer") if stage else "gpu",
        parameters=placement(zero, "offload_param"),
        within_node=stage == 3 and hpz_ranks(zero) > 1,
        quantized=stage == 3 and zero.get("zero_quantized_weights") is True,
        quantized_gradients=stage == 3 and zero.get("zero_quantized_gradients") is True,
    )
    if stage == 0:
        return UserLayout(strategy, Buckets())
    overlap = zero.get("overlap_comm")
    overlap = stage == 3 if overlap in (None, "auto") else overlap
    if stage < 3:
        sizes = Buckets(
            reduce=_size(zero, "reduce_bucket_size"), allgather=_size(zero, "allgather_bucket_size"), overlap=overlap
        )
        return UserLayout(strategy, sizes)
    sizes = Buckets(
        reduce=_size(zero, "reduce_bucket_size"),
        prefetch=_size(zero, "stage3_prefetch_bucket_size"),
        persistence=_size(zero, "stage3_param_persistence_threshold"),
        live=_size(zero, "stage3_max_live_parameters"),
        overlap=overlap,
    )
    return UserLayout(strategy, sizes)


def aliases(key: str) -> tuple[str, ...]:
    """Return the names of a key in DeepSpeed: stage-3 keys also without their prefix."""
    return (key, key.removeprefix("stage3_")) if key in STAGE_3 else (key,)


def _batch_faults(user: dict[str, Any], ranks: int) -> Iterator[Fault]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (user.get(key) for key in keys)
    if all(isinstance(value, int) for value in (batch, micro, accumulation)):
        assert isinstance(micro, int) and isinstance(accumulation, int)
        if batch != micro * accumulation * ranks:
            yield Fault(
                ("train_batch_size",),
                f"train_batch_size is {batch}, but {micro} a GPU x {accumulation} steps x {ranks} ranks are "
                f"{micro * accumulation * ranks}; use that, or leave the three out: training's values win",
            )


def _partition_faults(zero: dict[str, Any], strategy: Strategy, ranks: int) -> Iterator[Fault]:
    # deepspeed/utils/groups.py, _ensure_divisibility
    size = hpz_ranks(zero)
    if strategy.within_node and ranks % size:
        yield Fault(
            (ZERO, "zero_hpz_partition_size"),
            f"{ZERO}.zero_hpz_partition_size is {size}, and {ranks} ranks are not a multiple of it; use a number "
            f"that divides {ranks}, or remove it",
        )


def _size(zero: dict[str, Any], key: str) -> int:
    return int(next((zero[name] for name in aliases(key) if zero.get(name, "auto") != "auto"), DEFAULTS[key]))


def lines_of(path: Path) -> dict[Location, int]:
    """Return the line of each key of a valid JSON file by its path, in which entries of lists have their number; empty
    if the file is not on this machine."""
    try:
        # Blanks in JSON that YAML does not accept, or takes for line breaks.
        text = re.sub("[\t\x85\u2028\u2029]", " ", path.read_text(encoding="utf-8"))
        return dict(_key_lines(composed(text)[1], ()))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}


def _key_lines(node: yaml.Node | None, at: Location) -> Iterator[tuple[Location, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*at, key.value), key.start_mark.line + 1
            yield from _key_lines(value, (*at, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _key_lines(value, (*at, str(number)))


def line_at(lines: dict[Location, int], location: Location) -> int | None:
    """Return the line of a location, or of the innermost key around it."""
    return next((lines[location[:end]] for end in range(len(location), 0, -1) if location[:end] in lines), None)
