"""Limits of programs that support only a part of peft's adapters, such as vLLM and llama.cpp."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.methods.adapter_config import largest_rank
from zerolora.model import foreign
from zerolora.tensor_file import read_header

REMEDIES = {
    "use_dora": "set train.method: lora",
    "modules_to_save": "set train.lora.modules_to_save: []",
    "trainable_token_indices": "leave out add_special_tokens and add_tokens of the data set",
    "target_parameters": "name no experts in train.lora.targets",
    "rank_pattern": "set train.lora.rank_pattern: {}",
    "alpha_pattern": "set train.lora.alpha_pattern: {}",
    "use_rslora": "set train.lora.rank_stabilized: false",
}
"""Remedies by key of adapter_config.json."""
MERGED = "export the merged model, as gguf does"
ALWAYS = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
WEIGHTS = "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank (vllm/config/lora.py)."""
ROUTER = re.compile(r"\.(gate|router)\.")


def check_plain_lora(
    adapter: Path, where: str, program: str, instead: str = MERGED, refused: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the config of an adapter that consists of LoRA factors only.

    Raises UserError, which begins with the key `where` and ends with `instead`, for another method and for the options
    ALWAYS and `refused`, which `program` does not support.
    """
    path = adapter / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"{where}: {adapter} has full weights, not an adapter; {instead}")
    config = foreign.adapter_config(adapter)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{where}: {path}: peft_type is {shown(config.get('peft_type'))}, and {program} supports LoRA only; "
            f"set train.method: lora, or {instead}"
        )
    for key in (*ALWAYS, *refused):
        if config.get(key):
            raise UserError(
                f"{where}: {path}: {key} is {shown(config[key])}, which {program} does not support; "
                f"{REMEDIES[key]}, or {instead}"
            )
    return config


def check_for_vllm(adapter: Path, where: str, instead: str) -> dict[str, Any]:
    """Return the config of an adapter that vLLM reads as peft does.

    Raises UserError, which begins with the key `where` and ends with `instead`, for options that vLLM refuses
    (vllm/lora/peft_helper.py) or would compute wrongly: it scales every factor by the config's lora_alpha and r, so
    patterns of either would change the model.
    """
    config = check_plain_lora(adapter, where, "vLLM", instead, refused=("rank_pattern", "alpha_pattern"))
    path = adapter / "adapter_config.json"
    if (rank := largest_rank(config)) > RANKS[-1]:
        raise UserError(f"{where}: {path} has r: {rank}; set train.lora.r: {RANKS[-1]} or less, or {instead}")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise UserError(f"{where}: {path} has a trained bias, which vLLM does not support; {instead}")
    router = next((name for name in read_header(adapter / WEIGHTS).tensors if ROUTER.search(name)), None)
    if router:
        raise UserError(
            f"{where}: {adapter / WEIGHTS}: {router} belongs to a router, which vLLM does not support; remove it from "
            f"train.lora.targets, or {instead}"
        )
    return config


def rank_limit(rank: int) -> int:
    """Return the smallest --max-lora-rank for a rank."""
    return next(each for each in RANKS if each >= rank)
