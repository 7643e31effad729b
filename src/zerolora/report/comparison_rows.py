"""The rows of a comparison: the report's rows of finished runs, and status and reason of all others.

A run that was refused or failed has no outputs. The reason is in the log of the stage that ended it, on the lines for
the user (log.py).
"""

import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolora.config.grids import Shared
from zerolora.config.stages import STAGES, Stage
from zerolora.config.values import RUN_ADAPTER
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_object
from zerolora.log import PREFIX, read_status
from zerolora.report.run_settings import settings_of_run

Row = dict[str, Any]
"""A row of report/row.py, with `run`."""
ROWS = Path("compare/rows")
"""Relative to the results directory."""
NUMBER = re.compile(r"([0-9]+)")
TAIL_BYTES = 65536
"""The end of a log that its last messages are read from."""
ITS_LAST_LINES = "; its last lines:"
"""End of the first line of the message about a failed rank (train/launch/launcher.py)."""
RANK_FAILED = re.compile(r"\w+ \d+ failed with (exit code|signal) \w+( \(out of memory\?\))?")
"""The message about the first rank, whose own lines precede it in this log."""
NO_MESSAGE = "runs, or ended without a message"
"""Reason of a run whose stage logged none."""
PLANNING = ("estimate", "render")
"""Stages that refuse a run before training."""
OF_A_RUN = tuple(itertools.takewhile(lambda stage: stage.name != "accept", STAGES.values()))
"""The stages up to the report, in order, with those of models, data sets and tasks."""


def finished(runs: Iterable[str], folder: Path) -> list[Row]:
    """Return the rows of finished runs, in the order of their names. Raises UserError if one is missing or broken."""
    return [{"run": run, **read_object(folder / f"{run}.json", "zerolora stage report")} for run in by_name(runs)]


def by_name(runs: Iterable[str]) -> list[str]:
    """Return names sorted, with the numbers in them by value: r8 before r64."""
    return sorted(
        runs,
        key=lambda run: [(not part.isdigit(), int(part) if part.isdigit() else part) for part in NUMBER.split(run)],
    )


