"""Sampled answers, and those of a prompt that become rows."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.selection_sections import Kept, SelectionSection
from zerolora.data.normal_form import normal_form
from zerolora.errors import UserError

LEFT_OUT = ("not_ended", "not_whole", "blank", "too_long", "without_score", "not_mixed", "duplicates", "beyond_most")
"""Reasons for which an answer, right as it may be, becomes no row."""
ONE_ROW: tuple[Kept, ...] = ("best", "pairs")
"""Kinds of selections with one row a prompt by default."""


class SampledAnswer(NamedTuple):
    """An answer of answers.jsonl, and its verdict."""

    row: int
    """Index of its prompt in prompts.arrow."""
    sample: int
    text: str
    tokens: int | None
    """None if a server did not count them."""
    ended: bool
    whole: bool
    """Whether its text has all that was generated."""
    right: bool | None = None
    """None if nothing says so."""
    score: float | None = None
    """None if it could not be read."""


class KeptRow(NamedTuple):
    """A row to write: an answer, or a pair of which the first is the better one."""

    answer: SampledAnswer
    rejected: SampledAnswer | None = None


def read_answers(path: Path, prompts: int) -> Iterator[list[SampledAnswer]]:
    """Yield the answers to each of `prompts` prompts, by sample. Raises UserError unless each prompt has as many."""
    expected, count = 0, None
    for row, group in itertools.groupby(_answers_in(path), key=lambda answer: answer.row):
        members = list(group)
        count = count or len(members)
        if row != expected or [each.sample for each in members] != list(range(count)):
            break
        yield members
        expected += 1
    if expected != prompts:
        raise UserError(
            f"{path}: has not {count or 'any'} answers to each of the {prompts:,} prompts; run `zerolora stage sample` "
            "again"
        )


def _answers_in(path: Path) -> Iterator[SampledAnswer]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
                yield SampledAnswer(*(value[key] for key in ("row", "sample", "text", "tokens", "ended", "whole")))
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{path}:{number}: is no sampled answer; run `zerolora stage sample` again") from None


def chosen(
    settings: SelectionSection, answers: Sequence[SampledAnswer], left_out: Counter[str] | None = None
) -> list[KeptRow]:
    """Return the rows of one prompt's answers, and count in `left_out` the answers that would be rows but for LEFT_OUT.

    Equal scores are in the order of the samples, so that the same answers give the same rows.
    """
    counts: Counter[str] = Counter() if left_out is None else left_out
    members = list(_with_score(usable(settings, answers, counts), counts))
    if settings.mixed and len({answer.right for answer in answers}) < 2:
        counts["not_mixed"] += sum(_is_kept(settings.keep, answer) for answer in members)
        return []
    most = settings.most or (1 if settings.keep in ONE_ROW else len(answers))
    if settings.keep == "pairs":
        return _pairs(settings.margin, members, most, counts)
    if settings.keep == "best":
        members = _by_score(members)
    kept: list[KeptRow] = []
    known: set[tuple[Any, ...]] = set()
    rows: Counter[bool | None] = Counter()
    for answer in members:
        if not _is_kept(settings.keep, answer):
            continue
        label = answer.right if settings.keep == "labelled" else None
        key = normal_form(answer.text), label
        if key in known:
            counts["duplicates"] += 1
        elif rows[label] == most:
            counts["beyond_most"] += 1
        else:
            kept.append(KeptRow(answer))
            rows[label] += 1
        known.add(key)
    return kept


def usable(
    settings: SelectionSection, answers: Sequence[SampledAnswer], left_out: Counter[str] | None = None
) -> Iterator[SampledAnswer]:
    """Yield the answers that may become rows. One that its limit ended would teach a model to end there, and one whose
    text lacks some of it, such as the tokens around a call of a tool, something that no model has said."""
    counts: Counter[str] = Counter() if left_out is None else left_out
    for answer in answers:
        if not answer.ended:
            counts["not_ended"] += 1
        elif not answer.whole:
            counts["not_whole"] += 1
        elif not answer.text.strip():
            counts["blank"] += 1
        elif settings.max_answer_length and (answer.tokens or 0) > settings.max_answer_length:
            counts["too_long"] += 1
        else:
            yield answer


def _with_score(answers: Iterator[SampledAnswer], counts: Counter[str]) -> Iterator[SampledAnswer]:
    """Yield the answers whose score could be read."""
    for answer in answers:
        if answer.score is None:
            counts["without_score"] += 1
        else:
            yield answer


def _is_kept(keep: Kept, answer: SampledAnswer) -> bool:
    return answer.right is True or keep != "right"


def _by_score(answers: Sequence[SampledAnswer]) -> list[SampledAnswer]:
    return sorted(answers, key=lambda answer: (-_score(answer), answer.sample))


def _pairs(margin: float, answers: Sequence[SampledAnswer], most: int, counts: Counter[str]) -> list[KeptRow]:
    """Return pairs of the best with the worst answer, the next best with the next worst, and so on, whose scores differ
    by more than `margin`, of different texts."""
    better = _by_score(_distinct(answers))
    counts["duplicates"] += len(answers) - len(better)
    worse = sorted(better, key=lambda answer: (_score(answer), answer.sample))
    differing = itertools.takewhile(
        lambda pair: _score(pair[0]) - _score(pair[1]) > margin, zip(better, worse, strict=True)
    )
    pairs = [KeptRow(*pair) for pair in differing]
    counts["beyond_most"] += 2 * len(pairs[most:])
    return pairs[:most]


def _distinct(answers: Sequence[SampledAnswer]) -> list[SampledAnswer]:
    """Return the answers without those that differ from an earlier one by case, white space and punctuation alone: what
    sets a pair apart should be more."""
    known: dict[str, SampledAnswer] = {}
    for answer in answers:
        known.setdefault(normal_form(answer.text), answer)
    return list(known.values())


def _score(answer: SampledAnswer) -> float:
    assert answer.score is not None
    return answer.score
