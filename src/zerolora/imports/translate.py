"""`zerolora import`: reads another tool's config, translates it key by key, and writes a valid config of ours.

zerolora import FILE [--from FORMAT] [--output config/config.yaml]
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from zerolora.config.file import read_values
from zerolora.config.messages import remedy
from zerolora.config.rules import impossible
from zerolora.config.schema import Config, Prepare, Train
from zerolora.errors import UserError, printable, shown
from zerolora.files import write_text
from zerolora.imports.formats import FORMATS
from zerolora.imports.formats.base import Draft, Format, NoEqual

Kind = Literal["translated", "empty", "differs", "no equal", "assumed"]
TRIES = 50
"""Times that refused values are taken out; each takes out one at least, of a few dozen."""


@dataclass(frozen=True)
class Line:
    """What became of a key."""

    key: str
    """As the file has it, with the number of each list entry; ours if the file says nothing of it."""
    kind: Kind
    text: str = ""

    def __str__(self) -> str:
        return printable(f"{self.key}: {self.kind}: {self.text}")


@dataclass(frozen=True)
class Translation:
    """A valid config, and a line for every key of the imported file."""

    config: dict[str, Any]
    lines: list[Line]

    @property
    def told(self) -> list[Line]:
        """The lines of keys that were not simply translated."""
        return [line for line in self.lines if line.kind not in ("translated", "empty")]


def import_config(file: Path, source: str | None, output: Path, force: bool) -> Translation:
    """Translate `file` and write the config to `output`; `source` is a format's name, None to recognise it.

    Raises UserError if the file cannot be read or is of no known format, or if `output` exists and `force` is not set.
    """
    if output.exists() and not force:
        raise UserError(f"{output}: exists; write --force to replace it, or another --output")
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; correct the path")
    values = read_values(file, "the keys of a training are expected; correct the file")
    translated = translate(values, recognised(file, values, source), file.resolve().parent)
    comments = "".join(f"# {line}\n" for line in translated.told)
    body = yaml.safe_dump(translated.config, sort_keys=False, allow_unicode=True)
    write_text(output, f"# Translated by `zerolora import`. What needs a look:\n{comments}\n{body}")
    return translated


def recognised(file: Path, values: dict[str, Any], source: str | None) -> Format:
    """Return the format of a file: the one that knows most of its keys."""
    names = ", ".join(FORMATS)
    if source is not None:
        if source not in FORMATS:
            raise UserError(f"--from: {shown(source)} is no format; write one of {names}")
        return FORMATS[source]
    known = {name: sum(key in _sections(format) for key in values) for name, format in FORMATS.items()}
    most = max(known.values())
    best = [name for name, count in known.items() if count == most]
    if not most or len(best) > 1:
        like = f"its keys are as much those of {' and '.join(best)}" if most else "none of its keys is known"
        raise UserError(f"{file}: {like}; write --from with one of {names}")
    return FORMATS[best[0]]


def translate(values: dict[str, Any], source: Format, folder: Path) -> Translation:
    """Translate the values of a file in `folder`, which names other files relative to itself."""
    draft, lines = Draft(facts={"folder": folder}), []
    for key, value in leaves(values):
        lines.append(Line(key, *_translated(key, value, source, draft)))
    absent = {key: value for key, value in source.defaults.items() if values.get(key) is None}
    for key, value in absent.items():
        draft.key = key
        source.rules[key].translate(value, draft)
    if absent:
        text = ", ".join(f"{key} {value}" for key, value in absent.items())
        lines.append(Line("defaults", "assumed", f"as {source.title} has them: {text}"))
    for text in source.finish(draft):
        key, _, rest = text.partition(": ")
        lines.append(Line(key, "assumed", rest))
    lines += _taken_out(draft)
    return Translation(_ordered(draft.config), lines)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its value: sections joined by dots, entries of lists of sections by their number."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{key}[{number}]")
    else:
        yield key, value


def _translated(key: str, value: Any, source: Format, draft: Draft) -> tuple[Kind, str]:
    if value is None:
        return "empty", ""
    pattern = re.sub(r"\[[0-9]+\]", "[]", key)
    rule = source.rules.get(pattern)
    if rule is None:
        for end in (match.start() for match in re.finditer(r"\.|\[", pattern)):
            above = source.rules.get(pattern[:end])
            if above is not None and not above.new:
                return "no equal", above.remark
        return "no equal", f"no key of {source.title} that this translation knows"
    draft.key = key
    try:
        remark = rule.translate(value, draft)
    except NoEqual as reason:
        return "no equal", str(reason)
    return ("differs", remark) if remark else ("translated", rule.new)


def _sections(source: Format) -> set[str]:
    """Return the first part of every key of a format."""
    return {re.split(r"\.|\[", key)[0] for key in source.rules}


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
            if path is None:
                raise UserError(f"{'.'.join(location)}: {text} (of the translated config)")
            section = draft.config
            for part in path[:-1]:
                section = section[part]
            section.pop(path[-1], None)
            lines.append(Line(draft.came_from.pop(path) or ".".join(path), "no equal", text))
            break
    raise UserError("the translated config stays invalid: " + "; ".join(text for _, text in _mistakes(draft.config)))


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
