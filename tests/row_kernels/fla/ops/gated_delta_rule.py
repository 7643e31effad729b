"""flash-linear-attention's functions with its arguments, by transformers' own rule: the package itself needs a GPU."""

import itertools
from typing import Any

import torch


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> tuple[torch.Tensor, None]:
    """Return the rule's output of [1, tokens, heads, size] for each row between two of `cu_seqlens`."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
    ends = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    if len(query) > 1 and cu_seqlens is not None:
        raise ValueError("with cu_seqlens the batch size is 1")  # as the package
    parts = [
        rule(
            *(each[:, start:end] for each in (query, key, value, g, beta)),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )[0]
        for start, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, 1), None


def fused_recurrent_gated_delta_rule(*_: Any, **__: Any) -> torch.Tensor:
    """Refuse: training makes no step with a state."""
    raise NotImplementedError
