"""The messages of a stage: one logger, and a status file next to the log for progress displays.

    LOGGER.info(...)     goes to the log
    LOGGER.warning(...)  and LOGGER.error also go to the user's screen: their lines begin with "zerolora: "
    result("...")        one line about the stage's output
    say("...")           what a command was asked for, on stdout

All escape control characters, since names, rows and other tools' messages may have some.

With `--log FILE`, all output of a stage, its libraries and child processes goes to FILE. Its state goes to the status
file of FILE: a JSON object with `started` (ns since the epoch), `name`, `done`, `total` and `text` (progress), and
`result`. Snakemake's logger plugin (snakemake_logger_plugin_zerolora) reads both files.
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolora.errors import CONTROLS, printable, printable_lines

LOGGER = logging.getLogger("zerolora")
PREFIX = "zerolora: "
"""Marks lines for the user's screen."""
COLOUR = re.compile(r"(?P<colour>\x1b\[[0-9;]*m)|[^\x1b]+|\x1b")
UNWRITTEN = re.compile(f"{CONTROLS.pattern}|[\ud800-\udfff]")
"""Matches control characters, and halves of a character, which no encoding has."""
VARIABLE = "ZEROLORA_STATUS"
"""Environment variable: path of the status file, inherited by training ranks."""

TASKS = (
    *("RANK", "PET_NODE_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK"),
    *("SLURM_PROCID", "PALS_RANKID", "PMI_RANK"),
)
"""Environment variables of a launcher's task number; the first that is set counts (train/launch/topology.py)."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return printable_lines(text)
        return "\n".join(PREFIX + printable(line) for line in text.splitlines())


class _Handler(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm and sys.stderr.isatty():  # keeps a progress bar intact
            tqdm.tqdm.write(self.format(record), file=sys.stderr)
        else:  # without tqdm's lock, which forked ranks share: a stuck rank must not block the others
            super().emit(record)


def set_up() -> None:
    """Log to stderr: own messages from INFO on, those of other libraries from WARNING on."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(_Formatter())
    LOGGER.handlers = [handler]
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO)
    # On import DeepSpeed warns that it found no GPU (accelerator/real_accelerator.py); what runs where is said here.
    logging.getLogger("DeepSpeed").addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return record.module != "real_accelerator"


def say(text: str, *, coloured: bool = False) -> None:
    """Print a text on stdout, with control characters escaped, but for line ends and the colours of a table."""
    print("\n".join(COLOUR.sub(_colour, line) if coloured else printable(line) for line in text.split("\n")))


def escaped(text: str) -> str:
    """Return a text for a terminal or a page: line ends and tabs remain, and so do joined emojis."""
    return UNWRITTEN.sub(lambda found: found[0] if found[0] in "\n\t" else printable(found[0]), text)


def _colour(part: re.Match[str]) -> str:
    return part[0] if part["colour"] else printable(part[0])


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """Leave out other messages inside the block."""
    before = LOGGER.level
    LOGGER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        LOGGER.setLevel(before)


def redirect(log: Path) -> None:
    """Redirect the output of this process and its children to `log`, and start its status file.

    The tasks of a launcher share both files, and append to the log in any order. Snakemake removes the log before the
    next attempt, so each attempt has a second name, e.g. default.attempt1.log, until one succeeds
    (`result`).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    task = next((os.environ[name] for name in TASKS if name in os.environ), None)
    first = task in (None, "0")
    os.environ[VARIABLE] = str(status_file(log))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if task is None else 0), 0o666)
    if first:
        _write({"started": time.time_ns()})
        with contextlib.suppress(OSError):  # not every file system has links
            os.link(log, log.with_suffix(f".attempt{len(attempts(log)) + 1}.log"))
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    # Without line buffering, printed lines would appear after later log lines.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):  # a library may have replaced stdout
        reconfigure(line_buffering=True)


def status_file(log: Path) -> Path:
    """Return the path of a log's status file."""
    return log.with_suffix(".status.json")


def attempts(log: Path) -> list[Path]:
    """Return the logs of all attempts since a stage last succeeded, in order."""
    result = log.parent.glob(f"{log.stem}.attempt*.log")
    return sorted(result, key=lambda path: (len(path.name), path.name))


def read_status(log: Path) -> dict[str, Any]:
    """Return the status of a log; empty if there is none."""
    try:
        return dict(json.loads(status_file(log).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def forget(log: Path) -> None:
    """Remove a log and its status file before a stage runs again, so that what is there is of the present attempt. The
    log of a failed attempt keeps its second name."""
    for path in (log, status_file(log)):
        path.unlink(missing_ok=True)


def note_end(log: Path, how: str) -> None:
    """Note in the status file of a stage how its job ended, for a stage that could not say so itself."""
    path = status_file(log)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(read_status(log) | {"ended": how}), encoding="utf-8")


def update_status(**values: Any) -> None:
    """Set values in the status file, if this process has one."""
    if VARIABLE in os.environ:
        _write(read_status(_log()) | values)


def result(text: str) -> None:
    """Report the stage's output in one line."""
    LOGGER.info(text)
    update_status(result=text)
    if VARIABLE in os.environ:
        for path in attempts(_log()):
            path.unlink(missing_ok=True)


def _log() -> Path:
    return Path(os.environ[VARIABLE].removesuffix(".status.json") + ".log")


def _write(status: dict[str, Any]) -> None:
    path = Path(os.environ[VARIABLE])
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # The status is for display only; a disk that is full or gone is reported by the stage's own output.
    with contextlib.suppress(OSError):
        beside.write_text(json.dumps(status), encoding="utf-8")
        beside.replace(path)
