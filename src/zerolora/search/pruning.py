"""The median rule: a trial stops at a validation where its lowest loss so far is above the median of complete trials.

It is MedianPruner's of Optuna (optuna/pruners/_percentile.py), and Vizier's (Golovin et al. 2017, section 3.1). The
bars are settings of a trial, from the trials of earlier rounds alone: a training then depends on nothing that happens
at the same time, and gives the same result whenever it is run again.
"""

import statistics
from collections.abc import Sequence

from zerolora.config.studies import StopAbove
from zerolora.search.outcomes import Outcome

FEWEST = 5
"""Complete trials, as Optuna's n_startup_trials."""


def bars(outcomes: Sequence[Outcome]) -> list[StopAbove]:
    """Return the median loss of complete trials by step; none before there are FEWEST."""
    complete = [dict(each.validations) for each in outcomes if each.state == "complete"]
    if len(complete) < FEWEST:
        return []
    result = []
    for step in sorted({step for losses in complete for step in losses}):
        median = statistics.median(losses[step] for losses in complete if step in losses)
        result.append(StopAbove(step=step, loss=median))
    return result
