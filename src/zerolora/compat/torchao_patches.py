"""torchao: not imported by processes that do not quantize with it."""

import sys


def hide() -> None:
    """Make transformers and peft treat torchao as not installed, unless this process has imported it.

    Otherwise both import it in every process that builds a model, and it warns on stderr about kernels for other
    versions of torch.
    """
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # None: not importable
