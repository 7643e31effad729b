"""liger-kernel's fused kernels in place of a model's own operations (model/fused_kernels.py lists them by family).

The modules stay, so adapters, hooks, sharding and names do too: a module's `forward` is replaced on the instance, and
the rotary embedding in the module of its class.
"""

import contextlib
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from zerolora.errors import UserError
from zerolora.model.fused_kernels import PACKAGE, REMEDY, Part

ROTARY = "apply_rotary_pos_emb"  # of transformers' modeling files
OWN_ROTARY: dict[str, Any] = {}
"""The functions of modeling files that the library's has replaced, by the file's name in Python."""
LOSSES = "fused_losses"  # the attribute of a head that loss.py reads
OPTIONS: dict[str, Part] = {"rope": "rotary", "rms_norm": "norm", "swiglu": "mlp", "geglu": "mlp"}
"""Arguments of the library's functions, and the part that each turns on."""
WARPS = 32  # liger_kernel/ops/cross_entropy.py, on Hopper and earlier

FusedLosses = Callable[[torch.Tensor, torch.Tensor, float | None, bool], torch.Tensor]
"""See `fused_losses`."""


def use(model: Any, parts: tuple[Part, ...]) -> None:
    """Compute `parts` of a transformers model with the library's kernels, before an adapter is added.

    Raises UserError if the library is missing or too old.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as functions
    except ImportError as error:
        raise UserError(f"train.kernels needs liger-kernel, which cannot be imported ({error}); {REMEDY}") from None
    apply = functions.get(model.config.model_type)
    if apply is None:
        raise UserError(f"this liger-kernel ({_version()}) has no kernels for a {model.config.model_type}; {REMEDY}")
    accepted = apply.__code__.co_varnames[: apply.__code__.co_argcount]
    options = {name: OPTIONS.get(name) in parts for name in accepted if name != "model"}
    classes = sys.modules[type(model).__module__]
    before = dict(vars(classes))
    apply(**options, model=model)
    model.fused_rotary = (OWN_ROTARY.setdefault(classes.__name__, before.get(ROTARY)), getattr(classes, ROTARY, None))
    # The function also replaces classes, which models built later, such as one of shapes, would have.
    for name, value in before.items():
        if name != ROTARY and getattr(classes, name) is not value:
            setattr(classes, name, value)
    if "loss" in parts and has_fused_losses():
        setattr(model.get_output_embeddings(), LOSSES, fused_losses)


def in_use(model: Any) -> bool:
    """Return whether a transformers model computes with the library's kernels."""
    return hasattr(model, "fused_rotary")


@contextlib.contextmanager
def off(model: Any) -> Iterator[None]:
    """Compute with the model's own operations within the context. `model` is the base model of an adapter."""
    fused = list(_fused(model))
    forwards = [(module, module.__dict__.pop("forward")) for module in fused]
    heads = [(head, head.__dict__.pop(LOSSES)) for head in _heads(model)]
    _rotate_with(model, 0)
    try:
        yield
    finally:
        _rotate_with(model, 1)
        for module, forward in forwards:
            module.__dict__["forward"] = forward
        for head, losses in heads:
            head.__dict__[LOSSES] = losses


def remove(model: Any) -> None:
    """Compute with the model's own operations from now on."""
    for module in list(_fused(model)):
        del module.__dict__["forward"]
    for head in _heads(model):
        del head.__dict__[LOSSES]
    _rotate_with(model, 0)
    del model.fused_rotary


def described(model: Any) -> str:
    """Return what the library's kernels compute, with the number of modules."""
    names = {"RMSNorm": "norms", "GLUMLP": "MLPs"}
    kinds: Counter[str] = Counter()
    for module in _fused(model):
        name = module.__dict__["forward"].__func__.__qualname__
        kinds[next(text for part, text in names.items() if part in name)] += 1
    parts = [f"{count} {name}" for name, count in sorted(kinds.items())]
    own, other = model.fused_rotary
    parts += ["rotary embedding"] if own is not other else []
    parts += ["losses"] if _heads(model) else []
    return f"{', '.join(parts)} (liger-kernel {_version()})"


def _version() -> str:
    return importlib.metadata.version("liger-kernel")


def _fused(model: Any) -> Iterator[Any]:
    """Yield the modules whose forward pass is the library's, copies in an adapter included."""
    for module in model.modules():
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        if function is not None and function.__module__.startswith(f"{PACKAGE}."):
            yield module


def _heads(model: Any) -> list[Any]:
    """Return the output heads whose losses the library computes, copies in an adapter included."""
    return [module for module in model.modules() if LOSSES in module.__dict__]


def _rotate_with(model: Any, which: Literal[0, 1]) -> None:
    """Use the model's own function for rotary embeddings (0) or the library's (1)."""
    if model.fused_rotary[which] is not None:
        setattr(sys.modules[type(model).__module__], ROTARY, model.fused_rotary[which])


def has_fused_losses() -> bool:
    """Return whether the library's kernel for losses has exactly the arguments that `fused_losses` passes."""
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel

    nothing = torch.empty(1, 1)
    return set(kernel.arg_names) == _arguments(nothing, nothing[0], nothing[0], None, True).keys()


def fused_losses(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, with_gradient: bool
) -> torch.Tensor:
    """Return the cross-entropy of each token of `logits` [tokens, vocabulary] by one kernel, fp32; with `with_gradient`
    the logits become their gradient.

    The library's own function (ops/cross_entropy.py, cross_entropy_forward) returns losses in the logits' type, three
    digits in bf16, and waits for the GPU three times.
    """
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    kernel[(len(logits),)](**_arguments(logits, targets, losses, softcap, with_gradient), num_warps=WARPS)
    return losses


def _arguments(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, softcap: float | None, with_gradient: bool
) -> dict[str, Any]:
    import triton
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE

    tokens, vocabulary = logits.shape
    return {
        "X_ptr": logits,
        "X_stride": logits.stride(0),
        "Y_ptr": targets,
        "Y_stride": targets.stride(0),
        "weight_ptr": None,
        "loss_ptr": losses,
        "z_loss_ptr": None,
        "loss_stride": 1,
        "token_accuracy_ptr": None,
        "token_accuracy_stride": 0,
        "predicted_tokens_ptr": None,
        "predicted_tokens_stride": 0,
        "n_cols": vocabulary,
        "n_non_ignore": tokens,
        "sum_non_ignore_weight": tokens,
        "weight_sum": 0.0,
        "ignore_index": -1,
        "lse_square_scale": 0.0,
        "label_smoothing": 0.0,
        "reduction": "none",
        "softcap": softcap or None,
        "RETURN_Z_LOSS": False,
        "RETURN_TOKEN_ACCURACY": False,
        "RETURN_PREDICTED_TOKENS": False,
        "BLOCK_SIZE": min(MAX_FUSED_SIZE, triton.next_power_of_2(vocabulary)),
        "HAS_WEIGHT": False,
        "HAS_SOFTCAPPING": bool(softcap),
        "HAS_GRADIENTS": with_gradient,
    }
