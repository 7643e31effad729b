"""Chooses the candidate that is predicted to be fastest among those that fit, and the safe one of a canary.

A canary compares the first losses of a run with those of a safe setting. A setting is risky if its strategy says so
(Strategy.risk), if an option of DeepSpeed is known for wrong results (strategies/deepspeed_zero.py, RISKY), or if a
kernel is new.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.memory.estimate import Capacity, estimated, world_size
from zerolora.memory.table import rows as memory_table
from zerolora.memory.training_spec import RowStatistics
from zerolora.planner.candidates import Candidate, Choice, Planning, candidates, open_specs, predicted
from zerolora.schedules import steps_in
from zerolora.strategies import STRATEGIES
from zerolora.strategies.deepspeed_zero import RISKY, ZERO
from zerolora.strategies.strategy import Placement, Strategy
from zerolora.units import GIB, counted

TIE = 0.01
"""Predicted times that differ by less are equal."""
QUIETER = 0.2
"""Time that a simpler strategy may take longer if it sends less between nodes: the network's rate is the least certain,
since other jobs use it too, and predicted steps err by as much (docs/choice.md, published trainings)."""
PLACEMENTS: tuple[Placement, ...] = ("gpu", "cpu", "nvme")  # by distance from the GPU
STEPS = 5
"""Optimizer steps of each of the two short trainings with train.canary: auto."""
LEAST_STEPS = 100
"""Minimum steps of a run for a canary with auto, since a canary takes ten steps and loads the model twice."""
VARLEN = "attention flash computes rows of many lengths in one kernel of its own (torch.nn.attention.varlen)"
COMPILE = "train.compile: torch compiles the decoder layers"
KERNELS = "train.kernels: liger-kernel's kernels replace the model's own operations"
SHOWN = 10  # fitting candidates in the table
FREE = {"micro_batch": None, "activation_checkpointing": None, "attention": None}
"""Settings that change no loss, left open."""

Changes = dict[str, dict[str, str | int | bool]]
"""Keys of the config and their values, by section."""
Distance = tuple[float, ...]


def choose(planning: Planning) -> list[Candidate]:
    """Return every candidate: those that fit, the best first, then the rejected ones by bytes.

    Raises UserError with the nearest configuration that fits if no candidate does.
    """
    every = candidates(planning)
    fitting = [each for each in every if each.fault is None]
    if not fitting:
        raise UserError(refusal(every, planning, nearest(planning)))
    fastest = min(each.seconds for each in fitting)
    best = _preferred(fitting)
    longest = fastest * (1 + QUIETER)
    while simpler := [each for each in fitting if _simpler(each, best) and each.seconds <= longest]:
        first = min(each.order for each in simpler)
        best = _preferred([each for each in simpler if each.order == first])
    rest = sorted((each for each in fitting if each is not best), key=lambda each: (each.seconds, each.preference))
    rejected = sorted((each for each in every if each.fault), key=lambda each: (each.gpu, each.needed))
    return [best, *rest, *rejected]


def _preferred(candidates: list[Candidate]) -> Candidate:
    """Return the fastest candidate, or of those as fast the one that is preferred."""
    fastest = min(each.seconds for each in candidates)
    tied = [each for each in candidates if each.seconds <= fastest * (1 + TIE)]
    return min(tied, key=lambda each: each.preference)


def _simpler(candidate: Candidate, than: Candidate) -> bool:
    """Return whether a candidate's strategy is listed before another's, and sends less between nodes, or holds the same
    on every rank: DDP before stage 0, which reached 90 to 96 % of it where both were measured (docs/choice.md)."""
    whole = candidate.layout.stage == than.layout.stage == 0
    return candidate.order < than.order and (whole or candidate.cost.between_nodes < than.cost.between_nodes)


def nearest(planning: Planning) -> Candidate | None:
    """Return the candidate that fits and differs least from the settings; None if nothing fits.

    Nearest are other values of FREE; then another stage or engine; then another placement of states. Among equals the
    fastest is nearest.
    """
    same = replace(planning, settings=planning.settings.model_copy(update=FREE))
    specs = dict.fromkeys((*open_specs(same), *open_specs(_of_any_strategy(planning))))  # most are in both
    fitting = [each for each in (predicted(planning, spec) for spec in specs) if each.fault is None]
    return _nearest_of(fitting, planning)


def _of_any_strategy(planning: Planning) -> Planning:
    update = {**FREE, "strategy": "auto", "user_config": None}
    return replace(planning, settings=planning.settings.model_copy(update=update), user=None)


def _nearest_of(fitting: list[Candidate], planning: Planning) -> Candidate | None:
    settings = planning.settings
    wanted = planning.user.strategy if planning.user else STRATEGIES.get(settings.strategy)
    return min(fitting, key=lambda each: distance(each, wanted, settings), default=None)


def distance(candidate: Candidate, wanted: Strategy | None, settings: RenderSettings) -> Distance:
    """Return the distance of a candidate from the settings; `wanted` is their strategy, None for auto."""
    layout, changed = candidate.layout, len(changes(candidate.choice, settings).get("train", {}))
    if wanted is None:
        return (changed, candidate.seconds)
    moved = abs(_moved(layout) - _moved(wanted))
    unlike = (layout.engine != wanted.engine) + (layout.within_node != wanted.within_node)
    renamed = candidate.choice.strategy != settings.strategy
    return (moved, unlike, abs(layout.stage - wanted.stage), renamed, changed, candidate.seconds)


def _moved(layout: Strategy) -> int:
    return PLACEMENTS.index(layout.optimizer) + PLACEMENTS.index(layout.parameters)


def changes(choice: Choice, settings: RenderSettings) -> Changes:
    """Return the config keys that exclude a choice, with the values that allow it."""
    different = {
        "render": {"strategy": choice.strategy} if settings.strategy not in ("auto", choice.strategy) else {},
        "train": {
            key: getattr(choice, key) for key in FREE if getattr(settings, key) not in (None, getattr(choice, key))
        },
    }
    return {section: values for section, values in different.items() if values}


def refusal(every: list[Candidate], planning: Planning, instead: Candidate | None) -> str:
    """Return the error message: the least memory of each strategy, and the nearest choice that fits, or advice."""
    settings, model = planning.settings, planning.model
    capacity = Capacity(settings.gpu_memory, settings.host_memory)
    least: dict[str, Candidate] = {}
    for each in every:
        name = each.choice.strategy
        if name not in least or (each.gpu, each.needed) < (least[name].gpu, least[name].needed):
            least[name] = each
    needed = [estimated(model, each.spec, capacity) | {"fits": False, "why": each.fault} for each in least.values()]
    lines = [
        f"render.strategy is {settings.strategy} and nothing fits, not even with the smallest that "
        "train.micro_batch, activation_checkpointing and attention allow:",
        *_indented(memory_table(needed, capacity)),
        *(f"  {entry['strategy']}: {entry['why']}" for entry in needed),
    ]
    if instead is None:
        lines.append(
            "use more or larger GPUs, shorter rows (pack.capacity, prepare.max_length), or leave those keys at auto"
        )
        return "\n".join(lines)
    row = memory_table([estimated(model, instead.spec, capacity)], capacity).splitlines()[1]
    lines += [
        f"the nearest that fits, micro-batch {instead.choice.micro_batch} x {instead.choice.accumulation}, "
        f"{instead.seconds:.3g} s a step predicted:",
        *_indented(row),
        "add to config/config.yaml, or to the run:",
    ]
    for section, values in changes(instead.choice, settings).items():
        lines += [f"  {section}:", *(f"    {key}: {str(value).lower()}" for key, value in values.items())]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def risks(choice: Choice, options: dict[str, Any], settings: RenderSettings) -> Iterator[str]:
    """Yield the reasons why a choice, rendered as `options`, is risky."""
    strategy = STRATEGIES.get(choice.strategy)
    if strategy and strategy.risk:
        yield strategy.risk
    zero = options.get(ZERO, {})
    yield from (reason for key, reason in RISKY.items() if zero.get(key) is True)
    if choice.attention == "flash" and settings.device == "cuda" and settings.precision != "fp32":
        yield VARLEN
    if choice.kernels:
        yield KERNELS
    if settings.compile:
        yield COMPILE


def due(settings: RenderSettings, steps: int) -> int:
    """Return how many steps a canary takes for a run of `steps` optimizer steps; 0 for no canary."""
    if settings.canary == "off" or (settings.canary == "auto" and steps < LEAST_STEPS):
        return 0
    return min(steps, STEPS if settings.canary == "auto" else settings.canary)


def safe_choice(planning: Planning) -> Choice | None:
    """Return the safe choice that fits and differs least from the settings; None if none fits."""
    planning = replace(planning, settings=planning.settings.model_copy(update={"kernels": "off", "compile": False}))
    candidates = (predicted(planning, spec) for spec in open_specs(_of_any_strategy(planning)))
    nearest = _nearest_of([each for each in candidates if _is_safe(each, planning.settings)], planning)
    return _without_overlap(nearest.choice) if nearest else None


def _is_safe(candidate: Candidate, settings: RenderSettings) -> bool:
    return candidate.fault is None and not any(risks(_without_overlap(candidate.choice), {}, settings))


def _without_overlap(choice: Choice) -> Choice:
    return replace(choice, buckets=replace(choice.buckets, overlap=False))


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
    """All candidates, in the order of `choose`."""

    steps: int
    """Optimizer steps of the run."""
    considered: int
    ranked: list[Entry]


def summary(candidates: Sequence[Candidate], settings: RenderSettings, rows: RowStatistics) -> Summary:
    """Return the ranked candidates with bytes, seconds, tokens/s, rank-hours of the run, and reasons for rejection."""
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
                "host_bytes": each.needed,
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
    steps = steps_in(rows.packed_rows, settings.epochs, settings.global_batch)
    return min(steps, settings.max_steps or steps)


def table(summarized: Summary) -> str:
    """Return a table of the best candidates, and of the smallest rejected one of each strategy."""
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
