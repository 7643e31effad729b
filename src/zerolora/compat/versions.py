"""The library versions that patches are written for. With any other version, a patch stops instead of misbehaving."""

import functools
import importlib.metadata
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from zerolora.errors import UserError, install_command

VERSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bitsandbytes": ("0.50.2", ("0.48", "0.49", "0.50", "0.51")),
    "deepspeed": ("0.19.8", ("0.19.7",)),
    "peft": ("0.21.2", ("0.18", "0.19", "0.20", "0.21")),
    "snakemake": ("9.27.1", ("9.24", "9.25", "9.26", "9.27")),  # docs/own-data.md
    "snakemake-executor-plugin-slurm": ("2.8.0", ("2.7.1",)),
    "torch": ("2.13.0", ("2.11", "2.12")),  # some GPU machines have 2.11
    "transformers": ("5.23.0", ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")),
}
"""The tested version of each library, as in envs/requirements.lock, and others, or series of them, with which a patch
is allowed if the features that it uses exist. Those of Snakemake have been tested as well
(tests/workflow/test_other_releases.py)."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Patch:
    """A use of another library's internals."""

    name: str
    library: str
    version: str
    others: tuple[str, ...]
    """Other versions, or series of them; see VERSIONS."""
    upstream: str
    """The upstream thread that would make it unnecessary, or "none known"."""
    features: tuple[str, ...]
    """Objects that it uses, as in torch.distributed:Work.wait."""

    def check(self) -> None:
        """Raise UserError unless the patch is for the installed version."""
        result, wanted = installed(self.library), self.version
        if result == wanted:
            return
        if f"{result}.".startswith(tuple(f"{each}." for each in self.others)):
            missing = next((feature for feature in self.features if not _exists(feature)), None)
            if missing is None:
                return
            wanted += f" (this one has no {missing.replace(':', '.')})"
        raise UserError(
            f"{self.library} {result} is installed, but zerolora.compat ({self.name}) is written for {wanted}; run "
            f"{install_command(f'{self.library}=={self.version}')}"
        )


PATCHES: dict[str, Patch] = {}
"""All patches by function name, once all modules of this package are imported."""


def patch(
    library: str, *, upstream: str = "none known", features: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function to be a patch: each call checks the library's version first."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        declared = PATCHES[name] = Patch(name, library, *VERSIONS[library], upstream, features)

        @functools.wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            declared.check()
            return function(*arguments, **named)

        return checked

    return declare


@functools.cache
def installed(library: str) -> str:
    """Return the installed version of a library, without a local part such as +cpu."""
    return importlib.metadata.version(library).partition("+")[0]


def _exists(feature: str) -> bool:
    try:
        pkgutil.resolve_name(feature)
    except (ImportError, AttributeError):
        return False
    return True


def replaced(function: Any) -> Any:
    """Mark a function that replaces a library's own, so that it is installed only once."""
    function.by_zerolora = True
    return function


def is_replaced(function: Any) -> bool:
    """Return whether `replaced` marked this function."""
    return getattr(function, "by_zerolora", False)
