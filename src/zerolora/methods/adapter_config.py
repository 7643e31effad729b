"""The adapter_config.json of peft's LoRA, (IA)³ and VeRA: which keys decide what the tensors mean, and their values.

Source: config.py in peft/tuners/lora, ia3 and vera of peft 0.21.2.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolora.bounded import bounded_matching
from zerolora.errors import UserError, shown

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8
"""Of a config that does not say: peft's own."""
KEEPING_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base as it is (peft/tuners/lora/layer.py, update_layer)."""
WITHOUT_MEANING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "d_initial",
        "corda_config",  # this one, the next and lora_ga_config: how the factors started, as init_lora_weights says
        "eva_config",
        "fan_in_fan_out",  # of the last module that peft built, whatever the others are
        "inference_mode",
        "init_ia3_weights",
        "init_weights",
        "loftq_config",  # read with init_lora_weights: loftq alone
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",  # read with megatron_config alone
        "peft_version",
        "projection_prng_key",  # the file has what was drawn with it
        "qalora_group_size",  # read with use_qalora alone
        "revision",
        "runtime_config",
        "task_type",
        "vera_dropout",
    }
)
"""Keys that say where an adapter comes from, how it started and how it was trained."""
SELECTING = frozenset(
    {
        "exclude_modules",
        "feedforward_modules",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "target_modules",
        "target_parameters",
    }
)
"""Keys that decide which tensors an adapter has."""
SCALING = frozenset(
    {
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "init_lora_weights",
        "lora_alpha",
        "lora_bias",
        "peft_type",
        "r",
        "rank_pattern",
        "save_projection",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)
"""Keys that decide the shapes of the tensors, or what they mean."""
OTHER_PRODUCTS = frozenset(
    {
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
        "layer_replication",
        "megatron_config",
        "monteclora_config",
        "use_bdlora",
        "use_qalora",
        "velora_config",
    }
)
"""Keys of a LoraConfig with which a weight is not W + B·A·scale, or is not of the base."""


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError, which names the file `path`, if a key of an adapter's config has a value that no config can
    have, if its factors do not belong to the base as it is, or if a key is set whose meaning is unknown."""
    start = config.get("init_lora_weights")
    if start not in KEEPING_INITS:
        raise UserError(
            f"{path}: init_lora_weights is {shown(start)}, with which the factors belong to another base than the "
            "original; save the adapter with peft's path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if not value or key in WITHOUT_MEANING | SELECTING | SCALING:
            continue
        if key in OTHER_PRODUCTS:
            raise UserError(
                f"{path}: {key} is {shown(value)}, with which more than B·A is added; use the adapter beside its base "
                "with peft, or train one without it"
            )
        raise UserError(
            f"{path}: {shown(key)} is {shown(value)}, a key that peft 0.21 does not have and that may change what the "
            f"tensors mean (the file was written by peft {shown(config.get('peft_version'))}); remove the key if it "
            "does not, or use the adapter with that version of peft"
        )


def check_expressions(config: Mapping[str, Any], modules: Iterable[str], path: Path) -> None:
    """Raise UserError, which names the file `path`, if the regular expressions of an adapter's config take too long for
    the paths of a base's modules."""
    with bounded_matching(str(path)):
        for module in modules:
            is_target(config, module)
            is_feedforward(config, module)
            rank_and_alpha(config, module)


def rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return r and lora_alpha of a module of the base, by its path (peft/utils/other.py, get_pattern_key)."""
    return (
        next(_matching(config.get("rank_pattern"), module), config.get("r", DEFAULT_RANK)),
        next(_matching(config.get("alpha_pattern"), module), config.get("lora_alpha", DEFAULT_ALPHA)),
    )


def largest_rank(config: Mapping[str, Any]) -> int:
    """Return the largest r of any module."""
    return int(max(config.get("r") or DEFAULT_RANK, *(config.get("rank_pattern") or {}).values(), 0))


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether a config adapts a module of the base, by its path; layers_to_transform is not looked at
    (peft/tuners/tuners_utils.py, check_target_module_exists)."""
    excluded = config.get("exclude_modules")
    if _named(excluded, module) or is_saved_whole(config, module):
        return False
    return _named(config.get("target_modules"), module)


def is_saved_whole(config: Mapping[str, Any], module: str) -> bool:
    """Return whether modules_to_save keeps a module from being adapted: it is named there, or is a part of what is."""
    return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.get("modules_to_save") or ())


def is_saved(config: Mapping[str, Any], parameter: str) -> bool:
    """Return whether a parameter of the base is in a module that modules_to_save names: by the end of its path, also in
    the middle of a name (peft/utils/other.py, _set_trainable)."""
    ends = tuple(config.get("modules_to_save") or ())
    parts = parameter.split(".")[:-1]
    return bool(ends) and any(".".join(parts[:count]).endswith(ends) for count in range(1, len(parts) + 1))


def is_feedforward(config: Mapping[str, Any], module: str) -> bool:
    """Return whether (IA)³ scales the input of a module instead of its output (peft/tuners/ia3/model.py)."""
    named = config.get("feedforward_modules") or ()
    return bool(re.fullmatch(named, module)) if isinstance(named, str) else module.endswith(tuple(named))


def _named(names: Any, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _matching(pattern: Mapping[str, Any] | None, module: str) -> Any:
    return (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
