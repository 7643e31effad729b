"""preference: a chosen and a rejected answer to a prompt, as in the data of TRL, LLaMA-Factory, ms-swift and axolotl.

The answers are texts, messages, or whole conversations, whose prompt is the messages that they begin with in common.
"""

from collections.abc import Iterator
from itertools import takewhile
from math import isfinite
from typing import Any

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.chat import CONVERSATION, Turn, conversation, message_of
from zerolora.data.formats.form import Form, Row, value_at
from zerolora.data.formats.judged_answers import (
    ASKING,
    LISTS,
    TURNS,
    Prompt,
    after_question,
    check_all_read,
    check_answer,
    check_prompt_filled,
    is_in,
    messages_in,
    one_of,
    prompt_of,
    said,
)
from zerolora.data.formats.row_values import factor_of, filled, is_blank, objects_of, text_of, visible
from zerolora.errors import shown

CHOSEN = ("chosen", "chosen_response", "chosen_messages")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
REPLACING = REJECTED[1:]
"""Fields that replace the last answer of `messages`, which is the chosen one (ms-swift)."""
SCORES = ("score", "rating", "reward")
"""Words in the name of a column that rates an answer; more is better."""
FIELDS = (*ASKING, *CHOSEN, *REJECTED)
RANKED = ("answer", "rank")
"""Keys of ranked answers."""
LONG = 4  # words of a prompt that no answer repeats by chance


def _preference(row: Row) -> Example:
    better, worse = one_of(row, CHOSEN), one_of(row, REJECTED)
    chosen: str | list[Turn]
    rejected: str | list[Turn]
    asked = prompt_of(row)
    if not better and not worse and not is_blank(row.get("answers")):
        names, (chosen, rejected) = (row.name("answers"), row.name("answers")), _ranked(row)
    elif not better and worse in REPLACING and asked and asked.field in LISTS:
        names = row.name(asked.field), row.name(worse)
        rejected = said(row, worse)
        asked, chosen = _replaced(asked, rejected)
    else:
        better, worse = better or "chosen", worse or "rejected"
        names = row.name(better), row.name(worse)
        chosen, rejected = said(row, better), said(row, worse)
        asked = _without_chosen(asked, chosen, row, names[0])
    if asked and isinstance(chosen, str) and isinstance(rejected, str):
        _check_not_repeated(asked, chosen, rejected, names)
    prompt, answers = _split(row, asked, chosen, rejected, names)
    _check(prompt, answers, names)
    _check_scores(row, names)
    check_all_read(row, FIELDS)
    field = better or (asked.field if asked else "chosen")
    further = asked.further if asked else ""
    good, bad = (conversation([*prompt, *answer], row, field, len(prompt), further) for answer in answers)
    return good._replace(rejected=bad.messages, supervised=None, thoughts=good.thoughts or bad.thoughts)


def _ranked(row: Row) -> tuple[str, str]:
    """Return the best and the worst of ranked answers; 1 is the best rank."""
    name = row.name("answers")
    ranked = []
    answers = objects_of(row.needed("answers"), name)
    row.lists.append((f"{name}[]", len(answers)))
    for number, each in enumerate(answers):
        row.parts += [
            (f"{name}[].{key}", held) for key, held in each.items() if key not in RANKED and not is_blank(held)
        ]
        rank = factor_of(each.get("rank"))
        if rank is None or not isfinite(rank) or isinstance(each.get("rank"), bool):
            raise BadRow(f"{name}[{number}].rank is {shown(each.get('rank'))}; give its rank, 1 = the best")
        ranked.append(
            (rank, filled(text_of(each.get("answer"), f"{name}[{number}].answer"), f"{name}[{number}].answer"))
        )
    ranks = sorted(rank for rank, _ in ranked)
    if len(ranks) < 2 or ranks[0] == ranks[1] or ranks[-1] == ranks[-2] != ranks[0]:
        raise BadRow(
            f"{name} have the ranks {shown([f'{rank:g}' for rank in ranks])}, of which no single one is the best and "
            "no single one the worst; write the pair as chosen and rejected"
        )
    (_, best), *_, (_, worst) = sorted(ranked, key=lambda each: each[0])
    return best, worst


def _replaced(asked: Prompt, rejected: str | list[Turn]) -> tuple[Prompt | None, list[Turn]]:
    """Return the prompt and the chosen answer of a conversation whose last answer another field replaces."""
    turns = asked.turns
    if not isinstance(rejected, str) and rejected[0].message["role"] != "assistant":
        return None, turns
    single = isinstance(rejected, str) or len(rejected) == 1
    end = len(turns) - 1 if single else after_question(turns)
    return asked._replace(turns=turns[:end]), turns[end:]


def _without_chosen(asked: Prompt | None, chosen: str | list[Turn], row: Row, name: str) -> Prompt | None:
    """Return the prompt without the chosen answer that `messages` may end with."""
    if asked is None or asked.field not in LISTS:
        return asked
    answer = [Turn(message_of("assistant", chosen))] if isinstance(chosen, str) else chosen
    own, last = messages_in(asked.turns), messages_in(answer)
    if own[-len(last) :] == last:
        return asked._replace(turns=asked.turns[: -len(last)])
    if own and own[-1]["role"] == "assistant":
        field = row.name(asked.field)
        raise BadRow(
            f"{field} ends with an answer that is not {name}; end it with the question, or set ignore: [{field}]"
        )
    return asked


def _check_not_repeated(asked: Prompt, chosen: str, rejected: str, names: tuple[str, str]) -> None:
    text = asked.text
    if len(text.split()) >= LONG and chosen.startswith(text) and rejected.startswith(text):
        raise BadRow(
            f"{names[0]} and {names[1]} begin with the prompt, which would be read twice; remove it from both, or "
            "write the answers as messages if they repeat it"
        )


