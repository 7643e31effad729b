"""Guards of the meta device: what a config.json may not ask transformers to build."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.log import LOGGER
from zerolora.model.families.keys import LAYERS, most_of

MOST_MODULES = 40_000
"""Of a model that is built. The largest published ones have some thousands; building more takes over ten seconds."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("ffn_dim", "d_ff", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts"),
)
"""What sizes a model, by transformers' own names (attribute_map has those of each architecture). save_pretrained always
writes them, except for a part of a composite model."""
NEVER_ZERO = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
IGNORED = ("num_labels", "id2label", "label2id")
"""Keys of classifiers, which may make a table of any length."""


def check_sizes(config: dict[str, Any], where: Path) -> None:
    """Raise UserError for a size, at any depth of the file, with which building would take minutes, or that is 0."""
    for key in NEVER_ZERO:
        if isinstance(config.get(key, 1), int) and config.get(key, 1) < 1:
            raise UserError(f"{where}: {key} is {shown(config[key])}; write a whole number of at least 1")
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            for key, size in value.items():
                if key in (*SIZES, *LAYERS) and isinstance(size, int) and size > (most := most_of(key)):
                    raise UserError(f"{where}: {key} is {shown(size)}; write a whole number of at most {most:,}")


def check_complete(settings: Any, config: dict[str, Any], where: Path) -> None:
    """Raise UserError if the file lacks a size that the architecture needs, which its class would take by default.

    A composite model's part may lack sizes that are its class's defaults, since save_pretrained writes differences
    only; these are logged.
    """
    text = settings.get_text_config(decoder=True)
    part = next((name for name in settings.sub_configs if getattr(settings, name, None) is text), None)
    given = config.get(part) if part else None
    missing = _taken_by_default(text, given if isinstance(given, dict) else config)
    if missing and isinstance(given, dict):
        taken = ", ".join(f"{name} {value}" for name, value in missing.items())
        LOGGER.info("%s: %s lacks sizes, for which transformers' defaults are taken: %s", where, part, taken)
    elif missing:
        raise UserError(
            f"{where}: has no {next(iter(missing))}, which the architecture {config['model_type']} needs; "
            "fetch the model again"
        )


def attribute(text: Any, name: str) -> Any:
    """Return a value of a config, the largest one where layers differ in it; None if it has none."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers/integrations/heterogeneity: AmbiguousGlobalPerLayerAttributeError
        values = (getattr(layer, name, None) for layer in text.per_layer_config)
        return max((value for value in values if value is not None), default=None)


def _aliases(text: Any, name: str) -> set[str]:
    """Return the names that a config class accepts for one of its fields."""
    pairs = text.attribute_map.items()
    return {name} | {usual for usual, own in pairs if own == name} | {own for usual, own in pairs if usual == name}


def _taken_by_default(text: Any, given: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that a file does not give, with the default that its config class has taken."""
    return {
        field.name: field.default
        for field in (fields(text) if is_dataclass(text) else ())
        if isinstance(field.default, int)
        and not isinstance(field.default, bool)
        and (names := _aliases(text, field.name)) & set(SIZES)
        and not names & given.keys()
        # Some classes read older names of a key themselves.
        and attribute(text, field.name) == field.default
    }


@contextmanager
def limited_modules(where: Path) -> Iterator[None]:
    """Raise UserError if more modules are built than any model has."""
    from torch.nn.modules.module import register_module_module_registration_hook

    built = 0

    def count(*_: Any) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise UserError(f"{where}: describes a model of more than {MOST_MODULES:,} modules; correct its sizes")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_countable(text: Any, where: Path) -> None:
    """Raise UserError for a size that no model can have."""
    for name in NEVER_ZERO:
        value = attribute(text, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{where}: {name} is {shown(value)}; write a whole number of at least 1")
