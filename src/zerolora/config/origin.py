"""Checks that a run can continue from the adapter of another run of the config."""

from collections.abc import Iterable
from typing import Any

from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.config.resolve import models_by_source, run_sections
from zerolora.config.schema import Config, Train
from zerolora.errors import shown
from zerolora.methods import lora_init
from zerolora.methods.registry import TRAINABLE

LORA = {
    "r": "r",
    "alpha": "lora_alpha",
    "rank_stabilized": "use_rslora",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}
"""Keys of train.lora that decide the meaning of an adapter's tensors, and their names in peft's config."""
NAMES = ("targets", "modules_to_save")
"""Keys of a method's section that decide which tensors exist."""


def unlike_origin(config: Config, run: str, origin: str) -> Iterable[tuple[tuple[str, ...], str]]:
    """Yield (key, message) for each setting of `run` that prevents it from loading the adapter of `origin`.

    `key` is relative to the run's sections or to the config. Raises ValidationError if a section of either run is
    invalid.
    """
    train, theirs = (run_sections(config, each).train for each in (run, origin))
    adapter = f"results/{origin}/adapter"
    if _kind(train) != _kind(theirs):
        yield ("train", "method"), f"{train.method}, but {adapter} is of {theirs.method}; write {theirs.method}"
    else:
        for section in TRAINABLE[train.method].sections:
            ours, expected = (_meaning(each, section, publishes=each is theirs) for each in (train, theirs))
            for key, value in expected.items():
                if ours[key] != value:
                    yield (
                        ("train", section, key),
                        f"{shown(ours[key])}, but that of {adapter} is {shown(value)}"
                        f"{_twice(theirs) if key in LORA else ''}; write {key}: {shown(value)}",
                    )
    yield from _unlike_data(config, run, origin)


def _kind(train: Train) -> tuple[str | None, bool]:
    """Return the kind of adapter: peft's type, None for all weights, and whether it is DoRA."""
    method = TRAINABLE[train.method]
    return method.peft_type, getattr(method, "options", {}).get("use_dora", False)


def _meaning(train: Train, section: str, publishes: bool) -> dict[str, Any]:
    """Return the keys of a method's section that decide the meaning of the adapter that a run builds or `publishes`."""
    settings = getattr(train, section).model_dump()
    result = {
        key: sorted(set(value)) if isinstance(value := settings[key], list) else value
        for key in NAMES & settings.keys()
    }
    if section == "lora":
        lora = {name: settings[key] for key, name in LORA.items()}
        lora = lora_init.doubled(lora) if publishes and settings["init"] != DEFAULT_INIT else lora
        result |= {key: lora[name] for key, name in LORA.items()}
    return result


def _twice(train: Train) -> str:
    return f" (with init {train.lora.init}, it has twice the rank)" if train.lora.init != DEFAULT_INIT else ""


def _unlike_data(config: Config, run: str, origin: str) -> Iterable[tuple[tuple[str, ...], str]]:
    names = [config.all_runs[each].dataset for each in (run, origin)]
    if any(name not in config.prepare for name in names):  # reported elsewhere
        return
    data, theirs = (config.prepare[name] for name in names)
    models = {name: model for _, models in models_by_source(config) for name, model in models.items()}
    if data.model != theirs.model and models.get(data.model) != models.get(theirs.model):
        yield (
            ("prepare", names[0], "model"),
            f"{data.model}, but {run} continues from results/{origin}/adapter, whose base is {theirs.model}; write "
            f"{theirs.model}, or another data set in {run}",
        )
    for key in ("add_special_tokens", "add_tokens"):
        if getattr(data, key) != getattr(theirs, key):
            yield (
                ("prepare", names[0], key),
                f"{shown(getattr(data, key))}, but {run} continues from results/{origin}/adapter, which was trained "
                f"with {shown(getattr(theirs, key))}; write {key}: {shown(getattr(theirs, key))}",
            )
