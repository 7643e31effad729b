"""The interface of an export target: its settings, what it refuses, how it is made, and how it is opened again."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.config.section import Section
from zerolora.types import Device


@dataclass(frozen=True)
class RunResult:
    """What a run left behind, which a target is made of."""

    model: Path
    """resources/models/NAME: config and tokenizer of the base model, without weights."""
    weights: Path
    """Directory of the base model with its weights."""
    adapter: Path
    """Directory of the adapter."""
    data: Path
    """results/data/NAME: the prepared data that it was trained on."""
    merged: Path | None
    """Directory of the merged model; None if nothing was merged."""
    vllm_python: str | None = None
    """Python interpreter of the environment whose vLLM the run is evaluated with; None if it is not."""
    device: Device = "cpu"
    """Where vLLM answers; all other libraries answer on the CPU."""

    @property
    def merged_model(self) -> Path:
        """Return the directory of the merged model, for targets that are `of_merged`."""
        assert self.merged is not None
        return self.merged


@dataclass(frozen=True)
class Opened:
    """An exported model, opened by a library that will use it."""

    library: str
    """Which one, with its version."""
    answers: Callable[[list[list[int]], int, list[int]], list[list[int]]] | None
    """Returns the greedy continuations of prompts: of each at most so many tokens, up to one of the stop tokens. None
    if the library computes nothing here."""
    found: dict[str, Any]
    """What else it says of the file."""


def _nothing(source: RunResult, settings: Any) -> None:
    """The default of `try_out`: `check` refuses all that is known before training."""


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
    """Raises UserError, in one line, for what the target cannot hold; called before anything is written, and by render
    before training (export/early.py), when files have their names and shapes alone."""
    run: Callable[[RunResult, Any, Path], dict[str, Any]]
    """Writes its files into an empty directory, and returns what the manifest is to say of them."""
    opened: Callable[[RunResult, Any, Path], Opened]
    """Opens what `run` wrote as its user will. Raises UserError if it cannot be opened."""
    of_merged: bool = False
    """Made of the merged model, and so refused where nothing was merged; if false, of the adapter."""
    for_vllm: bool = False
    """Opened with vLLM where the run is evaluated with it."""
    try_out: Callable[[RunResult, Any], None] = _nothing
    """Raises UserError for what `run` would fail at, as far as names and shapes tell; called before training alone."""
