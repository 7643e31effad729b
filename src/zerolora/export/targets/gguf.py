"""gguf: the merged model as one GGUF file, for llama.cpp and programs built on it."""

from pathlib import Path
from typing import Any

from zerolora.config.target_sections import Gguf
from zerolora.export import llama_cpp, opened
from zerolora.export.targets.target import ExportTarget, Opened, RunResult

FILE = "model.gguf"


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
