"""Which of torch's fused kernels compute a model's attention on CUDA.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Flash attention's kernels take groups of heads, fewer of
keys and values than of queries; the memory-efficient ones do not (check_batch_size_and_num_heads_dense), so that torch
computes all scores instead. CUDNN's take no heads that flash attention's refuse.
"""

from zerolora.model.spec import ModelSpec
from zerolora.types import Attention

FLASH_CAPABILITY = 8.0
"""The lowest compute capability of flash attention's kernels (check_flash_attention_hardware_support)."""
FLASH_HEAD = 256
"""Their largest head size (check_head_dim_size_flash)."""


def has_flash(model: ModelSpec, attention: Attention, capability: float | None, half: bool, masked: bool) -> bool:
    """Return whether flash attention's kernels compute a model's attention, of kind sdpa or flash.

    `capability`: of the GPU; None for one that has them. `half`: query, key and value are fp16 or bf16. `masked`: sdpa
    gets a mask, which the kernels lack.
    """
    query, value = (sum(model.latent[:2]), model.latent[2]) if model.latent else (model.head_dim, model.head_dim)
    fits = max(query, value) <= FLASH_HEAD
    if attention == "sdpa":
        fits = query == value <= FLASH_HEAD and not masked
    # flash widens the smaller of two sizes (train/attention.py, _varlen).
    return fits and half and (capability is None or capability >= FLASH_CAPABILITY)


def computes_scores(model: ModelSpec, attention: Attention, capability: float | None, half: bool, masked: bool) -> bool:
    """Return whether attention on CUDA writes all scores to memory.

    transformers' sdpa leaves groups of heads to the kernel (enable_gqa), but for a mask repeats keys and values for all
    heads (integrations/sdpa_attention.py); flash repeats them where no kernel takes groups (train/attention.py).
    """
    if attention == "eager":
        return True
    grouped = model.heads != model.key_heads and attention == "sdpa" and not masked
    return grouped and not has_flash(model, attention, capability, half, masked)
