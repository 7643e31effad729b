"""The rows of added tokens, trained in the place of an embedding's and a head's own, which stay frozen.

peft writes the rows into a copy of the whole embedding, and one of the head, in every forward pass, and makes
gradients of that size (tuners/trainable_tokens/layer.py): gigabytes for a handful of rows. Here the embedding and the
head compute with their own weights, in calls of their own, for which stage 3 gathers them, and only what belongs to an
added token is computed from its row.
"""

from typing import Any

import torch

from zerolora.compat.peft_patches import replace_token_forward


def train_rows(model: Any) -> None:
    """Let a model that peft trains rows of compute with them so, in place. Its loss is already chunked (loss.py)."""
    replace_token_forward(model, _wrapper_forward, _embedding_forward)


def _wrapper_forward(wrapper: Any, *inputs: Any) -> torch.Tensor:
    layer = wrapper.token_adapter
    ((adapter, numbers),) = layer.token_indices.items()
    # Looked at in the wrapper's own call: stage 3 gathers it, and again for the wrapper's backward pass.
    rows = layer.trainable_tokens_delta[adapter]
    places = torch.tensor(numbers, device=inputs[0].device)
    result: torch.Tensor = layer.base_layer(*inputs, numbers=places, rows=rows)
    return result


def _embedding_forward(
    embedding: Any, ids: torch.Tensor, numbers: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    embedded: torch.Tensor = type(embedding).forward(embedding, ids)
    if numbers is None or rows is None:
        return embedded
    places = torch.searchsorted(numbers, ids).clamp_(max=len(numbers) - 1)
    own = torch.nn.functional.embedding(places, rows.to(embedded.dtype))
    scale = getattr(embedding, "embed_scale", None)  # of Gemma's, whose forward multiplies by it
    if scale is not None:
        own = own * torch.as_tensor(scale, dtype=own.dtype, device=own.device)
    return torch.where((numbers[places] == ids).unsqueeze(-1), own, embedded)
