"""Generation in batches of prompts of similar length: greedy, or of drawn tokens (sample/).

Prompts are padded on the left, and the model computes positions from the mask, so an answer does not depend on its
batch. When half of the rows of a batch have ended, the others continue without them, with their keys and values.

The KV cache is preallocated, and the common prefix of all prompts is computed once. transformers' cache copies all keys
and values of a layer for each new token, and would compute the tokens that all prompts begin with, such as a system
message or examples, for every row of a batch. Computing them once is vLLM's prefix caching (arXiv 2309.06180, section
4.4).
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from zerolora.config.settings import EvaluateSettings
from zerolora.evaluate.answer_loss import answer_losses, reference_of
from zerolora.evaluate.batches import PromptBatches
from zerolora.evaluate.kept import Answer
from zerolora.log import LOGGER
from zerolora.model.answer_text import AnswerTexts
from zerolora.model.greedy import greedy, own_settings
from zerolora.model.rope import first_grown
from zerolora.progress import Progress

SMALLEST = 4
"""A batch of at most this many rows is not reduced."""
FEWEST = 8
"""Minimum number of shared tokens."""
TOGETHER = 8
"""Prompts, of similar length where they are sorted, that are computed together before their answers."""
TRIED = 3
"""Tokens of the row on which a model's cache is tried."""


@dataclass(frozen=True)
class SharedPrefix:
    """The tokens that all prompts begin with."""

    length: int = 0
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Keys and values in each layer: shape (1, heads, length, width)."""

    def inputs(self, model: Any, rows: int, positions: int) -> dict[str, Any]:
        """Return the arguments of a forward pass on the tokens of `rows` rows after the prefix, up to `positions`."""
        if not self.length:
            return {"use_cache": False}
        return {"past_key_values": cache_of(model, self, rows, positions), "use_cache": True}


def generate(
    model: Any,
    tokenizer: Any,
    rows: Any,
    stops: set[int],
    settings: EvaluateSettings,
    keep: Callable[[dict[int, Answer]], None] | None = None,
    done: Iterable[int] = (),
    batches: PromptBatches | None = None,
    *,
    silent: bool = False,
    until: Sequence[str] = (),
    losses: bool = False,
) -> tuple[list[str], int]:
    """Return the greedy answers to the rows' prompts, in order, and the number of generated tokens.

    Generation stops at any token of `stops`, and soon after any text of `until`. `keep` is called with the answers of
    each finished batch, by index in `rows`, with the losses of the data's answers if `losses`; rows with an index in
    `done` are skipped, and their answers are empty. `silent` shows no bar.
    """
    done = set(done)
    batches = batches or PromptBatches(model, settings)
    prompts = [row["input_ids"][: row["prompt"]] for row in rows]
    answers = [""] * len(prompts)
    generated = 0

    texts = AnswerTexts(tokenizer, stops, until)

    # The longest first, which takes the most memory; similar lengths share a batch, to reduce padding.
    left = (index for index in range(len(prompts)) if index not in done)
    order = sorted(left, key=lambda index: (-len(prompts[index]), index))
    with Progress("answer", len(prompts), len(done), silent=silent) as bar:
        # A row whose rotary factors change with its length is answered by itself, as they would follow the longest.
        short = first_grown(model, [len(prompts[index]) + settings.max_new_tokens for index in reversed(order)])
        prefix = shared_prefix(model, [prompts[index] for index in order[len(order) - short :]])
        while order:
            by_itself = len(order) > short
            size = 1 if by_itself else batches.rows(len(prompts[order[0]]), len(order))
            members, order = order[:size], order[size:]
            finished = {}
            sums: list[float | None] = [None] * len(members)
            references = [reference_of(rows[index]) for index in members] if losses and not by_itself else []

            def score(
                cache: Any, mask: torch.Tensor, last: torch.Tensor, into: Any = sums, of: Any = references
            ) -> None:
                into[:] = answer_losses(model, cache, mask, last, of)

            continued = answer_batch(
                model,
                tokenizer.pad_token_id,
                [prompts[index] for index in members],
                stops,
                settings.max_new_tokens,
                None if by_itself else prefix,
                texts.ended if until else None,
                score if any(references) else None,
            )
            for index, tokens, loss in zip(members, continued, sums, strict=True):
                answers[index] = texts.text(tokens)
                finished[index] = Answer(answers[index], len(tokens), loss)
                generated += len(tokens)
            if keep:
                keep(finished)
            bar.update(len(members), f"{bar.rate(len(members)):.1f} rows/s")
    return answers, generated


def answer_batch(
    model: Any,
    padding: int,
    prompts: Sequence[list[int]],
    stops: set[int],
    limit: int,
    prefix: SharedPrefix | None = None,
    ended: Callable[[list[int]], bool] | None = None,
    score: Callable[[Any, torch.Tensor, torch.Tensor], None] | None = None,
    draw: Callable[[list[int], int], Any] | None = None,
    cache: Any = None,
) -> list[list[int]]:
    """Return the tokens after each prompt, up to and including the first stop token, at most `limit`.

    An answer for which `ended` is true may stop there, without a stop token. All prompts begin with `prefix`, followed
    by the padding. `score` is called once with the cache of all prompts, their mask and last tokens, if the model's
    cache has keys and values of every token. `draw` returns, for some of the rows and the tokens of the longest prompt,
    the processor of the logits whose largest value is the next token. `cache` is one of `cache_of_prompts`.
    """
    prefix = prefix or SharedPrefix()
    tokens, mask = _padded(prompts, prefix.length, padding, model.device)
    longest = tokens.shape[1]
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    cache = cache or cache_of(model, prefix, len(prompts), longest + limit - 1)
    score = score if cache is not None else None
    while alive:
        left = limit + longest - tokens.shape[1]
        half = 0 if len(alive) <= SMALLEST else len(alive) // 2
        settings = greedy(left, stops, padding)
        settings.return_dict_in_generate = True
        settings.use_cache = _caches(model)
        with torch.no_grad(), own_settings(model, settings):
            output = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=cache,
                generation_config=settings,
                stopping_criteria=[_Ended(longest, stops, half, ended)],
                logits_processor=[draw(alive, longest)] if draw else None,
            )
        tokens, cache = output.sequences, output.past_key_values
        if score:  # while the cache has all rows
            score(cache, mask, tokens[:, longest - 1])
            score = None
        ends = _ends(tokens[:, longest:], stops, ended)
        over = tokens.shape[1] - longest >= limit
        rest = []
        for index, row in enumerate(alive):
            if over or ends[index] is not None:
                answers[row] = tokens[index, longest:][: ends[index]].tolist()
            else:
                rest.append(index)
        if not hasattr(cache, "batch_select_indices") and rest:
            # A state that cannot be indexed by row, such as a recurrent layer's, is computed again.
            cache = None
        elif rest:
            cache.batch_select_indices(torch.tensor(rest))  # on the host: layers may be on several GPUs
        alive = [alive[index] for index in rest]
        tokens = tokens[rest]
        ones = mask.new_ones(len(rest), tokens.shape[1] - mask.shape[1])
        mask = torch.cat([mask[rest], ones], dim=1)
    return answers


def _padded(
    prompts: Sequence[list[int]], shared: int, padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of prompts and their mask: [rows, longest], padded after the `shared` first tokens."""
    longest = max(map(len, prompts))
    rows = [(prompt[:shared], [padding] * (longest - len(prompt)), prompt[shared:]) for prompt in prompts]
    tokens = torch.tensor([[*first, *pads, *own] for first, pads, own in rows]).to(device)
    mask = torch.tensor([[1] * shared + [0] * len(pads) + [1] * len(own) for _, pads, own in rows]).to(device)
    return tokens, mask


