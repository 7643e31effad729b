"""Packages that another library imports if they are installed, and that a process does not need.

transformers reads tokenizers without torch, and pyarrow converts columns without pandas: importing them takes three
CPU-seconds and half a second. transformers and peft would import torchao in every process that builds a model, and it
warns on stderr about kernels for other versions of torch.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def leave_out(*packages: str) -> None:
    """Make these packages count as not installed in this process, except those that it has imported."""
    for name in packages:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: not importable


@contextlib.contextmanager
def brought_in(package: str) -> Iterator[None]:
    """Make a package that is left out importable in the block, without its warnings; other libraries still count it as
    not installed."""
    marker = package in sys.modules and sys.modules[package] is None
    loggers = [logging.getLogger(name) for name in (package, "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    if marker:
        del sys.modules[package]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if marker:
            sys.modules[package] = None  # type: ignore[assignment]


def refuse_import(*packages: str) -> None:
    """Make importing these packages fail in this process, except those that it has imported.

    For compiled modules, as of pyarrow, which import a package that is left out as None.
    """
    sys.meta_path.insert(0, _Refusal(packages))


class _Refusal(MetaPathFinder, Loader):
    """Locates packages, and raises ImportError for each that is imported."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return a spec that cannot be loaded; None for other packages."""
        return ModuleSpec(name, self) if name in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Refuse."""
        raise ImportError(f"{spec.name} is left out of this process", name=spec.name)
