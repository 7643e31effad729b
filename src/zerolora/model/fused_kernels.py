"""The parts of a model that liger-kernel computes in one kernel each, by family.

Source: liger_kernel/transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN, with cross_entropy and
fused_linear_cross_entropy off; `tests/unit/test_kernels.py` compares the table with it. Of a mixture of experts the
experts stay as they are, since adapters of their weights need transformers' own products.
"""

import importlib.util
from typing import Literal

from zerolora.errors import UserError
from zerolora.types import Device, Kernels

Part = Literal["norm", "rotary", "mlp", "loss"]
"""What one kernel computes: a norm; the rotary embedding of query and key; activation x up; a chunk's losses and the
gradient of its logits."""

PACKAGE = "liger_kernel"
REMEDY = "install it with pip install '.[kernels]', or set train.kernels: auto or off"
EXPERTS: tuple[Part, ...] = ("norm", "rotary", "loss")
DENSE: tuple[Part, ...] = (*EXPERTS, "mlp")
FAMILIES: dict[str, tuple[Part, ...]] = {
    "gemma": DENSE,
    "gemma2": DENSE,
    "gemma3_text": DENSE,
    "llama": DENSE,
    "mistral": DENSE,
    "mixtral": EXPERTS,
    "phi3": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
}
GELU_FAMILIES = ("gemma", "gemma2", "gemma3_text")
"""Families whose kernel computes gelu_pytorch_tanh (ops/geglu.py); the others' computes silu (ops/swiglu.py)."""
COPIES = ("phi3",)
"""Families that join query with key and value, and gate with up: the kernels need each of them in one piece."""
GRADIENT_COPIES = ("gemma2", "gemma3_text")
"""Families whose norms write their input's gradient to a new tensor (in_place=False), not over that of their output."""


def is_installed() -> bool:
    """Return whether liger-kernel is installed, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


def parts(family: str, activation: str) -> tuple[Part, ...]:
    """Return the parts of a model of this family with this hidden_act that have kernels; empty for another family."""
    known = FAMILIES.get(family, ())
    own = ("gelu_pytorch_tanh",) if family in GELU_FAMILIES else ("silu", "swish")
    return known if activation in own else tuple(part for part in known if part != "mlp")


def lacks_package(wanted: Kernels, device: Device, family: str, activation: str) -> bool:
    """Return whether training computes without kernels only because liger-kernel is not installed."""
    return wanted == "auto" and device == "cuda" and bool(parts(family, activation)) and not is_installed()


def used(wanted: Kernels, device: Device, family: str, activation: str) -> tuple[Part, ...]:
    """Return the parts that training computes with kernels on a device. Raises UserError if kernels are `wanted` by
    name and cannot be used."""
    if wanted == "off" or (wanted == "auto" and (device != "cuda" or not is_installed())):
        return ()
    possible = parts(family, activation)
    if wanted == "liger" and not possible:
        raise UserError(
            f"train.kernels is liger, which has no kernels for a {family} here (docs/speed.md lists the families); "
            "use auto or off"
        )
    if wanted == "liger" and not is_installed():
        raise UserError(f"train.kernels is liger, but the package liger-kernel is not installed; {REMEDY}")
    return possible
