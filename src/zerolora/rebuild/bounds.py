"""Whether a rebuild whose bytes differ is equal within bounds, as on other hardware or with other kernels.

Bounds of losses and of gradients are the canary's tolerances (train/launch/canary.py): what another setting of the same
computation may change. A figure after all steps may differ as much as that of another seed, where the project repeats
the run with seeds (report/repeats.py); else only as much as a loss.
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from zerolora.config.stages import STAGES
from zerolora.evaluate.intervals import LEVEL, wilson
from zerolora.methods.peft_format import ADAPTER
from zerolora.planner.choice import STEPS
from zerolora.publish.record import names_of
from zerolora.rebuild.explanation import machines
from zerolora.rebuild.original import Original
from zerolora.rebuild.rebuilt_products import RebuiltProduct, figures, loss_tables
from zerolora.train.launch.canary import NORM_TOLERANCE, TOLERANCE

COMPUTED = frozenset({*(name for name, stage in STAGES.items() if stage.uses_gpus), "merge"})
"""Stages whose results depend on kernels."""
FIGURES = ("/train.json", "/evaluate.json")
SHARES = ("accuracy", "rate", "_low", "_high")
"""Ends of the names of shares of the rows. Others have the bound of a loss, which is narrower."""
FEWEST_SEEDS = 3
"""Two seeds say next to nothing of a third: Student's factor is 12.7."""


@dataclass(frozen=True)
class Bound:
    """A figure of both, and by how much they may differ."""

    figure: str
    values: tuple[float, float] | None
    """Of the original and the rebuild; None for weights."""
    apart: float
    """Their difference, not negative."""
    most: float
    """The largest allowed difference."""
    why: str

    @property
    def holds(self) -> bool:
        return math.isfinite(self.apart) and self.apart <= self.most

    def __str__(self) -> str:
        values = "" if self.values is None else " {:.6g} and {:.6g}".format(*self.values)
        limit = f"{'at most' if self.holds else 'more than'} {self.most:.2g}"
        return f"{self.figure}{values}: {self.apart:.2g} apart, {limit} ({self.why})"


def _bound(figure: str, original: float, rebuilt: float, most: float, why: str) -> Bound:
    return Bound(figure, (original, rebuilt), abs(original - rebuilt), most, why)


def other_kernels(original: Original, folder: Path) -> bool:
    """Return whether the two machines may round differently: they differ, or the original's is not recorded."""
    was, now = machines(original, folder)
    return not was or was != now


def is_computed(product: RebuiltProduct) -> bool:
    """Return whether a product is there, and kernels have computed it."""
    return product.stage.partition("@")[0] in COMPUTED and product.rebuilt is not None


def bounds(original: Original, folder: Path, products: list[RebuiltProduct]) -> list[Bound] | None:
    """Return the bounds of what differs; None if a product differs that no kernel computes, or losses or
    weights are not at hand."""
    if not all(product.equal or is_computed(product) for product in products):
        return None
    precision = json.loads((folder / zero_of(original)).read_text(encoding="utf-8"))["zerolora"]["precision"]
    tolerance: float = TOLERANCE[precision]
    was, now = loss_tables(original, folder)
    if not was or len(was) != len(now):
        return None
    result = [
        _bound(f"loss of step {one['step']}", float(one["loss"]), float(other["loss"]), *_of_loss(one, tolerance))
        for one, other in zip(was[:STEPS], now[:STEPS], strict=True)
    ]
    weights = list(_distance(original, folder, tolerance))
    if not weights:
        return None
    result += weights
    for product in products:
        if not product.equal and product.path.endswith(FIGURES):
            if product.path not in original.contents:
                return None
            result += _of_figures(original, folder, product.path, tolerance)
    return result


def zero_of(original: Original) -> str:
    """Return the path of zero.json."""
    return f"results/{names_of(original.receipts[f'train@{original.run}'])['rendered']}/zero.json"


def _of_loss(row: dict[str, str], tolerance: float) -> tuple[float, str]:
    return tolerance * abs(float(row["loss"])), f"the canary's tolerance of a loss, {tolerance:g}"


def _of_figures(original: Original, folder: Path, path: str, tolerance: float) -> Iterator[Bound]:
    was, now = figures(original, folder, path)
    owner = Path(path).parts[1]
    of_run = "" if owner == original.run else "base model's " if owner == "base" else f"{owner}'s "
    for name in sorted(was.keys() | now.keys()):
        one, two = was.get(name), now.get(name)
        if one == two and name not in ("accuracy", "loss"):
            continue
        if not _is_number(one) or not _is_number(two):
            yield Bound(f"{of_run}{name}", None, math.inf, 0.0, "it is no number in both")
            continue
        value, other = float(one), float(two)
        most, why = _of_loss({"loss": str(value)}, tolerance)
        widest = NORM_TOLERANCE * most
        if name.endswith(SHARES) and _is_number(was.get("rows")) and 0 <= value <= 1:
            low, high = wilson(value * was["rows"], was["rows"])
            most = widest = max(value - low, high - value)
            why = "its 95 % interval over the rows"
        seeds = [] if of_run else original.seeds.get(name, [])
        if len(seeds) >= FEWEST_SEEDS:
            most, why = _of_seeds(seeds)
            if original.record and most > widest:  # the word of who pushed it
                most, why = widest, f"{why}, and at most {widest:.2g}"
        yield _bound(f"{of_run}{name}", value, other, most, why)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_seeds(values: list[float]) -> tuple[float, str]:
    """Return by how much one more seed may differ from one of these: Student's prediction interval."""
    from scipy.stats import t

    quantile = float(t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) * math.sqrt(2), f"another seed, by {len(values)} repeats"


def _distance(original: Original, folder: Path, tolerance: float) -> Iterator[Bound]:
    """Yield how far the adapters are apart, relative to their norm, where both are at hand. Of merged weights the base
    is most of the norm, so they have no bound."""
    outputs = original.receipts[f"train@{original.run}"].outputs
    paths = [path for path in outputs if path.endswith(f"/adapter/{ADAPTER}") and (folder / path).is_file()]
    adapters = [path for path in paths if original.find(path)]
    if not adapters:
        return
    import torch
    from safetensors import safe_open

    apart = norm = 0.0
    for path in adapters:
        with safe_open(original.find(path), "pt") as first, safe_open(folder / path, "pt") as second:
            if {*first.keys()} != {*second.keys()}:
                apart = math.inf
                break
            for name in second.keys():  # noqa: SIM118 (no dict)
                one, other = (each.get_tensor(name).to(torch.float64) for each in (first, second))
                apart += float(((one - other) ** 2).sum()) if one.shape == other.shape else math.inf
                norm += float((other**2).sum())
    most = NORM_TOLERANCE * tolerance
    distance = math.sqrt(apart / norm) if norm else apart
    why = f"the canary's tolerance of a gradient, {most:g}"
    yield Bound("weights, relative to their norm", None, distance, most, why)
