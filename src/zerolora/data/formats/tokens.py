"""tokens: token numbers of the model's own tokenizer, with labels or without."""

from zerolora.data.example import BadRow, Example
from zerolora.data.formats.form import Form, Row
from zerolora.data.formats.row_values import numbers_of
from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import shown
from zerolora.units import counted


def _tokens(row: Row) -> Example:
    tokens = numbers_of(row.needed("input_ids"), row.name("input_ids"))
    if len(tokens) < 2:
        raise BadRow(
            f"{row.name('input_ids')} has {counted(len(tokens), 'token')}; a row needs 2: a token is predicted "
            "from those before"
        )
    if (lowest := min(tokens)) < 0:
        raise BadRow(f"{row.name('input_ids')}[{tokens.index(lowest)}] is {lowest}; token numbers begin at 0")
    _check_whole(row, tokens)
    if row.get("labels") is None:
        return Example(tokens=tokens, labels=list(tokens))
    name = row.name("labels")
    labels = numbers_of(row.get("labels"), name)
    if len(labels) != len(tokens):
        raise BadRow(
            f"{name} has {len(labels)} entries for {len(tokens)} tokens; use one for each, {IGNORED} = not supervised"
        )
    for position, (label, token) in enumerate(zip(labels, tokens, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(
                f"{name}[{position}] is {label} where the token is {token}; use {token}, or {IGNORED} = not supervised"
            )
    if all(label == IGNORED for label in labels[1:]):
        raise BadRow(f"{name} are {IGNORED} after the first token, so the loss sees nothing; remove the row")
    return Example(tokens=tokens, labels=labels)


def _check_whole(row: Row, tokens: list[int]) -> None:
    """Raise BadRow for padding and for several rows packed into one, which attention would ignore."""
    for field, expected in (("attention_mask", [1] * len(tokens)), ("position_ids", list(range(len(tokens))))):
        if (result := row.get(field)) is not None and numbers_of(result, row.name(field)) != expected:
            raise BadRow(
                f"{row.name(field)} is {shown(result)}, but must be {shown(expected)}; remove padding and packing"
            )


FORM = Form(
    name="tokens",
    fields=("input_ids", "labels", "attention_mask", "position_ids"),
    needed=("input_ids",),
    convert=_tokens,
    example={"input_ids": [1, 17, 9, 2], "labels": [-100, -100, 9, 2]},
)
