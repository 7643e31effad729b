"""LoRA's factors initialized from the base weight: PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775).

Both subtract B0·A0·scale from a weight W, freeze the residual W - B0·A0·scale, and train A and B from A0 and B0. The
saved adapter is of the original W and has twice the rank: W - B0·A0·scale + B·A·scale = W + [B, -B0]·[A; A0]·scale
(PiSSA, appendix C; peft/tuners/lora/model.py, subtract_mutated_init).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def first_factors(weight: "torch.Tensor", r: int, scale: float, init: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return A0 [r, inputs] and B0 [outputs, r] of a weight [outputs, inputs], in fp32.

    PiSSA: B0·A0·scale is the part of the weight with the largest singular values. OLoRA: B0 and A0 are the first r
    columns and rows of its QR decomposition (peft/tuners/lora/layer.py, pissa_init and olora_init).
    """
    import torch

    weight = weight.detach().float()
    if init == "olora":
        left, right = torch.linalg.qr(weight)
        return right[:r].contiguous(), left[:, :r].contiguous()
    if init == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = torch.svd_lowrank(weight, r, niter=int(init.rpartition("_")[2]))
        right = right.T
    root = torch.sqrt(values[:r] / scale)
    return root[:, None] * right[:r], left[:, :r] * root


def residual(
    weight: "torch.Tensor", first: "torch.Tensor", second: "torch.Tensor", scale: float, transposed: bool
) -> "torch.Tensor":
    """Return a weight minus B0·A0·scale, in its type. A `transposed` one is [inputs, outputs]."""
    product = second.float() @ first.float() * scale
    return (weight.detach().float() - (product.T if transposed else product)).to(weight.dtype)


def published(trained: "dict[str, torch.Tensor]", start: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return trained tensors with [A; A0] and [B, -B0] for the factors in `start`; both by their published names."""
    import torch

    result = dict(trained)
    for name, factor in start.items():
        first = ".lora_A." in name
        before = (factor if first else -factor).to(trained[name].dtype)
        result[name] = torch.cat([trained[name], before], dim=0 if first else 1)
    return result


def doubled(config: dict[str, Any]) -> dict[str, Any]:
    """Return peft's config of what `published` returns: twice the rank, and an alpha that leaves the scale."""
    factor = 2**0.5 if config["use_rslora"] else 2
    return config | {
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {key: 2 * value for key, value in config["rank_pattern"].items()},
        "alpha_pattern": {key: factor * value for key, value in config["alpha_pattern"].items()},
    }


def is_start(tensor: "torch.Tensor") -> bool:
    """Return whether a published B is the initial one: B = B0, so that its halves cancel."""
    half = tensor.shape[1] // 2
    return tensor.shape[1] % 2 == 0 and bool((tensor[:, :half] == -tensor[:, half:]).all())
