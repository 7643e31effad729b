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
from logging import INFO, WARNING, LogRecord
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
    *("No SLURM account given", "Unable to guess SLURM account"),  # sbatch says whether it needs one
)
"""Prefixes of messages that say nothing to a user, or repeat that a stage failed."""
SHOWN = (
    *("Nothing to be done", "Creating conda environment", "Pulling singularity image"),
    *("Waiting at most", "Job rate limit reached"),
    *("Will exit after", "Terminating processes"),  # when it is interrupted
)
"""Prefixes of messages for the user among those of level INFO that Snakemake logs during a run without an event."""
FAILED = "WorkflowError:"
"""Prefix of an error for the user, which Snakemake shows with the lines of code that raised it."""
REPORTS = "RuleException:"
"""First line of Snakemake's report of a stage that failed."""
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
    started: float = field(default_factory=time.monotonic)
    status: dict[str, Any] = field(default_factory=dict)
    """Status of this attempt; engine_sync.py removes that of an earlier one before the stage can begin."""
    queued: str | None = None
    """Its place in Slurm's queue, as in job 12 waits: Priority; None for a job of this machine."""
    times: tuple[int, int] | None = None
    """Seconds that it ran and waited, as Slurm has them."""
    state: str = ""
    """How Slurm says that it ended, as in job 12: TIMEOUT (TimeLimit)."""
    refused: bool = False
    """Whether it was shown that it was not submitted."""
    explained: bool = False
    """Whether it was shown what ended it."""
    _read: int = 0
    """Bytes of the log read so far."""
    _rest: bytes = b""
    last: str = ""
    """Last line of the log."""

    def poll(self) -> list[str]:
        """Read the stage's status, and return the new messages for the user in its log."""
        from zerolora.log import read_status

        status = read_status(self.log) if self.log else {}
        if not self.log or "started" not in status:
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
        """Return the time since the stage started, or that it ran in a job, as in 9.5 s or 3:07."""
        return duration(self.times[0] if self.times else time.monotonic() - self.started)

    @property
    def in_queue(self) -> str:
        """Return how long it waited in the queue, as in ", 3:07 in the queue"; empty if that is not known."""
        return f", {duration(self.times[1])} in the queue" if self.times else ""


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
    """Return seconds as in 9.5 s, 3:07 or 1:03:07; whole ones, as Slurm has them, as in 9 s."""
    if seconds < 60:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
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

    def queued(self, name: str, text: str) -> None:
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
        line.append(f" {job.name:<{NAME_WIDTH}} {job.seconds:>8}{job.in_queue}  {printable(text)}")
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
            bar: RenderableType
            if total:
                bar = ProgressBar(total, done, width=20)
                text = f"{100 * done // total:>3}%  {printable(job.status.get('text', ''))}"
            elif job.queued is not None:
                bar, text = Text(""), job.queued
            else:
                bar = ProgressBar(None, 0, width=20, pulse=True, animation_time=time.monotonic())
                text = ""
            table.add_row(name, f"{job.seconds:>8} ", bar, printable(text))
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
                self._print(job.name, f"{100 * done // total:>3}% after {job.seconds}  {job.status.get('text', '')}")

    def print(self, text: str, style: str = "") -> None:
        """Print lines."""
        print(printable_lines(text), file=self.stream, flush=True)

    def started(self, job: Job) -> None:
        """Print that a stage starts, unless it waits in a queue."""
        self._shown.pop(job.name, None)
        if job.queued is None:
            self._print(job.name, "started")

    def queued(self, name: str, text: str) -> None:
        """Print what becomes of a job in the queue."""
        self._print(name, text)

    def ended(self, job: Job, text: str) -> None:
        """Print how a stage ended."""
        self._print(job.name, f"done in {job.seconds}{job.in_queue}  {text}")

    def failed(self, job: Job, text: str) -> None:
        """Print that a stage failed."""
        self._print(job.name, f"failed after {job.seconds}{job.in_queue}{text}")

    def _print(self, name: str, text: str) -> None:
        self.print(f"{time.strftime('%H:%M:%S')}  {name:<{NAME_WIDTH}}  {text}")


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
        self.of_slurm: set[int] = set()
        """Jobs that go to Slurm."""
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
        elif about := values.get("slurm"):
            self._queued(about, record.levelno)
        elif event in (None, LogEvent.ERROR, LogEvent.GROUP_ERROR):
            self._message(record)
        self.running |= event not in (None, LogEvent.ERROR)

    def _start(self, values: dict[str, Any]) -> None:
        if values["rule_name"] in TARGETS:
            self.summary = True
            return
        name = " ".join([values["rule_name"], *map(str, values["wildcards"].values())])
        log = Path(values["log"][0]) if values["log"] else None
        job = Job(name, log, next(iter(values["output"]), ""))
        if values["jobid"] in self.of_slurm:
            job.queued = "not yet submitted"
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
            if job.refused:
                return
            logs = [path.partition(" ")[0] for path in values["log"]]
            # Without a status, the stage has not begun: only its job's log is of this attempt.
            began = job.log if job.status else next(iter(logs[1:]), None)
            if began and not job.explained and not is_message(job.last):
                for line in tail(Path(began)):
                    self.screen.print(f"  {line}")
            there = [path for path in logs if Path(path).exists()]
            parts = (job.state, f"log: {', '.join(there)}" if there else "")
            self.screen.failed(job, "".join(f"; {part}" for part in parts if part))

    def _queued(self, about: dict[str, Any], level: int) -> None:
        """Show what SlurmQueue (zerolora.compat.slurm_queue) says of jobs."""
        state, text = about.get("state", ""), about["text"]
        if state == "announced":
            self.of_slurm.update(about["jobs"])
        for job in filter(None, map(self.jobs.get, about["jobs"])):
            job.refused |= state == "refused"
            if state in ("submitted", "waiting", "running"):
                job.queued = text
            elif row := about.get("row"):
                job.times = (row.ran, row.waited or 0) if row.ran is not None else None
                job.explained = level > INFO
                job.state = f"job {about['number']}: {state}{f' ({row.reason})' if row.reason else ''}"
        name = about["name"].replace("-", " ", 1)
        if level > INFO:
            self.screen.print(f"{about['name']}: {text}", "red" if level > WARNING else "")
        elif state in ("submitted", "waiting", "running"):
            self.screen.queued(name, text)

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
    # In the log of a Slurm job, Snakemake's report follows what the stage printed.
    end = next((number for number, line in enumerate(lines) if number and line.startswith(REPORTS)), len(lines))
    return [printable(line) for line in lines[:end][-TAIL:]]
