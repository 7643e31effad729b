"""Write what the config means: the settings of every stage, defaults filled in, overrides merged.

    zerolora resolve --config config/config.yaml --output results/config.json

Both engines compare these settings, section by section, to decide which stages run.
"""

from pathlib import Path

from zerolora.config import load, resolve
from zerolora.files import write_json


def write(config: Path, output: Path) -> None:
    """Check `config` and write its resolved settings. Raises UserError with one line a mistake."""
    write_json(output, resolve(load(config)))
