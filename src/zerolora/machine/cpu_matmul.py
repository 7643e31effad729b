"""Chooses between MKL and oneDNN for fp32 matrix products on a CPU, and limits the number of cached kernels."""

import os

import torch

SIZE = 256
TOLERATED = 10.0
"""Maximum ratio of the error to that of torch's default kernels: another order of summation, but still full fp32."""

KEPT = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Kernels that torch and oneDNN each keep, unless the user says otherwise. A step on rows of another length needs other
ones, some 40 for all layers, of about half a MB; kept are a thousand otherwise, and memory grows with every new length
(pytorch#27971, #98688). To make one again takes a quarter of a millisecond."""


def choose() -> bool:
    """Have oneDNN multiply fp32 matrices on this CPU, if that costs no accuracy; return whether it does. Called before
    the first product, when torch reads how many kernels to keep.

    torch multiplies by MKL, which on some processors reaches less than half of what they can. "medium" hands products
    to oneDNN, which may shorten their factors to bf16 where the processor multiplies those faster (AMX); so a product
    is held against fp64 first. Nothing is timed: the same processor always gets the same kernels, and a resumed run the
    same bytes. Source: torch.set_float32_matmul_precision; use_mkldnn_matmul in aten/src/ATen/native/mkldnn/Matmul.cpp.
    """
    for name, number in KEPT.items():
        os.environ.setdefault(name, number)
    drawn = torch.Generator().manual_seed(0)
    one, other = (torch.randn(SIZE, SIZE, generator=drawn) for _ in range(2))
    exact = one.double() @ other.double()
    before = torch.get_float32_matmul_precision()
    own = _error(one @ other, exact)
    torch.set_float32_matmul_precision("medium")
    if _error(one @ other, exact) <= TOLERATED * own:
        return True
    torch.set_float32_matmul_precision(before)
    return False


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error of a product (Frobenius norm)."""
    return float((found - exact).norm() / exact.norm())
