"""Reads and checks config/config.yaml. Each mistake is reported in one line: file, line, key, value, remedy."""

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from zerolora.config.cross_checks import impossible
from zerolora.config.grid_rules import location_of
from zerolora.config.made_files import made_folders
from zerolora.config.mistakes import located
from zerolora.config.overrides import RunOverrides, SourcedValues
from zerolora.config.run_objectives import needs_reference, reference_adapter, reference_key
from zerolora.config.schema import Config
from zerolora.config.shorthands import ShorthandError, WrittenOut, written_out
from zerolora.config.studies import read_study
from zerolora.config.values import HUB_ADAPTERS
from zerolora.errors import CONTROLS, UserError, explained, shown
from zerolora.errors import LONGEST as LONGEST_SHOWN
from zerolora.files import write_text
from zerolora.json_file import read_bytes
from zerolora.yaml_file import DEEPEST, check_size, composed

LONGEST = 500_000  # characters of a config; parsed within a second
SHOWN = 20  # mistakes to print
NOTHING = RunOverrides()
ANCHORS = "x-"
"""Prefix of the keys of a config that are not settings, as in Compose files."""
EXPERIMENTS = "experiments"
"""Directory beside a config with a file for each further run."""
WILDCARD = re.compile(r"\{\s*\w+\s*(,[^{}]*)?\}")  # as in snakemake.io


def load(path: Path, *, before_first_trial: bool = False, over: RunOverrides = NOTHING) -> Config:
    """Return the checked config in `path`, with the trials of its searches. `before_first_trial` allows it no runs.

    Raises UserError with one line per mistake: file and line, or option, key, value, remedy.
    """
    written, lines = with_overrides(path, over)
    out = _written_out(path, written, lines)
    value = out.values

    def line(location: tuple[str, ...], text: str) -> str:
        location = out.origin(location)
        return f"{_where(path, location, lines)}: {_dotted(location)}: {text}"

    for location, each in _leaves(value):
        if not isinstance(each, str | int | float | None):  # e.g. a date, which JSON lacks
            text = f"{shown(str(each))} is read as a {type(each).__name__}; put it in quotes, or correct it"
            raise UserError(line(location, text))
    try:
        config = Config.model_validate(value)
    except ValidationError as error:
        found = located(error, value)
        texts: dict[str, None] = {}
        for number, each in enumerate(found):
            if len(texts) == SHOWN:
                raise UserError(_some([*texts], SHOWN + len(found) - number)) from None
            # Entries of one shorthand have the same text.
            texts[line(each.location, each.text(out.origin(each.location)))] = None
        raise UserError("\n".join(texts)) from None
    for location, each in _leaves(value):
        if isinstance(each, float) and not math.isfinite(each):  # in mappings with free keys, e.g. check_settings
            raise UserError(line(location, "is not finite; use a finite number, as in 2e-4"))
    config = config.with_studies({name: read_study(name) for name in config.searches})
    # All runs of a grid may have the same mistake.
    mistakes = dict.fromkeys(line(*each) for each in impossible(config, before_first_trial))
    if mistakes:
        raise UserError(_some(list(mistakes)[:SHOWN], len(mistakes)))
    return config


def check_files(path: Path, config: Config, over: RunOverrides = NOTHING) -> None:
    """Check that both engines can track the files that the config in `path` names.

    Raises UserError with one line per mistake: a data set that is neither local nor made by a stage, or a file name
    that Snakemake would take for a pattern.
    """
    made = made_folders(config)
    roots: dict[tuple[str, ...], Path] = {}
    mistakes: dict[tuple[str, ...], str] = {}
    roots |= {("prepare", name, "path"): Path(data.path) for name, data in config.prepare.items() if data.path}
    roots |= {("tasks", "rows", name, "path"): Path(task.path) for name, task in config.tasks.rows.items()}
    for location, data in roots.items():
        if not data.exists() and not any(each.concerns(data) for each in made):
            text = "there is no such file or directory; correct the path, or bring the data (`dvc pull`, fetch.data)"
            mistakes[location] = f"{shown(str(data))}: {text}"
    for name, run in config.all_runs.items():
        adapters: dict[tuple[str, ...], Any] = {("from_adapter",): run.train.get("from_adapter")}
        if needs_reference(config, name) and (reference := reference_adapter(config, name)) not in adapters.values():
            adapters[reference_key(config, name)] = reference
        for key, adapter in adapters.items():
            start = Path(str(adapter or "results"))
            if start.is_relative_to("results") or start.is_relative_to(HUB_ADAPTERS):
                continue
            here = location_of(config, name, "train", *key)
            roots[here] = start
            if not start.is_dir():
                mistakes[here] = f"{shown(str(start))}: there is no such directory; give the directory of an adapter"
    for name, model in config.fetch.directory.items():
        roots["fetch", "directory", name, "path"] = Path(model.path)
    for location, root in roots.items():
        for file in (root, *(root.rglob("*") if root.is_dir() else ())):
            if WILDCARD.search(str(file)):
                text = "Snakemake takes {...} in a file's name for a wildcard; rename the file"
                mistakes[location] = f"{shown(str(file))}: {text}"
    if mistakes:
        written, lines = with_overrides(path, over)
        out = _written_out(path, written, lines)
        places = {at: out.origin(at) for at in sorted(mistakes)}
        raise UserError(
            "\n".join(f"{_where(path, here, lines)}: {'.'.join(here)}: {mistakes[at]}" for at, here in places.items())
        )


SECTIONS = "sections such as fetch, prepare, runs are expected; add them, or let `zerolora init --force` write them"


