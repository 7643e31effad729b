"""Assigns rows to splits: duplicates, leakage, and how often each row is used for training."""

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerolora.config.schema import Source
from zerolora.config.settings import PrepareSettings
from zerolora.data.near_prompts import near
from zerolora.data.prepared_rows import SPLITS
from zerolora.errors import UserError
from zerolora.train.objectives import reading
from zerolora.units import counted

BLOCK = 1 << 18  # rows
Questions = Callable[[np.ndarray], Iterator[tuple[np.ndarray, list[str]]]]
"""Yields the given rows (sorted indices) in parts, each with the questions of its rows."""


class Index(NamedTuple):
    """Every row's source index, row hash, prompt hash and hash of the prompt's normal form: arrays [rows]. contrary: of
    preference data, the hash of the row that would contradict it; otherwise empty. continued: the indices of rows that
    are further parts of the row before, sorted."""

    source: np.ndarray
    row: np.ndarray
    prompt: np.ndarray
    normal: np.ndarray
    contrary: np.ndarray = np.zeros(0, np.uint64)
    continued: np.ndarray = np.zeros(0, np.int64)


class HeldOut(NamedTuple):
    """The held-out rows of another data set: their hashes as in Index, their questions, and how many of them, the first
    ones, are for validation."""

    row: np.ndarray
    prompt: np.ndarray
    normal: np.ndarray
    questions: list[str]
    validation: int


class Mixture(NamedTuple):
    """times: number of uses of each row in training [rows]. validation, test: row indices, in the order drawn. counts:
    duplicates, leaked and dropped rows. leaked: the training rows whose prompt is in a later split too, or nearly,
    whatever `leakage` does with them."""

    times: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    counts: dict[str, int]
    leaked: np.ndarray = np.zeros(0, np.int64)


def mix(
    index: Index,
    settings: PrepareSettings,
    sources: Sequence[Source],
    dropped: str = "",
    questions: Questions | None = None,
    held_out: HeldOut | None = None,
) -> Mixture:
    """Assign each row to a split, as the seed determines.

    Held-out rows are drawn before sources are weighted, so a repeated row cannot be both held out and trained on. Rows
    that are parts of one row, and rows of preference data with the same prompt, are drawn together, so that no split
    has fewer rows than asked for but maybe more.
    Raises UserError if a split would be empty, labelled rows of one have a single prompt, or a source with a share of
    the training rows yields none. dropped: the dropped rows, for this message. questions: of the rows, to find prompts
    that are nearly the same; None to look for none. held_out: rows that are held out already, beside which no equal or
    near row is trained on, whatever `leakage` says.
    """
    whole, starts = _whole_rows(index)
    first = _first(whole.row)
    counts = {"duplicate_rows": len(first) - int(first.sum())}
    kept = first if settings.duplicates == "drop" else np.ones(len(first), dtype=bool)
    drop = settings.leakage == "drop" or held_out is not None or bool(settings.selections)
    try:
        split = _split(whole, settings, sources, kept)
        asked = questions and _of_whole_rows(questions, starts)
        if held_out:
            whole, split, asked = _beside(whole, split[0], asked, held_out)
        of_leaks, leaked = _leaks(whole, split, drop, asked)
        counts |= of_leaks
        if held_out:
            split[1:] = [np.zeros(0, np.int64)] * 2
        for number, name in enumerate(SPLITS):
            if name != "train" and len(split[number]) == 0 and settings.holds_out(name):
                raise _TooFewError(
                    f"no row is left for {name}", f"raise split.{name}, or give a source `split: {name}`"
                )
        train, validation, test = (_parts(rows, starts) for rows in split)
        times = np.zeros(len(index.source), dtype=np.int32)
        times[train] = 1
        _weigh(times, index.source, sources, settings)
        if not times.any():
            raise _TooFewError("no row is left to train on", "lower split, or add rows")
        if settings.rows == "labelled":
            _check_prompts(index.prompt, np.flatnonzero(times), validation)
    except _TooFewError as error:
        missing, remedy = error.args
        parts = [f"{settings.title}: {missing}"] + [dropped] * bool(dropped)
        if settings.duplicates == "drop" and (duplicates := counts["duplicate_rows"]):
            parts.append(f"{duplicates:,} duplicates are dropped by duplicates: drop")
        in_later = sum(number for name, number in counts.items() if name in LEAKED)
        if drop and in_later:
            by = f", which {settings.held_out} holds out" if settings.held_out else " by leakage: drop"
            parts.append(f"{in_later:,} rows with a prompt of a later split are dropped{by}")
        parts.append(f"correct the dropped rows, or {remedy}" if dropped else remedy)
        raise UserError("; ".join(parts)) from None
    return Mixture(times, validation, test, counts, _parts(leaked, starts))


