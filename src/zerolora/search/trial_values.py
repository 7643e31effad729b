"""Chooses the values of further trials with Optuna, from the trials so far.

The sampler is seeded with the search's seed and the number of trials, so that equal trials with equal losses lead to
equal values.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from zerolora.config.ranges import Range
from zerolora.config.schema import Search
from zerolora.config.studies import StopAbove, Trial
from zerolora.search.outcomes import Outcome
from zerolora.search.pruning import bars

DIGITS = 4
"""Significant digits of a value of a range that is not whole: more tell nothing, and are hard to read."""


def choose(search: Search, trials: Sequence[Trial], outcomes: Sequence[Outcome], count: int) -> list[Trial]:
    """Return `count` further trials, from those so far and what came out of each."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    space = {key: _distribution(values) for key, values in sorted(search.over.items())}
    seed = (search.seed + len(trials)) % 2**32
    sampler: Any = optuna.samplers.RandomSampler(seed=seed)
    if search.sampler == "tpe":
        # The liar keeps the trials of a round apart: one that has no result yet counts as bad.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    known = [_frozen(trial, outcome, search, space) for trial, outcome in zip(trials, outcomes, strict=True)]
    study.add_trials([trial for trial in known if trial is not None])
    stop_above = bars(outcomes) if search.prune else []
    return [_asked(study.ask(space).params, search, stop_above) for _ in range(count)]


def _distribution(values: Any) -> Any:
    import optuna

    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution([str(number) for number in range(len(values))])
    if values.is_whole:
        return optuna.distributions.IntDistribution(
            int(values.low), int(values.high), values.log, int(values.step or 1)
        )
    distance = None if values.step is None else float(values.step)
    return optuna.distributions.FloatDistribution(float(values.low), float(values.high), values.log, distance)


def _choices(values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    return list(values.values()) if isinstance(values, Mapping) else list(values)


def _asked(params: Mapping[str, Any], search: Search, stop_above: list[StopAbove]) -> Trial:
    found: dict[str, Any] = {}
    for key, values in search.over.items():
        value = params[key]
        if not isinstance(values, Range):
            value = _choices(values)[int(value)]
        elif not values.is_whole and values.step is None:
            value = min(max(float(f"{value:.{DIGITS}g}"), float(values.low)), float(values.high))
        found[key] = value
    return Trial(values=found, stop_above=stop_above)


def _frozen(trial: Trial, outcome: Outcome, search: Search, space: Mapping[str, Any]) -> Any:
    """Return a trial as Optuna has it; None for one whose values are none of the search, which was edited since."""
    import optuna

    if trial.values.keys() != search.over.keys():
        return None
    params: dict[str, Any] = {}
    for key, values in search.over.items():
        value = trial.values[key]
        if not isinstance(values, Range):
            choices = _choices(values)
            if value not in choices:
                return None
            value = str(choices.index(value))
        params[key] = value
    state = {
        "waiting": optuna.trial.TrialState.RUNNING,
        "complete": optuna.trial.TrialState.COMPLETE,
        "pruned": optuna.trial.TrialState.PRUNED,
        "failed": optuna.trial.TrialState.FAIL,
    }[outcome.state]
    try:
        return optuna.trial.create_trial(
            state=state,
            value=outcome.loss if outcome.state == "complete" else None,
            params=params,
            distributions=dict(space),
            intermediate_values=dict(outcome.validations),
        )
    except (ValueError, TypeError):  # a value that is not of its range
        return None
