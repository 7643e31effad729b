"""The number of prompts in a batch of generation, from the memory estimate and the device's free memory."""

import json
from bisect import bisect_right
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import torch

from zerolora.errors import UserError
from zerolora.machine import devices
from zerolora.machine.devices import on_gpu
from zerolora.memory.inference import AUTO_ROWS, answering
from zerolora.model.read_spec import from_config, read_model_spec

SHARE = 0.5
"""Share of the free memory for the batches of all ranks; the rest is for other processes and unestimated memory."""
BLOCK = 128
"""Positions of a block of vLLM's cache on a CPU (vllm/platforms/cpu.py)."""
UNKNOWN = 8
"""Prompts in a batch of a model without an estimate."""
CGROUPS = Path("/sys/fs/cgroup")


class Answering(Protocol):
    """The settings of a stage that answers, as far as its batches depend on them."""

    @property
    def batch(self) -> int | Literal["auto"]:
        """Number of prompts per batch."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum length of an answer in tokens."""


class PromptBatches:
    """The batches of one model on one device."""

    def __init__(self, model: Any, settings: Answering, ranks: int = 1) -> None:
        """`ranks` processes share a CPU's memory."""
        self.settings, self.free, self.spec = settings, 0, None
        if settings.batch == "auto":
            self.width = model.dtype.itemsize
            numbers = {each for each in getattr(model, "hf_device_map", {}).values() if isinstance(each, int)}
            free = min(
                (free_memory(torch.device(devices.GPU, each)) for each in numbers), default=free_memory(model.device)
            )
            self.parts = max(1, len(numbers))  # the cache is on the devices of the layers
            self.free = int(SHARE * free) // (ranks if model.device.type == "cpu" else 1)
            try:
                self.spec = from_config(json.loads(model.config.to_json_string(use_diff=False)), Path("config.json"))
            except UserError:
                self.spec = None

    def rows(self, prompt: int, left: int) -> int:
        """Return the number of prompts in a batch, at least 1, with `left` prompts remaining of up to `prompt` tokens.

        With `batch: auto`, all batches have about the same size: a last one of a few rows would take nearly as long.
        """
        if self.settings.batch != "auto":
            return self.settings.batch
        most = UNKNOWN
        if spec := self.spec:

            def needed(rows: int) -> int:
                cache, working = answering(spec, self.width, "sdpa", rows, prompt, self.settings.max_new_tokens)
                return cache // self.parts + working

            most = max(1, bisect_right(range(1, AUTO_ROWS + 1), self.free, key=needed))
        return -(-left // -(-left // most))


def least_bytes(weights: Path, settings: Answering, prompt: int) -> int:
    """Return the minimum bytes of a batch of prompts beside the weights, in half precision; 0 without an estimate."""
    try:
        spec = read_model_spec(weights)
    except UserError:
        return 0
    rows = 1 if settings.batch == "auto" else settings.batch
    return sum(answering(spec, torch.bfloat16.itemsize, "sdpa", rows, prompt, settings.max_new_tokens))


def paged_cache(settings: Answering, config: Any, length: int) -> tuple[int, int]:
    """Return the number of rows of `length` tokens in vLLM's batch on a CPU, and the bytes of their fp32 cache, at most
    SHARE of the free memory."""
    rows = AUTO_ROWS if settings.batch == "auto" else settings.batch
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position = 2 * config.num_hidden_layers * heads * width * torch.float32.itemsize
    wanted = rows * (-(-length // BLOCK) + 1) * BLOCK * position
    return rows, min(wanted, int(SHARE * free_memory(torch.device("cpu"))))


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device: for a CPU, the minimum over the machine and the job's cgroups."""
    if on_gpu(device):
        return int(torch.cuda.mem_get_info(device)[0])
    free = psutil.virtual_memory().available
    for folder in _cgroups():
        try:
            limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        except OSError:
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used)))
    return int(free)


def _cgroups() -> list[Path]:
    """Return the cgroup (version 2) of this process and its parents."""
    try:
        line = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
    except (OSError, IndexError):
        return []
    own = CGROUPS / line.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(CGROUPS))]
