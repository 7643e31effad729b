"""GPTQ and AWQ: integers of 2 to 8 bits in 32-bit words, with a scale and a zero for each group of a module's inputs.

A weight M.weight is stored transposed, as M.qweight, M.qzeros and M.scales; GPTQ also stores the group of each input,
M.g_idx. A number is (code - zero) · scale. Sources:
- GPTQ, whose words are filled along the inputs, zeros along the outputs: AutoGPTQ/auto_gptq/nn_modules/qlinear/
  qlinear_cuda_old.py, and GPTQModel/gptqmodel/nn_modules/qlinear/__init__.py, dequantize_weight. Format gptq stores
  zeros less 1, gptq_v2 as they are (gptqmodel/utils/model.py, convert_gptq_v1_to_v2_format).
- AWQ, whose words are filled along the outputs, in the order 0 2 4 6 1 3 5 7: AutoAWQ/awq/utils/packing_utils.py,
  dequantize_gemm.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerolora.errors import UserError, shown
from zerolora.model.quantized.checkpoint import FLOATS, INSTEAD, Checkpoint, Weight, spans
from zerolora.model.quantized.numbers import WORD, unpacked, words
from zerolora.tensor_file import StoredTensor

if TYPE_CHECKING:
    import torch

CODES = ".qweight"
IDLE = (
    *("quant_method", "modules_to_not_convert", "damp_percent", "static_groups", "true_sequential", "lm_head"),
    *("model_name_or_path", "model_file_base_name", "quantizer", "meta", "batch_size", "block_name_to_quantize"),
    *("cache_block_outputs", "dataset", "disable_exllama", "exllama_config", "use_exllama", "use_cuda_fp16"),
    *("max_input_length", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("pad_token_id", "tokenizer", "act_group_aware", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len"),
    *("modules_to_fuse", "damp_auto_increment", "mse", "offload_to_disk", "hyb_act"),
)
"""Keys of how the codes were found, or how a library computes with them."""
GPTQ_KEYS = (
    *("bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "pack_dtype", "dynamic"),
    "is_marlin_format",
)
FALSE = (False, None)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""


def read(checkpoint: Checkpoint) -> None:
    """Add the GPTQ weights of a checkpoint."""
    stated = checkpoint.stated
    stated.only((*IDLE, *GPTQ_KEYS))
    bits = stated.one_of("bits", (2, 3, 4, 8))
    key = "format" if stated.values.get("checkpoint_format") is None else "checkpoint_format"
    less = 1 if stated.one_of(key, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
    stated.one_of("pack_dtype", ("int32",), "int32")
    stated.one_of("is_marlin_format", FALSE, False)
    stated.one_of("dynamic", ({}, None))
    ordered = stated.one_of("desc_act", (True, False), False)
    symmetric = stated.one_of("sym", (True, False), True)
    for module, codes in checkpoint.ends(CODES):
        sides = _sides(codes)
        inputs, outputs = sides[0] * WORD // bits, sides[1]
        if sides[0] * WORD % bits:
            raise UserError(
                f"{codes.path}: {shown(codes.name)} has {sides[0]} rows of {WORD} bits, which are no whole number of "
                f"{bits} bits; {INSTEAD}"
            )
        size = _group_size(checkpoint, inputs)
        groups = -(-inputs // size)
        scales = checkpoint.needs(f"{module}.scales", codes, FLOATS, (groups, outputs))
        zeros = checkpoint.needs(f"{module}.qzeros", codes, ("I32",), (groups, words(outputs, bits)))
        stored, order = [codes, scales, zeros], None
        if f"{module}.g_idx" in checkpoint.stored or ordered:
            order = checkpoint.needs(f"{module}.g_idx", codes, ("I32", "I64"), (inputs,))
            stored.append(order)
        blocks = functools.partial(_gptq, codes, scales, zeros, order, bits, size, less, symmetric, ordered)
        checkpoint.weights.append(Weight(f"{module}.weight", (outputs, inputs), tuple(stored), blocks))


def read_awq(checkpoint: Checkpoint) -> None:
    """Add the AWQ weights of a checkpoint."""
    stated = checkpoint.stated
    stated.only((*IDLE, "bits", "group_size", "zero_point", "version", "format", "sym", "desc_act"))
    stated.one_of("bits", (4,), 4)
    stated.one_of("version" if stated.values.get("version") is not None else "format", ("gemm", "GEMM"), "gemm")
    stated.one_of("zero_point", (True,), True)
    for module, codes in checkpoint.ends(CODES):
        inputs, columns = _sides(codes)
        outputs = columns * len(AWQ_ORDER)
        size = _group_size(checkpoint, inputs)
        scales = checkpoint.needs(f"{module}.scales", codes, FLOATS, (-(-inputs // size), outputs))
        zeros = checkpoint.needs(f"{module}.qzeros", codes, ("I32",), (-(-inputs // size), columns))
        blocks = functools.partial(_awq, codes, scales, zeros, size)
        checkpoint.weights.append(Weight(f"{module}.weight", (outputs, inputs), (codes, scales, zeros), blocks))


def _sides(codes: StoredTensor) -> tuple[int, int]:
    if codes.kind != "I32" or len(codes.shape) != 2:
        raise UserError(
            f"{codes.path}: {shown(codes.name)} is {codes.kind} and {list(codes.shape)}; a matrix of I32 is expected; "
            f"{INSTEAD}"
        )
    return codes.shape[0], codes.shape[1]


def _group_size(checkpoint: Checkpoint, inputs: int) -> int:
    """Return the inputs of a group; -1 stands for all of them."""
    size = checkpoint.stated.values.get("group_size")
    if type(size) is not int or (size != -1 and size < 1):
        checkpoint.stated.refuse("group_size", "and a number of inputs is expected, or -1")
    return inputs if size == -1 else size


def _gptq(
    codes: StoredTensor,
    scales: StoredTensor,
    zeros: StoredTensor,
    order: StoredTensor | None,
    bits: int,
    size: int,
    less: int,
    symmetric: bool,
    ordered: bool,
) -> "Iterator[torch.Tensor]":
    """Yield rows of a weight. Raises UserError for zeros and groups that libraries read differently."""
    import torch

    packed, scale = codes.read(), scales.read().float()
    inputs, (groups, outputs) = packed.shape[0] * WORD // bits, scale.shape
    zero = unpacked(zeros.read(), bits, outputs)
    if less and bool((zero == (1 << bits) - 1).any()):
        raise UserError(
            f"{zeros.path}: {shown(zeros.name)} has the highest code, which is a zero of 0 less 1, and read as "
            f"0 or as {1 << bits} by different libraries; {INSTEAD}"
        )
    zero += less
    if symmetric and bool((zero != 1 << (bits - 1)).any()):
        raise UserError(
            f"{zeros.path}: {shown(zeros.name)} has other zeros than {1 << (bits - 1)}, and sym is true, so that some "
            f"libraries do not read them; {INSTEAD}"
        )
    group = torch.arange(inputs) // size
    if order is not None:
        own = order.read().long()
        if int(own.min()) < 0 or int(own.max()) >= groups or not (ordered or own.equal(group)):
            raise UserError(
                f"{order.path}: {shown(order.name)} has inputs in other groups than desc_act, {str(ordered).lower()}, "
                f"and {groups} groups allow; {INSTEAD}"
            )
        group = own
    for first, last in spans(outputs, inputs):
        code = unpacked(packed[:, first:last].T, bits, inputs)
        yield (code - zero.T[first:last, group]).float().mul_(scale.T[first:last, group])


def _awq(codes: StoredTensor, scales: StoredTensor, zeros: StoredTensor, size: int) -> "Iterator[torch.Tensor]":
    """Yield rows of a weight."""
    import torch

    packed, scale, zero = codes.read(), scales.read().float(), zeros.read()
    group = torch.arange(packed.shape[0]) // size
    for first, last in spans(packed.shape[1], packed.shape[0] * len(AWQ_ORDER)):
        code, low = (_in_order(each[:, first:last]) for each in (packed, zero))
        part = scale[:, first * len(AWQ_ORDER) : last * len(AWQ_ORDER)]
        yield (code - low[group]).float().mul_(part[group]).T


def _in_order(packed: "torch.Tensor") -> "torch.Tensor":
    """Return the codes of AWQ's words, [rows, words], in the order of the outputs."""
    count = len(AWQ_ORDER)
    codes = unpacked(packed, WORD // count, packed.shape[1] * count).reshape(len(packed), -1, count)
    return codes[..., list(AWQ_ORDER)].flatten(1)
