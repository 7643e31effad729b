"""gguf_adapter: the adapter as a GGUF file, which llama.cpp adds to the base model (--lora)."""

import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.config.target_sections import GgufAdapter
from zerolora.export import llama_cpp
from zerolora.export.adapter_limits import WEIGHTS, check_plain_lora
from zerolora.export.targets.target import ExportTarget, Opened, RunResult
from zerolora.tensor_file import read_header

FILE = "adapter.gguf"


def _check(source: RunResult, settings: GgufAdapter) -> None:
    # llama.cpp has one alpha per file (convert_lora_to_gguf.py), divided by each factor's rank.
    check_plain_lora(
        source.adapter, "export.targets: gguf_adapter", "llama.cpp", refused=("alpha_pattern", "use_rslora")
    )


def _try_out(source: RunResult, settings: GgufAdapter) -> None:
    llama_cpp.try_adapter(source.adapter, source.model, _factors(source.adapter))


def _run(source: RunResult, settings: GgufAdapter, output: Path) -> dict[str, Any]:
    llama_cpp.convert(
        llama_cpp.LORA_CONVERTER, source.adapter, output / FILE, settings.type, "--base", str(source.model)
    )
    return {"type": settings.type}


def _opened(source: RunResult, settings: GgufAdapter, output: Path) -> Opened:
    """Open the file with llama.cpp on a temporary GGUF file of the base model; if llama.cpp is not installed, with the
    gguf package, which reads the factors but cannot compute."""
    file = output / FILE
    details = _contents(source, file)
    if not llama_cpp.is_installed():
        return Opened(f"gguf {version('gguf')}", None, details)

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        with tempfile.TemporaryDirectory(dir=output) as folder:  # as large as the base model
            base = Path(folder) / "base.gguf"
            llama_cpp.convert(llama_cpp.CONVERTER, source.weights, base, _exact_type(source.weights))
            answer = llama_cpp.opened(base, file).answers
            assert answer is not None
            return answer(prompts, tokens, stops)

    return replace(llama_cpp.opened(file), answers=answers, details=details)


def _contents(source: RunResult, file: Path) -> dict[str, Any]:
    """Return the number of factors in the file, and its alpha. Raises UserError if one is missing."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    factors = [tensor.name for tensor in reader.tensors if tensor.name.endswith((".lora_a", ".lora_b"))]
    llama_cpp.check_factors(source.adapter, len(factors), _factors(source.adapter))
    field = reader.get_field("adapter.lora.alpha")
    alpha = float(field.parts[field.data[0]][0]) if field else None
    return {"factors": len(factors), "alpha": alpha}


def _factors(adapter: Path) -> int:
    """Return the number of an adapter's factors, without the copies of embedding and head that peft also saves."""
    return sum(".lora_" in name for name in read_header(adapter / WEIGHTS).tensors)


def _exact_type(directory: Path) -> str:
    """Return the GGUF type that stores a model's weights unchanged."""
    from zerolora.model.architecture import config_of

    return {"torch.bfloat16": "bf16", "torch.float16": "f16"}.get(str(config_of(directory).dtype), "f32")


TARGET = ExportTarget(
    "gguf_adapter", "the adapter alone as a GGUF file", GgufAdapter, _check, _run, _opened, try_out=_try_out
)
