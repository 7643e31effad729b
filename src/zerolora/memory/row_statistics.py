"""The statistics of a packing plan that memory and time depend on."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """Lengths of a packing plan, in tokens, and how many packed rows it has."""

    packing: bool
    """Packed rows hold several rows."""
    longest_packed_row: int
    most_supervised: int
    """Maximum number of supervised tokens in a packed row."""
    packed_rows: int
    """For training."""
    tokens: int
    """Of all rows for training."""
    supervised_tokens: int
    mean_row_of_a_token: float
    """Mean, over tokens, of the length of the row that a token is in."""
    validation_rows: int
    """Packed rows for validation."""


def row_statistics(stats: dict[str, Any]) -> RowStatistics:
    """Return the statistics that a packing plan's stats.json holds."""
    return RowStatistics(
        packing=stats["packing"],
        longest_packed_row=stats["longest_packed_row"],
        most_supervised=stats["most_supervised"],
        packed_rows=stats["train_packed_rows"],
        tokens=stats["train_tokens"],
        supervised_tokens=stats["train_supervised_tokens"],
        mean_row_of_a_token=stats["train_mean_row_of_a_token"],
        validation_rows=stats["validation_packed_rows"],
    )
