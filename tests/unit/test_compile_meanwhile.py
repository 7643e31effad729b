"""Compiling packages while a command runs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from zerolora.machine.compile_meanwhile import SETTLED

# Waits until the old file is compiled, then exits with 3.
COMMAND = """
import os, sys, time
deadline = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.05)
sys.exit(3)
"""


def test_whole_files_are_compiled_and_the_commands_exit_code_is_kept(tmp_path: Path) -> None:
    package = tmp_path / "lib/package"
    (package / "tests").mkdir(parents=True)
    old, new, broken, unused = (package / name for name in ("old.py", "new.py", "broken.py", "tests/unused.py"))
    for file in (old, new, unused):
        file.write_text("X = 1\n")
    broken.write_text("def (\n")
    long_ago = new.stat().st_mtime - 10 * SETTLED
    for file in (old, broken, unused):
        os.utime(file, (long_ago, long_ago))
    soon = new.stat().st_mtime + 3600
    os.utime(new, (soon, soon))
    command = [sys.executable, "-c", COMMAND, importlib.util.cache_from_source(str(old))]
    result = subprocess.run(
        [sys.executable, "-m", "zerolora.machine.compile_meanwhile", str(tmp_path), "/tests?/", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert (result.returncode, result.stdout, result.stderr) == (3, "", "")
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")] == ["old"]
