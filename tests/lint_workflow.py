"""Lint the workflow with `snakemake --lint`, all but for the software of each rule: it is one environment for all."""

import subprocess
import sys
from pathlib import Path

ALLOWED = "    * Specify a conda environment or container for each rule.:"
HEAD = "    * "


def remarks(text: str) -> list[str]:
    """Return the first lines of the remarks, without those of ALLOWED, each after its rule."""
    rule, result = "", []
    for line in text.splitlines():
        if line.startswith("Lints for"):
            rule = line
        elif line.startswith(HEAD) and line != ALLOWED:
            result.append(f"{rule}\n{line}")
    return result


if __name__ == "__main__":
    snakemake = Path(sys.executable).with_name("snakemake")
    result = subprocess.run([snakemake, "--lint"], capture_output=True, text=True, check=False)
    listed = remarks(result.stdout + result.stderr)
    # It fails with remarks alone; any other failure has none.
    unread = result.returncode and ALLOWED not in result.stdout + result.stderr and not listed
    print("\n".join(listed) or (result.stderr if unread else "no remarks"))
    sys.exit(bool(listed or unread))
