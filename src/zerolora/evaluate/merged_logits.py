"""The distance of a merged model's logits from those of base model and adapter, on held-out rows.

They differ by the rounding of merged weights to the base's dtype, and by the loss of a quantized base. The change by
fine-tuning is the yardstick. QLoRA trains an adapter on a quantized base, with which the merged model is compared too,
whichever base it was merged into.
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
"""Compared rows, and supervised tokens of each: their logits over a vocabulary of 150,000 take 80 MB."""
BOUND = 0.1
"""Maximum merged_kl_share without a warning."""
LEAST = 1e-6
"""Nats per token: a smaller change by fine-tuning is within the rounding of fp32 sums."""


def next_tokens(model: Any, rows: Any) -> torch.Tensor:
    """Return a model's log-probabilities at the first supervised tokens of the first rows: fp32 (tokens, vocabulary) on
    the CPU."""
    result = []
    for index in range(min(ROWS, len(rows))):
        row = rows[index]
        supervised = [at for at in range(1, len(row["labels"])) if row["labels"][at] != IGNORED][:TOKENS]
        if not supervised:
            continue
        # Logits of the last positions, by their number: a model spread over several GPUs would get a tensor of
        # positions on its first GPU, and index hidden states on its last.
        first, last = supervised[0], supervised[-1]
        ids = torch.tensor([row["input_ids"][:last]]).to(model.device)
        with torch.no_grad():
            kept = last - first + 1
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, -kept:]  # some make all
        result.append(logits[0, [at - first for at in supervised]].float().log_softmax(-1).cpu())
    return torch.cat(result)


def of_merged(
    merged: torch.Tensor, base: torch.Tensor, tuned: torch.Tensor, model: EvaluatedModel, data: Path, rows: Any
) -> dict[str, float]:
    """Compare `merged`, the `next_tokens` of a merged model, with `base` and `tuned`, those of the base model and of
    base and adapter. If training quantized the base, it is loaded for that comparison.

    merged_kl         mean of KL(base and adapter || merged), nats per token (S. Kullback, R. Leibler, 1951)
    merged_kl_share   merged_kl over KL(base and adapter || base), the change by fine-tuning; 0 if that is below LEAST
    merged_argmax     share of tokens with the same most likely token
    merged_logits     largest difference of log-probabilities
    trained_kl, trained_logits
                      the same against the quantized base and adapter, if training quantized the base

    Warns of a merged_kl_share above BOUND.
    """
    assert model.adapter is not None
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
    _, trained, _ = of_base(model, data, rows, quantization=quantization)
    return figures | dict(zip(OF_TRAINED, (_divergence(trained, merged), _largest(trained, merged)), strict=True))


def of_base(
    model: EvaluatedModel,
    data: Path,
    rows: Any,
    beside: float = 0,
    quantization: quantized_base.BaseQuantization | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the `next_tokens` of the base model, quantized if `quantization` is set, and of base and adapter, and that
    model, placed with `beside` bytes next to its weights (evaluated_models.py, `load`)."""
    loaded, _ = load(model.base, model.torch_device, added_tokens.of_data(data), beside=beside)
    if quantization is not None:
        quantized_base.round_weights(loaded, quantization)
    base = next_tokens(loaded, rows)
    assert model.adapter is not None
    adapted = with_adapter(loaded, model.adapter).eval()
    if not hasattr(loaded, "hf_device_map"):  # on a model spread over several GPUs, peft has placed it already
        adapted.to(device=loaded.device)
    return base, next_tokens(adapted, rows), adapted


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _divergence(true: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean KL(true || other) of log-probabilities, in nats; not below 0 by rounding."""
    return max(0.0, float((true.exp() * (true - other)).sum(-1).double().mean()))
