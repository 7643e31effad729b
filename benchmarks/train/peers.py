"""One rank of a peer, in the peer's own virtual environment: peers.py llamafactory|swift SETTINGS, with RANK and so on.

It imports nothing of zerolora. SETTINGS is a JSON file: for LLaMA-Factory the keys of its YAML, for ms-swift the
options of `swift sft`. On a CPU both get the fp32 matmul kernels that zerolora chooses (machine/cpu_matmul.py).
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Train once."""
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    import torch

    torch.set_float32_matmul_precision("medium")
    kind, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    {"llamafactory": llamafactory, "swift": swift}[kind](settings)


def llamafactory(settings: dict[str, object]) -> None:
    from llamafactory.train.tuner import run_exp

    run_exp(settings)


def swift(settings: dict[str, object]) -> None:
    from swift.pipelines import sft_main

    sft_main([text for name, value in settings.items() for text in (f"--{name}", str(value))])


if __name__ == "__main__":
    main()
