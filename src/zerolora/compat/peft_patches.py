"""peft: which modules it builds into a model, and how those compute."""

import types
from collections.abc import Callable
from typing import Any

import torch

from zerolora.compat.versions import is_replaced, patch, replaced

VERSIONS = ("0.21.2",)
OLDER = ("0.18", "0.19", "0.20", "0.21")


@patch(
    "peft",
    *VERSIONS,
    upstream="none known",
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


@patch(
    "peft",
    *VERSIONS,
    upstream="none known",
    untested=OLDER,
    features=("peft.tuners.trainable_tokens:TrainableTokensLayer._collect_token_weights",),
)
def gather_rows_anywhere() -> None:
    """Let peft read the rows that it is to train of a sharded embedding on any device. It knows CUDA only, and sends
    from rank 0 what every rank has gathered (tuners/trainable_tokens/layer.py, _collect_token_weights)."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.integrations import gather_params_ctx

    if is_replaced(TrainableTokensLayer._collect_token_weights):
        return

    def collect(layer: Any, weight: torch.Tensor, rows: list[int], width: int) -> torch.Tensor:
        with gather_params_ctx([weight], modifier_rank=None):  # type: ignore[list-item]  # a parameter
            return weight.detach()[rows].clone()

    TrainableTokensLayer._collect_token_weights = replaced(collect)  # type: ignore[method-assign]


@patch(
    "peft",
    *VERSIONS,
    upstream="none known; peft writes the rows into a copy of the whole weight in every forward pass",
    untested=OLDER,
    features=("peft.utils.other:TrainableTokensWrapper", "peft.tuners.trainable_tokens:TrainableTokensLayer"),
)
def replace_token_forward(model: Any, of_wrapper: Callable[..., Any], of_embedding: Callable[..., Any]) -> None:
    """Let the wrappers of an embedding and a head whose rows are trained, and the embedding under its wrapper, be
    called through these methods, in place. The rows' values of before, buffers that only unmerging reads, are dropped:
    a rank whose weights are shapes has none to fill them with."""
    from peft.utils.other import TrainableTokensWrapper

    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper):
            layer: Any = module.token_adapter
            module.forward = types.MethodType(of_wrapper, module)  # type: ignore[method-assign]
            if isinstance(layer.base_layer, torch.nn.Embedding):
                layer.base_layer.forward = types.MethodType(of_embedding, layer.base_layer)  # type: ignore[method-assign]
            layer.trainable_tokens_original.clear()


@patch(
    "peft",
    *VERSIONS,
    upstream="none known",
    untested=OLDER,
    features=("peft.utils.other:TrainableTokensWrapper",),
)
def without_rows(head: Any) -> Any:
    """Return the module under the wrapper of one whose rows are trained, any other module as it is."""
    return head.token_adapter.base_layer if hasattr(head, "token_adapter") else head
