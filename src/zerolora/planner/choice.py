"""Chooses the candidate that fits and is predicted to be fastest, without running anything."""

from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.memory.estimate import Capacity, estimated
from zerolora.memory.table import rows as memory_table
from zerolora.planner.candidates import Candidate, Choice, Planning, candidates, open_specs, predicted
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Placement, Strategy

TIE = 0.01
"""Predicted times that differ by less count as equal, since the cost model is not more precise."""
PLACEMENTS: tuple[Placement, ...] = ("gpu", "cpu", "nvme")  # by distance from the GPU

Changes = dict[str, dict[str, str | int | bool]]
"""Keys of the config and their values, by section."""
Distance = tuple[float, ...]


def choose(planning: Planning) -> list[Candidate]:
    """Return every candidate: first those that fit, the best first, then the rejected ones by bytes.

    Raises UserError if none fits, with the nearest configuration that would.
    """
    every = candidates(planning)
    fitting = [each for each in every if each.fault is None]
    if not fitting:
        raise UserError(refusal(every, planning, nearest(planning)))
    fastest = min(each.seconds for each in fitting)
    tied = [each for each in fitting if each.seconds <= fastest * (1 + TIE)]
    best = min(tied, key=lambda each: each.preference)
    rest = sorted((each for each in fitting if each is not best), key=lambda each: (each.seconds, each.preference))
    rejected = sorted((each for each in every if each.fault), key=lambda each: (each.gpu, each.host))
    return [best, *rest, *rejected]


def nearest(planning: Planning) -> Candidate | None:
    """Return the candidate that fits and differs least from the settings, None if nothing fits.

    Other values of micro-batch, checkpointing and attention, which change no loss, count as nearest; then another stage
    or engine; then another placement of states. Among equals the fastest is returned.
    """
    settings = planning.settings
    unset = {"micro_batch": None, "activation_checkpointing": None, "attention": None}
    same = Planning(planning.model, settings.model_copy(update=unset), planning.rows, planning.hardware, planning.user)
    other = Planning(
        planning.model,
        settings.model_copy(update={**unset, "strategy": "auto", "user_config": None}),
        planning.rows,
        planning.hardware,
    )
    specs = dict.fromkeys((*open_specs(same), *open_specs(other)))  # most are in both
    every = [predicted(planning, spec) for spec in specs]
    wanted = planning.user.strategy if planning.user else STRATEGIES.get(settings.strategy)
    fitting = [each for each in every if each.fault is None]
    return min(fitting, key=lambda each: distance(each, wanted, settings), default=None)


def distance(candidate: Candidate, wanted: Strategy | None, settings: RenderSettings) -> Distance:
    """Return the distance of a candidate from the settings; `wanted` is the strategy that they name, None for auto."""
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
    """Return the config keys that rule out a choice, with the values that the choice needs."""
    different = {
        "render": {"strategy": choice.strategy} if settings.strategy not in ("auto", choice.strategy) else {},
        "train": {
            key: getattr(choice, key)
            for key in ("micro_batch", "activation_checkpointing", "attention")
            if getattr(settings, key) not in (None, getattr(choice, key))
        },
    }
    return {section: values for section, values in different.items() if values}


def refusal(every: list[Candidate], planning: Planning, instead: Candidate | None) -> str:
    """Return the error message: the minimum that each strategy needs, and the nearest choice that fits or advice."""
    settings, model = planning.settings, planning.model
    capacity = Capacity(settings.gpu_memory, settings.host_memory)
    least: dict[str, Candidate] = {}
    for each in every:
        name = each.choice.strategy
        if name not in least or (each.gpu, each.host) < (least[name].gpu, least[name].host):
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
        "write into config/config.yaml, or into the run:",
    ]
    for section, values in changes(instead.choice, settings).items():
        lines += [f"  {section}:", *(f"    {key}: {str(value).lower()}" for key, value in values.items())]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
