"""GPU memory of evaluation and generation with a merged model, which is whole on one GPU."""

from dataclasses import replace
from typing import Any

from zerolora.memory.decoder import evaluation
from zerolora.memory.estimate import Capacity, impossible
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.projections import NOTHING, ForwardSpec
from zerolora.model.spec import ModelSpec
from zerolora.types import Attention

AUTO_ROWS = 64
"""Maximum prompts of a batch of evaluation with batch: auto; an assumption, not measured."""


def evaluation_json(
    model: ModelSpec, spec: TrainingSpec, capacity: Capacity, rows: int, reserve: int
) -> dict[str, Any]:
    """Return the bytes of a forward pass with its loss over `rows` rows of the spec's length, without gradients: of the
    merged model alone, and of a rank in training."""
    in_training = predict(model, replace(spec, micro_batch=rows)).phases["evaluation"]
    working = _forward(model, spec.width, spec.attention, rows, spec.length, spec.logits)
    fits = impossible(spec, model) is None and (capacity.gpu is None or in_training <= capacity.gpu)
    return {
        "batch": rows,
        "length": spec.length,
        **_alone(model, spec, capacity, reserve, 0, working),
        "in_training": in_training,
        "fits_in_training": fits,
    }


def generation_json(
    model: ModelSpec, spec: TrainingSpec, capacity: Capacity, rows: int, lengths: tuple[int, int], reserve: int
) -> dict[str, Any]:
    """Return the bytes of generation with the merged model; `lengths` are of prompt and answer."""
    cache, working = answering(model, spec.width, spec.attention, rows, *lengths)
    sizes = {"batch": rows, "prompt": lengths[0], "answer": lengths[1]}
    return {**sizes, **_alone(model, spec, capacity, reserve, cache, working)}


def _alone(
    model: ModelSpec, spec: TrainingSpec, capacity: Capacity, reserve: int, cache: int, working: int
) -> dict[str, Any]:
    """Return the terms of the merged model, in the precision of training; `working` is the peak of operations."""
    terms = {"reserve": reserve, "weights": model.parameters * spec.width, "cache": cache, "working": working}
    total = sum(terms.values())
    return {**terms, "total": total, "fits": capacity.gpu is None or total <= capacity.gpu}


def answering(
    model: ModelSpec, width: int, attention: Attention, rows: int, prompt: int, answer: int
) -> tuple[int, int]:
    """Return the bytes of the cache in generation, and those beyond cache and weights.

    The peak is in the prompts' forward pass, whose cache has room for the answers (evaluate/generation.py), or in the
    last token's. The last token is not fed back, so the cache ends one position earlier.
    """
    positions = prompt + answer - 1
    full = cache_bytes(model, rows, positions, width)
    first = full + _forward(model, width, attention, rows, prompt, 1)
    last = full + _step(model, width, attention, rows, positions)
    return full, max(first, last) - full


def cache_bytes(model: ModelSpec, rows: int, positions: int, width: int) -> int:
    """Return the bytes of the key-value cache: 2 x layers x rows x positions x key-value heads x head_dim x width.

    Source: arXiv 2309.06180, section 3 (800 KB a token for OPT-13B in fp16); transformers/cache_utils.py, DynamicCache.
    That a sliding window bounds its layers' positions is not counted.
    """
    return 2 * model.layers * rows * positions * model.key_heads * model.head_dim * width


def _step(model: ModelSpec, width: int, attention: Attention, rows: int, positions: int) -> int:
    """Return the bytes that the forward pass of one token allocates beyond the cache.

    transformers' cache concatenates a layer's keys with the new ones before it frees the old tensor
    (DynamicLayer.update), and attention with a mask repeats keys and values for all heads
    (integrations/sdpa_attention.py, repeat_kv).
    """
    one = rows * positions * model.head_dim * width
    repeated = 2 * one * model.heads if model.key_heads < model.heads and attention != "flash" else 0
    return max(one * model.key_heads, repeated) + _forward(model, width, attention, rows, 1, 1)


def _forward(model: ModelSpec, width: int, attention: Attention, rows: int, length: int, logits: int) -> int:
    step = ForwardSpec(
        rows=rows,
        length=length,
        width=width,
        attention=attention,
        masked=True,  # rows of different lengths are padded
        checkpointing=False,
        loss="supervised" if logits else "full",
        logits=logits,
    )
    return evaluation(model, step, NOTHING)
