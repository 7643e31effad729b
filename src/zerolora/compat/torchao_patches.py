"""torchao: kept out of processes that quantize nothing with it."""

import sys


def hide() -> None:
    """Let transformers and peft take torchao for not installed, unless this process has imported it.

    Where it is there, both import it in every process that builds a model, and it writes lines to stderr about kernels
    for other versions of torch.
    """
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # None: not to be had
