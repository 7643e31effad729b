"""`zerolora keep`: results stay up to date for both engines although the code that makes them has changed.

Their inputs, settings and files must be unchanged.

Of a project of a version without receipts, dvc.lock says what its results were made of, and their receipts are written.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dvc_state import LOCK, repository, unchanged_in_lock
from receipts import Receipt, Receipts

from zerolora.commands.snakemake_command import KEPT_PREFIX
from zerolora.config.kept_results import read_kept, write_kept

if TYPE_CHECKING:
    from jobs import PlannedJob

RUNS = "ZEROLORA_KEEP"
"""Environment variable: the runs whose results are kept, separated by spaces; all if there are none."""
NEVER = frozenset({"resolve", "report", "accept", "compare"})
"""Stages that run again: they take seconds, and say what is kept."""


def keep(jobs: Mapping[str, Any], planned: Mapping[str, "PlannedJob"], known: Receipts) -> None:
    """Keep the results of the runs of RUNS, and print those that cannot be kept. `jobs` has
    Snakemake's jobs by stage, as in train@default."""
    runs = set(os.environ[RUNS].split())
    wanted = {name: planned[name] for name in jobs if name in planned and planned[name].stage not in NEVER}
    wanted = {name: entry for name, entry in wanted.items() if not runs or runs & entry.runs}
    _write_missing_receipts({name: jobs[name] for name in wanted if not known.of(name)}, wanted, known)
    kept, names = read_kept(), []
    for name, entry in wanted.items():
        receipt, now = known.of(name), params_of(jobs[name])
        if receipt is None or receipt.params == now:
            continue
        if why := _why_not(name, receipt, now, known):
            print(f"{KEPT_PREFIX}{name}: {why}; it runs again")
            continue
        kept.setdefault(entry.code_place, {})[entry.code_of_today] = receipt.params["code"]
        names.append(name)
    today = {entry.code_place: entry.code_of_today for entry in planned.values() if entry.stage not in NEVER}
    current = {place: {code: kept[place][code]} for place, code in today.items() if code in kept.get(place, {})}
    write_kept(current)
    known.hashes.save()
    said = f"kept: {', '.join(names)}" if names else "nothing to keep: no result differs in its code alone"
    print(f"{KEPT_PREFIX}{said}")


def _why_not(stage: str, receipt: Receipt, now: Mapping[str, str], known: Receipts) -> str:
    """Return why a result cannot be kept; empty if it can."""
    changed = [name for name in now if name != "code" and now[name] != receipt.params.get(name)]
    if changed:
        return f"its {' and '.join(changed)} changed too"
    if path := known.changed_input(receipt):
        return f"{path} has changed since"
    found = known.check([stage])
    wrong = [path for kind in (found.changed, found.added, found.missing) for path in kind.get(stage, [])]
    return f"{wrong[0]} is not what it wrote" if wrong else ""


def _write_missing_receipts(jobs: Mapping[str, Any], planned: Mapping[str, "PlannedJob"], known: Receipts) -> None:
    """Write the receipts of results that a version without receipts has recorded in dvc.lock, if their files and
    settings are those of today."""
    if not (jobs and LOCK.is_file()):
        return
    with repository() as repo:
        recorded = unchanged_in_lock(repo, jobs)
    for name, values in recorded.items():
        codes = [value for key, value in values.items() if key.startswith("code.")]
        settings = {key: value for key, value in values.items() if not key.startswith("code.")}
        if len(codes) == 1 and all(planned[name].setting(key) == value for key, value in settings.items()):
            job = jobs[name]
            known.write(name, {**params_of(job), "code": codes[0]}, inputs_of(job), map(str, job.output))


def params_of(job: Any) -> dict[str, str]:
    """Return the params of a job's rule as texts."""
    return {name: str(value) for name, value in job.params.items()}


def inputs_of(job: Any) -> list[str]:
    """Return the inputs of a job, without those whose content does not matter to it (`ancient`)."""
    return [str(path) for path in job.input if not path.is_ancient]
