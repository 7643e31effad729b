"""Triton's interpreter for liger-kernel's kernels on a CPU, in fp32. Import it before liger_kernel."""

import importlib
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _converted(argument: Any) -> Any:
    """Return a kernel's argument as the interpreter needs it; its own function leaves out floats."""
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _convert(argument)


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]  # Triton reads its source
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


interpreter._implicit_cvt = _converted
for _name in ("rms_norm", "geglu", "cross_entropy"):
    # The interpreter has no functions of CUDA's libdevice.
    _module = importlib.import_module(f"liger_kernel.ops.{_name}")
    for _function, _replacement in (("rsqrt", _rsqrt), ("tanh", _tanh)):
        if hasattr(_module, _function):
            setattr(_module, _function, _replacement)
