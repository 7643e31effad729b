"""Stage select: selects rows to train on from sampled answers.

zerolora stage select NAME
"""

from pathlib import Path
from typing import Any

from zerolora.errors import UserError


def select(settings: dict[str, Any], data: Path, samples: Path, output: Path) -> None:
    """Write the rows that `settings` keep of the answers in `samples` to directory `output`."""
    raise UserError(f"stage select: {output}: is not made yet ({samples}, {data}, {len(settings)} settings)")
