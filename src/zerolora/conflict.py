"""Why a strategy or an optimizer cannot run on a target."""

from typing import NamedTuple


class Conflict(NamedTuple):
    """A setting that a target cannot run, and what to set instead."""

    problem: str
    """The key and value in conflict, and why."""
    remedy: str
    """The setting to use instead."""
