"""Snakemake's output for users: the start and end of each stage, and a progress bar while it runs.

A profile turns it on with `logger: zerolora`. In a terminal each running stage has one line with a bar, and then a line
with its result; elsewhere (a file, a Slurm job's log) it has a line at its start, one now and then, and one at its end.
A dry run has a line for the jobs of each rule. `--verbose` keeps Snakemake's format, and `.snakemake/log/` always has
its full log.

Snakemake imports every installed plugin at each start, so this module imports only what Snakemake has loaded.
"""

import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from logging import WARNING, LogRecord
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

if TYPE_CHECKING:
    from rich.console import RenderableType

TARGETS = ("all", "default", "judge_all")
"""Rules without a command, which only collect outputs."""
HIDDEN = (
    *("Assuming unrestricted shared filesystem usage", "Building DAG of jobs", "SNAKEMAKE\n"),  # before the first event
    *("Exiting because a job execution failed", "WorkflowError:\nAt least one job did not complete successfully"),
)
"""Prefixes of messages that say nothing to a user, or repeat that a stage failed."""
SHOWN = (
    *("Nothing to be done", "Creating conda environment", "Pulling singularity image"),
    *("Waiting at most", "Job rate limit reached", "submitted a job array of"),
    *("Will exit after", "Terminating processes"),  # when it is interrupted
)
"""Prefixes of messages for the user among those of level INFO that Snakemake logs during a run without an event."""
FAILED = "WorkflowError:"
"""Prefix of an error for the user, which Snakemake shows with the lines of code that raised it."""
FRAMES = re.compile(r'\n  File ".*", line \d+, in \w+$', re.MULTILINE)
MESSAGE = re.compile(r"(\d+: )?zerolora: ")
"""Prefix of log lines for the user; `srun --label` puts the task's number before it."""
LISTED_NAMES = 3
"""Names of a rule's jobs that a dry run shows."""
TAIL = 20
"""Last lines of a log to show if a stage failed without a message."""
POLL_SECONDS = 0.25
LINE_SECONDS = 30
"""Between the lines of running stages where there is no terminal, for each of them."""
NAME_WIDTH = 28


@dataclass
class Job:
    """A running stage."""

    name: str
    log: Path | None
    output: str
    """Its first output file."""
    logged: float
    """When Snakemake logged its start, in seconds since the epoch. The stage may have begun before it is read here."""
    started: float = field(default_factory=time.monotonic)
    status: dict[str, Any] = field(default_factory=dict)
    _before: int = 0
    """`started` in the status file of an earlier run."""
    _read: int = 0
    """Bytes of the log read so far."""
    _rest: bytes = b""
    last: str = ""
    """Last line of the log."""

    def __post_init__(self) -> None:
        before = self._status().get("started", 0)
        self._before = before if before < self.logged * 1e9 else 0

    def _status(self) -> dict[str, Any]:
        from zerolora.log import read_status

        return read_status(self.log) if self.log else {}

    def poll(self) -> list[str]:
        """Read the stage's status, and return the new messages for the user in its log."""
        status = self._status()
        if not self.log or status.get("started", 0) == self._before:
            return []
        if status["started"] != self.status.get("started"):
            self._read, self._rest = 0, b""
        self.status = status
        try:
            with self.log.open("rb") as file:
                file.seek(self._read)
                text = self._rest + file.read()
                self._read = file.tell()
        except OSError:
            return []
        *lines, self._rest = text.split(b"\n")
        decoded = [printable(line.decode(errors="replace")) for line in lines]
        self.last = next((line for line in reversed(decoded) if line.strip()), self.last)
        return [line for line in decoded if is_message(line)]

    @property
    def seconds(self) -> str:
        """Return the time since the stage started, as in 9.5 s or 3:07."""
        return duration(time.monotonic() - self.started)


def is_message(line: str) -> bool:
    """Return whether a line of a log is for the user."""
    return MESSAGE.match(line) is not None


def printable(text: str) -> str:
    """Return a line without control characters, which could control the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def printable_lines(text: str) -> str:
    """Return lines without control characters."""
    return "\n".join(map(printable, text.split("\n")))


def duration(seconds: float) -> str:
    """Return seconds as in 9.5 s, 3:07 or 1:03:07."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


