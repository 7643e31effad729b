"""How far the logits of a merged model are from those of base model and adapter, on held-out rows.

Both are the same function but for the rounding of the merged weights to the dtype of the base, and for what a
quantized base lost. The yardstick is what fine-tuning changed. An adapter of QLoRA was trained beside a quantized base;
the merged model is compared with that one as well, whichever of the two it was merged into.
"""

from pathlib import Path
from typing import Any

import torch

from zerolora.data.prepared_rows import IGNORED
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, with_adapter
from zerolora.fail_if import OF_MERGED, OF_TRAINED
from zerolora.log import LOGGER
from zerolora.methods import quantized_base
from zerolora.model import added_tokens

ROWS, TOKENS = 8, 16
"""Rows, and supervised tokens of each, that are compared: their logits over a vocabulary of 150,000 take 80 MB."""
BOUND = 0.1
"""Largest share of what fine-tuning changed that a merge may lose without a warning."""
LEAST = 1e-6
"""Nats per token that fine-tuning must have changed for a share to mean anything: fp32 sums differ by as much."""


def next_tokens(model: Any, rows: Any) -> torch.Tensor:
    """Return the logarithms of a model's probabilities for the first supervised tokens of the first rows, on the CPU:
    fp32 of shape (tokens, vocabulary)."""
    found = []
    for place in range(min(ROWS, len(rows))):
        row = rows[place]
        supervised = [at for at in range(1, row["length"]) if row["labels"][at] != IGNORED][:TOKENS]
        ids = torch.tensor([row["input_ids"][: row["length"]]]).to(model.device)
        before = torch.tensor(supervised, device=model.device) - 1
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=before).logits
        found.append(logits[0].float().log_softmax(-1).cpu())
    return torch.cat(found)


def of_merged(merged: torch.Tensor, model: EvaluatedModel, data: Path, rows: Any) -> dict[str, float]:
    """Return the figures of a merged model, whose `next_tokens` are given, against base and adapter, loaded here.

    merged_kl         mean of KL(base and adapter || merged), nats per token (S. Kullback, R. Leibler, 1951)
    merged_kl_share   that, over KL(base and adapter || base): what the merge lost of what fine-tuning changed; 0 if
                      fine-tuning changed less than LEAST
    merged_argmax     share of tokens of which both find the same most likely
    merged_logits     largest difference of two logarithms of a probability
    trained_kl, trained_logits
                      as merged_kl and merged_logits, against the quantized base and adapter, if training quantized it

    A share above BOUND is told as a warning.
    """
    assert model.adapter is not None
    base, tuned = _of_base(model, data, rows)
    lost, changed = _divergence(tuned, merged), _divergence(tuned, base)
    share = lost / changed if changed > LEAST else 0.0
    if share > BOUND:
        LOGGER.warning(
            "the merged model is not what was trained: %.0f %% of what fine-tuning changed is lost (%.3g of %.3g nats "
            "per token), since the rounding of the base's dtype, or of a quantized base, is larger than the change; "
            "use the adapter (merge.enabled: false), or train longer",
            100 * share,
            lost,
            changed,
        )
    equal = float((tuned.argmax(-1) == merged.argmax(-1)).float().mean())
    figures = dict(zip(OF_MERGED, (lost, share, equal, _largest(tuned, merged)), strict=True))
    if not quantized_base.was_quantized(model.adapter):
        return figures
    quantization = quantized_base.quantization_of(model.adapter)
    _, trained = _of_base(model, data, rows, quantization)
    return figures | dict(zip(OF_TRAINED, (_divergence(trained, merged), _largest(trained, merged)), strict=True))


def _of_base(
    model: EvaluatedModel, data: Path, rows: Any, quantization: quantized_base.BaseQuantization | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `next_tokens` of the base model, with its weights as training quantized them if it did, and of base
    and adapter."""
    loaded, _ = load(model.base, model.torch_device, added_tokens.of_data(data))
    if quantization is not None:
        quantized_base.round_weights(loaded, quantization)
    base = next_tokens(loaded, rows)
    assert model.adapter is not None
    adapted = with_adapter(loaded, model.adapter).eval()
    if not hasattr(loaded, "hf_device_map"):  # where it is spread over several GPUs, peft has put it beside
        adapted.to(device=loaded.device)
    return base, next_tokens(adapted, rows)


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _divergence(true: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean of KL(true || other) of rows of logarithms, in nats; rounding makes it no less than 0."""
    return max(0.0, float((true.exp() * (true - other)).sum(-1).double().mean()))
