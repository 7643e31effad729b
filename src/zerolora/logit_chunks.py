"""How many tokens get logits at once: what training and evaluation compute, and what their memory is predicted from."""

import math

LEAST_CHUNK = 256
"""Tokens of a chunk at least: with fewer, reading the head's weight takes longer than the products."""
EVALUATION_TOKENS = 2048
"""Tokens of one forward pass of evaluation without generation, padding counted."""


def chunk_size(tokens: float, hidden: int, vocabulary: int) -> int:
    """Return how many tokens of a micro-batch get logits at once.

    A chunk's logits are about as large as the hidden states of all tokens
    (liger_kernel/ops/fused_linear_cross_entropy.py), but a chunk has at least LEAST_CHUNK tokens.
    """
    fair = max(1, math.ceil(tokens / math.ceil(vocabulary / hidden)))
    return max(LEAST_CHUNK, int(2 ** math.ceil(math.log2(fair))))
