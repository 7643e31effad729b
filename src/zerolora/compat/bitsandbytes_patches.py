"""bitsandbytes: imported without compilers, and what its kernels for CPUs get wrong in training."""

import functools
import importlib.util
import logging
import sys
from typing import Any

from zerolora.compat.versions import installed, patch
from zerolora.errors import UserError

VERSION = "0.50.2"
_ABSENT: Any = object()


def load() -> None:
    """Import bitsandbytes, if it is installed, before peft does: peft imports it even if no base is quantized."""
    if importlib.util.find_spec("bitsandbytes"):
        load_without_compilers()


@functools.cache
@patch(
    "bitsandbytes",
    VERSION,
    upstream="none known",
    untested=("0.48", "0.49", "0.50", "0.51"),
    features=("torch:compile",),
)
def load_without_compilers() -> None:
    """Import bitsandbytes with a torch.compile that does nothing.

    Its fallbacks for devices without kernels of their own are decorated with torch.compile (backends/default/ops.py),
    which loads torch's compiler, 1.4 CPU-seconds in every process, and would run a C++ compiler at their first call.
    Nor does it fetch a kernel from the hub, as it does where the package kernels is installed (backends/cpu/ops.py).
    And it does not initialise CUDA, after which no rank could be forked: of a GPU's capability, which it asks at its
    import, it reads nothing but that there is one (cuda_specs.py).
    """
    import torch

    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # says that there is no such kernel
    compile_, kernels = torch.compile, sys.modules.get("kernels", _ABSENT)
    capability_of = torch.cuda.get_device_capability
    torch.compile, sys.modules["kernels"] = _as_it_is, None  # type: ignore[assignment]  # None: not to be had
    torch.cuda.get_device_capability = _lowest_capability  # type: ignore[assignment]
    try:
        importlib.import_module("bitsandbytes")
    finally:
        torch.compile, torch.cuda.get_device_capability = compile_, capability_of
        del sys.modules["kernels"]
        if kernels is not _ABSENT:
            sys.modules["kernels"] = kernels


@patch(
    "bitsandbytes",
    VERSION,
    upstream="none known",
    untested=("0.48", "0.49", "0.50", "0.51"),
    features=("bitsandbytes.nn:Linear4bit",),
)
def keep_layout(model: Any) -> None:
    """Keep 4-bit weights as they are stored, in place.

    On CPUs with AVX512-BF16 a forward pass in evaluation mode packs them for a kernel of its own (nn/modules.py,
    Linear4bit.forward), after which gradients are wrong.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def check_cuda_library() -> None:
    """Raise UserError if bitsandbytes has loaded no library for CUDA: its kernels would fail, or compute on the CPU."""
    import torch
    from bitsandbytes.cextension import CudaBNBNativeLibrary, lib

    if not isinstance(lib, CudaBNBNativeLibrary):
        raise UserError(
            f"bitsandbytes {installed('bitsandbytes')} has no library for CUDA {torch.version.cuda}, which torch is "
            "built for, or cannot load it; `python -m bitsandbytes` says why; or write a train.method and "
            "train.optimizer that need none"
        )


def _lowest_capability(*_: Any) -> tuple[int, int]:
    return 7, 5


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Return a function as torch.compile would return it compiled, also when called as a decorator with options."""
    return function if function is not None else _as_it_is
