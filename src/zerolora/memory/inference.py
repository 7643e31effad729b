"""GPU memory of evaluation and generation with a merged model, which is whole on one GPU."""

from dataclasses import asdict, dataclass, replace
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


@dataclass(frozen=True)
class Inference:
    """Bytes on a GPU."""

    weights: int
    """Of the merged model, in the precision of training."""
    cache: int
    """Keys and values at the end of generation; 0 for a forward pass."""
    working: int
    """The peak of operations beyond weights and cache."""
    total: int


def evaluation_json(
    model: ModelSpec, spec: TrainingSpec, capacity: Capacity, rows: int, reserve: int
) -> dict[str, Any]:
    """Return the memory of an evaluation as JSON values: of the merged model alone, and of a rank in training."""
    in_training = predict(model, replace(spec, micro_batch=rows)).phases["evaluation"]
    alone = evaluated(model, spec, rows)
    sizes = {"batch": rows, "length": spec.length, "reserve": reserve}
    result = {**sizes, **_with_reserve(alone, reserve, capacity), "in_training": in_training}
    fits = impossible(spec, model) is None and (capacity.gpu is None or in_training <= capacity.gpu)
    return {**result, "fits_in_training": fits}


def generation_json(
    model: ModelSpec, spec: TrainingSpec, capacity: Capacity, rows: int, lengths: tuple[int, int], reserve: int
) -> dict[str, Any]:
    """Return the memory of generation with the merged model as JSON values; `lengths` are of prompt and answer."""
    sizes = {"batch": rows, "prompt": lengths[0], "answer": lengths[1], "reserve": reserve}
    return {**sizes, **_with_reserve(generated(model, spec, rows, *lengths), reserve, capacity)}


def _with_reserve(inference: Inference, reserve: int, capacity: Capacity) -> dict[str, Any]:
    total = inference.total + reserve
    return {**asdict(inference), "total": total, "fits": capacity.gpu is None or total <= capacity.gpu}


def evaluated(model: ModelSpec, spec: TrainingSpec, rows: int) -> Inference:
    """Return the memory of a forward pass over `rows` rows of the spec's length, with its loss, without gradients."""
    working = _forward(model, spec.width, spec.attention, rows, spec.length, spec.logits)
    return _sum(model, spec, 0, working)


def generated(model: ModelSpec, spec: TrainingSpec, rows: int, prompt: int, answer: int) -> Inference:
    """Return the memory of generating `answer` tokens after each of `rows` prompts of `prompt` tokens."""
    return _sum(model, spec, *answering(model, spec.width, spec.attention, rows, prompt, answer))


def answering(
    model: ModelSpec, width: int, attention: Attention, rows: int, prompt: int, answer: int
) -> tuple[int, int]:
    """Return the bytes of the cache in generation, and those beyond cache and weights.

    The peak is in the prompts' forward pass, whose cache has room for the answers (evaluate/batch_cache.py), or in the
    last token's. The last token is not fed back, so the cache ends one position earlier; an encoder-decoder's answer
    begins with a start token.
    """
    positions = prompt + answer - (not model.encoder_layers)
    full = cache_bytes(model, rows, positions, width)
    first = full + _forward(model, width, attention, rows, prompt, 1)
    last = full + _step(model, width, attention, rows, positions)
    return full, max(first, last) - full


def cache_bytes(model: ModelSpec, rows: int, positions: int, width: int) -> int:
    """Return the bytes of the key-value cache: 2 x layers x rows x positions x key-value heads x head_dim x width.

    Source: arXiv 2309.06180, section 3 (800 KB a token for OPT-13B in fp16); transformers/cache_utils.py, DynamicCache.
    That a sliding window bounds its layers' positions is not counted. An encoder-decoder's cache has the answer's
    positions for self-attention and the prompt's for cross-attention: the same sum.
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


def _sum(model: ModelSpec, spec: TrainingSpec, cache: int, working: int) -> Inference:
    weights = model.parameters * spec.width
    return Inference(weights, cache, working, weights + cache + working)
