"""Preference data: prompts with a chosen and a rejected answer, or with one that has a label.

Only prompts are shortened, the same in both sequences of a pair: an answer whose end is cut would be another answer.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerolora.data.encode import CONTEXT, Piece, Tokens
from zerolora.data.example import BadRow
from zerolora.data.ragged import Ragged
from zerolora.data.truncation import Limits

OTHER_PROMPT = BadRow(
    "has another prompt before the rejected answer than before the chosen one, as the template writes them; remove the "
    "row, or use a template that writes a prompt alike whatever follows it"
)


class Answers(NamedTuple):
    """Rows that fit: the index of each row, its prompt's tokens, and its sequences, each prompt and answer: the chosen
    and the rejected one, or the labelled one. too_long: the reasons of the others."""

    row: np.ndarray
    prompt: np.ndarray
    sequences: list[Tokens]
    shortened: int
    too_long: dict[int, str]


def prompts_of(sequences: list[Tokens]) -> np.ndarray:
    """Return the tokens of each row before its answer: [rows]. Rows whose sequences have different prompts become wrong
    in the first one."""
    prompts = [_before_answer(tokens) for tokens in sequences]
    first, *others = sequences
    for other, of_other in zip(others, prompts[1:], strict=True):
        for number in range(len(first.ids)):
            end = prompts[0][number]
            same = end == of_other[number] and np.array_equal(first.ids[number][:end], other.ids[number][:end])
            if not same and number not in other.wrong:
                first.wrong.setdefault(number, OTHER_PROMPT)
    return prompts[0]


def _before_answer(tokens: Tokens) -> np.ndarray:
    """Return the position of the first supervised token of each row, its length without one: [rows]."""
    supervised = np.append(np.flatnonzero(tokens.supervised_role != CONTEXT), len(tokens.supervised_role))
    starts, ends = tokens.ids.offsets[:-1], tokens.ids.offsets[1:]
    first = supervised[np.searchsorted(supervised, starts)]
    return np.asarray(np.minimum(first, ends) - starts)


def fitted_answers(
    sequences: list[Tokens], prompt: np.ndarray, longest: int, policy: str, bos: int | None, limits: Limits
) -> Answers:
    """Return the rows whose sequences have at most `longest` tokens, and prompt and answer at most `limits`. With
    truncate_left, longer prompts lose their beginning, but for BOS, the same in all sequences of a row."""
    lengths = np.stack([tokens.ids.lengths for tokens in sequences])
    answer = (lengths - prompt).max(0)
    over = np.maximum(0, prompt + answer - longest)
    if limits.prompt is not None:
        over = np.maximum(over, prompt - limits.prompt)
    first = sequences[0].ids
    begins = np.zeros(len(first), np.int64)
    if bos is not None:
        begins[first.lengths > 0] = first.values[first.heads] == bos
    too_long: dict[int, str] = {}
    wrong = set().union(*(tokens.wrong for tokens in sequences))
    used = []
    for number in range(len(first)):
        if number in wrong:
            continue
        size, least = int(answer[number]), int(begins[number]) + 1
        if limits.answer is not None and size > limits.answer:
            has = f"has {size} tokens in its answer, max_answer_length is {limits.answer}"
            too_long[number] = f"{has}; an answer is never cut: shorten it, or raise max_answer_length"
        elif size + least > longest and over[number]:
            beside = "" if size > longest else " with a token of the prompt"
            has = f"has {size} tokens in its answer, max_length is {longest}{beside}"
            too_long[number] = f"{has}; an answer is never cut: shorten it, or raise max_length"
        elif over[number] > prompt[number] - least:
            has = f"has {prompt[number]} tokens in its prompt, max_prompt_length is {limits.prompt}"
            too_long[number] = f"{has}, which leaves nothing but BOS; use {least} or more"
        elif over[number] and policy != "truncate_left":
            remedy = "or set too_long: drop or truncate_left, which shortens the prompt"
            has = f"has {prompt[number] + size} tokens, max_length is {longest}"
            if limits.prompt is not None and prompt[number] > limits.prompt:
                has = f"has {prompt[number]} tokens in its prompt, max_prompt_length is {limits.prompt}"
            too_long[number] = f"{has}; shorten it, raise the limit, {remedy}"
        else:
            used.append(number)
    which = np.array(used, np.int64)
    cut = over[which]
    return Answers(
        which,
        prompt[which] - cut,
        [_without(tokens, which, begins[which], cut) for tokens in sequences],
        int((cut > 0).sum()),
        too_long,
    )


def _without(tokens: Tokens, which: np.ndarray, begins: np.ndarray, cut: np.ndarray) -> Tokens:
    """Return rows without `cut` tokens after the first `begins` ones."""
    starts, ends = tokens.ids.offsets[which], tokens.ids.offsets[which + 1]
    edges = np.stack([starts, starts + begins, starts + begins + cut, ends], 1).reshape(-1, 2)
    two = np.full(len(which), 2)
    ids = tokens.ids.slices(*edges.T).joined(two)
    roles = Ragged(tokens.supervised_role, tokens.ids.offsets).slices(*edges.T).values
    roles[ids.heads] = CONTEXT
    return Tokens(ids, roles, tokens.prompt[which], tokens.roles, {})


def hashes(prompts: Sequence[Piece], answers: Sequence[Sequence[Piece]], label: bool | None) -> tuple[int, int, int]:
    """Return 64-bit hashes of a row, of its prompt, and of the row that would contradict it: the same with the answers
    exchanged, or with the opposite label."""
    prompt = hashlib.blake2b(_text(prompts), digest_size=8)
    texts = [_text(answer) for answer in answers]
    row, contrary = prompt.copy(), prompt.copy()
    row.update(b"\0".join([b"", *texts, str(label).encode()]))
    opposite = label if label is None else not label
    contrary.update(b"\0".join([b"", *texts[::-1], str(opposite).encode()]))
    row_hash, prompt_hash, contrary_hash = (int.from_bytes(each.digest()) for each in (row, prompt, contrary))
    return row_hash, prompt_hash, contrary_hash


def parted(pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces before the first supervised one, and the others."""
    first = next((number for number, piece in enumerate(pieces) if piece.supervised), len(pieces))
    return pieces[:first], pieces[first:]


def _text(pieces: Sequence[Piece]) -> bytes:
    return "".join([piece.text for piece in pieces]).encode()
