"""One line of telemetry.csv for each step; docs/telemetry.md explains every column.

During training rank 0 appends lines to a file beside the checkpoints; a resumed run first removes those of steps after
its checkpoint. At the end the file is published among the metrics.
"""

import contextlib
import csv
import io
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerolora.config.settings import TrainingPlan
from zerolora.files import write_text
from zerolora.log import LOGGER
from zerolora.train.engines.engine import Engine
from zerolora.train.feed import Batches
from zerolora.train.telemetry.health import Health
from zerolora.train.telemetry.routers import Routers
from zerolora.train.telemetry.stopwatch import PARTS, Collectives, Counts, Stopwatch
from zerolora.train.telemetry.system_monitor import EnergyMeter, SystemMonitor
from zerolora.train.telemetry.trackers import TrackedRun

Row = dict[str, Any]
COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "gradient_norm",
    "tokens",
    "tokens_per_second",
    "tflops_per_second",
    "mfu",
    "seconds",
    *(f"{part}_seconds" for part in PARTS),
    "between_seconds",
    "communication_bytes",
    "cpu_percent",
    "host_memory_bytes",
    "gpu_percent",
    "gpu_memory_bytes",
    "gpu_energy_joules",
)
MEASURED = (
    *("step", "tokens_per_second", "tflops_per_second", "seconds", "between_seconds"),
    *(f"{part}_seconds" for part in PARTS),
)
"""The columns with a value in every line of a measured step."""
FILE = "telemetry.csv"