def cache_of_prompts(
    model: Any, padding: int, prompts: Sequence[list[int]], limit: int, prefix: SharedPrefix
) -> Callable[[], Any]:
    """Compute prompts but for their last token once, for several calls of `answer_batch` with answers of at most
    `limit` tokens. Return a function that returns the cache of each call in turn, in the same buffers; or None, if the
    model's cache does not keep keys and values of every token.
    """
    computed = max(map(len, prompts)) - 1
    if computed <= prefix.length or not _keeps_all_tokens(model):
        return lambda: None
    cache = cache_of(model, SharedPrefix(), len(prompts), computed + limit)
    for start in range(0, len(prompts), TOGETHER):
        rows = slice(start, start + TOGETHER)
        part = _computed(model, padding, prompts[rows], prefix)
        for layer, own in zip(cache.layers, part.layers, strict=True):
            layer.place(rows, len(prompts), own, prefix.length, computed)

    def again() -> Any:
        result: Any = DynamicCache(config=model.config)
        result.layers = [layer.cut_to(computed) for layer in cache.layers]
        return result

    return again


def _computed(model: Any, padding: int, prompts: Sequence[list[int]], prefix: SharedPrefix) -> Any:
    """Return the cache of prompts but for their last token."""
    tokens, mask = _padded(prompts, prefix.length, padding, model.device)
    length = tokens.shape[1] - 1
    cache = cache_of(model, prefix, len(prompts), max(length, 1))
    settings = greedy(1, (), padding)
    if length > prefix.length:
        with torch.no_grad(), own_settings(model, settings):
            # Its token is not used: `generate` computes the positions of padded rows.
            model.generate(
                input_ids=tokens[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, generation_config=settings
            )
    return cache


class _Ended:
    """Stops generation when all rows, or all but `left`, have ended."""

    def __init__(self, prompt: int, stops: set[int], left: int, ended: Callable[[list[int]], bool] | None) -> None:
        self.prompt, self.stops, self.left, self.ended = prompt, stops, left, ended

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ends = _ends(tokens[:, self.prompt :], self.stops, self.ended)
        return torch.full((len(ends),), ends.count(None) <= self.left, device=tokens.device)


def _ends(answers: torch.Tensor, stops: set[int], ended: Callable[[list[int]], bool] | None) -> list[int | None]:
    """Return the length of each answer up to its first stop token, or until it has `ended`; None if neither."""
    result = torch.isin(answers, torch.tensor(sorted(stops), dtype=torch.long, device=answers.device)).tolist()
    tokens = answers.tolist() if ended else result
    return [
        row.index(True) + 1 if True in row else len(row) if ended and ended(own) else None
        for row, own in zip(result, tokens, strict=True)
    ]


def shared_prefix(model: Any, prompts: Sequence[list[int]]) -> SharedPrefix:
    """Return the common prefix of all prompts, at least one token shorter than each. Empty for a single prompt, for
    fewer than FEWEST tokens, and for a model whose layers cache anything but keys and values of all tokens.

    A batch has its padding after the prefix, not before it. Answers do not change where positions come from the mask,
    but they would with a sliding window.
    """
    if len(prompts) < 2 or not _keeps_all_tokens(model):
        return SharedPrefix()
    first, last = min(prompts), max(prompts)  # in lexicographic order: their common prefix is that of all
    most = min(map(len, prompts)) - 1
    length = next((at for at in range(most) if first[at] != last[at]), most)
    if length < FEWEST:
        return SharedPrefix()
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        tokens = torch.tensor([first[:length]], device=model.device)
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return SharedPrefix(length, [(layer.keys, layer.values) for layer in cache.layers])


def cache_of(model: Any, prefix: SharedPrefix, rows: int, positions: int) -> Any:
    """Return a cache with room for `positions` tokens of each row, filled with `prefix`; None if transformers has to
    make the model's cache."""
    if not _keeps_all_tokens(model):
        return None
    cache: Any = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer(positions) for _ in cache.layers]
    for layer, (keys, values) in zip(cache.layers, prefix.states, strict=False):
        layer.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
    return cache


