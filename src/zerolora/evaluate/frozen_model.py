"""Loads a model that stays as it is, for values of the prepared rows' tokens, and batches rows for it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolora.compat.transformers_patches import resizable
from zerolora.config.method_sections import Quantization
from zerolora.evaluate.evaluated_models import placement, with_adapter
from zerolora.memory.loaded_weights import loaded_bytes
from zerolora.methods.registry import check_published
from zerolora.model.added_tokens import AddedToken, add_rows
from zerolora.model.read_spec import read_model_spec
from zerolora.model.rope import EVER
from zerolora.model.spec import EVALUATION_TOKENS
from zerolora.train import base_model
from zerolora.train.attention import IMPLEMENTATIONS
from zerolora.train.engines.engine import DTYPES
from zerolora.train.isolation import check_loss, shares_prefixes
from zerolora.train.loss import make_chunked
from zerolora.train.rope_by_row import compute_by_row
from zerolora.types import Precision


def load(
    weights: Path,
    tokens: Sequence[AddedToken],
    device: torch.device,
    precision: Precision,
    quantization: Quantization | None = None,
    adapter: Path | None = None,
) -> tuple[Any, bool]:
    """Return the model of directory `weights` with rows for `tokens` and an adapter, in evaluation mode, and whether it
    computes the common prefix of sequences once: on `device`, or spread over all GPUs of this process if it does not
    fit on one. Raises UserError for an adapter of another model."""
    bitsandbytes = base_model.bitsandbytes_config(quantization, precision, sharded=False) if quantization else None
    dtype = DTYPES[precision]
    spec = read_model_spec(weights)
    placed = placement(weights, device, loaded=loaded_bytes(spec, dtype.itemsize, quantization))
    # A model that is spread computes whole rows, with the attentions of transformers.
    attention = next(name for name in spec.attentions if not (placed and name == "flash"))
    own = attention == "flash"
    model = base_model.read(weights, dtype, IMPLEMENTATIONS.get(attention, attention), device, bitsandbytes, placed)
    with resizable(model):
        add_rows(model, tokens)
    model.config.use_cache = False
    if not placed:  # whose hooks move the inputs of whole modules
        make_chunked(model)
    if adapter:
        check_published(adapter, weights)
        model = with_adapter(model, adapter)
    model.eval()
    if not placed:
        check_loss(model, model, device, precision)
    by_row = compute_by_row(model, EVER)
    return model, not by_row and own and shares_prefixes(model, model.config, device)


def is_chunked(model: Any) -> bool:
    """Return whether the model takes supervised positions (train/loss.py, make_chunked)."""
    return hasattr(model, "logits_are_plain")


def batches(padded: np.ndarray) -> Iterator[np.ndarray]:
    """Yield numbers of rows in batches of rows with similar length, the longest first: up to EVALUATION_TOKENS tokens
    with padding, but at least one row. `padded`: the tokens of each row, [rows]."""
    order = np.argsort(-padded, kind="stable")
    while len(order):
        size = max(1, EVALUATION_TOKENS // max(1, int(padded[order[0]])))
        yield order[:size]
        order = order[size:]
