"""The interface of an export target: its settings, checks, writer and reader."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.config.section import Section
from zerolora.types import Device


@dataclass(frozen=True)
class RunResult:
    """The outputs of a run that targets are made from."""

    model: Path
    """resources/models/NAME: config and tokenizer of the base model, without weights."""
    weights: Path
    """Directory of the base model with its weights."""
    adapter: Path
    """Directory of the adapter."""
    data: Path
    """results/data/NAME: its prepared data."""
    merged: Path | None
    """Directory of the merged model; None if nothing was merged."""
    vllm_python: str | None = None
    """Python interpreter with the vLLM that evaluates the run; None if vLLM does not."""
    device: Device = "cpu"
    """Device for vLLM; all other libraries run on the CPU."""

    @property
    def merged_model(self) -> Path:
        """Directory of the merged model, for targets that are `of_merged`."""
        assert self.merged is not None
        return self.merged


@dataclass(frozen=True)
class Opened:
    """An exported model, opened by one of its future libraries."""

    library: str
    """Name and version."""
    answers: Callable[[list[list[int]], int, list[int]], list[list[int]]] | None
    """Returns the greedy continuations of prompts, given the maximum number of tokens and the stop tokens. None if the
    library cannot compute."""
    details: dict[str, Any]
    """Other properties of the file."""


@dataclass(frozen=True)
class ExportTarget:
    """A form in which a run is exported."""

    name: str
    """Name in `export.targets`, and of the directory in results/<run>/export/."""
    makes: str
    """Short description."""
    settings: type[Section]
    """Its section of `export`."""
    check: Callable[[RunResult, Any], None]
    """Raises UserError for everything that the target does not support. Called before anything is written, and by
    render before training (export/early.py), when tensors have only names and shapes."""
    run: Callable[[RunResult, Any, Path], dict[str, Any]]
    """Writes the files to an empty directory, and returns details for the manifest."""
    opened: Callable[[RunResult, Any, Path], Opened]
    """Opens the files as a user will. Raises UserError if they cannot be opened."""
    of_merged: bool = False
    """Made from the merged model, so refused if nothing was merged; if false, made from the adapter."""
    for_vllm: bool = False
    """Opened with vLLM if the run is evaluated with it."""
    try_out: Callable[[RunResult, Any], None] = lambda source, settings: None
    """Raises UserError if `run` would fail, judging by names and shapes. Called only before training."""
