"""Reads the judge's verdicts: a rating of 1 to 10, or the better one of two answers; a win needs both orders."""

import re

RATING = re.compile(r"\[\[([0-9]+(?:\.[0-9]+)?)\]\]")
WINNER = re.compile(r"\[\[([ABC])\]\]")
LOWEST, HIGHEST = 1.0, 10.0
TIE = "tie"


def rating(text: str) -> float | None:
    """Return the rating that a text gives as [[5]]; None if it gives none, two different ones, or one out of range."""
    result = {float(each) for each in RATING.findall(text)}
    value = result.pop() if len(result) == 1 else None
    return value if value is not None and LOWEST <= value <= HIGHEST else None


def winner(text: str, models: tuple[str, ...]) -> str | None:
    """Return the better of two models by [[A]] or [[B]], TIE by [[C]]; None if the text says none or two of these."""
    result = set(WINNER.findall(text))
    return {"A": models[0], "B": models[1], "C": TIE}[result.pop()] if len(result) == 1 else None


def outcome(one: str | None, other: str | None) -> str | None:
    """Return the winner of a comparison in both orders: the model that both name, otherwise TIE.

    None if one of the verdicts could not be read. This is the conservative rule of arXiv 2306.05685, section 3.4.
    """
    if one is None or other is None:
        return None
    return one if one == other else TIE
