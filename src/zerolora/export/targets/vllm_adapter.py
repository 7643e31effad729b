"""vllm_adapter: the adapter, checked against the limits of vLLM (`vllm serve BASE --enable-lora`)."""

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.config.target_sections import VllmAdapter
from zerolora.errors import UserError
from zerolora.export import opened
from zerolora.export.adapter_limits import MERGED, WEIGHTS, check_for_vllm, rank_limit
from zerolora.export.targets.target import ExportTarget, Opened, RunResult
from zerolora.methods.adapter_config import largest_rank

FILES = ("adapter_config.json", WEIGHTS)


def _check(source: RunResult, settings: VllmAdapter) -> None:
    """Raise UserError for options that vLLM reads differently from peft, and for a rank above the server's."""
    config = check_for_vllm(source.adapter, "export.targets: vllm_adapter", MERGED)
    if (rank := largest_rank(config)) > settings.max_lora_rank:
        raise UserError(
            f"export.vllm_adapter.max_lora_rank: {settings.max_lora_rank}, but {source.adapter / FILES[0]} has "
            f"r: {rank}; use {rank_limit(rank)}, or a smaller train.lora.r"
        )


def _run(source: RunResult, settings: VllmAdapter, output: Path) -> dict[str, Any]:
    for name in FILES:
        shutil.copyfile(source.adapter / name, output / name)
    return {"max_lora_rank": settings.max_lora_rank}


def _opened(source: RunResult, settings: VllmAdapter, output: Path) -> Opened:
    """Open the copy with vLLM if configured, else with peft on the base model."""
    if source.vllm_python is not None:
        return opened.by_vllm(source.vllm_python, source.weights, source.data, output, source.device)
    return opened.answering(opened.with_adapter(source.weights, output), f"peft {version('peft')}")


TARGET = ExportTarget(
    "vllm_adapter", "the adapter alone, within vLLM's limits", VllmAdapter, _check, _run, _opened, for_vllm=True
)
