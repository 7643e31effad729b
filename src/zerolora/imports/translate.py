"""`zerolora import`: translates another tool's config key by key into a valid config.

    zerolora import FILE [--from FORMAT] [--output config/config.yaml] [--as-sft]

Tools share many keys, since most build on transformers' TrainingArguments. A file is attributed to the tool of which it
has most own keys, if it names its model as that tool does; any other file is refused.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from zerolora.config.cross_checks import impossible
from zerolora.config.file import publish, read_values
from zerolora.config.mistakes import located
from zerolora.config.recipes import schema_line
from zerolora.config.schema import Config, Prepare, Train
from zerolora.errors import UserError, printable, shown
from zerolora.imports.formats import FORMATS
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    GROUPS,
    NO_EFFECT,
    Draft,
    Format,
    Group,
    LeftOut,
    NoEqual,
    Remark,
    Rule,
    Same,
    Unlike,
    is_default,
    off,
    top_of,
)
from zerolora.imports.formats.shared.named_files import LARGEST_FILE, exists
from zerolora.imports.formats.shared.scaffold import GPU
from zerolora.imports.python_file import read_sections
from zerolora.imports.shell_file import read_flags
from zerolora.json_file import read_foreign
from zerolora.yaml_file import dumped


def _script(file: Path) -> dict[str, Any]:
    """Return the flags of a script's command, and the values of the Python config that it names."""
    flags = read_flags(file)
    if "config" not in flags or "dataset" in flags:
        return flags
    name = str(flags.pop("config"))
    config = next(
        (each for each in (file.parent / name, file.parent / f"{name}.py") if exists(each, Path.is_file)), None
    )
    if config is None:
        raise UserError(f"{file}: {name} is not here; put the config beside the script (`xtuner copy-cfg`)")
    return read_sections(config) | flags


def _yaml(file: Path) -> dict[str, Any]:
    return read_values(file, "the keys of a training are expected; correct the file")


Kind = Literal["translated", "same", "empty", "default", "differs", "no equal", "assumed"]
TRIES = 50
"""Maximum number of invalid values to remove; a config has a few dozen."""
SFT = "zerolora trains on text: pass --as-sft to import the rest of the file as supervised fine-tuning"
READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **dict.fromkeys((".yaml", ".yml"), _yaml),
    ".json": lambda file: read_foreign(file, "correct the file", LARGEST_FILE),
    ".sh": _script,
    ".py": read_sections,
}
"""The reader of a file, by its suffix. None of them runs anything."""
BY_HAND = "start from a config of zerolora (config/README.md)"
MOST_SHOWN = 5  # keys in a message
OFF = "off or empty, as by default"


@dataclass(frozen=True)
class Line:
    """How a key was translated."""

    key: str
    """The key in the file, with the index of each list entry; our key if the file lacks it."""
    kind: Kind
    text: str = ""
    group: Group | None = None
    """Its meaning for the user; None for a plain translation."""

    def __str__(self) -> str:
        return printable(f"{self.key}: {self.kind}: {self.text}")


@dataclass(frozen=True)
class Translation:
    """A valid config, and a line for each key of the imported file."""

    config: dict[str, Any]
    lines: list[Line]
    unlike: list[tuple[str, str]]
    """(key, reason) of each value that chooses another objective, method or modality."""

    def of(self, group: Group) -> list[Line]:
        """Return the lines of a group."""
        return [line for line in self.lines if line.group == group]

    @property
    def text(self) -> list[str]:
        """The lines with a group, below the group's name."""
        text: list[str] = []
        for group in GROUPS:
            if lines := self.of(group):
                text += [f"{group}:", *(f"  {line}" for line in lines)]
        return text


def import_config(file: Path, source: str | None, output: Path, force: bool, as_sft: bool = False) -> Translation:
    """Translate `file` and write the config to `output`; `source` is a format's name, None to detect it.

    Raises UserError if the file is unreadable or of no supported format, if it has another objective, method or
    modality and `as_sft` is not set, or if `output` exists and `force` is not set.
    """
    if output.exists() and not force:
        raise UserError(f"{output}: exists; pass --force to replace it, or another --output")
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; correct the path")
    if file.suffix not in READERS:
        raise UserError(
            f"{file}: is none of {', '.join(READERS)}, and no other file is read; write its values as YAML "
            f"with the keys of {_titles()}, or {BY_HAND}"
        )
    values = READERS[file.suffix](file)
    translated = translate(values, recognised(file, values, source), file.resolve().parent)
    if translated.unlike and not as_sft:
        reasons = "; ".join(f"{key}: {reason}" for key, reason in translated.unlike)
        raise UserError(f"{file}: {reasons}; {SFT}")
    comments = "".join(f"# {line}\n" for line in translated.text)
    head = f"{schema_line(output)}# Translated by `zerolora import`."
    publish(output, f"{head}\n{comments}\n{dumped(translated.config)}", translated.config)
    return translated


