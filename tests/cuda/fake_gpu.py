"""A fake GPU: torch's privateuse backend under fake tensors, which have shapes, types and devices, and no values.

A tensor left on the CPU is an error there, as on a GPU, and so is an index on another GPU than its tensor. What kernels
of a GPU require, which fake ones do not check, is checked here before each of them (KERNELS).
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import core_model_loading

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.left_out import leave_out
from zerolora.machine import devices
from zerolora.optimizers import low_bits

leave_out("torchao")
low_bits.library()  # not under fake tensors, whose values it would read
bitsandbytes_patches.load()
import bitsandbytes  # noqa: E402 (not before its patches)
from bitsandbytes.nn.modules import Int8Params, Params4bit  # noqa: E402

NAME = "fakegpu"
HALF = (torch.float16, torch.bfloat16)
READ = 9
"""An integer that is read of a fake tensor."""
FREE = 2**34
"""Bytes of a GPU, all free."""


class Stream:
    """A stream, or an event of one, all of whose work is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes the arguments of both."""

    def wait_stream(self, _: Any) -> None:
        """Return at once."""

    def wait_event(self, _: Any) -> None:
        """Return at once."""

    def record_event(self, *_: Any) -> "Stream":
        """Return an event that has happened."""
        return Stream()


class Gpus:
    """The GPUs of this process: the functions of torch.cuda that zerolora calls, without their calls of CUDA."""

    def __init__(self, count: int, capability: tuple[int, int]) -> None:
        self.count, self.capability = count, capability

    def module(self) -> types.SimpleNamespace:
        """Return the functions of a device's module."""
        return types.SimpleNamespace(
            is_initialized=lambda: True,
            is_available=lambda: True,
            device_count=lambda: self.count,
            current_device=lambda: 0,
            set_device=lambda _: None,
            _is_in_bad_fork=lambda: False,
            manual_seed=lambda _: None,
            manual_seed_all=lambda _: None,
            get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
            set_rng_state=lambda *_: None,
            get_amp_supported_dtype=lambda: list(HALF),
            get_device_capability=lambda *_: self.capability,
            is_bf16_supported=lambda *_, **__: self.capability >= (8, 0),
            mem_get_info=lambda *_: (FREE, FREE),
            memory_reserved=lambda *_: 0,
            memory_allocated=lambda *_: 0,
            max_memory_allocated=lambda *_: 0,
            reset_peak_memory_stats=lambda *_: None,
            empty_cache=lambda: None,
            synchronize=lambda *_: None,
            Stream=Stream,
            Event=Stream,
            current_stream=Stream,
            stream=contextlib.nullcontext,
        )


