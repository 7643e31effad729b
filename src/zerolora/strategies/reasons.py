"""A rendered config as a list of values, each with its reason and source."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Reason(NamedTuple):
    """One value of a rendered config."""

    key: str
    """Path of the value, as in zero_optimization.offload_param.device."""
    value: Any
    reason: str
    """Why it has this value."""
    source: str
    """A file of DeepSpeed or torch, a paper, or a thread as in DeepSpeed#1234."""


def nested(reasons: Iterable[Reason]) -> dict[str, Any]:
    """Return the nested config that `reasons` list."""
    config: dict[str, Any] = {}
    for entry in reasons:
        *path, last = entry.key.split(".")
        section = config
        for name in path:
            section = section.setdefault(name, {})
        section[last] = entry.value
    return config
