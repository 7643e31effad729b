"""Greedy generation in batches of prompts of similar length.

Prompts are padded on the left, and the model computes positions from the mask, so an answer does not depend on its
batch. The common prefix of all prompts is computed once (batch_cache.py). When half of the rows of a batch have ended,
the others continue without them, with their keys and values.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zerolora.config.settings import EvaluateSettings
from zerolora.evaluate.batch_cache import SharedPrefix, cache_of, shared_prefix
from zerolora.evaluate.batches import PromptBatches
from zerolora.progress import Progress

SMALLEST = 4
"""A batch of at most this many rows is not reduced."""


def generate(
    model: Any,
    tokenizer: Any,
    rows: Any,
    stops: set[int],
    settings: EvaluateSettings,
    keep: Callable[[dict[int, tuple[str, int]]], None] | None = None,
    done: Iterable[int] = (),
    batches: PromptBatches | None = None,
    *,
    silent: bool = False,
    until: Sequence[str] = (),
) -> tuple[list[str], int]:
    """Return the greedy answers to the rows' prompts, in order, and the number of generated tokens.

    Generation stops at any token of `stops`, and soon after any text of `until`. `keep` is called with the answers of
    each finished batch and their token counts, by index in `rows`; rows with an index in `done` are skipped, and their
    answers are empty. `silent` shows no bar.
    """
    done = set(done)
    batches = batches or PromptBatches(model, settings)
    prompts = [row["input_ids"][: row["prompt"]] for row in rows]
    answers = [""] * len(prompts)
    generated = 0

    def ended(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return any(end in text for end in until)

    # The longest first, which takes the most memory; similar lengths share a batch, to reduce padding.
    left = (index for index in range(len(prompts)) if index not in done)
    order = sorted(left, key=lambda index: (-len(prompts[index]), index))
    with Progress("answer", len(prompts), len(done), silent=silent) as bar:
        prefix = shared_prefix(model, [prompts[index] for index in order])
        while order:
            size = batches.rows(len(prompts[order[0]]), len(order))
            members, order = order[:size], order[size:]
            finished = {}
            continued = answer_batch(
                model,
                tokenizer.pad_token_id,
                [prompts[index] for index in members],
                stops,
                settings.max_new_tokens,
                prefix,
                ended if until else None,
            )
            for index, tokens in zip(members, continued, strict=True):
                answers[index] = tokenizer.decode(tokens, skip_special_tokens=True)
                finished[index] = answers[index], len(tokens)
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
) -> list[list[int]]:
    """Return the tokens after each prompt, up to and including the first stop token, at most `limit`.

    An answer for which `ended` is true may stop there, without a stop token. All prompts begin with `prefix`, followed
    by the padding.
    """
    prefix = prefix or SharedPrefix()
    longest, shared = max(map(len, prompts)), prefix.length
    rows = [(prompt[:shared], [padding] * (longest - len(prompt)), prompt[shared:]) for prompt in prompts]
    tokens = torch.tensor([[*first, *pads, *own] for first, pads, own in rows]).to(model.device)
    mask = torch.tensor([[1] * shared + [0] * len(pads) + [1] * len(own) for _, pads, own in rows]).to(model.device)
    answers: list[list[int]] = [[] for _ in prompts]
    alive, cache = list(range(len(prompts))), cache_of(model, prefix, len(prompts), longest + limit - 1)
    while alive:
        left = limit + longest - tokens.shape[1]
        half = 0 if len(alive) <= SMALLEST else len(alive) // 2
        with torch.no_grad():
            output = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=left,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                eos_token_id=sorted(stops) or None,
                pad_token_id=padding,
                stopping_criteria=[_Ended(longest, stops, half, ended)],
                return_dict_in_generate=True,
            )
        tokens, cache = output.sequences, output.past_key_values
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
            cache.batch_select_indices(torch.tensor(rest, device=model.device))
        alive = [alive[index] for index in rest]
        tokens = tokens[rest]
        ones = mask.new_ones(len(rest), tokens.shape[1] - mask.shape[1])
        mask = torch.cat([mask[rest], ones], dim=1)
    return answers


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