class PreallocatedLayer(DynamicLayer):
    """The keys and values of one layer, each the filled part of a buffer."""

    def __init__(self, positions: int) -> None:
        """The buffer of `positions` tokens is allocated by the first update, when the shapes are known."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = positions
        self.buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; return those of all."""
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
            shapes = [(*new.shape[:2], self.positions, new.shape[3]) for new in (key_states, value_states)]
            self.buffers = [key_states.new_empty(shape) for shape in shapes]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        return self._show(end)

    def place(self, rows: slice, count: int, part: "PreallocatedLayer", shared: int, filled: int) -> None:
        """Copy the states of some of `count` rows into the buffers: the `shared` first ones, and the others so that the
        last one is at position `filled` - 1. Positions between them are padding, and 0."""
        if not part.get_seq_length():  # of prompts of one token
            return
        if not self.buffers:
            self.lazy_initialization(*part.buffers)
            shapes = [(count, each.shape[1], self.positions, each.shape[3]) for each in part.buffers]
            self.buffers = [each.new_zeros(shape) for each, shape in zip(part.buffers, shapes, strict=True)]
        length = part.get_seq_length()
        for buffer, own in zip(self.buffers, part.buffers, strict=True):
            buffer[rows, :, :shared] = own[:, :, :shared]
            buffer[rows, :, filled - (length - shared) : filled] = own[:, :, shared:length]

    def cut_to(self, filled: int) -> "PreallocatedLayer":
        """Return a layer in the same buffers, with their first `filled` tokens."""
        result = PreallocatedLayer(self.positions)
        result.lazy_initialization(*self.buffers)
        result.buffers = list(self.buffers)
        result._show(filled)
        return result

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._show(self.get_seq_length())

    def _show(self, filled: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (buffer[:, :, :filled] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


def _keeps_all_tokens(model: Any) -> bool:
    """Return whether a model is a text decoder whose layers all cache keys and values of every token and of nothing
    else, and that takes them for several tokens at once: tried on three tokens."""
    if model not in _KEEPING:
        config = model.config
        likely = config.get_text_config() is config and not model._is_stateful
        likely = likely and model._supports_default_dynamic_cache()
        likely = likely and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        _KEEPING[model] = likely and _tried(model, lambda: _continued(model))
    return _KEEPING[model]


def _caches(model: Any) -> bool:
    """Return whether a model computes with a cache of its own making: some classes fail for some of their configs."""
    if model not in _CACHING:
        _CACHING[model] = _tried(model, lambda: model(input_ids=_three_tokens(model), use_cache=True) is not None)
        if not _CACHING[model]:
            LOGGER.info("%s cannot compute with a cache; answers take longer without", type(model).__name__)
    return _CACHING[model]


def _continued(model: Any) -> bool:
    cache: Any = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer(TRIED) for _ in cache.layers]
    for part in _three_tokens(model).split([1, TRIED - 1], 1):
        model(input_ids=part, past_key_values=cache, use_cache=True)
    return all(layer.get_seq_length() == TRIED for layer in cache.layers)


def _three_tokens(model: Any) -> torch.Tensor:
    return torch.zeros((1, TRIED), dtype=torch.int64, device=model.device)


def _tried(model: Any, trial: Callable[[], bool]) -> bool:
    try:
        with torch.no_grad():
            return trial()
    except Exception as error:  # classes raise errors of many types
        LOGGER.debug("%s: with a cache, a pass ends with %s", type(model).__name__, error)
        return False


_KEEPING: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_CACHING: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
