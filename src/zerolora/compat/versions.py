"""The versions that a patch was written for. With any other version it stops instead of misbehaving."""

import functools
import importlib.metadata
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from zerolora.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Patch:
    """One use of what another library does not promise to keep."""

    name: str
    library: str
    versions: tuple[str, ...]
    """Exact versions that it was tested with; those of envs/requirements.lock first."""
    upstream: str
    """The thread that would make it unnecessary, or "none known"."""
    untested: tuple[str, ...] = ()
    """Release series, as in 2.11, in which it is allowed if all `features` exist."""
    features: tuple[str, ...] = ()
    """What it relies on, as in torch.distributed:Work.wait."""

    def check(self) -> None:
        """Raise UserError if the installed version is none that this patch is for."""
        result = installed(self.library)
        if result in self.versions:
            return
        wanted = " or ".join(self.versions)
        if result.startswith(tuple(f"{series}." for series in self.untested)):
            missing = next((feature for feature in self.features if not _exists(feature)), None)
            if missing is None:
                return
            wanted += f" (this one has no {missing.replace(':', '.')})"
        raise UserError(
            f"{self.library} {result} is installed, but zerolora.compat ({self.name}) is written for {wanted}; run "
            "`make`, which installs envs/requirements.lock"
        )


PATCHES: dict[str, Patch] = {}
"""Every patch by the name of its function; complete once all modules of this package are imported."""


def patch(
    library: str, *versions: str, upstream: str, untested: tuple[str, ...] = (), features: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function to be a patch, which checks the library's version each time that it is called."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        declared = PATCHES[function.__name__] = Patch(
            function.__name__, library, versions, upstream, untested, features
        )

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
    """Mark a function that stands in for a library's own, so that it is put there once only."""
    function.by_zerolora = True
    return function


def is_replaced(function: Any) -> bool:
    """Tell whether `replaced` marked this function."""
    return getattr(function, "by_zerolora", False)