class TelemetryWriter:
    """The telemetry of one run. Every rank times its steps; rank 0 writes."""

    def __init__(
        self, engine: Engine, batches: Batches, times: Stopwatch, sent: Collectives, plan: TrainingPlan
    ) -> None:
        self.engine, self.batches, self.times, self.sent = engine, batches, times, sent
        self.flops, self.device = plan.flops, times.device
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.rows: list[Row] = []
        """A line of each step; on rank 0 only."""
        self.health = Health()
        self.steps = 0
        """Number of steps of this process."""
        self.totals: Counts = {}
        """Collectives of those steps."""
        self.system = SystemMonitor(self.device)
        self.energy = EnergyMeter(self.device)
        self.routers = Routers(engine.module)
        self.columns = (*COLUMNS, *batches.objective.metrics, *self.routers.columns)
        self._file: Any = None
        self._tracker: TrackedRun | None = None

    def open(self, path: Path, known: list[Row], tracker: TrackedRun) -> None:
        """Write to `path` from now on, after its lines of the steps `known`, which have loss, learning rate and
        metrics; their other columns come from the file, or stay empty. Rank 0 only."""
        on_disk = {row["step"]: row for row in read(path, self.columns)}
        self.rows = [{**dict.fromkeys(self.columns), **on_disk.get(row["step"], {}), **row} for row in known]
        self._tracker = tracker
        for row in self.rows:
            self.health.judge(row)  # earlier faults are not reported again
            tracker.log(row)
        try:
            write_text(path, text(self.rows, self.columns))
            self._file = path.open("a", encoding="utf-8", newline="")
        except OSError as error:
            self._without(path, error)

    def start(self) -> None:
        """Begin a step."""
        self.sent.mark()
        self.times.start()

    def write(self, step: int, loss: float, learning_rate: float, norm: float | None, metrics: dict[str, float]) -> Row:
        """Write the line of a finished step, warn of its faults, and return it; empty on ranks other than 0. `norm` is
        that of the gradient."""
        self.times.stop()
        if self.rank:
            return {}
        calls, size, waited = self.engine.reduced()
        if calls:
            self.sent.add("all_reduce", calls, size)
        self.steps += 1
        for name, counted in self.sent.counts().items():
            total = self.totals.setdefault(name, {"calls": 0, "bytes": 0})
            for unit, number in counted.items():
                total[unit] += number
        parts = self.times.seconds()
        parts["backward"] -= waited
        parts["communication"] += waited
        seconds = self.times.total
        tokens, squared, supervised = self.batches.sizes_at(step - 1)
        flops = self.flops.token * tokens + self.flops.squared_token * squared
        rate = (flops + self.flops.supervised_token * supervised) / seconds / self.world
        row: Row = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "gradient_norm": norm,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "tflops_per_second": rate / 1e12,
            "mfu": rate / self.flops.peak if self.flops.peak else None,
            "seconds": seconds,
            **{f"{part}_seconds": spent for part, spent in parts.items()},
            "between_seconds": self.times.between,
            "communication_bytes": sum(counted["bytes"] for counted in self.sent.counts().values()),
            **self.system.now(),
            "gpu_energy_joules": self.energy.since_last(),
            **{name: None if math.isnan(value) else value for name, value in metrics.items()},
            **self.routers.figures(),
        }
        self.rows.append(row)
        if self._tracker:
            self._tracker.log(row)
        if self._file:
            try:
                self._file.write(text([row], self.columns, header=False))
                self._file.flush()  # for readers while training runs
            except OSError as error:
                self._without(Path(self._file.name), error)
        for line in self.health.judge(row):
            LOGGER.warning(line)
        return row

    def publish(self, path: Path) -> None:
        """Write all lines to `path`, atomically."""
        write_text(path, text(self.rows, self.columns))

    def routed(self) -> dict[str, float]:
        """Return the mean over all steps of each router figure that any has, from the digits on disk, as a resumed run
        has them."""
        means = {}
        for name in self.routers.columns:
            if known := [float(_cell(name, row[name])) for row in self.rows if row[name] is not None]:
                means[name] = sum(known) / len(known)
        return means

    def summary(self) -> dict[str, float]:
        """Return figures of the whole run: FLOP/s, shares of the time, faults, and the collectives of a step."""
        measured = [row for row in self.rows if row["seconds"] is not None]
        figures: dict[str, float] = {f"health_{fault}": count for fault, count in self.health.faults.items()}
        if not measured:
            return figures
        seconds = sum(row["seconds"] for row in measured)
        whole = seconds + sum(row["between_seconds"] for row in measured)
        for part in (*PARTS, "between"):
            figures[f"{part}_share"] = sum(row[f"{part}_seconds"] for row in measured) / whole
        figures["tflops_per_second"] = sum(row["tflops_per_second"] * row["seconds"] for row in measured) / seconds
        if self.flops.peak:
            figures["mfu"] = figures["tflops_per_second"] * 1e12 / self.flops.peak
        for name, counted in self.totals.items():
            figures |= {f"{name}_{unit}_per_step": number / self.steps for unit, number in counted.items()}
        return figures

    def __enter__(self) -> "TelemetryWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
        if self._tracker:
            self._tracker.close()

    def _without(self, path: Path, error: OSError) -> None:
        self._file = None
        LOGGER.warning(
            f"{path}: telemetry cannot be written there ({error.strerror}); it is written when training ends"
        )


def text(rows: list[Row], columns: tuple[str, ...] = COLUMNS, header: bool = True) -> str:
    """Return lines of telemetry as CSV; measurements have six digits."""
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({name: _cell(name, value) for name, value in row.items()} for row in rows)
    return table.getvalue()


def read(path: Path, expected: tuple[str, ...] = COLUMNS) -> list[Row]:
    """Return the complete lines of a telemetry file; none if it does not exist, or its columns are not the `expected`.

    Damaged lines, which lack a number, are skipped.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    columns = tuple(lines[0].strip().split(",")) if lines else ()
    if columns != expected:
        return []
    # A killed process may have left half a line.
    whole = [line.rstrip("\n").split(",") for line in lines[1:] if line.endswith("\n")]
    rows = [dict(zip(columns, map(_value, cells), strict=True)) for cells in whole if len(cells) == len(columns)]
    return [row for row in rows if None not in [row[name] for name in MEASURED]]


def _cell(name: str, value: Any) -> Any:
    exact = isinstance(value, int) or value is None or name in ("loss", "learning_rate")
    return value if exact else f"{value:.6g}"


def _value(cell: str) -> float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return None