def all_runs(results: Path, outdated: Mapping[str, str] | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Return a row for each run of `results`/config.json, finished or not, and the overrides of each run.

    `outdated` has, by run, a stage that must run again: the run's files are from an earlier config. Raises UserError if
    config.json or a row is broken.
    """
    path = results / "config.json"
    resolved = read_object(path, "zerolora stage resolve")
    try:
        overrides = dict(resolved["compare"]["runs"])
        named = {run: _names(results, run, resolved) for run in by_name(overrides)}
    except (KeyError, TypeError):
        raise UserError(f"{path}: was written by another version; run `zerolora stage resolve` again") from None
    return [_row(names, outdated or {}, named) for names in named.values()], overrides


def _names(results: Path, run: str, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the wildcards of the stages for a run, its strategy and its tasks."""
    settings = settings_of_run(results, run)
    return {
        "results": results,
        "run": run,
        **{key: settings.get(key, "") for key in Shared._fields},
        "dataset": settings["dataset"],
        "model": resolved["prepare"][settings["dataset"]]["model"],
        "strategy": settings["render"]["strategy"],
        "tasks": settings["report"]["tasks"],
        "made_of": list(_made_of(settings["dataset"], resolved)),
        "after": sorted(_origins(settings, resolved) - {run}),
    }


def _made_of(dataset: str, resolved: Mapping[str, Any]) -> Iterator[tuple[Stage, dict[str, str]]]:
    """Yield the stages that make the answers of a data set, in order, each with the value of its wildcard."""
    prepared = resolved["prepare"]
    for selection in prepared[dataset].get("selections", ()):
        sample = resolved["selections"][selection]["samples"]
        asked = resolved["samples"][sample]["dataset"]
        compared = resolved.get("held_out", {})
        for name in dict.fromkeys([asked, *(each["dataset"] for each in compared.values() if each.get("dataset"))]):
            yield STAGES["fetch"], {"model": prepared[name]["model"]}
            yield STAGES["prepare"], {"dataset": name}
        for task in (each["task"] for each in compared.values() if each.get("task")):
            yield STAGES["task_rows"], {"task": task}
        yield STAGES["sample"], {"sample": sample}
        yield from ((STAGES["held_out"], {"questions": name}) for name in compared)
        yield STAGES["select"], {"selection": selection}


def _origins(settings: Mapping[str, Any], resolved: Mapping[str, Any]) -> set[str]:
    """Return the runs that a run waits for: those whose answers or adapter it has."""
    sections = [settings.get(stage) or {} for stage in ("train", "reference", "teacher")]
    adapters = [section.get("from_adapter") or section.get("adapter") for section in sections]
    found = {match[1] for each in adapters if each and (match := RUN_ADAPTER.fullmatch(each))}
    for selection in resolved["prepare"][settings["dataset"]].get("selections", ()):
        found.add(resolved["samples"][resolved["selections"][selection]["samples"]]["of"].get("run", ""))
    return found - {""}


def _row(names: Mapping[str, Any], outdated: Mapping[str, str], others: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the row of a run, by its names; `others` are those of all runs."""
    run, results = names["run"], names["results"]
    row = _ended(results, names)
    if row is None and run in outdated:
        reason = f"{outdated[run]} has to run again; the files here are of an earlier config"
        row = {"status": "not run", "reason": reason}
    if row is None and (results / ROWS / f"{run}.json").is_file():
        return finished([run], results / ROWS)[0]
    if row is None or row["status"] == "not run":
        lacking = (each for each in names["after"] if not (results / each / "adapter" / MANIFEST).is_file())
        if origin := next((each for each in lacking if each in others), None):
            status = _row(others[origin], outdated, others)["status"]
            row = {"status": "not run", "reason": f"waits for {origin}, {status}"}
    return {"run": run, "strategy": names["strategy"], **(row or {"status": "not run", "reason": ""})}


def _ended(results: Path, names: Mapping[str, Any]) -> Row | None:
    """Return status and reason of a run that a stage ended, and figures of the stages before; None if none did.

    A stage ended a run if its output is missing and its status file has no result.
    """
    before: set[str] = set()
    for stage, named in _stages_of(names):
        path = results / "logs" / stage.log.format(**named)
        target = stage.target.format(**named)
        output = results / target.removeprefix("results/") if target.startswith("results/") else Path(target)
        if output.exists() or not (status := read_status(path)) or "result" in status:
            before |= {stage.name} if output.exists() else set()
            continue
        figures = _figures(results / names["run"] / "metrics", before)
        if reason := reason_in(path, names["strategy"]):
            ended = "refused" if stage.name in PLANNING else "failed"
            return {"status": ended, "reason": f"{stage.name}: {reason}", **figures}
        far = f" at {status['done']} of {status['total']}" if status.get("total") else ""
        where = f"; see {path}" if path.exists() else ""
        return {"status": "failed", "reason": f"{stage.name}: {status.get('ended', NO_MESSAGE)}{far}{where}", **figures}
    return None


def _figures(metrics: Path, stages: Container[str]) -> Row:
    """Return figures of the stages of a run that ended well, under the keys of report/row.py."""
    figures: Row = {}
    if "train" in stages:
        trained = read_object(metrics / "train.json", "zerolora stage train")
        resources = read_object(metrics / "train_resources.json", "zerolora stage train")
        figures |= {
            name: trained[name] for name in ("steps", "trainable_parameters", "loss_validation") if name in trained
        }
        figures |= {"wall_seconds": resources["total_seconds"], "tokens_per_second": resources["tokens_per_second"]}
    if "evaluate" in stages:
        evaluated = read_object(metrics / "evaluate.json", "zerolora stage evaluate")
        figures |= {name: evaluated[name] for name in ("accuracy", "loss") if name in evaluated}
    return figures


def _stages_of(names: Mapping[str, Any]) -> Iterator[tuple[Stage, Mapping[str, Any]]]:
    """Yield the stages of a run and of the answers that it learns from, with the values of their wildcards: a stage of
    tasks once for each."""
    yield from names["made_of"]
    for stage in OF_A_RUN:
        if "task" in stage.wildcards:
            yield from ((stage, {**names, "task": task}) for task in names["tasks"])
        elif stage.wildcards and names.keys() >= {*stage.wildcards}:
            yield stage, names


def reason_in(log: Path, strategy: str = "") -> str:
    """Return the last message for the user in a log as one line, empty if the log does not end with a message.

    A message that continues after a colon is reduced to its first line and the line about `strategy`, a message about a
    failed rank to the rank's last line.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    written = [line for line in lines if line.strip()]
    messages = list(itertools.takewhile(lambda line: line.startswith(PREFIX), reversed(written)))
    block = [line.removeprefix(PREFIX) for line in reversed(messages)]
    for index, line in enumerate(block[:-1]):
        if line.endswith(ITS_LAST_LINES):
            return f"{line.removesuffix(ITS_LAST_LINES)}: {block[-1].strip()}"
        if line.endswith(":") and line[0] != " ":
            own = f"  {strategy}: "
            said = next((each.removeprefix(own) for each in block[index:] if each.startswith(own)), "")
            return f"{line} {said}" if said else line.removesuffix(":")
    if not block or not (match := RANK_FAILED.fullmatch(block[-1])):
        return block[-1] if block else ""
    if len(block) > 1:
        return block[-2]
    before = written[: -len(block)]
    return f"{block[-1]}: {before[-1].strip()}" if before and match[1] == "exit code" else block[-1]
