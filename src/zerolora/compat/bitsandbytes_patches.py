"""bitsandbytes: import without compilers, and correct gradients of its CPU kernels."""

import functools
import importlib.util
import logging
import sys
from typing import Any

from zerolora.compat.versions import installed, patch
from zerolora.errors import UserError

_ABSENT: Any = object()
PACKED = "packed_states"
"""Attribute of a module that unpacks 4-bit parameters of its own while it computes: their QuantState by name."""


def load() -> None:
    """Import bitsandbytes, if installed, before peft does: peft imports it even if no base is quantized."""
    if importlib.util.find_spec("bitsandbytes"):
        load_without_compilers()


@functools.cache
@patch("bitsandbytes", features=("torch:compile",))
def load_without_compilers() -> None:
    """Import bitsandbytes with a torch.compile that does nothing.

    - Its fallbacks for devices without own kernels use torch.compile (backends/default/ops.py), which loads torch's
      compiler, 1.4 CPU-seconds in every process, and would run a C++ compiler at the first call.
    - With the package kernels installed, it would download a kernel from the hub (backends/cpu/ops.py).
    - It would initialise CUDA, after which no rank can be forked: it queries a GPU's capability, of which it uses only
      the existence (cuda_specs.py).
    """
    import torch

    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # warns that there is no such kernel
    compile_, kernels = torch.compile, sys.modules.get("kernels", _ABSENT)
    capability_of = torch.cuda.get_device_capability
    torch.compile, sys.modules["kernels"] = _as_it_is, None  # type: ignore[assignment]  # None: not importable
    torch.cuda.get_device_capability = _lowest_capability  # type: ignore[assignment]
    try:
        importlib.import_module("bitsandbytes")
    finally:
        torch.compile, torch.cuda.get_device_capability = compile_, capability_of
        del sys.modules["kernels"]
        if kernels is not _ABSENT:
            sys.modules["kernels"] = kernels


@patch("bitsandbytes", features=("bitsandbytes.nn:Linear4bit",))
def keep_layout(model: Any) -> None:
    """Keep the layout of 4-bit weights, in place.

    On CPUs with AVX512-BF16, a forward pass in evaluation mode repacks them for another kernel (nn/modules.py,
    Linear4bit.forward), after which gradients are wrong.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def is_packed(parameter: Any) -> bool:
    """Return whether a parameter is a quantized 4-bit weight."""
    from bitsandbytes.nn.modules import Params4bit

    return isinstance(parameter, Params4bit)


@patch("bitsandbytes", features=("bitsandbytes.nn.modules:Params4bit",))
def packed(tensor: Any, config: Any) -> Any:
    """Return a tensor of any shape as a 4-bit parameter, quantized where it is. `config`: a BitsAndBytesConfig."""
    from bitsandbytes.nn.modules import Params4bit

    parameter: Any = Params4bit(
        tensor,
        requires_grad=False,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=config.bnb_4bit_quant_storage,
    )
    return parameter.to(tensor.device)


def packed_parameters(module: Any) -> dict[str, Any]:
    """Return a module's own 4-bit parameters by name, unless its class computes with them."""
    from bitsandbytes.nn.modules import Linear4bit

    own = {} if isinstance(module, Linear4bit) else dict(module.named_parameters(recurse=False))
    return {name: each for name, each in own.items() if getattr(each, "quant_state", None) is not None}


@patch("bitsandbytes", features=("bitsandbytes.functional:dequantize_4bit",))
def unpacked(parameter: Any, state: Any) -> Any:
    """Return the numbers of a 4-bit parameter, in the shape and type that it was quantized from."""
    from bitsandbytes import functional

    return functional.dequantize_4bit(parameter.data, state)


@patch("bitsandbytes", features=("bitsandbytes.nn.modules:Params4bit",))
def on_meta(parameter: Any, shape: Any) -> Any:
    """Return a 4-bit parameter of `shape` on the meta device, with the attributes of `parameter`, such as quantization
    constants, which its own methods lose or move with it."""
    import torch
    from bitsandbytes.nn.modules import Params4bit

    data = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return Params4bit(data, requires_grad=False, **vars(parameter))


def check_cuda_library() -> None:
    """Raise UserError if bitsandbytes has no CUDA library: its kernels would fail, or compute on the CPU."""
    import torch
    from bitsandbytes.cextension import CudaBNBNativeLibrary, lib

    if not isinstance(lib, CudaBNBNativeLibrary):
        raise UserError(
            f"bitsandbytes {installed('bitsandbytes')} has no library for CUDA {torch.version.cuda}, which torch is "
            "built for, or cannot load it; `python -m bitsandbytes` shows why; or use a train.method and "
            "train.optimizer that need none"
        )


def _lowest_capability(*_: Any) -> tuple[int, int]:
    return 7, 5


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Return a function uncompiled; like torch.compile, also usable as a decorator with options."""
    return function if function is not None else _as_it_is