def recognised(file: Path, values: dict[str, Any], source: str | None) -> Format:
    """Return the format of a file; `source` is its name, None to detect it.

    A file is of the format whose model key and most own keys it has, if at most a third of its keys have no rule there.
    Raises UserError if there is no such format, or more than one.
    """
    if source is not None and source not in FORMATS:
        raise UserError(f"--from: {shown(source)} is not a format; use one of {', '.join(FORMATS)}")
    own = {name: sum(map(format.owns, values)) for name, format in FORMATS.items() if format.needed in values}
    most = max(own.values(), default=0)
    best = [source] if source else [name for name, count in own.items() if count == most > 0]
    if len(best) > 1:  # of a tool's commands, of which the folder or the file may have the name
        parts = {part.lower() for part in (*file.resolve().parent.parts, *re.split(r"[\W_]+", file.stem))}
        best = [name for name in best if name.rpartition("-")[2] in parts] or best
    if len(best) > 1:
        raise UserError(f"{file}: is as much a config of {' as of '.join(best)}; choose one with --from")
    if not best:
        needed = ", ".join(f"{format.needed} ({format.title})" for format in FORMATS.values())
        raise UserError(
            f"{file}: is not a config of {_titles()}: its keys are {_shown([*values])}, without a tool's own keys "
            f"beside one of {needed}; for a part of a config, use --from {'|'.join(FORMATS)}, otherwise {BY_HAND}"
        )
    chosen = FORMATS[best[0]]
    unknown = [key for key in values if not chosen.knows(key)]
    if len(unknown) * 3 > len(values):
        raise UserError(
            f"{file}: is not a config of {chosen.title}, which has no key {_shown(unknown)} ({len(unknown)} of "
            f"{len(values)} keys are unknown); {BY_HAND}"
        )
    return chosen


def _titles() -> str:
    *others, last = (format.title for format in FORMATS.values())
    return f"{', '.join(others)} or {last}"


def _shown(keys: list[str]) -> str:
    more = ", ..." if len(keys) > MOST_SHOWN else ""
    return ", ".join(shown(key) for key in keys[:MOST_SHOWN]) + more


def translate(values: dict[str, Any], source: Format, folder: Path) -> Translation:
    """Translate the values of a file in `folder`, to which its paths are relative.

    A key that is translated changes the config or a line, or has the tool's default; any other is named.
    """
    given = dict(leaves(values, whole=source.whole))
    draft, lines = _drafted(given, source, folder)
    lines = [
        Line(line.key, "translated", "no difference beside the file's other keys", NO_EFFECT)
        if line.kind == "translated" and _is_idle(line.key, given, source, folder, (draft, lines))
        else line
        for line in lines
    ]
    lines += _valid(draft, lines)
    return Translation(_ordered(draft.config), lines, draft.unlike)


def _valid(draft: Draft, lines: list[Line]) -> list[Line]:
    """Remove values that are invalid in our config, and return a line for each. Values that need a GPU stay: without
    one in this machine, `hardware` becomes one."""
    elsewhere = Draft(copy.deepcopy(draft.config), {**draft.came_from})
    removed = _remove_invalid(draft)
    if not removed or elsewhere.config["hardware"]["device"] == "cuda":
        return removed
    elsewhere.config["hardware"] = GPU | {"gpus_per_node": 1}
    kept = _remove_invalid(elsewhere)
    needed = [line.key for line in removed if line.key not in {other.key for other in kept}]
    if not needed:
        return removed
    draft.config = elsewhere.config
    number = next(number for number, line in enumerate(lines) if line.key == "hardware")
    text = f"{', '.join(needed)} of the file needs a GPU, of which this machine has none; one of 80 GB is written: "
    lines[number] = Line("hardware", "assumed", f"{text}correct it", FILL_IN)
    return kept


def _is_idle(
    key: str, given: dict[str, Any], source: Format, folder: Path, translated: tuple[Draft, list[Line]]
) -> bool:
    """Return whether a key that has not the tool's default makes no difference to the config and the other lines."""
    if is_default(given[key], source.default(_pattern(key))):
        return False
    draft, lines = _drafted({other: value for other, value in given.items() if other != key}, source, folder)
    same = draft.config == translated[0].config and draft.unlike == translated[0].unlike
    others = [line for number, line in enumerate(translated[1]) if number != list(given).index(key)]
    return same and lines == others  # an own line of the key would be one of `others`


