"""Finds prompts that are nearly those of held-out rows: they share runs of words.

A prompt is near a held-out one if it has at least half (SHARE) of that one's distinct runs of 8 words, without case and
punctuation; GPT-3 takes runs of 8 to 13 words, Llama 3 of 8 tokens and a share. As for GPT-3, a run that more than 10
different prompts have (COMMON) is of a template, not of a question; runs with a word of it do not count either. Without
a run that counts, as with fewer than 8 words, a prompt is near none.
See Brown et al. 2020 (arXiv 2005.14165, appendix C) and Llama Team 2024 (arXiv 2407.21783, section 5.1.4).

The runs are compared themselves, not hashes of them. Memory grows with the words of the held-out prompts alone, time
with those of all.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from zerolora.data.normal_form import words_of

STEPS = (1, 2, 4)
"""A run of 8 words is made of two of 4, each of two of 2, each of two words."""
WORDS = 2 * STEPS[-1]
SHARE = 0.5
COMMON = 10
NONE = -1  # no known word, or no run that begins there
Texts = Callable[[np.ndarray], Iterator[tuple[np.ndarray, list[str]]]]


class _Matches(NamedTuple):
    """Indices of prompts, and the number of a run that each has; no pair occurs twice."""

    prompt: np.ndarray
    run: np.ndarray


def near(prompts: np.ndarray, ranks: np.ndarray, texts: Texts) -> list[np.ndarray]:
    """Return the prompts of rank 0, and those of rank 1, that are near one of a higher rank; ranks are 0 to 2.

    prompts: their numbers, sorted. texts: yields some of them in parts, each with its texts.
    """
    words: dict[str, int] = {}
    learned = partial(map, lambda word: words.setdefault(word, len(words)))
    targets, of_targets = _numbered(prompts, texts(prompts[ranks > 0]), learned)
    runs = _Runs(len(words), targets)
    times = np.zeros(runs.count, np.int32)
    matches = [_Matches(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for part in texts(prompts) if runs.count else ():
        numbers, of_prompts = _numbered(prompts, [part], lambda written: map(words.get, written, repeat(NONE)))
        found = _distinct(of_prompts, runs.of(numbers), runs.count)
        times += np.bincount(found.run, minlength=runs.count).astype(np.int32)
        few = times[found.run] <= COMMON
        matches.append(_Matches(found.prompt[few], found.run[few]))
    own = _distinct(of_targets, _without_common(runs.of(targets), times), runs.count)
    pairs = _pairs(_Matches(*map(np.concatenate, zip(*matches, strict=True))), own, ranks)
    one, other, shared = pairs
    one = one[shared >= SHARE * np.bincount(own.prompt, minlength=len(prompts))[other]]
    return [prompts[np.unique(one[ranks[one] == rank])] for rank in (0, 1)]


def _numbered(
    prompts: np.ndarray,
    parts: Iterable[tuple[np.ndarray, list[str]]],
    numbers_of: Callable[[Iterable[str]], Iterable[int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the words of all texts, each text followed by NONE, and the index of each word's prompt."""
    numbers, owners = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for rows, texts in parts:
        written = [words_of(text) for text in texts]
        lengths = np.array([len(words) for words in written], np.int64)
        place = np.full(lengths.sum() + len(texts), NONE, np.int32)
        is_word = np.ones(len(place), bool)
        is_word[np.cumsum(lengths + 1) - 1] = False
        place[is_word] = np.fromiter(numbers_of(chain.from_iterable(written)), np.int32, lengths.sum())
        numbers.append(place)
        owners.append(np.repeat(np.searchsorted(prompts, rows), lengths + 1))
    return np.concatenate(numbers), np.concatenate(owners)


class _Runs:
    """The distinct runs of words in some texts, numbered."""

    def __init__(self, words: int, numbers: np.ndarray) -> None:
        """words: the number of different words. numbers: those of the texts, with NONE between texts."""
        self.sizes, self.codes = [words], []
        for step in STEPS:
            codes = _joined(numbers, step, self.sizes[-1])
            self.codes.append(np.unique(codes[codes != NONE]))
            self.sizes.append(len(self.codes[-1]))
            numbers = _places(codes, self.codes[-1])

    @property
    def count(self) -> int:
        """The number of runs."""
        return self.sizes[-1]

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of the run that begins at each word, NONE if there is none: [words]."""
        length = len(numbers)
        for step, size, known in zip(STEPS, self.sizes, self.codes, strict=False):
            numbers = _places(_joined(numbers, step, size), known)
        return np.concatenate([numbers, np.full(length - len(numbers), NONE, np.int32)])


def _joined(numbers: np.ndarray, step: int, size: int) -> np.ndarray:
    """Return one number for each pair of `numbers` that are `step` apart, NONE if one is."""
    one, other = numbers[:-step].astype(np.int64), numbers[step:]
    return np.where((one == NONE) | (other == NONE), NONE, one * size + other)


def _places(codes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the index of each code in `known` (sorted), NONE without one."""
    result = np.full(len(codes), NONE, np.int32)
    given = np.flatnonzero(codes != NONE)
    if len(known):
        places = np.searchsorted(known, codes[given]).clip(max=len(known) - 1)
        result[given] = np.where(known[places] == codes[given], places, NONE)
    return result


def _distinct(prompts: np.ndarray, runs: np.ndarray, count: int) -> _Matches:
    """Return the different runs of each prompt; `runs` begin at the words of `prompts`."""
    given = runs != NONE
    pairs = np.unique(prompts[given] * count + runs[given])
    return _Matches(*np.divmod(pairs, max(1, count)))


def _without_common(runs: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the run that begins at each word, NONE for those that have a word of a common run."""
    begins = np.flatnonzero((runs != NONE) & (times[runs] > COMMON) if len(times) else np.zeros(len(runs), bool))
    edges = np.zeros(len(runs) + WORDS + 1, np.int32)
    edges[begins] += 1
    edges[begins + WORDS] -= 1
    common = np.concatenate([[0], np.cumsum(np.cumsum(edges) > 0)])
    inside = common[WORDS : WORDS + len(runs)] - common[: len(runs)]
    return np.where(inside > 0, NONE, runs)


def _pairs(matches: _Matches, own: _Matches, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pairs of a prompt and one of a higher rank, and how many runs in `own` of the other they share."""
    own = _Matches(*(each[np.argsort(own.run, kind="stable")] for each in own))
    first, end = (np.searchsorted(own.run, matches.run, side) for side in ("left", "right"))
    counts = end - first
    one = np.repeat(matches.prompt, counts)
    other = own.prompt[np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
    higher = ranks[one] < ranks[other]
    pairs, shared = np.unique(one[higher] * len(ranks) + other[higher], return_counts=True)
    return *np.divmod(pairs, max(1, len(ranks))), shared
