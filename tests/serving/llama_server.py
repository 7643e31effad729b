"""llama.cpp's own server, from the package xllamacpp, in a process of its own: as `llama-server -m MODEL --port PORT`.

    python tests/serving/llama_server.py MODEL

It listens on a free port of the loopback, prints its address, and ends with its standard input. Attention is in fp32
instead of the default f16, so that differences come from the file.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serve a GGUF file, and yield the server's address."""
    command = [sys.executable, __file__, str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            address = server.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), "the server has ended"
            yield address
        finally:
            server.kill()


def main(model: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = model, ["127.0.0.1"], 0
    params.n_ctx, params.n_gpu_layers, params.n_parallel = 256, 0, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.use_jinja = True  # the chat template of the file
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
