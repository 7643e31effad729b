"""The interface of an export target: its settings, what it refuses, how it is made, and how it is opened again."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.config.section import Section


@dataclass(frozen=True)
class RunResult:
    """What a run left behind, which a target is made of."""

    model: Path
    """resources/models/NAME: config and tokenizer of the base model, without weights."""
    weights: Path
    """Directory of the base model with its weights."""
    adapter: Path
    """Directory of the adapter."""
    merged: Path
    """Directory of the merged model."""


@dataclass(frozen=True)
class Opened:
    """An exported model, opened by a library that will use it."""

    library: str
    """Which one, with its version."""
    answer: Callable[[list[int], int, list[int]], list[int]] | None
    """Returns the greedy continuation of a prompt: at most so many tokens, up to one of the stop tokens. None if the
    library computes nothing here."""
    found: dict[str, Any]
    """What else it says of the file."""


@dataclass(frozen=True)
class ExportTarget:
    """One form in which a run is exported."""

    name: str
    """As `export.targets` has it; also the folder's name in results/<run>/export/."""
    makes: str
    """What it is, in a few words."""
    settings: type[Section]
    """Its section of `export`."""
    check: Callable[[RunResult, Any], None]
    """Raises UserError, in one line, for what the target cannot hold; called before anything is written."""
    run: Callable[[RunResult, Any, Path], dict[str, Any]]
    """Writes its files into an empty directory, and returns what the manifest is to say of them."""
    opened: Callable[[RunResult, Any, Path], Opened]
    """Opens what `run` wrote as its user will. Raises UserError if it cannot be opened."""