def read_values(path: Path, expected: str = SECTIONS, longest: int = LONGEST) -> dict[str, Any]:
    """Return the unchecked values in a file of at most `longest` characters. Raises UserError if it is not a YAML
    mapping."""
    return _parse(path, expected, longest)[0]


def publish(path: Path, text: str, values: Mapping[str, Any] | None = None) -> None:
    """Write the text of a config, whole or not at all, if it is read back as `values`; None: as any mapping.

    Everything that writes a config calls it: comments have names, options and rows of others, which must not become
    keys. Raises UserError, and writes nothing, if it is not read back so, or if a new text has control characters.
    """
    read_back = _parsed(path, text, SECTIONS)[0]
    if values is not None and (read_back != values or CONTROLS.search(text.replace("\n", ""))):
        raise UserError(
            f"{path}: is not written, since it would be read as something else; report its options and rows"
        )
    write_text(path, text)


def read_written_out(path: Path) -> dict[str, Any]:
    """Return the unchecked values in a config, without shorthands. Raises UserError as `read_values` does."""
    return _written_out(path, *with_overrides(path, NOTHING)).values


def _written_out(path: Path, values: dict[str, Any], lines: dict[tuple[str, ...], str]) -> WrittenOut:
    try:
        return written_out(copy.deepcopy(values))
    except ShorthandError as error:
        location, text = error.args
        raise UserError(f"{_where(path, location, lines)}: {_dotted(location)}: {text}") from None


def with_overrides(path: Path, over: RunOverrides) -> SourcedValues:
    """Return the values in a file and in the files of its experiments, with the overrides merged over them.

    Raises UserError if a file is not a YAML mapping, or a run is in two.
    """
    result = SourcedValues({}, {}) if over.replaces else _with_experiments(path)
    for part in over.parts:
        result = part.over(result)
    return result


def _with_experiments(path: Path) -> SourcedValues:
    """Return the values in a config; each experiments/NAME.yaml beside it is the entry NAME of its `runs`."""
    result = read(path)
    for file in sorted((path.parent / EXPERIMENTS).glob("[!.]*")):
        if file.suffix != ".yaml":
            raise UserError(f"{file}: is not the file of a run; name it NAME.yaml, or move it out of {file.parent}")
        run, lines = _parse(file, "the keys of a run are expected, as in train: {learning_rate: 1e-4}")
        runs = result.values.get("runs") or {}
        if not isinstance(runs, dict):
            return result  # reported by the config's check
        if file.stem in runs:
            raise UserError(f"{file}: {path} has a run {shown(file.stem)} too; rename one of the two")
        here = ("runs", file.stem)
        sources = {here: str(file), **{(*here, *key): f"{file}:{line}" for key, line in lines.items()}}
        values = {**result.values, "runs": {**runs, file.stem: _without_anchors(run)}}
        result = SourcedValues(values, result.sources | sources)
    return result


def read(path: Path) -> SourcedValues:
    """Return the unchecked values in a file, and their lines. Raises UserError if it is not a YAML mapping."""
    values, lines = _parse(path)
    return SourcedValues(_without_anchors(values), {location: f"{path}:{line}" for location, line in lines.items()})


def _without_anchors(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the keys that begin with x-, which hold what anchors of YAML repeat."""
    return {key: value for key, value in values.items() if not key.startswith(ANCHORS)}


def _parse(
    path: Path, expected: str = SECTIONS, longest: int = LONGEST
) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the values of the file and the line of each key."""
    return _parsed(path, _read(path, longest), expected)


def _parsed(path: Path, text: str, expected: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        loader, node = composed(text)
        check_size(node)
        value = None if node is None else loader.construct_document(node)
        lines = _lines(node)
    except RecursionError:
        raise UserError(f"{path}: is nested too deep; use at most {DEEPEST} levels") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: {shown(text[error.position])} is not a character of YAML; remove it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise UserError(f"{where}: {problem}; correct the YAML") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # from PyYAML's handling of tags
        raise UserError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())}); correct it") from None
    if not isinstance(value, dict):
        actual = "is empty" if node is None else f"holds {shown(value)}"
        raise UserError(f"{path}: {actual} where {expected}")
    return value, lines


def _read(path: Path, longest: int) -> str:
    try:
        text = read_bytes(path).decode()
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no such file; "
            "create it with `zerolora init --model DIRECTORY --data FILE`, or `--recipe NAME`"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(explained(error)) from None
    if len(text) > longest:
        raise UserError(f"{path}: has {len(text):,} characters; use at most {longest:,}")
    return text


def _leaves(value: Any, location: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (location, value) for each value that is neither a mapping nor a list."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, (*location, str(key)))
    else:
        yield location, value


def _some(lines: list[str], count: int) -> str:
    """Return the lines of the first mistakes, and the number of further ones."""
    more = count - len(lines)
    return "\n".join([*lines, *([f"and {more:,} more mistakes"] if more else [])])


def _dotted(location: Iterable[str]) -> str:
    return ".".join(part if len(part) <= LONGEST_SHOWN else f"{part[: LONGEST_SHOWN - 3]}..." for part in location)


def _lines(node: yaml.Node | None, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            location = (*prefix, str(key.value))
            lines[location] = key.start_mark.line + 1
            lines.update(_lines(value, location))
    return lines


def _where(path: Path, location: tuple[str, ...], lines: dict[tuple[str, ...], str]) -> str:
    for end in range(len(location), 0, -1):
        if location[:end] in lines:
            return lines[location[:end]]
    return str(path)
