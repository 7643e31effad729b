"""The keys of adapter_config.json of peft's LoRA, (IA)³ and VeRA that select and scale modules.

Source: config.py in peft/tuners/lora, ia3 and vera of peft 0.21.2. model/foreign.py checks their values.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolora.bounded import bounded_matching
from zerolora.errors import UserError, shown

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8
"""peft's default."""
KEEPING_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the base (peft/tuners/lora/layer.py, update_layer)."""
WITHOUT_MEANING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "d_initial",
        "corda_config",  # as eva_config and lora_ga_config, about the start of the factors
        "eva_config",
        "fan_in_fan_out",  # of the last module that peft built only
        "inference_mode",
        "init_ia3_weights",
        "init_weights",
        "loftq_config",  # read only with init_lora_weights: loftq
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",  # read only with megatron_config
        "peft_version",
        "projection_prng_key",  # the file has the projections
        "qalora_group_size",  # read only with use_qalora
        "revision",
        "runtime_config",
        "task_type",
        "vera_dropout",
    }
)
"""Keys about an adapter's origin, its start and its training."""
SELECTING = frozenset(
    {
        *("exclude_modules", "feedforward_modules", "layers_pattern", "layers_to_transform", "modules_to_save"),
        *("target_modules", "target_parameters"),
    }
)
"""Keys that select an adapter's tensors."""
SCALING = frozenset(
    {
        *("alpha_pattern", "bias", "ensure_weight_tying", "init_lora_weights", "lora_alpha", "lora_bias", "peft_type"),
        *("r", "rank_pattern", "save_projection", "trainable_token_indices", "use_dora", "use_rslora"),
    }
)
"""Keys that decide the shapes or the meaning of the tensors."""
OTHER_PRODUCTS = frozenset(
    {
        *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config"),
        *("monteclora_config", "use_bdlora", "use_qalora", "velora_config"),
    }
)
"""Keys of a LoraConfig with which a weight is not W + B·A·scale, or is not of the base."""


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError, naming the file `path`, if an adapter's factors belong to a changed base, if it adds more than
    their product, or if its config has an unknown key."""
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
    """Raise UserError, naming the file `path`, if the regular expressions of an adapter's config take too long to match
    the paths of a base's modules."""
    with bounded_matching(str(path)):
        for module in modules:
            is_target(config, module)
            is_feedforward(config, module)
            rank_and_alpha(config, module)


def rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return r and lora_alpha of the base's module at a path (peft/utils/other.py, get_pattern_key)."""
    return (
        next(_matching(config.get("rank_pattern"), module), config.get("r", DEFAULT_RANK)),
        next(_matching(config.get("alpha_pattern"), module), config.get("lora_alpha", DEFAULT_ALPHA)),
    )


def largest_rank(config: Mapping[str, Any]) -> int:
    """Return the largest r of any module."""
    return int(max(config.get("r") or DEFAULT_RANK, *(config.get("rank_pattern") or {}).values(), 0))


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether a config adapts the base's module at a path, without regard to layers_to_transform
    (peft/tuners/tuners_utils.py, check_target_module_exists)."""
    excluded = config.get("exclude_modules")
    if _named(excluded, module) or is_saved_whole(config, module):
        return False
    return _named(config.get("target_modules"), module)


def is_saved_whole(config: Mapping[str, Any], module: str) -> bool:
    """Return whether modules_to_save names a module, or one around it, so that it is not adapted."""
    return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.get("modules_to_save") or ())


def is_saved(config: Mapping[str, Any], parameter: str) -> bool:
    """Return whether a parameter of the base is in a module of modules_to_save, which are ends of paths, also in the
    middle of a name (peft/utils/other.py, _set_trainable)."""
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
