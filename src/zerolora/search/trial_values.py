"""Chooses the values of further trials with Optuna, and the bounds at which they are pruned.

The sampler's seed is derived from the search's seed and the number of trials, so that equal trials with equal losses
give equal values.
"""

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from zerolora.config.schema import Range, Search
from zerolora.config.studies import StopAbove, Trial
from zerolora.search.outcomes import Outcome

DIGITS = 4
"""Significant digits of a value from a continuous range; more would carry no information."""
FEWEST = 5
"""Complete trials before pruning starts, as Optuna's n_startup_trials."""


def choose(search: Search, trials: Sequence[Trial], outcomes: Sequence[Outcome], count: int) -> list[Trial]:
    """Return `count` further trials, given those so far and their outcomes."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed = (search.seed + len(trials)) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about constant_liar, and about lists as values, which only a storage rejects
        space = {key: _distribution(values) for key, values in sorted(search.over.items())}
        sampler: Any = optuna.samplers.RandomSampler(seed=seed)
        if search.sampler == "tpe":
            # constant_liar treats trials without a result as bad, which spreads the trials of a round.
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        known = [_optuna_trial(trial, outcome, space) for trial, outcome in zip(trials, outcomes, strict=True)]
        study.add_trials([trial for trial in known if trial is not None])
        drawn = [study.ask(space).params for _ in range(count)]
    stop_above = bounds(outcomes) if search.prune else []
    return [
        Trial(values={key: _rounded(params[key], search.over[key]) for key in search.over}, stop_above=stop_above)
        for params in drawn
    ]


def bounds(outcomes: Sequence[Outcome]) -> list[StopAbove]:
    """Return the median loss of the complete trials at each step, none if there are fewer than FEWEST.

    The median rule is that of Optuna's MedianPruner (optuna/pruners/_percentile.py) and of Vizier (Golovin et al. 2017,
    section 3.1). The bounds come from earlier rounds only and are settings of a trial, so that its training depends on
    nothing that happens at the same time and can be reproduced.
    """
    complete = [dict(each.validations) for each in outcomes if each.state == "complete"]
    if len(complete) < FEWEST:
        return []
    return [
        StopAbove(step=step, loss=statistics.median(losses[step] for losses in complete if step in losses))
        for step in sorted({step for losses in complete for step in losses})
    ]


def _distribution(values: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution([*(values.values() if isinstance(values, dict) else values)])
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), values.log, int(values.step or 1))
    step = None if values.step is None else float(values.step)
    return FloatDistribution(float(values.low), float(values.high), values.log, step)


def _rounded(value: Any, values: Any) -> Any:
    if not isinstance(values, Range) or values.is_whole or values.step is not None:
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), float(values.low)), float(values.high))


def _optuna_trial(trial: Trial, outcome: Outcome, space: dict[str, Any]) -> Any:
    """Return a trial for Optuna; None if its keys or values are no longer those of the search."""
    from optuna.trial import TrialState, create_trial

    states = {
        "waiting": TrialState.RUNNING,
        "complete": TrialState.COMPLETE,
        "pruned": TrialState.PRUNED,
        "failed": TrialState.FAIL,
    }
    try:
        return create_trial(
            state=states[outcome.state],
            value=outcome.loss if outcome.state == "complete" else None,
            params=trial.values,
            distributions=space,
            intermediate_values=dict(outcome.validations),
        )
    except (ValueError, TypeError):
        return None
