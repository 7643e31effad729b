"""The number of tokens that get logits at a time, for training, evaluation and their memory estimate."""

import math

LEAST_CHUNK = 256
"""Minimum tokens of a chunk: with fewer, reading the head's weight takes longer than the products."""
EVALUATION_TOKENS = 2048
"""Tokens of one forward pass of evaluation without generation, including padding."""


def chunk_size(tokens: float, hidden: int, vocabulary: int) -> int:
    """Return how many tokens of a micro-batch get logits at once.

    A chunk's logits are about as large as the hidden states of all tokens
    (liger_kernel/ops/fused_linear_cross_entropy.py), but a chunk has at least LEAST_CHUNK tokens.
    """
    fair = max(1, math.ceil(tokens / math.ceil(vocabulary / hidden)))
    return max(LEAST_CHUNK, int(2 ** math.ceil(math.log2(fair))))
