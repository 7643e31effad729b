"""ollama: a GGUF file with a Modelfile, for `ollama create NAME -f Modelfile`."""

import tempfile
from pathlib import Path
from typing import Any

from zerolora.config.target_sections import Ollama
from zerolora.export import llama_cpp, modelfile, opened
from zerolora.export.targets.gguf import FILE
from zerolora.export.targets.target import ExportTarget, Opened, RunResult
from zerolora.log import LOGGER


def _check(source: RunResult, settings: Ollama) -> None:
    llama_cpp.check_types(settings.type, "export.ollama.type")
    with tempfile.TemporaryDirectory() as folder:
        modelfile.write(source.merged_model, Path(folder), settings.system, FILE)


def _try_out(source: RunResult, settings: Ollama) -> None:
    llama_cpp.try_conversion(source.merged_model)


def _run(source: RunResult, settings: Ollama, output: Path) -> dict[str, Any]:
    llama_cpp.write_gguf(source.merged_model, output / FILE, settings.type)
    known = modelfile.write(source.merged_model, output, settings.system, FILE)
    if known is None:
        LOGGER.warning(
            "export: ollama: the model's chat template is not one of %s, so the Modelfile has no TEMPLATE; Ollama "
            "looks for one that fits the template in the GGUF file",
            ", ".join(modelfile.GO_TEMPLATES),
        )
    return {"type": settings.type, "prompt_format": known}


def _opened(source: RunResult, settings: Ollama, output: Path) -> Opened:
    return opened.gguf(output / FILE)


TARGET = ExportTarget(
    "ollama", "a GGUF file with Ollama's Modelfile", Ollama, _check, _run, _opened, of_merged=True, try_out=_try_out
)