def _split(
    row: Row,
    asked: Prompt | None,
    chosen: str | list[Turn],
    rejected: str | list[Turn],
    names: tuple[str, str],
) -> tuple[list[Turn], tuple[list[Turn], list[Turn]]]:
    """Return the turns of the prompt, and those of each answer."""
    if asked is None:
        for answer, name in zip((chosen, rejected), names, strict=True):
            if isinstance(answer, str):
                check_prompt_filled(row)
                raise BadRow(
                    f"{name} is a text, and the row has no prompt (it has {row}); set columns: {{prompt: ...}} with "
                    "its column, or whole conversations"
                )
        assert not isinstance(chosen, str) and not isinstance(rejected, str)
        return _implicit(row, chosen, rejected, names)
    turns = [
        [Turn(message_of("assistant", answer))] if isinstance(answer, str) else answer for answer in (chosen, rejected)
    ]
    whole = [answer[0].message["role"] != "assistant" for answer in turns]
    if all(whole):
        prompt, answers = _implicit(row, turns[0], turns[1], names)
        if asked.turns and not (is_in(asked, prompt) and (asked.text or len(prompt) == len(asked.turns))):
            raise BadRow(
                f"{row.name(asked.field)} is not the prompt that {names[0]} and {names[1]} begin with; correct it, or "
                f"set ignore: [{row.name(asked.field)}]"
            )
        return prompt, answers
    for number, begins in enumerate(whole):
        if begins:
            size = len(asked.turns)
            if messages_in(turns[number])[:size] != messages_in(asked.turns):
                raise BadRow(f"{names[number]} does not begin with the prompt; write the answer alone")
            turns[number] = turns[number][size:]
    return asked.turns, (turns[0], turns[1])


def _implicit(
    row: Row, chosen: list[Turn], rejected: list[Turn], names: tuple[str, str]
) -> tuple[list[Turn], tuple[list[Turn], list[Turn]]]:
    """Return the turns that two conversations begin with in common, and the rest of each."""
    if messages_in(chosen) == messages_in(rejected):
        raise BadRow(f"{names[0]} and {names[1]} are equal; remove the row")
    pairs = zip(messages_in(chosen), messages_in(rejected), strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not common:
        if chosen[0].message["role"] == rejected[0].message["role"] == "assistant":
            check_prompt_filled(row)
            raise BadRow(f"{names[0]} has an answer without a prompt; set columns: {{prompt: ...}} with its column")
        raise BadRow(
            f"{names[0]} and {names[1]} begin with different messages, so they answer different prompts; write the "
            "answers to one prompt, or remove the row"
        )
    return chosen[:common], (chosen[common:], rejected[common:])


def _check(prompt: list[Turn], answers: tuple[list[Turn], list[Turn]], names: tuple[str, str]) -> None:
    """Raise BadRow unless two answers to a prompt differ by more than white space."""
    for answer, name in zip(answers, names, strict=True):
        check_answer(answer, prompt, name)
    better, worse = map(messages_in, answers)
    if better == worse:
        raise BadRow(f"{names[0]} and {names[1]} are equal; remove the row")
    if _squeezed(better) == _squeezed(worse):
        raise BadRow(f"{names[0]} and {names[1]} differ only in white space; remove the row")


def _squeezed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: " ".join(visible(held).split()) if isinstance(held, str) else held for key, held in message.items()}
        for message in messages
    ]


def _check_scores(row: Row, names: tuple[str, str]) -> None:
    """Read the scores of both answers, if the row has them. Raises BadRow if they contradict the pair."""
    fields = row.columns.get("score_chosen", "score_chosen"), row.columns.get("score_rejected", "score_rejected")
    for pair in dict.fromkeys([fields, *_scored(row, names)]):
        values = [value_at(row.value, name) for name in pair]
        one, other = map(factor_of, values)
        if one is None or other is None or not row.ignored.isdisjoint(pair):
            continue
        if other > one:
            raise BadRow(
                f"{pair[1]} is {other:g}, more than {pair[0]} with {one:g}; swap the answers, remove the row, or "
                f"set ignore: [{pair[0]}, {pair[1]}]"
            )
        row.read |= dict(zip(pair, values, strict=True))


def _scored(row: Row, names: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the columns with the scores of the chosen and of the rejected answer: their names differ as those of the
    answers do, as in chosen_rating, or rating_a for response_a."""
    start, end = _in_common(*names)
    one, other = (name[start : len(name) - end] for name in names)
    for name in row.value if one and other else ():
        if one in name and any(word in name.lower() for word in SCORES):
            begin = name.rindex(one)
            yield name, name[:begin] + other + name[begin + len(one) :]


def _in_common(one: str, other: str) -> tuple[int, int]:
    """Return the number of characters that two names begin and end with in common."""
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    ends = zip(one[start:][::-1], other[start:][::-1], strict=False)
    return start, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))


def _fits(row: Row) -> bool:
    better, worse = ([field for field in fields if row.get(field) is not None] for fields in (CHOSEN, REJECTED))
    if better and worse:
        return True
    if not better and set(worse) & set(REPLACING):
        return any(row.get(field) is not None for field in LISTS)
    answers = row.get("answers")
    return not better and not worse and isinstance(answers, list) and all(isinstance(each, dict) for each in answers)


FORM = Form(
    name="preference",
    fields=(*FIELDS, *CONVERSATION, "answers", "score_chosen", "score_rejected"),
    needed=("prompt", "chosen", "rejected"),
    convert=_preference,
    example={"prompt": "1 + 4 =", "chosen": "5", "rejected": "6"},
    fits=_fits,
    keys=TURNS,
    rows="pairs",
)
