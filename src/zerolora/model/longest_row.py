"""The tokens of the longest row that a model takes, by its config."""

from pathlib import Path

from zerolora.model.architecture import config_of


def longest_row(weights: Path) -> int | None:
    """Return the most tokens of a row of the model in a directory; None if its config does not say."""
    most = getattr(config_of(weights).get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None
