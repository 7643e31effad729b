"""The KV cache of a batch: preallocated buffers, with the common prefix of all prompts computed once.

transformers' cache copies all keys and values of a layer for each new token, and would compute the tokens that all
prompts begin with, such as a system message or solved rows, for every row of a batch. Computing them once is vLLM's
prefix caching (arXiv 2309.06180, section 4.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

FEWEST = 8
"""Minimum number of shared tokens."""


@dataclass(frozen=True)
class SharedPrefix:
    """The tokens that all prompts begin with."""

    length: int = 0
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Keys and values in each layer: shape (1, heads, length, width)."""


def shared_prefix(model: Any, prompts: Sequence[list[int]]) -> SharedPrefix:
    """Return the common prefix of all prompts, at least one token shorter than each. Empty for a single prompt, for
    fewer than FEWEST tokens, and for a model whose layers cache anything but keys and values of all tokens.

    A batch has its padding after the prefix, not before it. Answers do not change where positions come from the mask,
    but they would with a sliding window.
    """
    if len(prompts) < 2 or not _keeps_all_tokens(model):
        return SharedPrefix()
    first, last = min(prompts), max(prompts)  # in lexicographic order: their common prefix is that of all
    most = min(map(len, prompts)) - 1
    length = next((at for at in range(most) if first[at] != last[at]), most)
    if length < FEWEST:
        return SharedPrefix()
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        tokens = torch.tensor([first[:length]], device=model.device)
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return SharedPrefix(length, [(layer.keys, layer.values) for layer in cache.layers])


def cache_of(model: Any, prefix: SharedPrefix, rows: int, positions: int) -> Any:
    """Return a cache with room for `positions` tokens of each row, filled with `prefix`; None if transformers has to
    make the model's cache."""
    if not _keeps_all_tokens(model):
        return None
    cache: Any = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer(positions) for _ in cache.layers]
    for layer, (keys, values) in zip(cache.layers, prefix.states, strict=False):
        layer.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
    return cache


class PreallocatedLayer(DynamicLayer):
    """The keys and values of one layer, each the filled part of a buffer."""

    def __init__(self, positions: int) -> None:
        """The buffer of `positions` tokens is allocated by the first update, when the shapes are known."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = positions
        self.buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; return those of all."""
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
            shapes = [(*new.shape[:2], self.positions, new.shape[3]) for new in (key_states, value_states)]
            self.buffers = [key_states.new_empty(shape) for shape in shapes]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        return self._show(end)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._show(self.get_seq_length())

    def _show(self, filled: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (buffer[:, :, :filled] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


def _keeps_all_tokens(model: Any) -> bool:
    """Return whether a model is a text decoder whose layers all cache keys and values of every token."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
