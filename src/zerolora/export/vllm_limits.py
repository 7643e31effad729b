"""What an adapter may be for vLLM."""

import re
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.export.peft_limits import check_plain_lora
from zerolora.methods.adapter_config import largest_rank
from zerolora.tensor_file import read_header

WEIGHTS = "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank (vllm/config/lora.py)."""
ROUTER = re.compile(r"\.(gate|router)\.")


def check_for_vllm(adapter: Path, where: str, instead: str) -> dict[str, Any]:
    """Return the config of an adapter that vLLM reads as peft does.

    Raises UserError, which begins with the key `where` and ends with `instead`, for what vLLM refuses
    (vllm/lora/peft_helper.py), and for what it would compute wrongly: it scales every factor by the one lora_alpha and
    r of the config, so patterns of either would change the model.
    """
    config = check_plain_lora(adapter, where, "vLLM", instead, refused=("rank_pattern", "alpha_pattern"))
    path = adapter / "adapter_config.json"
    if (rank := largest_rank(config)) > RANKS[-1]:
        raise UserError(f"{where}: {path} has r: {rank}; write train.lora.r: {RANKS[-1]} or less, or {instead}")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise UserError(f"{where}: {path} has a trained bias, which vLLM does not read; {instead}")
    router = next((name for name in _tensors(adapter) if ROUTER.search(name)), None)
    if router:
        raise UserError(
            f"{where}: {adapter / WEIGHTS}: {router} is a router's, for which vLLM has no LoRA; leave it out of "
            f"train.lora.targets, or {instead}"
        )
    return config


def rank_limit(rank: int) -> int:
    """Return the least --max-lora-rank for a rank."""
    return next(each for each in RANKS if each >= rank)


def _tensors(adapter: Path) -> list[str]:
    return list(read_header(adapter / WEIGHTS).tensors)
