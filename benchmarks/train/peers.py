"""One rank of a peer, in the peer's own virtual environment: peers.py llamafactory|swift FOLDER, with RANK and so on.

It imports nothing of zerolora. FOLDER/settings.json has LLaMA-Factory's keys, or the options of `swift sft`. Both get
the fp32 matmul kernels that zerolora chooses on a CPU (machine/cpu_matmul.py). Writes the CPU seconds of this process
at the end of every step to FOLDER/rank<N>.json.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train once."""
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    import torch
    from transformers.trainer_callback import CallbackHandler

    torch.set_float32_matmul_precision("medium")
    on_step_end, seconds = CallbackHandler.on_step_end, []

    def noted(*arguments: Any, **named: Any) -> Any:
        seconds.append(time.process_time())
        return on_step_end(*arguments, **named)

    setattr(CallbackHandler, "on_step_end", noted)  # noqa: B010 - mypy allows no assignment to a method
    kind, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    {"llamafactory": llamafactory, "swift": swift}[kind](settings)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps({"cpu_seconds": seconds}), encoding="utf-8")


def llamafactory(settings: dict[str, Any]) -> None:
    from llamafactory.train.tuner import run_exp

    run_exp(settings)


def swift(settings: dict[str, Any]) -> None:
    from swift.pipelines import sft_main

    sft_main([text for name, value in settings.items() for text in (f"--{name}", str(value))])


if __name__ == "__main__":
    main()