class Plan:
    """What a dry run plans: how many jobs of each rule, and why."""

    def __init__(self) -> None:
        self.rules: dict[str, list[tuple[str, str]]] = {}
        """Name and reason of each job, by rule."""

    def add(self, values: dict[str, Any]) -> None:
        """Add a planned job."""
        if values["rule_name"] not in TARGETS:
            # The files and values of each reason are in Snakemake's own format.
            reason = re.split(r"[:;]", str(values["reason"]), maxsplit=1)[0].strip()
            name = "-".join(map(str, (values["wildcards"] or {}).values()))
            self.rules.setdefault(values["rule_name"], []).append((name, reason))

    def lines(self) -> list[str]:
        """Return a line for each rule, and one for all; none without a job."""
        result = []
        for rule, jobs in self.rules.items():
            names = [name for name, _ in jobs if name]
            more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
            reasons = "; ".join(dict.fromkeys(reason for _, reason in jobs if reason))
            listed = f"{', '.join(names[:LISTED_NAMES])}{more}: " if names else ""
            result.append(f"{len(jobs):>5}  {rule:<18}  {listed}{reasons[:1].lower()}{reasons[1:]}")
        count = sum(map(len, self.rules.values()))
        end = f"{count:>5}  jobs; a dry run runs none, and with --verbose shows the files and reason of each"
        return [*result, end] if result else []


class Terminal:
    """Permanent lines above a progress bar for each running stage."""

    def __init__(self, stream: Any, colour: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=stream, no_color=not colour, highlight=False, soft_wrap=True)
        self.jobs: list[Job] = []
        self._live = Live(console=self.console, get_renderable=self._running, auto_refresh=False, transient=True)

    def show(self, jobs: list[Job]) -> None:
        """Draw the bars of running stages, or remove them if there are none."""
        self.jobs = jobs
        if jobs and not self._live.is_started:
            self._live.start()
        elif not jobs and self._live.is_started:
            self._live.stop()
        if jobs:
            self._live.refresh()

    def print(self, text: str, style: str = "") -> None:
        """Print permanent lines."""
        self.console.print(printable_lines(text), style=style, markup=False)

    def started(self, job: Job) -> None:
        """Print nothing: the bar shows it."""

    def ended(self, job: Job, text: str) -> None:
        """Print how a stage ended."""
        self._print("✓", "green", job, text)

    def failed(self, job: Job, text: str) -> None:
        """Print that a stage failed."""
        self._print("✗", "red", job, f"failed{text}")

    def _print(self, mark: str, style: str, job: Job, text: str) -> None:
        from rich.text import Text

        # Cut to the terminal's width; the log has the whole line.
        line = Text(no_wrap=True, overflow="ellipsis").append(mark, style)
        line.append(f" {job.name:<{NAME_WIDTH}} {job.seconds:>8}  {printable(text)}")
        self.console.print(line, soft_wrap=False)

    def _running(self) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(4):
            table.add_column(no_wrap=True, overflow="ellipsis")
        for job in self.jobs:
            name = Text(f"  {job.name:<{NAME_WIDTH}}", style="bold")
            total, done = job.status.get("total"), job.status.get("done", 0)
            if total:
                bar = ProgressBar(total, done, width=20)
                text = f"{100 * done // total:>3}%  {printable(job.status.get('text', ''))}"
            else:
                bar = ProgressBar(None, 0, width=20, pulse=True, animation_time=time.monotonic())
                text = ""
            table.add_row(name, f"{job.seconds:>8} ", bar, text)
        return table