def _beside(
    index: Index, train: np.ndarray, questions: Questions | None, held_out: HeldOut
) -> tuple[Index, list[np.ndarray], Questions | None]:
    """Return the index of own rows with held-out ones behind them, the numbers of all splits in it, and the questions
    of both."""
    count, more = len(index.row), len(held_out.row)
    hashes = {name: (getattr(index, name), getattr(held_out, name)) for name in ("row", "prompt", "normal")}
    index = index._replace(**{name: np.concatenate(both) for name, both in hashes.items()})
    splits = np.split(np.arange(count, count + more), [held_out.validation])

    def of(rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[str]]]:
        assert questions is not None
        end = int(np.searchsorted(rows, count))
        if end:
            yield from questions(rows[:end])
        if end < len(rows):
            yield rows[end:], [held_out.questions[number] for number in (rows[end:] - count).tolist()]

    return index, [train, *splits], questions and of


def _whole_rows(index: Index) -> tuple[Index, np.ndarray | None]:
    """Return the index of whole rows, and the first part of each and the number of parts: [rows + 1]; None if none has
    several parts."""
    if not len(index.continued):
        return index, None
    starts = np.delete(np.arange(len(index.source) + 1), index.continued)
    whole = index._replace(
        **{name: getattr(index, name)[starts[:-1]] for name in ("source", "row", "prompt", "normal")}
    )
    return whole, starts


def _parts(rows: np.ndarray, starts: np.ndarray | None) -> np.ndarray:
    """Return the parts of whole rows, in order."""
    if starts is None:
        return rows
    rows = rows.astype(np.int64)
    counts = starts[rows + 1] - starts[rows]
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts[rows] - offsets, counts) + np.arange(counts.sum())


def _of_whole_rows(questions: Questions, starts: np.ndarray | None) -> Questions:
    """Return the questions of whole rows, by the first part of each."""
    if starts is None:
        return questions

    def of(rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[str]]]:
        for part, texts in questions(starts[rows]):
            yield np.searchsorted(starts, part), texts

    return of


def _check_prompts(prompts: np.ndarray, train: np.ndarray, validation: np.ndarray) -> None:
    """Raise an error for labelled rows of a single prompt, to whose answers there are none of another to compare with
    (train/objectives/mismatched.py). Nothing compares the answers of test rows."""
    remedies = {
        "train": (train, "add rows with other prompts"),
        "validation": (validation, "raise split.validation, or hold out no rows"),
    }
    for name, (rows, remedy) in remedies.items():
        if len(rows) and (prompts[rows] == prompts[rows[0]]).all():
            problem = f"all {counted(len(rows), f'{name} row')} have the same prompt"
            raise _TooFewError(
                f"{problem}, but {reading('labelled')[0]} compares answers with those to other prompts", remedy
            )


def contradictory(index: Index) -> np.ndarray:
    """Return the numbers of the rows that contradict another one."""
    if not len(index.contrary):
        return np.zeros(0, np.int64)
    return np.flatnonzero(_among(index.contrary, np.arange(len(index.row)), index.row))


class _TooFewError(Exception):
    """A split has too few rows. Arguments: the problem, and the remedy."""


def _split(index: Index, settings: PrepareSettings, sources: Sequence[Source], kept: np.ndarray) -> list[np.ndarray]:
    """Return the row indices of train, validation and test: drawn rows first, then those of sources with a split."""
    own = np.array([SPLITS.index(source.split) if source.split else -1 for source in sources], np.int8)[index.source]
    drawn = array("I", np.flatnonzero(kept & (own < 0)).astype(np.uint32).tobytes())
    random.Random(settings.seed).shuffle(drawn)  # noqa: S311 - data, not secrets
    validation, test = (_held_out(getattr(settings.split, name), len(drawn)) for name in SPLITS[1:])
    if len(drawn) < validation + test or (len(drawn) == validation + test and not (kept & (own == 0)).any()):
        remedy = "lower split" if len(drawn) else "add rows"
        raise _TooFewError(f"has {counted(len(drawn), 'row')}, and split takes {validation + test:,}", remedy)
    order = np.frombuffer(drawn, dtype=np.uint32) if len(drawn) else np.zeros(0, np.uint32)
    train, tested = len(order) - validation - test, len(order) - test
    if len(index.contrary) and len(order):
        order, starts = _by_prompt(order, index.prompt)
        tested = _last_start(starts, tested, len(order))
        train = _last_start(starts, tested - validation, len(order))
        if validation + test and train == 0 and not (kept & (own == 0)).any():
            raise _TooFewError(f"has too few prompts for {validation + test:,} held-out rows", "lower split")
    parts = np.split(order, [train, tested])
    return [np.concatenate([part, np.flatnonzero(kept & (own == number))]) for number, part in enumerate(parts)]


