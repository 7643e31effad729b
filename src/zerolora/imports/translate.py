"""`zerolora import`: reads another tool's config, translates it key by key, and writes a valid config of ours.

zerolora import FILE [--from FORMAT] [--output config/config.yaml] [--as-sft]
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from zerolora.config.error_messages import remedy
from zerolora.config.file import read_values
from zerolora.config.rules import impossible
from zerolora.config.schema import Config, Prepare, Train
from zerolora.errors import UserError, printable
from zerolora.files import write_text
from zerolora.imports.formats import FORMATS
from zerolora.imports.formats.common import LARGEST_FILE
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    GROUPS,
    NO_EFFECT,
    Draft,
    Format,
    Group,
    NoEqual,
    Remark,
    Rule,
    Unlike,
)
from zerolora.imports.recognise import recognised
from zerolora.json_file import read_foreign

Kind = Literal["translated", "empty", "differs", "no equal", "assumed"]
TRIES = 50
"""Times that refused values are taken out; each takes out one at least, of a few dozen."""
CODE = {
    ".py": "a Python file, as configs of XTuner are",
    ".ipynb": "a notebook",
    ".sh": "a shell script",
    ".toml": "TOML, as configs of torchtitan are",
}
"""Kinds of files in which trainings are written that are not run or read, by their suffix."""
SFT = "zerolora does supervised fine-tuning on text"


@dataclass(frozen=True)
class Line:
    """What became of a key."""

    key: str
    """As the file has it, with the number of each list entry; ours if the file says nothing of it."""
    kind: Kind
    text: str = ""
    group: Group | None = None
    """What it means to the reader; None if the key was simply translated."""

    def __str__(self) -> str:
        return printable(f"{self.key}: {self.kind}: {self.text}")


@dataclass(frozen=True)
class Translation:
    """A valid config, and a line for every key of the imported file."""

    config: dict[str, Any]
    lines: list[Line]
    unlike: list[tuple[str, str]]
    """(key, reason) of what chooses another objective, method or modality."""

    def of(self, group: Group) -> list[Line]:
        """Return the lines of a group."""
        return [line for line in self.lines if line.group == group]

    @property
    def text(self) -> list[str]:
        """The lines of keys that were not simply translated, below the name of their group."""
        text: list[str] = []
        for group in GROUPS:
            if lines := self.of(group):
                text += [f"{group}:", *(f"  {line}" for line in lines)]
        return text


def import_config(file: Path, source: str | None, output: Path, force: bool, as_sft: bool = False) -> Translation:
    """Translate `file` and write the config to `output`; `source` is a format's name, None to recognise it.

    Raises UserError if the file cannot be read or is of no known format, if it has another objective, method or
    modality and `as_sft` is not set, or if `output` exists and `force` is not set.
    """
    if output.exists() and not force:
        raise UserError(f"{output}: exists; write --force to replace it, or another --output")
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; correct the path")
    if file.suffix in CODE:
        raise UserError(
            f"{file}: is {CODE[file.suffix]}, which is not read; write its values as YAML with the keys of one of "
            f"{', '.join(FORMATS)}, or the config by hand (config/README.md)"
        )
    if file.suffix == ".json":
        values = read_foreign(file, "correct the file", LARGEST_FILE)
    else:
        values = read_values(file, "the keys of a training are expected; correct the file")
    translated = translate(values, recognised(file, values, source), file.resolve().parent)
    if translated.unlike and not as_sft:
        reasons = "; ".join(f"{key}: {reason}" for key, reason in translated.unlike)
        raise UserError(f"{file}: {reasons}; {SFT}: write --as-sft to import the rest of the file as that")
    comments = "".join(f"# {line}\n" for line in translated.text)
    body = yaml.safe_dump(translated.config, sort_keys=False, allow_unicode=True)
    write_text(output, f"# Translated by `zerolora import`.\n{comments}\n{body}")
    return translated


def translate(values: dict[str, Any], source: Format, folder: Path) -> Translation:
    """Translate the values of a file in `folder`, which names other files relative to itself."""
    draft, lines = Draft(facts={"folder": folder}), []
    for key, value in leaves(values, whole=source.whole):
        lines.append(_translated(key, value, source, draft))
    absent = {key: value for key, value in source.defaults.items() if values.get(key) is None}
    for key, value in absent.items():
        draft.key = key
        source.rules[key].translate(value, draft)
    if absent:
        text = ", ".join(f"{key} {value}" for key, value in absent.items())
        lines.append(Line("defaults", "assumed", f"as {source.title} has them: {text}", NO_EFFECT))
    by_key = len(draft.unlike)
    for text in source.finish(draft):
        key, _, rest = text.partition(": ")
        group = text.group if isinstance(text, Remark) else FILL_IN
        lines.append(Line(key, "differs" if group == CHANGES else "assumed", rest, group))
    lines += [Line(key, "no equal", reason, CHANGES) for key, reason in draft.unlike[by_key:]]
    lines += _taken_out(draft)
    return Translation(_ordered(draft.config), lines, draft.unlike)


def leaves(value: Any, key: str = "", whole: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value: sections joined by dots, entries of lists of sections by their number.

    Sections of the keys in `whole` are not opened.
    """
    if isinstance(value, dict) and value and key not in whole:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name), whole)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{key}[{number}]", whole)
    else:
        yield key, value


