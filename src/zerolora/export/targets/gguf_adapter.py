"""gguf_adapter: the adapter alone as a GGUF file, which llama.cpp adds to the base model's (--lora)."""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from zerolora.config.section import Section
from zerolora.errors import UserError
from zerolora.export import llama_cpp
from zerolora.export.peft_limits import check_plain_lora
from zerolora.export.targets.base import ExportTarget, Opened, RunResult

FILE = "adapter.gguf"


class GgufAdapter(Section):
    """The adapter as a GGUF file."""

    type: Literal["f32", "f16", "bf16", "q8_0", "auto"] = "f16"
    """Type of the factors."""


def _check(source: RunResult, settings: GgufAdapter) -> None:
    # One alpha for the whole file (llama.cpp, convert_lora_to_gguf.py), divided by each factor's own rank.
    check_plain_lora(
        source.adapter, "export.targets: gguf_adapter", "llama.cpp", refused=("alpha_pattern", "use_rslora")
    )


def _run(source: RunResult, settings: GgufAdapter, output: Path) -> dict[str, Any]:
    llama_cpp.convert(
        llama_cpp.LORA_CONVERTER, source.adapter, output / FILE, settings.type, "--base", str(source.model)
    )
    return {"type": settings.type}


def _opened(source: RunResult, settings: GgufAdapter, output: Path) -> Opened:
    """Open the file with the gguf package, which reads what llama.cpp reads, but computes nothing."""
    from gguf import GGUFReader
    from safetensors import safe_open

    reader = GGUFReader(output / FILE)
    factors = [tensor.name for tensor in reader.tensors if tensor.name.endswith((".lora_a", ".lora_b"))]
    with safe_open(source.adapter / "adapter_model.safetensors", "numpy") as file:
        trained = len(list(file.keys()))
    if len(factors) != trained:
        raise UserError(f"{output / FILE}: holds {len(factors)} factors of {trained}; report it to llama.cpp")
    field = reader.get_field("adapter.lora.alpha")
    alpha = float(field.parts[field.data[0]][0]) if field else None
    return Opened(f"gguf {version('gguf')}", None, {"factors": len(factors), "alpha": alpha})


TARGET = ExportTarget("gguf_adapter", "the adapter alone as a GGUF file", GgufAdapter, _check, _run, _opened)
