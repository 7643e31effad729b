"""Write the table of strategies in docs/methods.md from the registries: python docs/method_table.py.

With --check it writes nothing, and exits with 1 if the table is out of date.
"""

import re
import sys
from pathlib import Path

from module_table import write_or_check

from zerolora.methods.registry import table

DOCUMENT = Path(__file__).resolve().parent / "methods.md"
MARK = re.compile(r"(<!-- strategies of each method -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the table, or compare it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    new = MARK.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", text)
    code: int = write_or_check(DOCUMENT, new)
    return code


if __name__ == "__main__":
    sys.exit(main())
