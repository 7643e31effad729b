"""transformers: its import, in half the time.

For its lazy modules, transformers reads all files of its models for their __all__, line by line, and does so again for
the package of all models, since its cache of directories is too small.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from zerolora.compat.versions import patch

MODULE = "transformers.utils.import_utils"
EXPORTS = "__all__"


def import_quickly() -> None:
    """Make a later import of transformers in this process take half the time; without effect after its import."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Locates MODULE once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of MODULE, with another loader; None for other modules."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec and spec.origin:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then replace its functions."""
        super().exec_module(module)
        read_exports_quickly(module)


@patch(
    "transformers",
    upstream="none known; import transformers takes 0.8 CPU-seconds, and AutoTokenizer 1.2",
    features=(f"{MODULE}:fetch__all__", f"{MODULE}:create_import_structure_from_path"),
)
def read_exports_quickly(module: Any) -> None:
    """Replace functions of MODULE, before their first call, by ones with the same results: exported names are read from
    the end of a file's text, and the cache holds all directories."""
    module.fetch__all__ = exports_from_end(module.fetch__all__)
    module.create_import_structure_from_path = functools.cache(module.create_import_structure_from_path.__wrapped__)


def exports_from_end(fetch: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Return fetch__all__ without a pass over all lines: it uses those from the last one that begins with __all__."""

    @functools.wraps(fetch)
    def fetched(content: str) -> list[str]:
        last = content.rfind(f"\n{EXPORTS}") + 1
        return fetch(content[last:]) if content.startswith(EXPORTS, last) else []

    return fetched
