"""`zerolora import`: translates another tool's config key by key into a valid config.

    zerolora import FILE [--from FORMAT] [--output config/config.yaml] [--as-sft]

Tools share many keys, since most build on transformers' TrainingArguments. A file is attributed to the tool that knows
most of its keys, if it names its model as that tool does; a file of an unsupported tool is refused by name.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from zerolora.config.cross_checks import impossible
from zerolora.config.file import read_values
from zerolora.config.schema import Config, Prepare, Train
from zerolora.config.values import remedy
from zerolora.errors import UserError, printable, shown
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
from zerolora.imports.known_keys import SWIFT, TRAINING, TRL
from zerolora.json_file import read_foreign

Kind = Literal["translated", "empty", "differs", "no equal", "assumed"]
TRIES = 50
"""Maximum number of invalid values to remove; a config has a few dozen."""
CODE = {
    ".py": "a Python file, as configs of XTuner are",
    ".ipynb": "a notebook",
    ".sh": "a shell script",
    ".toml": "TOML, as configs of torchtitan are",
}
"""Kinds of training files that are neither executed nor read, by suffix."""
SFT = "zerolora trains on text: write --as-sft to import the rest of the file as supervised fine-tuning"
OTHERS = {
    "TRL, alignment-handbook or open-r1": TRL | TRAINING,
    "ms-swift": SWIFT | TRAINING,
}
"""Keys of unsupported tools, by tool."""
NOT_READ = "which is not read; write the config by hand (config/README.md)"
MOST_SHOWN = 3  # unknown keys in a message
MARKS = {
    "fetch prepare": "a config of zerolora itself, which needs no import",
    "peft_type": "peft's adapter_config.json; name its directory in train.from_adapter",
    "architectures model_type": "a model's config.json; name its directory in fetch.directory",
    **dict.fromkeys(
        ("compute_environment", "distributed_type", "num_machines"),
        "a config of `accelerate launch`, which names neither model nor rows",
    ),
    **dict.fromkeys(("model model_class", "model train_dataset"), "a config of LLaMA-Factory's v1"),
    "actor_rollout_ref": "a config of verl, which is for reinforcement learning",
    "data model optim trainer": "a config of verl",
    **dict.fromkeys(("exp_manager", "trainer model name", "step_scheduler"), "a config of NeMo"),
    **dict.fromkeys(("pretrain zero_stage", "pretrain input_key"), "a config of OpenRLHF"),
    "input_features output_features": "a config of Ludwig",
    **dict.fromkeys(("merge_method models", "merge_method slices"), "a config of mergekit, which trains nothing"),
    "task project_name": "a config of AutoTrain",
    "model data training": "a config of Oumi",
    "training lora": "a config of Unsloth Studio",
    "model iters": "a config of mlx-lm",
    "model training_file": "a fine-tuning job of OpenAI's API",
    "checkpoint_dir devices": "a config of LitGPT",
    "services": "a file of Docker Compose",
}
"""Files that are not supported training configs, by the top-level keys that they all contain."""


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
        raise UserError(f"{file}: {reasons}; {SFT}")
    comments = "".join(f"# {line}\n" for line in translated.text)
    body = yaml.safe_dump(translated.config, sort_keys=False, allow_unicode=True)
    write_text(output, f"# Translated by `zerolora import`.\n{comments}\n{body}")
    return translated


def recognised(file: Path, values: dict[str, Any], source: str | None) -> Format:
    """Return the format of a file; `source` is its name, None to detect it.

    Raises UserError if the format is not supported, or if more than a third of the file's keys are not in it.
    """
    names = ", ".join(FORMATS)
    if source is not None:
        if source not in FORMATS:
            raise UserError(f"--from: {shown(source)} is not a format; write one of {names}")
        _mostly_known(file, values, FORMATS[source])
        return FORMATS[source]
    if other := _other_kind(values):
        raise UserError(f"{file}: is {other}")
    counts = {name: _count(values, format.keys) for name, format in FORMATS.items() if format.needed in values}
    foreign = {title: _count(values, keys) for title, keys in OTHERS.items()}
    if not counts:
        raise UserError(f"{file}: {_without_model(values, foreign)}")
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    nearest = max(foreign, key=lambda title: foreign[title])
    if foreign[nearest] > most:
        unknown = [key for key in values if key not in FORMATS[best[0]].keys]
        raise UserError(
            f"{file}: looks like a config of {nearest}, which is not read ({_shown(unknown)} is not a key of "
            f"{FORMATS[best[0]].title}); write the config by hand (config/README.md)"
        )
    if len(best) > 1 or foreign[nearest] == most:
        like = [FORMATS[name].title for name in best] + [title for title in foreign if foreign[title] == most]
        raise UserError(
            f"{file}: its keys are as much those of {' and '.join(like)}; write --from with one of {names}, if it is"
        )
    _mostly_known(file, values, FORMATS[best[0]])
    return FORMATS[best[0]]


def _count(values: dict[str, Any], keys: Iterable[str]) -> int:
    known = frozenset(keys)
    return sum(key in known for key in values)


def _mostly_known(file: Path, values: dict[str, Any], source: Format) -> None:
    unknown = [key for key in values if key not in source.keys]
    if len(unknown) * 3 > len(values):
        raise UserError(
            f"{file}: is not a config of {source.title}, which has no key {_shown(unknown)} ({len(unknown)} of "
            f"{len(values)} keys are unknown)"
        )


def _without_model(values: dict[str, Any], foreign: dict[str, int]) -> str:
    """Return what a file without a model looks like."""
    needed = ", ".join(f"{format.needed} of {format.title}" for format in FORMATS.values())
    counts = {format.title: _count(values, format.keys) for format in FORMATS.values()} | foreign
    best = max(counts, key=lambda title: counts[title])
    if not counts[best]:
        return f"none of its keys is known; {needed} is required"
    if best in foreign and "model" in values and counts[best] > 1:
        return f"looks like a config of {best}, {NOT_READ}"
    return f"is not a training config that is read: {needed} is needed; if it is one, write --from {'|'.join(FORMATS)}"


def _other_kind(values: dict[str, Any]) -> str | None:
    """Return the kind of a file that is not a supported training config, None if not recognised."""
    for keys, kind in MARKS.items():
        if {*keys.split()} <= values.keys():
            return kind if re.search("; |which ", kind) else f"{kind}, {NOT_READ}"
    for key, tool in (("_component_", "torchtune"), ("_target_", "NeMo or another tool that is built on Hydra")):
        if any(key == each for each in _all_keys(values)):
            return f"a config of {tool}, {NOT_READ}"
    if values and all(re.match(r"_|fsdp|xla", key) for key in values):
        return "settings of FSDP only, which name neither model nor rows; write render.strategy: fsdp"
    entries = list(values.values())
    if entries and all(
        isinstance(entry, dict) and {"file_name", "hf_hub_url", "ms_hub_url", "script_url"} & entry.keys()
        for entry in entries
    ):
        return "LLaMA-Factory's dataset_info.json, which is read with the training's own YAML"
    return None


def _all_keys(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _all_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _all_keys(inner)


def _shown(keys: list[str]) -> str:
    more = ", ..." if len(keys) > MOST_SHOWN else ""
    return ", ".join(shown(key) for key in keys[:MOST_SHOWN]) + more


def translate(values: dict[str, Any], source: Format, folder: Path) -> Translation:
    """Translate the values of a file in `folder`, to which its paths are relative."""
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
    lines += _remove_invalid(draft)
    return Translation(_ordered(draft.config), lines, draft.unlike)


def leaves(value: Any, key: str = "", whole: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value, entering sections, except those in `whole`, and lists of sections."""
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
        text = f"this key of {source.title} has no equivalent" if known else f"no key of {source.title}"
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
    """Return the rule of the innermost section around a key, if that section as a whole has no equal."""
    for end in reversed([match.start() for match in re.finditer(r"\.|\[", pattern)]):
        above = source.rules.get(pattern[:end])
        if above is not None:
            return None if above.new else above
    return None


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
        for mistake in error.errors():
            yield tuple(str(part) for part in mistake["loc"]), remedy(mistake)
        return
    yield from impossible(checked)


def _ordered(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with sections and keys in the order of the schema."""
    rows = config["prepare"]["rows"]
    config = config | {"prepare": {"rows": {key: rows[key] for key in Prepare.model_fields if key in rows}}}
    config["train"] = {key: config["train"][key] for key in Train.model_fields if key in config["train"]}
    return {name: config[name] for name in Config.model_fields if config.get(name)}
