"""Reads config/config.yaml and reports each mistake in one line, with file, line, key, value and remedy."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from zerolora.config.grid_rules import place
from zerolora.config.messages import remedy
from zerolora.config.rules import impossible
from zerolora.config.schema import VALUES, Config, data_folders
from zerolora.config.studies import read_study
from zerolora.config.values import HUB_ADAPTERS
from zerolora.errors import UserError, shown

MOST, DEEPEST = 1_000_000, 50  # values and levels of a config: far more than one needs, and read in seconds
WILDCARD = re.compile(r"\{\s*\w+\s*(,[^{}]*)?\}")  # as snakemake.io has it


def load(path: Path, *, before_first_trial: bool = False) -> Config:
    """Return the checked config in `path`, with the trials of its searches. `before_first_trial` lets it have no run.

    Raises UserError with one line a mistake: file and line, key, value seen, remedy.
    """
    value, lines = _parse(path)
    try:
        config = Config.model_validate(value)
    except ValidationError as error:
        raise UserError("\n".join(_mistakes(path, error, lines))) from None
    config = config.with_studies({name: read_study(name) for name in config.searches})
    # What all runs of a grid have in common is wrong once.
    mistakes = dict.fromkeys(
        f"{_where(path, location, lines)}: {'.'.join(location)}: {text}"
        for location, text in impossible(config, before_first_trial)
    )
    if mistakes:
        raise UserError("\n".join(mistakes))
    return config


def check_files(path: Path, config: Config) -> None:
    """Check that both engines can watch the files that the config in `path` names.

    Raises UserError with one line a mistake: a data set that is neither on this machine nor fetched, or a file whose
    name Snakemake would take for a pattern.
    """
    fetched = [Path(folder) for folder in data_folders(config.fetch).values()]
    places: dict[tuple[str, ...], Path] = {}
    mistakes: dict[tuple[str, ...], str] = {}
    named: dict[tuple[str, ...], str] = {("prepare", name): data.path for name, data in config.prepare.items()}
    named |= {("tasks", "rows", name): task.path for name, task in config.tasks.rows.items()}
    for section, named_path in named.items():
        places[*section, "path"] = data = Path(named_path)
        is_fetched = any(folder.is_relative_to(data) or data.is_relative_to(folder) for folder in fetched)
        if not is_fetched and not data.exists():
            mistakes[*section, "path"] = (
                f"{shown(str(data))}: there is no such file or directory; correct the path, or bring the data "
                "(`dvc pull`, fetch.data)"
            )
    for name, run in config.all_runs.items():
        if not config.is_continued(name):
            continue
        start = Path(run.train["from_adapter"])
        if not start.is_relative_to("results") and not start.is_relative_to(HUB_ADAPTERS):
            here = place(config, name, "train", "from_adapter")
            places[here] = start
            if not start.is_dir():
                mistakes[here] = f"{shown(str(start))}: there is no such directory; write that of an adapter"
    for name, model in config.fetch.directory.items():
        places["fetch", "directory", name, "path"] = Path(model.path)
    for location, root in places.items():
        for file in (root, *(root.rglob("*") if root.is_dir() else ())):
            if WILDCARD.search(str(file)):
                mistakes[location] = (
                    f"{shown(str(file))}: Snakemake takes {{...}} in a file's name for a wildcard; rename the file"
                )
    if mistakes:
        lines = _parse(path)[1]
        raise UserError(
            "\n".join(f"{_where(path, at, lines)}: {'.'.join(at)}: {text}" for at, text in sorted(mistakes.items()))
        )


SECTIONS = (
    "sections such as fetch, prepare, runs are expected; write them, or take them from a recipe "
    "(`zerolora init --recipe NAME --force`)"
)


def read_values(path: Path, expected: str = SECTIONS) -> dict[str, Any]:
    """Return the values that the file says, unchecked. Raises UserError if it is not YAML, or no mapping."""
    return _parse(path, expected)[0]


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 2e-4 as a number, as YAML 1.2 (and DVC) does, and refuses a key given twice.

    What YAML calls a number or date and Python cannot hold is an error with its line.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is no plain text", key.start_mark)
            kind = key.tag.rpartition(":")[2]
            if kind not in ("str", "merge"):
                problem = f"the key {key.value} is read as {kind}, not as text: put it in quotes, or correct it"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # half a character, as in "\ud800", is in no file
            return value
        except (ValueError, TypeError, OverflowError, LookupError, AttributeError):  # whatever a tag makes PyYAML read
            kind = node.tag.rpartition(":")[2]
            problem = f"{shown(node.value)} is no {kind}" if isinstance(node, yaml.ScalarNode) else f"this is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(path: Path, expected: str = SECTIONS) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the file's values and the line of each key."""
    text = _read(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _check_size(node, {}, set())
        value = None if node is None else loader.construct_document(node)
        lines = _lines(node)
    except RecursionError:
        raise UserError(f"{path}: is nested too deep; write at most {DEEPEST} levels") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: {shown(text[error.position])} is no character of YAML; remove it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise UserError(f"{where}: {problem}; correct the YAML") from None
    if not isinstance(value, dict):
        held = "is empty" if node is None else f"holds {shown(value)}"
        raise UserError(f"{path}: {held} where {expected}")
    return value, lines


def _check_size(node: yaml.Node | None, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Return values and levels of a node with its aliases written out; `known` are those of nodes seen, by id.

    Raises ConstructorError for an alias inside what it stands for, and if there are more than MOST values or DEEPEST
    levels: a few lines of aliases could fill the memory.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1, 0
    if id(node) not in known:
        problem = ""
        if id(node) in above:
            raise yaml.constructor.ConstructorError(None, None, "an alias stands inside itself", node.start_mark)
        pairs = isinstance(node, yaml.MappingNode)
        inner = [part for entry in node.value for part in entry] if pairs else node.value
        sizes = [_check_size(each, known, above | {id(node)}) for each in inner]
        values, levels = 1 + sum(size for size, _ in sizes), 1 + max((level for _, level in sizes), default=0)
        if values > MOST:
            problem = f"more than {MOST:,} values with all aliases written out"
        if levels > DEEPEST:
            problem = f"more than {DEEPEST} levels"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        known[id(node)] = values, levels
    return known[id(node)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; write it with `zerolora init --recipe NAME`") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def _lines(node: yaml.Node | None, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            location = (*prefix, str(key.value))
            lines[location] = key.start_mark.line + 1
            lines.update(_lines(value, location))
    return lines


def _where(path: Path, location: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> str:
    for end in range(len(location), 0, -1):
        if location[:end] in lines:
            return f"{path}:{lines[location[:end]]}"
    return str(path)


def _mistakes(path: Path, error: ValidationError, lines: dict[tuple[str, ...], int]) -> Iterable[str]:
    told: dict[tuple[str, ...], str] = {}
    for mistake in error.errors():
        location = tuple(str(part) for part in mistake["loc"] if part != "[key]")
        # A union reports each alternative that failed; the first one says enough, but for a word that would do as well.
        located = tuple(part for part in location if (part in _known(lines)) or location.index(part) == 0)
        if located not in told:
            told[located] = f"{_where(path, location, lines)}: {'.'.join(_readable(location))}: {remedy(mistake)}"
        elif mistake["type"] == "literal_error":
            told[located] += f", or {mistake['ctx']['expected']}"
    return told.values()


def _known(lines: dict[tuple[str, ...], int]) -> set[str]:
    return {part for location in lines for part in location}


def _readable(location: tuple[str, ...]) -> list[str]:
    """Return a location without the alternatives of a union, which pydantic names in it."""
    return [
        part
        for part in location
        if not re.match(r"(literal|list|constrained|function|str|float|int)\b.*\[", part)
        and part not in ("bool", "constrained-int", *VALUES)
    ]
