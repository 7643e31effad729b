"""Checks of `selections`, and of the data sets that read them, against the other sections of the config."""

from collections.abc import Iterable, Iterator

from zerolora.config.evaluated_questions import OF_TASK, evaluated_questions, is_of_results
from zerolora.config.run_objectives import holds_out, reference_adapter, row_kinds, teacher_of
from zerolora.config.schema import Config
from zerolora.config.section import Fault
from zerolora.config.task_checks import unusable_task
from zerolora.config.values import JUDGE, RUN_ADAPTER
from zerolora.data.sampled_rows import KINDS
from zerolora.errors import shown
from zerolora.evaluate.tasks import TASKS

Node = tuple[str, str]
"""A section and a name in it."""


def impossible_selections(config: Config) -> Iterable[Fault]:
    """Yield selections whose check cannot judge, data sets that read rows of another kind than their runs need, unknown
    names, and rows that are made with themselves."""
    for name, rounds in config.rounds.items():
        if rounds.of not in (*config.runs, *config.continued):
            listed = ", ".join([*config.runs, *config.continued]) or "none: add it to runs"
            yield ("rounds", name, "of"), f"{shown(rounds.of)} is not in runs or continued; use one of {listed}"
        if "from_adapter" in rounds.train:
            text = f"{shown(rounds.train['from_adapter'])}, but a round continues the adapter of the round before"
            yield ("rounds", name, "train", "from_adapter"), f"{text}; remove it"
    for name, section in config.selections.items():
        for key, text in section.faults():
            yield ("selections", name, *key), text
        yield from _unusable_check(config, name)
    for name, data in config.prepare.items():
        here = ("prepare", name)
        for selection in data.selections:
            if selection not in config.selections:
                listed = ", ".join(config.selections) or "none: add it there"
                yield (*here, "selections"), f"{shown(selection)} is not in selections; use one of {listed}"
            else:
                yield from _of_other_rows(config, name, selection)
        if data.held_out is not None:
            yield from _impossible_held_out(config, name, data.held_out)
    yield from _circle(config)
    yield from _evaluated_with_results(config)


def _evaluated_with_results(config: Config) -> Iterator[Fault]:
    """Yield what selections are compared with, but is read from results, which may be made of a selection."""
    for each in evaluated_questions(config).values():
        if each.harness:
            continue
        here: tuple[str, ...] = ("tasks", "rows", str(each.task), "path")
        if each.dataset is not None:
            here = ("prepare", each.dataset, "path")
        path = config.prepare[each.dataset].path if each.dataset else config.tasks.rows[str(each.task)].path
        if is_of_results(path):
            text = f"{path}, but selections are compared with its rows, which may be made of one; copy them to another"
            yield here, f"{text} folder, or name a selection in selections"


def _unusable_check(config: Config, name: str) -> Iterator[Fault]:
    """Yield mistakes in the check of a selection. The user's Python file is not executed."""
    section, here = config.selections[name], ("selections", name)
    if section.check == JUDGE:
        if config.judge.endpoint is None or config.judge.model is None:
            yield (*here, "check"), "judge, but judge.endpoint or judge.model is not set; set both"
        return
    if section.check is not None:
        yield from unusable_task(section.check, section.check_settings, here)
    known = _scores(section.check) if section.check and section.check in TASKS else None
    if section.score is not None and known is not None and section.score not in known:
        listed = f"which has {', '.join(known)}" if known else "which has none"
        yield (*here, "score"), f"{shown(section.score)} is no score of {section.check}, {listed}; correct it"


def _scores(check: str) -> list[str] | None:
    """Return the names of the scores of a check; None if its package is missing, which the stage will report."""
    task, example = TASKS[check], TASKS[check].example
    row = {"question": example.question, "expected": example.expected, "prompt": 1}
    try:
        return [*task.configured(example.settings).judge(row, example.right).scores]
    except ImportError:
        return None