def _drafted(given: dict[str, Any], source: Format, folder: Path) -> tuple[Draft, list[Line]]:
    """Translate leaves to a config, which may have invalid values, and a line for each."""
    draft, lines = Draft(facts={"folder": folder}), []
    absent = {key: value for key, value in source.defaults.items() if given.get(key) is None}
    for key, value in absent.items():
        draft.key, draft.default = key, source.default(key)
        source.rules[key].translate(value, draft)
    for key, value in given.items():  # after the defaults, which other keys may replace
        lines.append(_translated(key, value, source, draft))
    if absent:
        text = ", ".join(f"{key} {value}" for key, value in absent.items())
        lines.append(Line("defaults", "assumed", f"as {source.title} has them: {text}", NO_EFFECT))
    by_key = len(draft.unlike)
    for text in source.finish(draft):
        key, _, rest = text.partition(": ")
        group = text.group if isinstance(text, Remark) else FILL_IN
        lines.append(Line(key, "differs" if group == CHANGES else "assumed", rest, group))
    lines += [Line(key, "no equal", reason, CHANGES) for key, reason in draft.unlike[by_key:]]
    return draft, lines


def leaves(value: Any, key: str = "", whole: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value, entering sections, except those in `whole`, and lists of sections."""
    own = _pattern(key) in whole
    if isinstance(value, dict) and value and not own:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name), whole)
    elif isinstance(value, list) and value and not own and all(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{key}[{number}]", whole)
    else:
        yield key, value


def _translated(key: str, value: Any, source: Format, draft: Draft) -> Line:
    pattern = _pattern(key)
    draft.key, draft.default = key, source.default(pattern)
    if value is None and (draft.default is None or top_of(key) not in source.sections):
        return Line(key, "empty")
    if value is None and off(draft.default):
        return Line(key, "default", OFF, NO_EFFECT)
    rule = source.rule(pattern)
    if rule is None:
        if is_default(value, draft.default):
            return Line(key, "default")
        known = (
            "without an equal here" if source.knows(top_of(key)) or pattern in source.arguments else "that is not known"
        )
        return Line(key, "no equal", f"a key of {source.title} {known}", CHANGES)
    return _by_rule(rule, key, value, draft)


def _by_rule(rule: Rule, key: str, value: Any, draft: Draft) -> Line:
    try:
        remark = rule.translate(value, draft)
    except Same:
        line = Line(key, "same", "always so here")
    except LeftOut:
        line = Line(key, "default") if is_default(value, draft.default) else Line(key, "default", OFF, NO_EFFECT)
    except NoEqual as reason:
        if isinstance(reason, Unlike):
            draft.unlike.append((key, str(reason)))
        line = Line(key, "no equal", str(reason), reason.group)
    else:
        group = remark.group if isinstance(remark, Remark) else CHANGES
        line = Line(key, "differs", remark, group) if remark else Line(key, "translated", rule.new)
    return line


def _pattern(key: str) -> str:
    """Return a dotted key as rules have it, with [] for any entry of a list."""
    return re.sub(r"\[[0-9]+\]", "[]", key)


def _remove_invalid(draft: Draft) -> list[Line]:
    """Remove values that are invalid in our config, and return a line for each."""
    lines: list[Line] = []
    for _ in range(TRIES):
        mistakes = list(_mistakes(draft.config))
        if not mistakes:
            return lines
        for location, text in mistakes:
            path = next((each for each in draft.came_from if each == location[: len(each)]), None)
            path = path or next((each for each in draft.came_from if each[: len(location)] == location), None)
            path = path or next((each for each in draft.came_from if _needs(each, location)), None)
            if path is None:
                raise UserError(f"{'.'.join(location)}: {text} (of the translated config)")
            section = draft.config
            for part in path[:-1]:
                section = section[part]
            section.pop(path[-1], None)
            key, ours = draft.came_from.pop(path), ".".join(path)
            lines.append(Line(key or ours, "no equal", f"{ours}: {text}" if key else text, CHANGES))
            break
    raise UserError("the translated config stays invalid: " + "; ".join(text for _, text in _mistakes(draft.config)))


def _needs(path: tuple[str, ...], location: tuple[str, ...]) -> bool:
    """Return whether a missing key is for the options of another key, e.g. schedule_options."""
    return path[:-1] == location[:-1] and location[-1].startswith(f"{path[-1]}_")


def _mistakes(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    try:
        checked = Config.model_validate(config)
    except ValidationError as error:
        yield from ((mistake.location, mistake.text()) for mistake in located(error, config))
        return
    yield from impossible(checked)


def _ordered(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with sections and keys in the order of the schema."""
    rows = config["prepare"]["rows"]
    config = config | {"prepare": {"rows": {key: rows[key] for key in Prepare.model_fields if key in rows}}}
    config["train"] = {key: config["train"][key] for key in Train.model_fields if key in config["train"]}
    return {name: config[name] for name in Config.model_fields if config.get(name)}
