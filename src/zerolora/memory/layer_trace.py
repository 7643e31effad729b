"""The traces of layers from their own classes (layer_tracing.py), each kept in a file.

A trace takes seconds. The files are in $XDG_CACHE_HOME/zerolora/traces (by default ~/.cache), named by a digest of the
config, the settings of the pass and the code.
"""

import functools
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zerolora.files import write_json
from zerolora.log import LOGGER
from zerolora.memory.traced_parts import MEASURES, LayerTrace, TracedPart, TracedPass
from zerolora.model.foreign import reason
from zerolora.model.spec import ModelSpec

PACKAGES = ("torch", "transformers", "peft")
"""Packages whose code allocates."""
CODE = ("memory/as_on_cuda.py", "memory/layer_tracing.py", "memory/traced_parts.py", "methods", "model", "compat")
"""Modules of this package whose code does, or that read the config."""


@functools.lru_cache(maxsize=1024)
def layer_trace(model: ModelSpec, traced: TracedPass) -> LayerTrace | None:
    """Return the trace of a model's layers, None if its class cannot be traced (`fault_of_tracing`)."""
    key = _key(model, traced)
    result = _read(key)
    if result is None:
        result = _new(model, traced)
        _write(key, result)
    if isinstance(result, str):
        _faults[model.config] = result
        return None
    return result


_faults: dict[str, str] = {}
_announced: set[str] = set()


def fault_of_tracing(model: ModelSpec) -> str | None:
    """Return why a model's class could not be traced in this process; None if it could, or was not."""
    return _faults.get(model.config)


def _new(model: ModelSpec, traced: TracedPass) -> LayerTrace | str:
    """Return a new trace, or the error of the model's class."""
    if model.config not in _announced:
        _announced.add(model.config)
        folder = _folder()
        kept = f"; kept in {folder}" if folder else ""
        LOGGER.info("a %s has no table of its own: its layers are traced, some seconds once%s", model.family, kept)
    from zerolora.memory.layer_tracing import trace_layers

    try:
        return trace_layers(model, traced)
    except Exception as error:  # model classes raise errors of any type
        LOGGER.debug("the layers of a %s cannot be traced", model.family, exc_info=True)
        return reason(error)


def _folder() -> Path | None:
    """Return the directory of the traces, which may not exist yet; None without a home directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "zerolora/traces"
    except RuntimeError:
        return None


def _write(key: str, result: LayerTrace | str) -> None:
    """Keep a trace; without a directory that can be written, the next process traces again."""
    if folder := _folder():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"{key}.json", result if isinstance(result, str) else asdict(result))


def _read(key: str) -> LayerTrace | str | None:
    """Return a kept trace, or error; None if there is none, or its file is damaged."""
    folder = _folder()
    try:
        content = json.loads((folder / f"{key}.json").read_text(encoding="utf-8")) if folder else None
        if content is None or isinstance(content, str):
            return content
        parts = [_part(each) for each in (content["before"], content["first"], *content["layers"], content["after"])]
        order, hidden = tuple(content["order"]), content["hidden"]
        return LayerTrace(order, hidden, parts[0], parts[1], tuple(parts[2:-1]), parts[-1])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _part(content: dict[str, Any]) -> TracedPart:
    measures = {name: tuple(content[name]) for name in MEASURES}
    return TracedPart(tuple(content["lengths"]), content["step"], **measures)


def _key(model: ModelSpec, traced: TracedPass) -> str:
    method = None if traced.method is None else [traced.method.name, asdict(traced.method)]
    values = [model.config, asdict(traced) | {"method": method}, code()]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


@functools.cache
def code() -> str:
    """Return a digest of the code that a trace depends on: modules of this package, and versions of others."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in CODE:
        place = package / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update(f"{name}=={version(name)}".encode())
    return digest.hexdigest()
