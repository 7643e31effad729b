"""Tiny checkpoints in published quantized formats, packed bit by bit from their specifications, and their values."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantized = tuple[Tensors, torch.Tensor]
"""What is stored of a weight, by the end of its name, and its values in fp32."""
GROUP = 16
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has each of eight outputs (AutoAWQ/awq/utils/packing_utils.py)."""


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows of unsigned codes as rows of 32-bit words, by the arithmetic of Python's integers."""
    rows = []
    for row in codes.tolist():
        whole = sum(code << (number * bits) for number, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [(whole >> (32 * number)) & 0xFFFFFFFF for number in range(count)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def by_block(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return (code - zero) · scale, a number at a time."""
    result = torch.empty(codes.shape)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            at = i // rows, j // columns
            result[i, j] = (codes[i, j].float() - zeros[at].float()) * scales[at].float()
    return result


def codes_of(shape: torch.Size, first: int, last: int) -> torch.Tensor:
    return torch.randint(first, last + 1, tuple(shape), dtype=torch.int32)


def fp8_blocks(shape: torch.Size) -> Quantized:
    """Blocks of [16, 20], which do not divide the weights, as those of DeepSeek-V3 of 576 rows."""
    codes = torch.randn(shape).mul(8).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 16), -(-shape[1] // 20)).add(0.1)
    values = by_block(codes.float(), scales, torch.zeros_like(scales), 16, 20)
    return {"weight": codes, "weight_scale_inv": scales}, values


def fp8_whole(shape: torch.Size) -> Quantized:
    codes, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.tensor(0.37)
    scales = {"weight_scale": scale, "input_scale": torch.tensor(2.0)}
    return {"weight": codes, **scales}, codes.float() * scale


def fp8_rows(shape: torch.Size) -> Quantized:
    codes, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(shape[0], 1)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_powers(shape: torch.Size) -> Quantized:
    """Blocks of [1, 16] with exponents, as MXFP8 has."""
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    exponents = codes_of(torch.Size((shape[0], shape[1] // GROUP)), 120, 130)
    values = by_block(codes.float(), 2.0 ** (exponents - 127), torch.zeros_like(exponents), 1, GROUP)
    return {"weight": codes, "weight_scale_inv": exponents.to(torch.uint8)}, values


def int4_groups(shape: torch.Size) -> Quantized:
    """W4A16 of llm-compressor, asymmetric."""
    codes, size = codes_of(shape, -8, 7), torch.Size((shape[0], shape[1] // GROUP))
    scales, zeros = torch.rand(size).to(torch.bfloat16), codes_of(size, -8, 7)
    stored = {
        "weight_packed": packed(codes + 8, 4),
        "weight_shape": torch.tensor(shape),
        "weight_scale": scales,
        "weight_zero_point": packed((zeros + 8).T, 4).T.contiguous(),
    }
    return stored, by_block(codes, scales, zeros, 1, GROUP)


def int8_rows(shape: torch.Size) -> Quantized:
    """W8A8 of llm-compressor."""
    codes, scales = codes_of(shape, -128, 127), torch.rand(shape[0], 1).to(torch.bfloat16)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes.float() * scales.float()


def gptq(shape: torch.Size, bits: int = 4, less: int = 1) -> Quantized:
    """In the order of activations, asymmetric; zeros are stored less 1 in the first version of the format."""
    outputs, inputs = shape
    most = (1 << bits) - 1
    codes, groups = codes_of(shape, 0, most), inputs // GROUP
    zeros = codes_of(torch.Size((groups, outputs)), less, most)
    scales = torch.rand(groups, outputs).half()
    order = torch.arange(inputs)[torch.randperm(inputs)] // GROUP
    values = torch.empty(shape)
    for j in range(inputs):
        group = int(order[j])
        values[:, j] = (codes[:, j] - zeros[group]).float() * scales[group].float()
    stored = {"qweight": packed(codes, bits).T.contiguous(), "qzeros": packed(zeros - less, bits), "scales": scales}
    return {**stored, "g_idx": order.to(torch.int32)}, values


def awq(shape: torch.Size) -> Quantized:
    outputs, inputs = shape
    codes, size = codes_of(shape, 0, 15), torch.Size((inputs // GROUP, outputs))
    zeros, scales = codes_of(size, 0, 15), torch.rand(size).half()
    values = by_block(codes, scales.T, zeros.T, 1, GROUP)

    def words(numbers: torch.Tensor) -> torch.Tensor:
        placed = torch.empty_like(numbers).unflatten(1, (-1, 8))
        placed[..., list(AWQ_PLACES)] = numbers.unflatten(1, (-1, 8))
        return packed(placed.flatten(1), 4)

    return {"qweight": words(codes.T), "qzeros": words(zeros), "scales": scales}, values


def scheme(**weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax", **weights}}
    named = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", **named}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": True, "sym": False, "damp_percent": 0.01}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Size], Quantized]]] = {
    "fp8, blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 20]},
        fp8_blocks,
    ),
    "fp8, whole": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, fp8_whole),
    "fp8, rows": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "fp8, powers of two": (
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [1, GROUP]},
        fp8_powers,
    ),
    "compressed-tensors, int4": (scheme(**INT4) | {"format": "pack-quantized"}, int4_groups),
    "compressed-tensors, int8": (
        scheme(num_bits=8, type="int", strategy="channel", symmetric=True) | {"format": "int-quantized"},
        int8_rows,
    ),
    "compressed-tensors, fp8": (
        scheme(num_bits=8, type="float", strategy="channel", symmetric=True) | {"format": "float-quantized"},
        fp8_rows,
    ),
    "gptq": (GPTQ | {"bits": 4}, gptq),
    "gptq_v2, 2 bits": (GPTQ | {"bits": 2, "checkpoint_format": "gptq_v2"}, lambda shape: gptq(shape, 2, 0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
}
"""quantization_config, and what stores a weight of a linear module."""


def saved_quantized(model: Path, output: Path, kind: str) -> Tensors:
    """Write a model with other linear weights, quantized, and return the tensors that it should be converted to."""
    config, quantize = FORMATS[kind]
    torch.manual_seed(0)
    stored: Tensors = {}
    expected: Tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, values = quantize(tensor.shape)
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
            expected[name] = values.to(torch.bfloat16)
        else:
            stored[name] = expected[name] = tensor
    shutil.copytree(model, output, ignore=shutil.ignore_patterns("*.safetensors"))
    _save(stored, output, config)
    return expected


def saved_mxfp4(model: Path, output: Path) -> Tensors:
    """Write a tiny gpt-oss with the tokenizer of a model, its experts in MXFP4, and return the tensors that it should
    be converted to."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import dequantize_convertops

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = GptOssConfig(**sizes, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    GptOssForCausalLM(config).save_pretrained(output)
    for path in (*model.glob("tokenizer*"), *model.glob("chat_template*")):
        shutil.copy(path, output)
    stored = load_file(output / "model.safetensors")
    expected = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = codes_of(torch.Size((experts, outputs, inputs // 32, 16)), 0, 255).to(torch.uint8)
        scales = codes_of(blocks.shape[:-1], 110, 120).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = dequantize_convertops(blocks, scales, torch.bfloat16).detach()
    _save(stored, output, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return expected


def _save(stored: Tensors, output: Path, quantization: dict[str, Any]) -> None:
    save_file(stored, output / "model.safetensors", {"format": "pt"})
    path = output / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def sharded(model: Path) -> None:
    """Divide a model's tensors into two files, the scales of a weight in another than its codes."""
    file = "model.safetensors"
    tensors = load_file(model / file)
    names = {name: f"model-0000{1 + ('scale' in name)}-of-00002.safetensors" for name in tensors}
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    for each in set(names.values()):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == each}, model / each)
    (model / file).unlink()
    (model / f"{file}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