def _translated(key: str, value: Any, source: Format, draft: Draft) -> Line:
    if value is None:
        return Line(key, "empty")
    pattern = re.sub(r"\[[0-9]+\]", "[]", key)
    draft.key = key
    rule = source.rules.get(pattern) or _of_section(pattern, source)
    if rule is None:
        known = re.split(r"\.|\[", pattern)[0] in source.keys
        text = f"this key of {source.title} has no equal" if known else f"no key of {source.title}"
        return Line(key, "no equal", text, CHANGES)
    try:
        remark = rule.translate(value, draft)
    except Unlike as reason:
        draft.unlike.append((key, str(reason)))
        return Line(key, "no equal", str(reason), CHANGES)
    except NoEqual as reason:
        return Line(key, "no equal", str(reason), reason.group)
    if not remark:
        return Line(key, "translated", rule.new)
    return Line(key, "differs", remark, remark.group if isinstance(remark, Remark) else CHANGES)


def _of_section(pattern: str, source: Format) -> Rule | None:
    """Return the rule of the innermost section around a key, if it has no equal as a whole."""
    for end in reversed([match.start() for match in re.finditer(r"\.|\[", pattern)]):
        above = source.rules.get(pattern[:end])
        if above is not None:
            return None if above.new else above
    return None


def _taken_out(draft: Draft) -> list[Line]:
    """Take out values that the config's own check refuses, and return a line for each."""
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
            lines.append(Line(draft.came_from.pop(path) or ".".join(path), "no equal", text, CHANGES))
            break
    raise UserError("the translated config stays invalid: " + "; ".join(text for _, text in _mistakes(draft.config)))


def _needs(path: tuple[str, ...], location: tuple[str, ...]) -> bool:
    """Return whether the key at a location, which is not there, is of the options of another, as schedule_options."""
    return path[:-1] == location[:-1] and location[-1].startswith(f"{path[-1]}_")


def _mistakes(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    try:
        checked = Config.model_validate(config)
    except ValidationError as error:
        for mistake in error.errors():
            yield tuple(str(part) for part in mistake["loc"]), remedy(mistake)
        return
    yield from impossible(checked)


def _ordered(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with its sections, and the keys of a data set, in the order of their classes."""
    rows = config["prepare"]["rows"]
    config = config | {"prepare": {"rows": {key: rows[key] for key in Prepare.model_fields if key in rows}}}
    config["train"] = {key: config["train"][key] for key in Train.model_fields if key in config["train"]}
    return {name: config[name] for name in Config.model_fields if config.get(name)}
