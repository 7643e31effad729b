"""labelled: an answer to a prompt, and whether it is desirable, as in data for KTO of TRL and LLaMA-Factory."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.chat import CONVERSATION, Turn, conversation, message_of
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.judged_answers import (
    ASKING,
    LISTS,
    TURNS,
    after_question,
    check_all_read,
    check_answer,
    check_prompt_filled,
    is_in,
    one_of,
    present_in,
    prompt_of,
    said,
)
from zerolora.data.formats.row_values import factor_of
from zerolora.errors import shown

ANSWERS = ("completion", "output", "response")
LABELS = ("label", "kto_tag")
FIELDS = (*ASKING, *ANSWERS, *LABELS)
WORDS = {"desirable": True, "undesirable": False, "chosen": True, "rejected": False, "good": True, "bad": False}


def _labelled(row: Row) -> Example:
    desirable = _label(row)
    field = one_of(row, ANSWERS)
    asked = prompt_of(row)
    if not field and asked and asked.field in LISTS:
        field, turns = asked.field, asked.turns
        end = after_question(turns)
        prompt, answer = turns[:end], turns[end:]
    else:
        field = field or "completion"
        value = said(row, field)
        answer = [Turn(message_of("assistant", value))] if isinstance(value, str) else value
        prompt = asked.turns if asked else []
        if answer[0].message["role"] != "assistant":
            end = after_question(answer)
            if asked and not is_in(asked, answer[:end]):
                raise BadRow(
                    f"{row.name(asked.field)} is not the prompt that {row.name(field)} begins with; correct it, or "
                    f"set ignore: [{row.name(asked.field)}]"
                )
            prompt, answer = answer[:end], answer[end:]
    if not prompt:
        check_prompt_filled(row)
    check_answer(answer, prompt, row.name(field))
    check_all_read(row, FIELDS)
    example = conversation([*prompt, *answer], row, field, len(prompt), asked.further if asked else "")
    return example._replace(desirable=desirable, supervised=None)


def _label(row: Row) -> bool:
    """Return the label of a row. Raises BadRow if it is missing or has another meaning."""
    present = present_in(row, LABELS)
    values = [_meaning(row, field) for field in present]
    if not present:
        row.needed("label")
    if len(set(values)) > 1:
        raise BadRow(f"{row.name(present[0])} and {row.name(present[1])} contradict each other; keep one")
    return values[0]


def _meaning(row: Row, field: str) -> bool:
    held = row.get(field)
    word = held.strip().lower() if isinstance(held, str) else ""
    factor = factor_of(held)
    if word in WORDS or factor in (0.0, 1.0):
        return WORDS[word] if word in WORDS else bool(factor)
    raise BadRow(f"{row.name(field)} is {shown(held)}; use true (1, desirable) or false (0, undesirable)")


def _fits(row: Row) -> bool:
    labelled = any(row.get(field) is not None for field in LABELS)
    return labelled and any(row.get(field) is not None for field in (*ANSWERS, *LISTS))


FORM = Form(
    name="labelled",
    fields=(*FIELDS, *CONVERSATION),
    needed=("prompt", "completion", "label"),
    convert=_labelled,
    example={"prompt": "1 + 4 =", "completion": "5", "label": True},
    fits=_fits,
    keys=TURNS,
    rows="labelled",
)
