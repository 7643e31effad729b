"""Reads a model's config.json and checks each key."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown

LARGEST = 2**31 - 1
"""Maximum of a size; a file with a larger one is damaged."""
MOST_LAYERS = 1000
"""Maximum layers of a stack. Published models have up to 200; counting more layer by layer would take minutes."""
LAYERS = (*("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers", "depth"),)
"""Architectures' keys for a number of layers."""
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)
"""transformers' names of activations (activations.py, ACT2FN). A test keeps the two equal."""
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation", "feed_forward_proj")


@dataclass(frozen=True)
class Keys:
    """A config.json whose values are checked when they are read, under the first of their names that is present."""

    config: dict[str, Any]
    where: Path
    family: str

    def size(self, *names: str, default: int | None = None, null: int | None = None) -> int:
        """Return a number from 1 to LARGEST, of layers to MOST_LAYERS; `default` for a missing key, `null` for null.

        Without `default` the key is required even if the config class has a default: the file describes a model of
        another size.
        """
        name = next((name for name in names if name in self.config), None)
        if name is None:
            if default is None:
                raise UserError(
                    f"{self.where}: has no {names[-1]}, which a {self.family} model needs; fetch the model again"
                )
            return default
        value = self.config[name]
        if value is None and null is not None:
            return null
        # true in JSON becomes bool, a subclass of int.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a whole number of at least 1, without quotes")
        if value > (most := most_of(name)):
            raise self.wrong(name, f"a whole number of at most {most:,}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def rate(self, name: str, default: float) -> float:
        """Return a number from 0 to 1, such as a dropout."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(name, "a number from 0 to 1")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Return a name, such as an activation's."""
        value = self.config.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, f"a name such as {default}")
        if name in ACTIVATION_KEYS and value.rpartition("-")[2] not in ACTIVATIONS:
            raise self.wrong(name, f"an activation that transformers has, such as {default}")
        return value

    def capped(self, name: str, default: bool) -> bool:
        """Return whether attention scores or logits are capped."""
        value = self.config.get(name, 1.0 if default else None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise self.wrong(name, "a number above 0, or null")
        return value is not None

    def divided(self, hidden: int, heads: int) -> int:
        """Return the width of a head, in a family whose class refuses a remainder."""
        if hidden % heads:
            raise UserError(
                f"{self.where}: the hidden size {hidden} is not a multiple of the {heads} attention heads, "
                f"which a {self.family} model needs; use one that is, or fetch the model again"
            )
        return hidden // heads

    def rotary_share(self, name: str, default: float) -> float:
        """Return the share of a head that rotary embedding rotates, under `name` in older files."""
        parameters = self.config.get("rope_scaling") or self.config.get("rope_parameters")
        if isinstance(parameters, dict) and "partial_rotary_factor" in parameters:
            return replace(self, config=parameters).rate("partial_rotary_factor", default)
        return self.rate(name, default)

    def wrong(self, name: str, remedy: str) -> UserError:
        """Return the error for an invalid value."""
        return UserError(f"{self.where}: {name} is {shown(self.config[name])}; use {remedy}")


def most_of(name: str) -> int:
    """Return the largest value that a size may have."""
    return MOST_LAYERS if name in LAYERS else LARGEST