def _by_prompt(order: np.ndarray, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows in an order in which those of a prompt follow each other, in place of the first, and the positions
    where a prompt begins."""
    _, first, group = np.unique(prompts[order], return_index=True, return_inverse=True)
    place = first[group]
    order = order[np.argsort(place, kind="stable")]
    return order, np.flatnonzero(np.diff(np.sort(place), prepend=-1))


def _last_start(starts: np.ndarray, position: int, end: int) -> int:
    """Return the last of `starts` that is not after a position; `end` is one too."""
    starts = np.append(starts, end)
    return int(starts[np.searchsorted(starts, max(position, 0), "right") - 1])


def _held_out(wanted: int | float, rows: int) -> int:
    """Return the number of rows of a split; of a share of the rows, at least one."""
    return wanted if isinstance(wanted, int) else max(1, round(wanted * rows))


LEAKED = (
    "leaked_prompts",
    "leaked_normalized_prompts",
    "leaked_near_prompts",
    "leaked_validation_prompts",
    "leaked_validation_normalized_prompts",
    "leaked_validation_near_prompts",
)
"""Counts of training rows, and of validation rows, whose prompt also occurs in a later split: the same prompt, one with
the same normal form (normal_form.py) without the system prompt, or one that is nearly the same (near_prompts.py). A row
counts once."""


def _leaks(
    index: Index, split: list[np.ndarray], drop: bool, questions: Questions | None
) -> tuple[dict[str, int], np.ndarray]:
    """Count rows whose prompt also occurs in a later split; with `drop`, remove them from `split`. Return the counts,
    and the training rows among them."""
    train, validation, test = split
    held_out = np.concatenate([validation, test])
    earlier = [(train, held_out), (validation, test)]
    found = [
        [_among(hashes, rows, hashes[later]) for hashes in (index.prompt, index.normal)] for rows, later in earlier
    ]
    nearly = _near(index, split, [one | other for one, other in found], questions)
    names, counts = iter(LEAKED), {"leaked_rows": int(_among(index.row, train, index.row[held_out]).sum())}
    leaked = []
    for (exact, normal), near_ones in zip(found, nearly, strict=True):
        for part in (exact, normal & ~exact, near_ones):
            counts[next(names)] = int(part.sum())
        leaked.append(exact | normal | near_ones)
    if drop:
        split[:2] = [rows[~each] for rows, each in zip(split, leaked, strict=False)]
    return counts, train[leaked[0]]


def _near(
    index: Index, split: list[np.ndarray], leaked: list[np.ndarray], questions: Questions | None
) -> list[np.ndarray]:
    """Return whether the question of each training row, and of each validation row, that is not `leaked` is nearly that
    of a row of a later split."""
    train, validation, test = split
    none = [np.zeros(len(rows), bool) for rows in (train, validation)]
    if questions is None or not len(validation) + len(test):
        return none
    # A prompt that occurs several times is looked at once.
    distinct = [rows[_first(index.normal[rows])] for rows in (train[~leaked[0]], validation, test)]
    rows = np.concatenate(distinct).astype(np.int64)
    order = np.argsort(rows, kind="stable")
    ranks = np.repeat(np.arange(3, dtype=np.int8), [len(part) for part in distinct])[order]
    found = near(rows[order], ranks, questions)
    return [
        _among(index.normal, part, index.normal[found[rank]]) & ~before
        for rank, (part, before) in enumerate(zip((train, validation), leaked, strict=True))
    ]


def _first(hashes: np.ndarray) -> np.ndarray:
    """Return whether each hash is its first occurrence; a 16th of them at a time, to save memory."""
    first = np.zeros(len(hashes), dtype=bool)
    share = (hashes >> np.uint64(60)).astype(np.uint8)
    for number in range(16):
        members = np.flatnonzero(share == number)
        first[members[np.unique(hashes[members], return_index=True)[1]]] = True
    return first


def _among(hashes: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether each row's hash is in `wanted`; in blocks, to save memory."""
    wanted = np.sort(wanted)
    result = np.zeros(len(rows), dtype=bool)
    if len(wanted):
        for start in range(0, len(rows), BLOCK):
            some = hashes[rows[start : start + BLOCK]]
            nearest = np.searchsorted(wanted, some).clip(max=len(wanted) - 1)
            result[start : start + BLOCK] = wanted[nearest] == some
    return result


def _weigh(times: np.ndarray, source: np.ndarray, sources: Sequence[Source], settings: PrepareSettings) -> None:
    """Set the uses of each training row in place, by its source's `rows` or `weight`. Raises _TooFewError if such a
    source has none."""
    members = {number: np.flatnonzero((source == number) & (times > 0)) for number in range(len(sources))}
    own = [name for name in settings.sources if name not in settings.selections] or (
        [settings.path] if settings.path else []
    )
    names = [*own, *settings.selections]
    for name, entry, result in zip(names, sources, members.values(), strict=False):
        if (entry.weight or entry.rows) and not len(result):
            key = "weight" if entry.weight else "rows"
            raise _TooFewError(
                f"no row of {name} is left to train on, which has {key} in sources",
                f"lower split, give it `split: train`, or take {name} out of sources",
            )
    weights = {number: entry.weight for number, entry in enumerate(sources) if entry.weight}
    total = sum(weights.values())
    whole = min((len(members[number]) * total / weight for number, weight in weights.items()), default=0)
    for number, entry in enumerate(sources):
        result = members[number]
        wanted = entry.rows or len(result)
        if number in weights:
            # The small addend keeps a share such as 0.1 x 10 rows from rounding to just below a whole row.
            wanted = min(len(result), int(whole * weights[number] / total + 1e-6))
        if len(result) == 0 or wanted == len(result):
            continue
        draw = np.random.default_rng([settings.seed, number]).permutation(result)
        times[result] = wanted // len(result)
        times[draw[: wanted % len(result)]] += 1
