"""The command `zerolora check`."""

import sys
from pathlib import Path

from zerolora.check.check_table import closing, shows, table
from zerolora.check.machine import this_machine
from zerolora.check.needs import needs_of
from zerolora.check.rows import Check, rows
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.log import say
from zerolora.report.comparison_terminal import terminal_width

DEFAULT = Path("config/config.yaml")


def check(config: Path | None) -> int:
    """Print this machine against what a config needs, and return the exit code: 1 if anything is missing.

    Without `config` the project's config is read, if it has one. Raises UserError if a config is invalid.
    """
    file = config or (DEFAULT if DEFAULT.is_file() else None)
    read = load(file) if file else None
    checked = rows(this_machine(), needs_of(read) if read else None)
    if read:
        from zerolora.check.rehearsal import faults

        stops = faults(resolve(read))
        checked += [Check(job, "missing", "would stop", remedy=text) for job, text in stops]
    plain, colour = not shows(sys.stdout.encoding), sys.stdout.isatty()
    say(table(checked, terminal_width(), colour=colour, plain=plain), coloured=colour)
    say(closing(checked, str(file) if file else None))
    return int(any(row.mark == "missing" for row in checked))
