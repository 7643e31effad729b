"""Sections of the config. It imports nothing else of zerolora, since the config imports it."""

from typing import Annotated

from pydantic import Field

from zerolora.config.section import Positive, Section


class Bundle(Section):
    """The adapter as a ZIP file."""

    compressed: bool = False
    """Compress it."""


class HardRows(Section):
    """Rows that are harder than the mean count more."""

    sharpness: Annotated[float, Field(gt=0)] = 1.0
    """Factor of a row's distance from the mean."""


class Narrow(Section):
    """The adapter of narrow."""

    r: Positive = 4
    """Rank of the two factors."""
