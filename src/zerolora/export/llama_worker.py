"""Continue prompts greedily with llama.cpp: python -I llama_worker.py REQUEST ANSWERS.

A separate process, since llama.cpp ends its process on an unexpected file. It imports nothing from zerolora; prompts
and answers are tokens. llama_cpp.py writes the request.
"""

import http.client
import json
import secrets
import sys
from pathlib import Path
from typing import Any

ERRORS_ONLY = 1


def answers(request: dict[str, Any]) -> list[list[int]]:
    """Return the continuation of each prompt: at most `tokens` tokens, up to llama.cpp's own stop."""
    import xllamacpp  # not before: on import it reads the settings of OpenMP

    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    if request["adapter"]:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["adapter"], 1.0)]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.n_ctx = max(map(len, request["prompts"])) + request["tokens"]
    params.n_parallel = params.n_threads_http = 1
    params.n_gpu_layers = 0
    params.warmup = params.use_jinja = False
    params.cache_ram_mib = 0
    # Attention in fp32 instead of the default f16, so that differences come from the file.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity = ERRORS_ONLY
    key = secrets.token_hex()
    params.api_keys = [key]  # on a free port of 127.0.0.1, for this process only
    server = xllamacpp.Server(params)
    return [_answer(server.listening_address, key, prompt, request["tokens"]) for prompt in request["prompts"]]


def _answer(address: str, key: str, prompt: list[int], tokens: int) -> list[int]:
    # Not Server.handle_completions(): it returns text, and tokens only if they end at a whole character.
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("POST", "/completion", json.dumps(request), headers)
    written: list[int] = json.load(connection.getresponse())["tokens"]
    return written


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answers(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
