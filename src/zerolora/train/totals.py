"""The sums of an objective's terms and metrics over micro-batches and ranks, and what a step is divided by."""

import functools
import operator
from collections.abc import Mapping

import torch

from zerolora.train.feed import Units
from zerolora.train.objectives.objective import Objective, Values


class Totals:
    """Sums over some batches of which the units are known."""

    def __init__(self, objective: Objective, units: Units, sources: int) -> None:
        """`units` are those of all batches, over all ranks."""
        self.objective, self.units, self.sources = objective, units, sources
        self.first, *more = objective.terms
        self.names = (*more, *objective.metrics)
        self.unit_of = {**objective.terms, **objective.metrics}
        self.sums = torch.zeros(1 + sources + len(self.names), dtype=torch.float64)
        """The first term, its part of each source with the others' shares added, the other terms, the metrics."""

    def add(self, values: Mapping[str, Values]) -> dict[str, torch.Tensor]:
        """Add the terms and metrics of a batch, and return the sum of each term, with its gradient."""
        terms = {name: values[name].each.sum() for name in self.objective.terms}
        self.sums[0] += terms[self.first].detach().cpu()
        for name in self.objective.terms:
            each, source = values[name]
            parts = torch.zeros(self.sources, dtype=each.dtype, device=each.device)
            parts.index_add_(0, source, each.detach())
            self.sums[1 : 1 + self.sources] += parts.cpu() * (self.count(self.first) / self.count(name))
        for place, name in enumerate(self.names, 1 + self.sources):
            self.sums[place] += values[name].each.detach().sum().cpu()
        return terms

    def weighted(self, terms: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        """Return the loss of a batch to start the backward pass from: each term over its own unit, times `factor`."""
        return functools.reduce(operator.add, (value * (factor / self.count(name)) for name, value in terms.items()))

    def count(self, name: str) -> int:
        """Return how many items a term or a metric is the mean of; 1 where there is none, as its sum is 0 then."""
        return max(1, self.units[self.unit_of[name]])

    @property
    def by_source(self) -> torch.Tensor:
        """The loss of each source: its share of the loss, as a sum over the first term's unit. [sources], fp64."""
        return self.sums[1 : 1 + self.sources]

    @property
    def loss(self) -> float:
        """The mean loss."""
        means = self.means
        return sum((means[name] for name in [*self.objective.terms][1:]), means[self.first])

    @property
    def means(self) -> dict[str, float]:
        """Each term and metric."""
        sums = {self.first: self.sums[0], **dict(zip(self.names, self.sums[1 + self.sources :], strict=True))}
        return {name: value.item() / self.count(name) for name, value in sums.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Each metric beside the loss."""
        means = self.means
        return {name: means[name] for name in self.objective.metrics}