class Lines:
    """One line after another, with the time of day."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._shown: dict[str, float] = {}
        """When each stage had its last line."""

    def show(self, jobs: list[Job]) -> None:
        """Print how far the stages are, each after LINE_SECONDS for every running one."""
        now = time.monotonic()
        for job in jobs:
            total, since = job.status.get("total"), self._shown.get(job.name, job.started)
            if total and now - since >= LINE_SECONDS * len(jobs):
                self._shown[job.name] = now
                done = job.status.get("done", 0)
                self._print(job, f"{100 * done // total:>3}% after {job.seconds}  {job.status.get('text', '')}")

    def print(self, text: str, style: str = "") -> None:
        """Print lines."""
        print(printable_lines(text), file=self.stream, flush=True)

    def started(self, job: Job) -> None:
        """Print that a stage starts."""
        self._shown.pop(job.name, None)
        self._print(job, "started")

    def ended(self, job: Job, text: str) -> None:
        """Print how a stage ended."""
        self._print(job, f"done in {job.seconds}  {text}")

    def failed(self, job: Job, text: str) -> None:
        """Print that a stage failed."""
        self._print(job, f"failed after {job.seconds}{text}")

    def _print(self, job: Job, text: str) -> None:
        self.print(f"{time.strftime('%H:%M:%S')}  {job.name:<{NAME_WIDTH}}  {text}")


class LogHandler(LogHandlerBase):
    """Turns Snakemake's events into lines. Snakemake calls it from one thread."""

    writes_to_stream = True
    writes_to_file = False  # Snakemake keeps writing its log file
    has_filter = False  # Snakemake's filter handles `--quiet`
    has_formatter = False  # `--verbose` uses Snakemake's formatter
    needs_rulegraph = False

    def __post_init__(self) -> None:
        """Prepare to print; the terminal's modules are imported at the first stage."""
        self.stream = sys.stdout if self.common_settings.stdout else sys.stderr
        self.plain = bool(self.common_settings.verbose)
        self.plan = Plan() if self.common_settings.dryrun else None
        self.screen: Terminal | Lines = Lines(self.stream)
        self.jobs: dict[int, Job] = {}
        self.failed = self.summary = self.running = False
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def emit(self, record: LogRecord) -> None:
        """Show a record if it is for the user."""
        try:
            with self._lock:
                self._emit(record)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Remove the bars and print the summary."""
        self._ended.set()
        with self._lock:
            self.screen.show([])
            for line in self.plan.lines() if self.plan and not self.plain and not self.failed else ():
                self.screen.print(line)
            self.plan = None
            if self.summary and not self.failed and "DVC_STAGE" not in os.environ:
                self._print_summary()
                self.summary = False
        super().close()

    def _emit(self, record: LogRecord) -> None:
        event: LogEvent | None = getattr(record, "event", None)
        values = vars(record)
        if self.plain:
            text = self.format(record)
            if text and text != "None":
                text = printable_lines(text)
                print(("\n" if event == LogEvent.JOB_INFO else "") + text, file=self.stream, flush=True)
        elif event == LogEvent.JOB_INFO and self.plan:
            self.plan.add(values)
        elif event == LogEvent.JOB_INFO:
            self._start(values)
        elif event == LogEvent.JOB_FINISHED:
            self._finish(values["job_id"])
        elif event == LogEvent.JOB_ERROR:
            self._fail(values)
        elif event in (None, LogEvent.ERROR, LogEvent.GROUP_ERROR):
            self._message(record)
        self.running |= event not in (None, LogEvent.ERROR)

    def _start(self, values: dict[str, Any]) -> None:
        if values["rule_name"] in TARGETS:
            self.summary = True
            return
        name = " ".join([values["rule_name"], *map(str, values["wildcards"].values())])
        log = Path(values["log"][0]) if values["log"] else None
        job = Job(name, log, next(iter(values["output"]), ""), values["created"])
        if not self.jobs and self.stream.isatty() and isinstance(self.screen, Lines):
            self.screen = Terminal(self.stream, not self.common_settings.nocolor)
        self.jobs[values["jobid"]] = job
        self.screen.started(job)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()

    def _finish(self, number: int) -> None:
        if job := self.jobs.pop(number, None):
            self._poll(job)
            self.screen.show(list(self.jobs.values()))
            output = job.output.removesuffix("/manifest.json")
            self.screen.ended(job, "  ".join(filter(None, (output, job.status.get("result", "")))))

    def _fail(self, values: dict[str, Any]) -> None:
        self.failed = True
        # Snakemake logs it again when it ends.
        if job := self.jobs.pop(values["jobid"], None):
            self._poll(job)
            self.screen.show(list(self.jobs.values()))
            logs = [path.partition(" ")[0] for path in values["log"]]
            if job.log and not is_message(job.last):
                for line in tail(job.log):
                    self.screen.print(f"  {line}")
            self.screen.failed(job, f"; log: {', '.join(logs)}" if logs else "")

    def _message(self, record: LogRecord) -> None:
        text = self.format(record).strip()
        is_detail = record.levelno < WARNING and self.running and not text.startswith(SHOWN)
        # A CalledProcessError is a stage that failed, which has its own line.
        if not text or is_detail or "CalledProcessError" in text or text.startswith(HIDDEN):
            return
        if text.startswith("Nothing to be done"):
            self.summary = "all" in sys.argv
        if text.startswith(FAILED):
            text = FRAMES.sub("", text)
        self.screen.print(text, "red" if record.levelno > WARNING else "")

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            with self._lock:
                if not self._ended.is_set():
                    for job in self.jobs.values():
                        self._poll(job)
                    self.screen.show(list(self.jobs.values()))

    def _poll(self, job: Job) -> None:
        for line in job.poll():
            self.screen.print(line, "yellow")

    def _print_summary(self) -> None:
        from zerolora.errors import UserError
        from zerolora.report.show import summary

        try:
            self.screen.print(f"\n{summary(Path('results'))}")
        except UserError as error:
            self.screen.print(str(error))


def tail(log: Path) -> list[str]:
    """Return a log's last lines."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [printable(line) for line in lines[-TAIL:]]
