"""The candidates of a choice as JSON for render.json, and as a table for the log."""

from collections.abc import Sequence
from typing import TypedDict

from zerolora.config.settings import RenderSettings
from zerolora.memory.estimate import world_size
from zerolora.memory.row_statistics import RowStatistics
from zerolora.planner.candidates import Candidate
from zerolora.units import GIB, counted

SHOWN = 10  # fitting candidates in the table


class Entry(TypedDict):
    """One candidate in render.json."""

    strategy: str
    micro_batch: int
    accumulation: int
    activation_checkpointing: bool
    attention: str
    live_parameters: int
    gpu_bytes: int
    host_bytes: int
    step_seconds: float
    tokens_per_second: float
    rank_hours: float
    rejected: str | None


class Summary(TypedDict):
    """Every candidate, in the order of `choose`."""

    steps: int
    """Optimizer steps of the run."""
    considered: int
    ranked: list[Entry]


def summary(candidates: Sequence[Candidate], settings: RenderSettings, rows: RowStatistics) -> Summary:
    """Return the ranked candidates: bytes, seconds, tokens/s, rank-hours of the run, and why others were rejected."""
    steps = steps_of(settings, rows)
    tokens = rows.tokens / rows.packed_rows * settings.global_batch
    return {
        "steps": steps,
        "considered": len(candidates),
        "ranked": [
            {
                "strategy": each.choice.strategy,
                "micro_batch": each.choice.micro_batch,
                "accumulation": each.choice.accumulation,
                "activation_checkpointing": each.choice.activation_checkpointing,
                "attention": each.choice.attention,
                "live_parameters": each.choice.buckets.live,
                "gpu_bytes": each.gpu,
                "host_bytes": each.host,
                "step_seconds": each.seconds,
                "tokens_per_second": tokens / each.seconds,
                "rank_hours": steps * each.seconds * world_size(settings) / 3600,
                "rejected": each.fault,
            }
            for each in candidates
        ],
    }


def steps_of(settings: RenderSettings, rows: RowStatistics) -> int:
    """Return the optimizer steps of a run."""
    steps = rows.packed_rows * settings.epochs // settings.global_batch
    return min(steps, settings.max_steps or steps)


def table(summarized: Summary) -> str:
    """Return the best candidates, and the smallest rejected one of each strategy, as text."""
    ranked = summarized["ranked"]
    fitting = [each for each in ranked if not each["rejected"]]
    rejected = [each for each in ranked if each["rejected"]]
    lines = [
        f"{len(fitting)} of {len(ranked)} configurations fit; predicted for {counted(summarized['steps'], 'step')}:",
        f"{'strategy':<24}{'micro-batch':>12}{'checkpointing':>14}{'attention':>10}{'GPU GiB':>9}{'host GiB':>9}"
        f"{'s/step':>9}{'tokens/s':>10}{'rank-hours':>11}",
    ]
    lines += [_line(each) for each in fitting[:SHOWN]]
    if rejected:
        lines.append("rejected, of each strategy the smallest:")
        smallest = {each["strategy"]: each for each in reversed(rejected)}
        lines += [f"{_line(each)}  {each['rejected']}" for each in reversed(smallest.values())]
    return "\n".join(lines)


def _line(entry: Entry) -> str:
    batch = f"{entry['micro_batch']} x {entry['accumulation']}"
    saving = "yes" if entry["activation_checkpointing"] else "no"
    return (
        f"{entry['strategy']:<24}{batch:>12}{saving:>14}{entry['attention']:>10}{entry['gpu_bytes'] / GIB:>9.2f}"
        f"{entry['host_bytes'] / GIB:>9.2f}{entry['step_seconds']:>9.3g}{entry['tokens_per_second']:>10.0f}"
        f"{entry['rank_hours']:>11.3g}"
    )
