"""Truncates, splits or drops rows longer than max_length."""

import itertools
from typing import NamedTuple

import numpy as np

from zerolora.data.encode import CONTEXT, Tokens
from zerolora.data.ragged import Ragged


class Parts(NamedTuple):
    """The used parts of rows: the index of each part's row, and its tokens."""

    row: np.ndarray
    tokens: Tokens


class Limits(NamedTuple):
    """The most tokens of a row's prompt and of its last answer; None for no limit."""

    prompt: int | None = None
    answer: int | None = None

    def exceeded(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Return whether the prompt of each row is longer, and whether its answer is."""
        answers = tokens.ids.lengths - tokens.prompt
        none = np.zeros(len(tokens.ids), bool)
        return (
            none if self.prompt is None else tokens.prompt > self.prompt,
            none if self.answer is None else answers > self.answer,
        )


NO_LIMITS = Limits()


def fitted(tokens: Tokens, longest: int, policy: str, bos: int | None, limits: Limits = NO_LIMITS) -> Parts:
    """Return rows as parts of at most `longest` tokens, by the policy too_long; before that, prompts and answers of at
    most `limits`.

    Parts without supervised tokens are dropped. truncate_left keeps BOS. truncate_turns shortens a turn and what comes
    before it in proportion. A row with a truncated prompt loses its `prompt`, so evaluation skips it.
    """
    over = np.logical_or(*limits.exceeded(tokens))
    if over.any() and policy in ("truncate_left", "truncate_right"):
        tokens = _limited(tokens, limits, policy, bos)
    ids = tokens.ids
    if not tokens.wrong and not over.any() and not (ids.lengths > longest).any():
        return Parts(np.arange(len(ids)), tokens)
    rows: list[int] = []
    slices: list[list[tuple[int, int]]] = []
    for row, (start, end) in enumerate(itertools.pairwise(ids.offsets.tolist())):
        if row not in tokens.wrong and not (over[row] and policy in ("fail", "drop")):
            if policy == "truncate_turns" and end - start > longest:
                result = [_shortened_turns(start, tokens.supervised_role[start:end] != CONTEXT, longest)]
            else:
                result = _cuts(start, end, longest, policy, ids.values[start] == bos)
            rows += [row] * len(result)
            slices += result
    starts, ends = np.array([pair for part in slices for pair in part], np.int64).reshape(-1, 2).T
    taken = ids.slices(starts, ends).joined(map(len, slices))
    supervised = Ragged(tokens.supervised_role, ids.offsets).slices(starts, ends).values
    # The first token of a part is never predicted.
    supervised[taken.heads] = CONTEXT
    which = np.array(rows, np.int64)
    prompt = tokens.prompt[which]
    prompt[(ids.lengths[which] > longest) & ((prompt >= longest) | (policy != "truncate_right"))] = 0
    parts = Parts(which, Tokens(taken, supervised, prompt, tokens.roles, {}))
    kept = np.flatnonzero(parts.tokens.supervised)
    if len(kept) == len(which):
        return parts
    roles = Ragged(supervised, taken.offsets).take(kept).values
    return Parts(which[kept], Tokens(taken.take(kept), roles, prompt[kept], tokens.roles, {}))


def long_enough(parts: Parts, lengths: np.ndarray, shortest: int) -> Parts:
    """Return the parts of rows of at least `shortest` of their `lengths` in tokens: [rows]."""
    kept = np.flatnonzero(lengths[parts.row] >= shortest)
    if len(kept) == len(parts.row):
        return parts
    tokens = parts.tokens
    roles = Ragged(tokens.supervised_role, tokens.ids.offsets).take(kept).values
    return Parts(parts.row[kept], Tokens(tokens.ids.take(kept), roles, tokens.prompt[kept], tokens.roles, {}))


def _limited(tokens: Tokens, limits: Limits, policy: str, bos: int | None) -> Tokens:
    """Return all rows, with prompts and answers cut at the side of the policy."""
    ids, (long_prompts, long_answers) = tokens.ids, limits.exceeded(tokens)
    slices: list[list[tuple[int, int]]] = []
    for row, (start, end) in enumerate(itertools.pairwise(ids.offsets.tolist())):
        middle = start + int(tokens.prompt[row])
        keep_first = len(ids[row]) > 0 and ids.values[start] == bos
        prompt, answer = [(start, middle)], [(middle, end)]
        if long_prompts[row] and limits.prompt is not None:
            (prompt,) = _cuts(start, middle, limits.prompt, policy, keep_first)
        if long_answers[row] and limits.answer is not None:
            (answer,) = _cuts(middle, end, limits.answer, policy, keep_first=False)
        slices.append([*prompt, *answer])
    starts, ends = np.array([pair for part in slices for pair in part], np.int64).reshape(-1, 2).T
    taken = ids.slices(starts, ends).joined(map(len, slices))
    supervised = Ragged(tokens.supervised_role, ids.offsets).slices(starts, ends).values
    supervised[taken.heads] = CONTEXT
    prompts = tokens.prompt.copy()
    prompts[long_prompts | (long_answers & (policy != "truncate_right"))] = 0
    return Tokens(taken, supervised, prompts, tokens.roles, tokens.wrong)


def _cuts(start: int, end: int, longest: int, policy: str, keep_first: bool) -> list[list[tuple[int, int]]]:
    """Return the parts of the row from `start` to `end`, each as a list of slices to join."""
    if end - start <= longest:
        return [[(start, end)]]
    match policy:
        case "truncate_right":
            return [[(start, start + longest)]]
        case "truncate_left" if keep_first and longest > 1:
            return [[(start, start + 1), (end - longest + 1, end)]]
        case "truncate_left":
            return [[(end - longest, end)]]
        case "split":
            return [[(first, min(first + longest, end))] for first in range(start, end, longest)]
    return []


def _shortened_turns(start: int, supervised: np.ndarray, longest: int) -> list[tuple[int, int]]:
    """Return the slices of a row from `start` that LLaMA-Factory keeps (infer_seqlen and _encode_data_example in its
    src/llamafactory/data/processor). supervised: whether each token of the row is [tokens]."""
    edges = np.flatnonzero(np.diff(supervised.astype(np.int8))) + 1
    bounds = [0, *([0] * bool(supervised[0])), *edges.tolist(), len(supervised)]
    bounds += [len(supervised)] * (len(bounds) % 2 == 0)
    slices = []
    left = longest
    for source, target, end in zip(bounds[:-1:2], bounds[1::2], bounds[2::2], strict=True):
        if left <= 0:
            break
        before, after = target - source, end - target
        if 2 * after < left:
            most = left
        elif 2 * before < left:
            most = left - before
        else:
            most = int(left * (after / (before + after)))
        after = min(most, after)
        before = min(before, max(left - after, 0))
        slices += [(start + source, start + source + before), (start + target, start + target + after)]
        left -= before + after
    return slices
