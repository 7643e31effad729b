"""NEFTune (arXiv 2310.05914): noise on the embeddings in training; the shorter the row, the larger the noise."""

from typing import Any

import torch

from zerolora.train.attention import lengths


def add_noise(model: Any, alpha: float) -> None:
    """Make a model add uniform noise to its embedded tokens in training mode: in a row of L tokens of width d, up to
    alpha / sqrt(L d) for each number.

    L is the row's own length, also in a packed row: a row gets the noise that it would get alone.
    """

    def hook(module: torch.nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        scale = alpha / (lengths.of_tokens(embedded) * embedded.shape[-1]).sqrt().unsqueeze(-1)
        return embedded + (2 * torch.rand_like(embedded) - 1) * scale.to(embedded.dtype)

    model.get_input_embeddings().register_forward_hook(hook)