def _of_other_rows(config: Config, name: str, selection: str) -> Iterator[Fault]:
    """Yield rows of another kind than the runs of a data set learn from."""
    section = config.selections[selection]
    for kind, objective in row_kinds(config, name).items():
        if kind != KINDS[section.keep]:
            text = f"{selection} has keep: {section.keep}, but the runs of {name} have objective {objective}"
            fitting = " or ".join(keep for keep, rows in KINDS.items() if rows == kind)
            yield ("prepare", name, "selections"), f"{text}; use keep: {fitting}, or another objective"


def _impossible_held_out(config: Config, name: str, other: str) -> Iterator[Fault]:
    """Yield a data set of held-out rows that there is not, or that has none to evaluate."""
    here = ("prepare", name, "held_out")
    if other not in config.prepare:
        listed = ", ".join(each for each in config.prepare if each != name)
        yield here, f"{shown(other)} is not a data set of prepare; use one of {listed or 'none: add it there'}"
        return
    if other == name:
        yield here, f"{name} is this data set itself; set split instead"
        return
    if further := config.prepare[other].held_out:
        yield here, f"{other} has the held-out rows of {further}; name that"
        return
    if not any(holds_out(config, name, split) for split in ("validation", "test")):
        yield here, f"{other} has no held-out rows that can be those of {name}; set its split.test"
    elif config.evaluate.split == "validation" and not holds_out(config, name, "validation"):
        text = f"{other}, whose validation rows hold something else than the rows of {name}, which evaluate.split names"
        yield here, f"{text}; use evaluate.split: test"


def _circle(config: Config) -> Iterator[Fault]:
    """Yield the first data set that is made of answers of a run which is trained on it."""
    done: set[Node] = set()

    def find(node: Node, path: list[Node]) -> list[Node] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in made_of(config, node):
            if circle := find(other, [*path, node]):
                return circle
        done.add(node)
        return None

    for name, data in config.prepare.items():
        if (circle := find(("prepare", name), [])) and data.selections:
            chain = " of ".join(f"{section}.{each}" for section, each in circle)
            yield ("prepare", name, "selections"), f"is made with itself: {chain}; select from an earlier run's answers"
            return


def all_of(config: Config, run: str) -> dict[str, set[str]]:
    """Return the names in each section of what a run is made of, with itself."""
    result: dict[str, set[str]] = {
        section: set() for section in ("prepare", "selections", "samples", "runs", "tasks", "harness")
    }
    waiting: list[Node] = [("runs", run)]
    while waiting:
        section, name = waiting.pop()
        if name not in result[section]:
            result[section].add(name)
            waiting += made_of(config, (section, name))
    return result


def made_of(config: Config, node: Node) -> Iterator[Node]:
    """Yield what an entry of the config is made of."""
    section, name = node
    if section == "prepare" and name in config.prepare:
        data = config.prepare[name]
        yield from (("selections", each) for each in data.selections)
        if data.held_out:
            yield "prepare", data.held_out
    elif section == "selections" and name in config.selections:
        yield "samples", config.selections[name].samples
        for kind, each in evaluated_questions(config).items():
            of_task = "harness" if each.harness else "tasks"
            yield ("prepare", each.dataset) if each.dataset else (of_task, kind.removeprefix(OF_TASK))
    elif section == "samples" and name in config.samples:
        yield "prepare", config.prompts_of(name)
        if run := config.samples[name].of.run:
            yield "runs", run
    elif section == "runs" and name in config.all_runs:
        run_of = config.all_runs[name]
        yield "prepare", run_of.dataset
        for adapter in (run_of.train.get("from_adapter"), reference_adapter(config, name)):
            if isinstance(adapter, str) and (match := RUN_ADAPTER.fullmatch(adapter)) and match[1] != name:
                yield "runs", match[1]
        if (teacher := teacher_of(config, name)) and teacher.run:
            yield "runs", teacher.run
