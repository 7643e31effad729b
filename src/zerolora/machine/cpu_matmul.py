"""The choice between MKL and oneDNN for fp32 matrix products on a CPU, and a limit on cached kernels."""

import os

import torch

SIZE = 256
TOLERATED = 10.0
"""Maximum ratio of the error to that of torch's default kernels: another order of summation, but still full fp32."""
KEPT = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Kernels that torch and oneDNN each cache, unless the user sets another number. Each row length needs its own, some 40
for all layers, of about half a MB each; by default a thousand are cached, so memory grows with every new length
(pytorch#27971, #98688). Creating one takes a quarter of a millisecond."""


def choose() -> bool:
    """Use oneDNN for fp32 matrix products on this CPU if that costs no accuracy; return whether it is used. Call it
    before the first product, when torch reads the limit on cached kernels.

    torch uses MKL, which reaches less than half of the speed of some processors. "medium" selects oneDNN, which may
    round factors to bf16 where the processor multiplies those faster (AMX); so a product is compared with fp64 first.
    Nothing is timed: the same processor always gets the same kernels, and a resumed run the same bytes. Source:
    torch.set_float32_matmul_precision; use_mkldnn_matmul in aten/src/ATen/native/mkldnn/Matmul.cpp.
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


def _error(product: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error of a product (Frobenius norm)."""
    return float((product - exact).norm() / exact.norm())
