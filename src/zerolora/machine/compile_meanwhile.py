"""Compiles packages on a core that pip leaves idle: `compile_meanwhile FOLDER UNUSED COMMAND …`.

It runs the command, and meanwhile compiles what has appeared under the folder and does not match the regular expression
UNUSED. It needs no package.
"""

import contextlib
import importlib.util
import os
import py_compile
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

SETTLED = 5.0
"""Seconds after which a file is whole: of a part, compiled code could pass for that of the whole file."""
PAUSE = 2.0
"""Seconds between two looks at the folder."""


def main() -> None:
    """Exit as the command does."""
    folder, unused, *command = sys.argv[1:]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the command too, which says so
    process = subprocess.Popen(command)
    os.nice(10)
    seen: set[str] = set()
    while process.poll() is None:
        compile_new(Path(folder), re.compile(unused), seen, process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PAUSE)
    sys.exit(process.returncode)


def compile_new(folder: Path, unused: re.Pattern[str], seen: set[str], process: "subprocess.Popen[bytes]") -> None:
    """Compile whole files of a folder that are neither `unused` nor `seen`, and add them, until the process ends."""
    for path, _, names in os.walk(folder):
        for name in names:
            file = f"{path}/{name}"
            if process.poll() is not None:
                return
            if not name.endswith(".py") or file in seen or unused.search(file):
                continue
            with contextlib.suppress(OSError, py_compile.PyCompileError, ValueError):  # pip may have removed it
                if time.time() - Path(file).stat().st_mtime < SETTLED:
                    continue
                seen.add(file)
                if not Path(importlib.util.cache_from_source(file)).exists():
                    py_compile.compile(file, doraise=True, quiet=2)


if __name__ == "__main__":
    main()
