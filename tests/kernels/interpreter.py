"""Triton's interpreter for liger-kernel's kernels on a CPU, in fp32, bf16 and fp16. Import it before liger_kernel."""

import importlib
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_convert = interpreter._implicit_cvt
_binary, _unary, _cast = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op, InterpreterBuilder.cast_impl


def _converted(argument: Any) -> Any:
    """Return a kernel's argument as the interpreter needs it; its own function leaves out floats."""
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _convert(argument)


def _is_bf16(operand: Any) -> bool:
    return bool(operand.dtype.scalar == tl.bfloat16)


def _values(operand: Any) -> Any:
    """Return an operand's values; those of bf16, which numpy lacks and the interpreter has as integers, in fp32."""
    return (operand.data.astype(np.uint32) << 16).view(np.float32) if _is_bf16(operand) else operand.data


def _bf16(values: Any) -> Any:
    """Return values in bf16, rounded to the nearest as GPUs do."""
    rounded = torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16().view(torch.int16)
    return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)


def _binary_of_values(builder: Any, left: Any, right: Any, function: Any) -> Any:
    """Compute in bf16; the interpreter's own computes with the integers."""
    if not _is_bf16(left):
        return _binary(builder, left, right, function)
    result = function(_values(left), _values(right))
    return TensorHandle(result, tl.bfloat16) if result.dtype == bool else _bf16(result)


def _unary_of_values(builder: Any, operand: Any, function: Any) -> Any:
    return _bf16(function(_values(operand))) if _is_bf16(operand) else _unary(builder, operand, function)


def _cast_of_values(builder: Any, operand: Any, wanted: Any, rounding: Any = None) -> Any:
    """Convert to or from bf16; the interpreter's own truncates."""
    if wanted.scalar == tl.bfloat16:
        return _bf16(_values(operand))
    if _is_bf16(operand):
        return TensorHandle(_values(operand).astype(interpreter._get_np_dtype(wanted)), wanted.scalar)
    return _cast(builder, operand, wanted)


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]  # Triton reads its source
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


interpreter._implicit_cvt = _converted
InterpreterBuilder.binary_op, InterpreterBuilder.unary_op = _binary_of_values, _unary_of_values
InterpreterBuilder.cast_impl = InterpreterBuilder.create_fp_to_fp = _cast_of_values
for _name in ("rms_norm", "geglu", "cross_entropy"):
    # The interpreter has no functions of CUDA's libdevice.
    _module = importlib.import_module(f"liger_kernel.ops.{_name}")
    for _function, _replacement in (("rsqrt", _rsqrt), ("tanh", _tanh)):
        if hasattr(_module, _function):
            setattr(_module, _function, _replacement)
