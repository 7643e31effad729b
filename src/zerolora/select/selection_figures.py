"""The figures of a selection: pass@k of the samples, and how the selected rows differ from the prompts."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerolora.evaluate.intervals import bootstrap_mean, wilson
from zerolora.select.asked_prompts import SampledPrompt
from zerolora.select.kept_answers import LEFT_OUT, KeptRow, SampledAnswer

EASY = 0.5
"""A prompt is easy if more than this share of its answers is right."""
PARTS = 4
"""Groups of prompts by length, of about equal size."""


@dataclass(frozen=True)
class PromptResult:
    """A prompt, its answers with their verdicts, and the rows that were kept of them."""

    prompt: SampledPrompt
    answers: list[SampledAnswer]
    rows: list[KeptRow]

    @property
    def right(self) -> int:
        """The number of right answers."""
        return sum(answer.right is True for answer in self.answers)

    @property
    def rate(self) -> float:
        """The share of right answers."""
        return self.right / len(self.answers)


@dataclass(frozen=True)
class Coverage:
    """A group of prompts, and its share of the prompts and of the rows."""

    name: str
    prompts: int
    prompts_with_rows: int
    rows: int
    prompt_share: float
    row_share: float
    rate: float | None
    """Mean share of right answers."""


def pass_at(k: int, samples: int, right: int) -> float:
    """Return the unbiased estimate of the probability that one of k answers is right, from `samples` answers of which
    some are right: 1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def pass_rates(results: Sequence[PromptResult]) -> dict[int, tuple[float, float, float]]:
    """Return {k: (pass@k, low, high)} for k = 1, 2, 4, … and the number of samples. The ends are those of a 95 %
    interval over the prompts: Wilson's where each prompt counts 0 or 1, otherwise a bootstrap of their means."""
    samples = len(results[0].answers)
    counts = [result.right for result in results]
    rates = {}
    for k in sorted({*(2**power for power in range(samples.bit_length())), samples}):
        by_right = [pass_at(k, samples, right) for right in range(samples + 1)]
        values = [by_right[right] for right in counts]
        share = {*values} <= {0.0, 1.0}
        low, high = wilson(sum(values), len(values)) if share else bootstrap_mean(values)
        rates[k] = sum(values) / len(values), low, high
    return rates


def coverage(results: Sequence[PromptResult], judged: bool) -> dict[str, list[Coverage]]:
    """Return the groups of prompts by their length in tokens, and by their source."""
    lengths = np.array([result.prompt.tokens for result in results])
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, PARTS + 1)[1:-1], method="lower")).tolist()
    starts = [int(lengths.min()), *(edge + 1 for edge in edges)]
    ends = [*edges, int(lengths.max())]
    spans = [(start, end) for start, end in zip(starts, ends, strict=True) if start <= end]
    part = {
        (start, end): f"{start:,} to {end:,} tokens" if start < end else f"{start:,} tokens" for start, end in spans
    }

    def of_length(result: PromptResult) -> str:
        return next(name for (_, end), name in part.items() if result.prompt.tokens <= end)

    return {
        "prompt length": list(_groups(results, of_length, [*part.values()], judged)),
        "source": list(_groups(results, lambda result: result.prompt.source, [], judged)),
    }


def _groups(
    results: Sequence[PromptResult], key: Callable[[PromptResult], str], names: Sequence[str], judged: bool
) -> Iterator[Coverage]:
    members: dict[str, list[PromptResult]] = defaultdict(list)
    for result in results:
        members[key(result)].append(result)
    rows = sum(len(result.rows) for result in results)
    for name in names or sorted(members):
        if not (group := members[name]):
            continue
        own = sum(len(result.rows) for result in group)
        rate = sum(result.rate for result in group) / len(group) if judged else None
        kept = sum(bool(result.rows) for result in group)
        yield Coverage(name, len(group), kept, own, len(group) / len(results), own / rows, rate)


def changes(results: Sequence[PromptResult], judged: bool) -> dict[str, tuple[float, float]]:
    """Return what selection changed: {figure: (mean over the prompts, mean over the rows)}. Each answer of a prompt,
    and each row, counts once."""
    rows = [(result, row) for result in results for row in result.rows]
    figures = {
        "prompt_tokens": (
            _mean([result.prompt.tokens for result in results]),
            _mean([result.prompt.tokens for result, _ in rows]),
        )
    }
    answers = [answer.tokens for result in results for answer in result.answers if answer.tokens is not None]
    if kept := [row.answer.tokens for _, row in rows if row.answer.tokens is not None]:
        figures["answer_tokens"] = _mean(answers), _mean(kept)
    if judged:
        figures["pass_rate"] = _mean([each.rate for each in results]), _mean([each.rate for each, _ in rows])
        figures["easy_share"] = (
            _mean([float(each.rate > EASY) for each in results]),
            _mean([float(each.rate > EASY) for each, _ in rows]),
        )
    return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def metrics(results: Sequence[PromptResult], left_out: Mapping[str, int]) -> dict[str, Any]:
    """Return flat metrics: counts, pass@k with intervals, and what selection changed."""
    judged = is_judged(results)
    rights = Counter(result.right == len(result.answers) if result.right else None for result in results)
    values: dict[str, Any] = {
        "prompts": len(results),
        "answers": sum(len(result.answers) for result in results),
        "samples": len(results[0].answers),
        "rows": sum(len(result.rows) for result in results),
        "prompts_with_rows": sum(bool(result.rows) for result in results),
        **{f"left_out_{name}": left_out.get(name, 0) for name in LEFT_OUT},
    }
    if judged:
        values |= {"prompts_always_right": rights[True], "prompts_never_right": rights[None]}
        for k, (rate, low, high) in pass_rates(results).items():
            values |= {f"pass_at_{k}": rate, f"pass_at_{k}_low": low, f"pass_at_{k}_high": high}
    for name, (before, after) in changes(results, judged).items():
        values |= {f"{name}_of_prompts": before, f"{name}_of_rows": after}
    return values


def is_judged(results: Sequence[PromptResult]) -> bool:
    """Return whether it is known of the answers which are right."""
    return results[0].answers[0].right is not None
