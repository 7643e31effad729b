"""peft: which modules it builds into a model."""

from typing import Any

import torch

from zerolora.compat.versions import patch

VERSIONS = ("0.21.2",)
OLDER = ("0.18", "0.19", "0.20", "0.21")


@patch(
    "peft",
    *VERSIONS,
    upstream="none found",
    untested=OLDER,
    features=("peft.tuners.lora:LoraLayer",),
)
def replace_dropout(model: torch.nn.Module, replacement: Any) -> None:
    """Put replacement(p) in the place of each torch.nn.Dropout, in place. LoraConfig takes a probability only, no
    module (tuners/lora/layer.py, update_layer)."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, replacement(child.p))
