"""gguf: the merged model as one GGUF file, for llama.cpp and what is built on it."""

from pathlib import Path
from typing import Any, Literal

from zerolora.config.section import Section
from zerolora.export import llama_cpp, opened
from zerolora.export.targets.target import ExportTarget, Opened, RunResult

FILE = "model.gguf"
Type = Literal[
    "f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto",
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k",
]  # fmt: skip


class Gguf(Section):
    """The merged model as a GGUF file."""

    type: Type = "f16"
    """Type of the weights: f32, f16, bf16, q8_0, tq1_0, tq2_0 or auto by llama.cpp's converter; q2_k to q6_k need its
    llama-quantize on the PATH."""


def _check(source: RunResult, settings: Gguf) -> None:
    llama_cpp.check_types(settings.type, "export.gguf.type")


def _try_out(source: RunResult, settings: Gguf) -> None:
    llama_cpp.try_conversion(source.merged_model)


def _run(source: RunResult, settings: Gguf, output: Path) -> dict[str, Any]:
    llama_cpp.write_gguf(source.merged_model, output / FILE, settings.type)
    return {"type": settings.type}


def _opened(source: RunResult, settings: Gguf, output: Path) -> Opened:
    return opened.gguf(output / FILE)


TARGET = ExportTarget(
    "gguf", "the merged model as a GGUF file", Gguf, _check, _run, _opened, of_merged=True, try_out=_try_out
)
