"""vllm_adapter: the adapter alone, checked against what vLLM serves (`vllm serve BASE --enable-lora`)."""

import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from zerolora.config.section import Section
from zerolora.errors import UserError
from zerolora.export import opened
from zerolora.export.peft_limits import check_plain_lora
from zerolora.export.targets.base import ExportTarget, Opened, RunResult

FILES = ("adapter_config.json", "adapter_model.safetensors")
ROUTER = re.compile(r"\.(gate|router)\.")


class VllmAdapter(Section):
    """The adapter for vLLM."""

    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """The server's --max-lora-rank; these are the values that it takes (vllm/config/lora.py)."""


def _check(source: RunResult, settings: VllmAdapter) -> None:
    """Raise UserError for what vLLM refuses (vllm/lora/peft_helper.py), and for what it would compute wrongly.

    It scales every factor by the one lora_alpha and r of the config, so patterns of either would change the model.
    """
    config = check_plain_lora(source.adapter, "vllm_adapter", "vLLM", refused=("rank_pattern", "alpha_pattern"))
    path = source.adapter / "adapter_config.json"
    if config["r"] > settings.max_lora_rank:
        raise UserError(
            f"export.vllm_adapter.max_lora_rank: {settings.max_lora_rank}, but {path} has r: {config['r']}; write the "
            f"next of 8, 16, 32, 64, 128, 256, 320, 512, or a smaller train.lora.r"
        )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise UserError(f"{path}: has a trained bias, which vLLM does not read; export the merged model")
    router = next((name for name in _tensors(source.adapter) if ROUTER.search(name)), None)
    if router:
        raise UserError(
            f"export.targets: vllm_adapter: {source.adapter / FILES[1]}: {router} is a router's, for which vLLM has no "
            "LoRA; leave it out of train.lora.targets, or export the merged model"
        )


def _tensors(adapter: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(adapter / FILES[1], "numpy") as file:
        return list(file.keys())


def _run(source: RunResult, settings: VllmAdapter, output: Path) -> dict[str, Any]:
    for name in FILES:
        shutil.copyfile(source.adapter / name, output / name)
    return {"max_lora_rank": settings.max_lora_rank}


def _opened(source: RunResult, settings: VllmAdapter, output: Path) -> Opened:
    """Open the copy with peft, on the base model: vLLM needs a machine of its own."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(opened.model_of(source.weights), str(output))
    return opened.answering(model.eval(), f"peft {version('peft')}")


TARGET = ExportTarget("vllm_adapter", "the adapter alone, within vLLM's limits", VllmAdapter, _check, _run, _opened)
