"""The loss of the data's answers after prompts whose keys and values generation has already computed.

It computes the answers' tokens alone: the cache is read, and stays as it is. Losses equal those of whole rows but for
rounding (evaluate.py, `loss`).
"""

import inspect
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicLayer

from zerolora.data.prepared_rows import IGNORED
from zerolora.model.spec import EVALUATION_TOKENS


class Reference(NamedTuple):
    """The data's answer to a prompt."""

    tokens: list[int]
    labels: list[int]


def reference_of(row: dict[str, Any]) -> Reference | None:
    """Return the answer of a held-out row; None if no token of it is supervised, or one of the prompt is."""
    labels, prompt = row["labels"], row["prompt"]
    if any(label != IGNORED for label in labels[1:prompt]) or all(label == IGNORED for label in labels[prompt:]):
        return None
    return Reference(row["input_ids"][prompt:], labels[prompt:])


def answer_losses(
    model: Any, cache: Any, mask: torch.Tensor, last: torch.Tensor, references: list[Reference | None]
) -> list[float | None]:
    """Return the summed cross-entropy of each reference; None where there is none.

    cache: keys and values of the prompts, and maybe of further tokens. mask: of the prompts, [rows, tokens]; each ends
    at the last position. last: the last token of each prompt, [rows].
    """
    result: list[float | None] = []
    width = max((len(each.tokens) for each in references if each), default=0)
    size = max(1, EVALUATION_TOKENS // (mask.shape[1] + width))
    for start in range(0, len(references), size):
        part = slice(start, start + size)
        if any(references[part]):
            result += _of_part(model, cache, mask, last, references[part], part)
        else:
            result += [None] * len(references[part])
    return result


def _of_part(
    model: Any, cache: Any, mask: torch.Tensor, last: torch.Tensor, references: list[Reference | None], part: slice
) -> list[float | None]:
    width = max(len(each.tokens) for each in references if each)
    before = mask.shape[1] - 1
    ids, labels, real = torch.zeros(3, len(references), width, dtype=torch.long)
    labels[:] = IGNORED
    ids[:, 0] = last[part]
    for index, each in enumerate(references):
        tokens, wanted = each or Reference([], [])
        ids[index, 1 : len(tokens)] = torch.tensor(tokens[:-1], dtype=torch.long)
        labels[index, : len(tokens)] = torch.tensor(wanted, dtype=torch.long)
        real[index, : max(1, len(tokens))] = 1
    whole = torch.cat([mask[part, :before], real.to(mask.device)], 1)
    inputs = {"input_ids": ids.to(mask.device), "attention_mask": whole}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (whole.cumsum(1) - 1).clamp_(min=0)[:, before:]  # as in generation
    with torch.no_grad():
        logits = model(**inputs, past_key_values=_Prompts.of(cache, part, before), use_cache=True).logits.float()
    labels = labels.to(logits.device)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    sums = losses.view_as(labels).double().sum(1).tolist()
    return [value if reference else None for value, reference in zip(sums, references, strict=True)]


class _Prompts(DynamicLayer):
    """Keys and values of some prompts, without those of the tokens that a forward pass adds."""

    @classmethod
    def of(cls, cache: Any, part: slice, tokens: int) -> Any:
        """Return a cache of the first `tokens` positions of the rows `part` of another."""
        result = type(cache)()
        result.layers = [cls(layer.keys[part, :, :tokens], layer.values[part, :, :tokens]) for layer in cache.layers]
        return result

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.prompts = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prompts' states with those of new tokens."""
        keys, values = self.prompts
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)

    def get_seq_length(self) -> int:
        """Return the tokens of the prompts."""
        return self.prompts[0].shape[-2]
