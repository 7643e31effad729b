"""The settings of the export targets: sections of `export` in the config."""

from typing import Literal

from zerolora.config.section import Section
from zerolora.registries import with_sections

GgufType = Literal[
    "f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto",
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k",
]  # fmt: skip


class CompressedTensors(Section):
    """The merged model quantized by llm-compressor."""

    type: Literal["fp8", "int8", "int4"] = "int4"
    """Weight type of linear layers: fp8 (e4m3) or int8 with a scale per row, or int4 with a scale per group_size
    values. fp8 also rounds activations to fp8, with a scale per token."""
    group_size: Literal[32, 64, 128] = 128
    """Values per scale for int4. Layers whose input size is not a multiple of it are not quantized."""


class Gguf(Section):
    """The merged model as a GGUF file."""

    type: GgufType = "f16"
    """Weight type. f32, f16, bf16, q8_0, tq1_0, tq2_0 and auto are written by llama.cpp's converter; q2_k to q6_k need
    its llama-quantize on the PATH."""


class GgufAdapter(Section):
    """The adapter as a GGUF file."""

    type: Literal["f32", "f16", "bf16", "q8_0", "auto"] = "f16"
    """Type of the factors."""


class Ollama(Section):
    """The merged model as a GGUF file with a Modelfile for Ollama."""

    type: GgufType = "q8_0"
    """Weight type, as for gguf."""
    system: str | None = None
    """System prompt of the Modelfile. Default: none."""


class TorchAo(Section):
    """The merged model quantized by torchao."""

    type: Literal["int8", "fp8", "nvfp4"] = "int8"
    """Weight type of linear layers: int8 or fp8 (e4m3) with a scale per row, or nvfp4 (4-bit floats) with a scale per
    16 values."""


class VllmAdapter(Section):
    """The adapter for vLLM."""

    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """The server's --max-lora-rank (values as in vllm/config/lora.py)."""


@with_sections("target_sections")
class ExportSections(Section):
    """The settings of all export targets."""

    compressed_tensors: CompressedTensors = CompressedTensors.model_construct()
    """Settings of compressed_tensors: the merged model with weights in 8 or 4 bits, in vLLM's format."""
    gguf: Gguf = Gguf.model_construct()
    """Settings of gguf: the merged model as a GGUF file."""
    gguf_adapter: GgufAdapter = GgufAdapter.model_construct()
    """Settings of gguf_adapter: the adapter as a GGUF file."""
    ollama: Ollama = Ollama.model_construct()
    """Settings of ollama: a GGUF file with a Modelfile for Ollama."""
    torchao: TorchAo = TorchAo.model_construct()
    """Settings of torchao: the merged model with weights in 8 or 4 bits."""
    vllm_adapter: VllmAdapter = VllmAdapter.model_construct()
    """Settings of vllm_adapter: the adapter within vLLM's limits."""