def set_up(count: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
    """Give this process `count` fake GPUs, for good: torch registers a backend once."""
    gpus = Gpus(count, capability).module()
    backend_registration._setup_privateuseone_for_python_backend(NAME, gpus)
    devices.GPU = NAME
    for name, function in vars(gpus).items():
        setattr(torch.cuda, name, function)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    module: Any = torch.nn.Module
    module._apply = _apply
    loading: Any = core_model_loading
    loading._materialize_copy = _read
    of_peft: Any = importlib.import_module("peft.utils.save_and_load")
    of_peft.safe_load_file = _read_all
    _fake_quantized_weights()


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Compute with fake tensors; a value that is read of one is true, 1.0 or READ."""
    checked: Any = Checked
    # A device's thread of the backward pass would lose what is raised in it, and not end.
    with Fakes(allow_non_fake_inputs=True), checked(), torch.autograd.set_multithreading_enabled(False):
        yield


class Fakes(FakeTensorMode):
    """Fake tensors, also of torch.tensor on a device, which would first make a real one there."""

    avoid_device_init = True


def _apply(module: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Module._apply with new parameters: a fake tensor cannot be changed to another device's in place."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                applied = function(parameter)
            if applied is not parameter:
                own = isinstance(applied, torch.nn.Parameter)
                module._parameters[name] = applied if own else torch.nn.Parameter(applied, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _read(stored: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
    """What transformers reads of a file: real, and fake from where it is placed."""
    with _disable_current_modes():
        real = stored[...]
    mode: Any = active_fake_mode()
    tensor: torch.Tensor = mode.from_tensor(real).to(device=device, dtype=dtype)
    return tensor


def _read_all(path: str, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """What peft reads of an adapter's file."""
    with _disable_current_modes():
        real = load_file(path)
    mode: Any = active_fake_mode()
    return {name: mode.from_tensor(tensor).to(device) for name, tensor in real.items()}


def _fake_quantized_weights() -> None:
    """Let bitsandbytes' weights be fake tensors, which are a class of their own, as Params4bit and Int8Params are."""
    for kind, fake in ((Params4bit, FakeParams4bit), (Int8Params, FakeInt8Params)):
        _make_fakes(kind, fake)


def _make_fakes(kind: Any, fake: Any) -> None:
    """Let `kind` make a `fake` of fake data."""
    real = kind.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = False, **settings: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return real(cls, data, requires_grad, **settings)
        weight = data.detach()
        weight.__class__ = fake
        with _disable_current_modes():
            kept = real(kind, torch.empty(0), **settings).__dict__
        weight.__dict__.update({name: kept[name] for name in kept if name not in FakeTensor.__dict__})
        return weight.requires_grad_(requires_grad)

    kind.__new__ = new


def _like(weight: Any, data: Any) -> Any:
    """Return fake data as a weight with the settings of another."""
    data.__class__ = type(weight)
    data.__dict__.update({name: value for name, value in weight.__dict__.items() if name not in data.__dict__})
    return data


class FakeParams4bit(Params4bit, FakeTensor):
    """A fake 4-bit weight."""

    def _quantize(self, device: Any) -> Any:
        """As Params4bit does, but in a new tensor."""
        codes, state = bitsandbytes.functional.quantize_4bit(
            self.data.contiguous().to(device),
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
        )
        weight = _like(self, codes)
        weight.quant_state, weight.bnb_quantized = state, True
        if self.module is not None:
            self.module.quant_state = state
        return weight

    def __deepcopy__(self, memo: Any) -> Any:
        return _like(self, self.detach())


class FakeInt8Params(Int8Params, FakeTensor):
    """A fake 8-bit weight."""

    def _quantize(self, device: Any) -> Any:
        """As Int8Params does, but in a new tensor."""
        values = self.data.contiguous().to(device=device, dtype=torch.float16)
        codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(values)
        weight = _like(self, codes)
        weight.CB, weight.SCB = weight.data, scales
        return weight

    def __deepcopy__(self, memo: Any) -> Any:
        return _like(self, self.detach())


# By these peft knows them (peft/utils/integrations.py).
FakeParams4bit.__name__, FakeInt8Params.__name__ = Params4bit.__name__, Int8Params.__name__


class Checked(TorchDispatchMode):
    """Checks the operands of kernels, and answers where a value is read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else READ
        if func is torch.ops.aten.allclose.default:
            return True
        check = KERNELS.get(func.name().partition(".")[0])
        if check and any(isinstance(each, torch.Tensor) and each.device.type == NAME for each in args):
            names = (each.name for each in func._schema.arguments)
            check({**dict(zip(names, args, strict=False)), **kwargs})
        if func.name().partition(".")[0] == "bitsandbytes::int8_vectorwise_quant" and any(args[1:]):
            # The fake kernel cannot count the columns with outliers; here there are none.
            codes, scales, _ = func(args[0])
            return codes, scales, codes.new_empty(0, dtype=torch.int64)
        if func.name().partition(".")[0] == "bitsandbytes::int8_mixed_scaled_mm":
            rows, weights = args[0], args[2]
            return rows.new_empty(*rows.shape[:-1], len(weights)), rows.new_empty(0)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # The fake kernel takes this type alone, the real one all floats of up to 32 bits (GroupedBlas.cpp).
            return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)


def refuse(fault: bool, text: str) -> None:
    """Raise AssertionError of a kernel's requirement."""
    if fault:
        raise AssertionError(text)


Operands = dict[str, Any]
"""By their names in the operation's schema."""


def _flash(given: Operands) -> None:
    """pytorch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd."""
    operands = query, key, _ = given["query"], given["key"], given["value"]
    sizes, kinds = [each.shape[-1] for each in operands], {each.dtype for each in operands}
    refuse(len(set(sizes)) > 1, f"flash attention with heads of {sizes}")
    refuse(sizes[0] % 8 > 0 or sizes[0] > 256, f"flash attention with heads of {sizes[0]}")
    refuse(len(kinds) > 1 or not kinds <= set(HALF), f"flash attention in {kinds}")
    refuse(torch.cuda.get_device_capability(query.device) < (8, 0), "flash attention below 8.0")
    refuse(query.shape[-2] % key.shape[-2] > 0, "flash attention with heads that are no multiple of the key's")
    refuse(any(each.stride(-1) != 1 for each in operands), "flash attention of strided heads")
    ends = [given[name] for name in ("cu_seq_q", "cu_seq_k") if name in given]
    refuse(any(each.dtype != torch.int32 or each.device != query.device for each in ends), "flash attention of ends")


def _index(given: Operands) -> None:
    """pytorch/aten/src/ATen/native/TensorAdvancedIndexing.cpp, check_indices_on_cpu_or_selfdevice."""
    device = given["self"].device
    for index in given["indices"]:
        if isinstance(index, torch.Tensor):
            refuse(index.device.type != "cpu" and index.device != device, f"{device} indexed on {index.device}")


def _grouped(given: Operands) -> None:
    """pytorch/aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: strides in multiples of 16 bytes."""
    for each in (given["self"], given["mat2"]):
        last = each.stride()[-2:]
        refuse(1 not in last, f"grouped product of a matrix of strides {last}")
        refuse(max(last) * each.element_size() % 16 > 0, f"grouped product with rows of {max(last)} elements")


def _blockwise(given: Operands) -> None:
    """bitsandbytes/backends/cuda/ops.py: sizes of blocks, types of floats, all on one device."""
    tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
    refuse(len({each.device for each in tensors}) > 1, f"bitsandbytes on {[str(each.device) for each in tensors]}")
    refuse(given["blocksize"] not in BLOCKS, f"bitsandbytes with blocks of {given['blocksize']}")
    kind = given.get("dtype", given["A"].dtype)
    refuse(kind not in (*HALF, torch.float32), f"bitsandbytes in {kind}")


def _products(given: Operands) -> None:
    """bitsandbytes/backends/cuda/ops.py, _int8_linear_matmul_impl: int8 rows and weights of one length, with fp32
    scales, all on one device."""
    tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
    refuse(len({each.device for each in tensors}) > 1, f"int8 on {[str(each.device) for each in tensors]}")
    kinds = [given[name].dtype for name in ("CA", "CB", "SCA", "SCB")]
    refuse(kinds != [torch.int8, torch.int8, torch.float32, torch.float32], f"an int8 product of {kinds}")
    refuse(given["CA"].shape[-1] != given["CB"].shape[-1], "an int8 product of rows of another length")


def _updates(given: Operands) -> None:
    """bitsandbytes/backends/cuda/ops.py and functional.py, is_on_gpu: all on one device, but paged states; 32-bit
    states in fp32."""
    tensors = [each for each in given.values() if isinstance(each, torch.Tensor) and not hasattr(each, "is_paged")]
    refuse(len({each.device for each in tensors}) > 1, f"an update on {[str(each.device) for each in tensors]}")
    kinds = {given[name].dtype for name in ("state1", "state2") if given.get(name) is not None}
    refuse(not kinds <= {torch.float32, torch.uint8}, f"an update of states in {kinds}")


BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
KERNELS: dict[str, Callable[[Operands], None]] = {
    "aten::_flash_attention_forward": _flash,
    "torch_attn::_varlen_attn": _flash,
    "aten::index": _index,
    "aten::index_put": _index,
    "aten::index_put_": _index,
    "aten::_grouped_mm": _grouped,
    "bitsandbytes::quantize_4bit": _blockwise,
    "bitsandbytes::dequantize_4bit": _blockwise,
    "bitsandbytes::quantize_blockwise": _blockwise,
    "bitsandbytes::dequantize_blockwise": _blockwise,
    "bitsandbytes::int8_mixed_scaled_mm": _products,
    "bitsandbytes::optimizer_update_32bit": _updates,
    "bitsandbytes::optimizer_update_8bit_blockwise": _updates,
}
"""The requirements of kernels of a GPU by operation."""
