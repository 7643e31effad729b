"""Chooses the values of further trials with Optuna, from the trials so far.

The sampler is seeded with the search's seed and the number of trials, so that equal trials with equal losses lead to
equal values.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from zerolora.config.ranges import Range
from zerolora.config.schema import Search
from zerolora.config.studies import Trial
from zerolora.search.outcomes import Outcome
from zerolora.search.pruning import bars

DIGITS = 4
"""Significant digits of a value of a range that is not whole: more tell nothing, and are hard to read."""


def choose(search: Search, trials: Sequence[Trial], outcomes: Sequence[Outcome], count: int) -> list[Trial]:
    """Return `count` further trials, from those so far and what came out of each."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed = (search.seed + len(trials)) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant_liar, and of lists as values, which no storage has to hold here
        space = {key: _distribution(values) for key, values in sorted(search.over.items())}
        sampler: Any = optuna.samplers.RandomSampler(seed=seed)
        if search.sampler == "tpe":
            # The liar keeps the trials of a round apart: one that has no result yet counts as bad.
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        known = [_as_optuna_has_it(trial, outcome, space) for trial, outcome in zip(trials, outcomes, strict=True)]
        study.add_trials([trial for trial in known if trial is not None])
        drawn = [study.ask(space).params for _ in range(count)]
    stop_above = bars(outcomes) if search.prune else []
    return [
        Trial(values={key: _rounded(params[key], search.over[key]) for key in search.over}, stop_above=stop_above)
        for params in drawn
    ]


def _distribution(values: Any) -> Any:
    import optuna

    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution(
            [*(values.values() if isinstance(values, dict) else values)]
        )
    if values.is_whole:
        return optuna.distributions.IntDistribution(
            int(values.low), int(values.high), values.log, int(values.step or 1)
        )
    distance = None if values.step is None else float(values.step)
    return optuna.distributions.FloatDistribution(float(values.low), float(values.high), values.log, distance)


def _rounded(value: Any, values: Any) -> Any:
    if not isinstance(values, Range) or values.is_whole or values.step is not None:
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), float(values.low)), float(values.high))


def _as_optuna_has_it(trial: Trial, outcome: Outcome, space: dict[str, Any]) -> Any:
    """Return a trial for Optuna; None for one with other keys or values than the search, which was edited since."""
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
