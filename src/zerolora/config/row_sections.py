"""Sections that select rows by their columns, and order the answers of pairs."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from zerolora.config.section import Section, Text
from zerolora.errors import shown

COMPARISON = re.compile(r"\s*(<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)\s*")
"""A comparison with a number, as in "< 0"."""


def _comparison(value: str) -> str:
    if not COMPARISON.fullmatch(value):
        raise ValueError(f"{shown(value)} is no comparison; use one as in '> 0.5', or a list of values")
    return value


Scalar = bool | int | float | str | None
Values = Annotated[list[Scalar], Field(min_length=1)]
Wanted = Values | Annotated[str, AfterValidator(_comparison)]
"""The values of a column, or a comparison with a number."""


class Better(Section):
    """Which of two answers is the better one, where rows do not say it by their columns. Rows of equal answers are
    dropped."""

    column: Text | None = None
    """Column that says which answer is better, e.g. overall_preference."""
    first: Wanted | None = None
    """Its values where the answer in the column of `chosen` is better: a list, or a comparison, e.g. "< 0"."""
    second: Wanted | None = None
    """Its values where the one of `rejected` is better. Default: the opposite of a comparison; a list needs it."""
    tie: list[Scalar] = []
    """Its values where neither is better. Rows with the number of a comparison are ties as well."""
    scores: Annotated[list[Text], Field(min_length=2, max_length=2)] | None = None
    """Instead of `column`: the columns with the scores of the two answers; more is better, and equal scores are a
    tie."""

    @model_validator(mode="after")
    def _is_decided(self) -> "Better":
        if (self.column is None) == (self.scores is None):
            raise ValueError("set one of column and scores")
        if self.scores and (self.first is not None or self.second is not None or self.tie):
            raise ValueError("scores need no first, second or tie; remove them")
        if self.column and self.first is None:
            raise ValueError('column needs first: its values where the answer of `chosen` is better, or "> 0"')
        if isinstance(self.first, list) and self.second is None:
            raise ValueError("first is a list of values, which needs second: those where the other answer is better")
        return self

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        return self.scores or [self.column or ""]
