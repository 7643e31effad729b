"""Says which tool wrote a config, by all of its keys.

Tools share many keys, since most build on transformers' TrainingArguments: a file belongs to the tool that knows most
of its keys, if it names its model as that tool does. What no format here can read is refused with the name of the tool
that it looks like.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.errors import UserError, shown
from zerolora.imports.formats import FORMATS
from zerolora.imports.formats.import_format import Format
from zerolora.imports.known_keys import SWIFT, TRAINING, TRL

OTHERS = {
    "TRL, alignment-handbook or open-r1": TRL | TRAINING,
    "ms-swift": SWIFT | TRAINING,
}
"""Keys of tools that are not read, by the name of the tool."""
NOT_READ = "which is not read; write the config by hand (config/README.md)"
MOST_SHOWN = 3  # unknown keys in a message


class Mark(NamedTuple):
    """What a file has that is of another kind than a training config."""

    keys: frozenset[str]
    """Keys that it has all of."""
    what: str


ACCELERATE = "a config of `accelerate launch`, which names neither model nor rows"
MARKS = (
    Mark(frozenset({"fetch", "prepare"}), "a config of zerolora itself, which needs no import"),
    Mark(frozenset({"peft_type"}), "peft's adapter_config.json; name its directory in train.from_adapter"),
    Mark(frozenset({"architectures", "model_type"}), "a model's config.json; name its directory in fetch.directory"),
    *(
        Mark(frozenset(keys.split()), ACCELERATE)
        for keys in ("compute_environment", "distributed_type", "num_machines")
    ),
    Mark(frozenset({"model", "model_class"}), "a config of LLaMA-Factory's v1"),
    Mark(frozenset({"model", "train_dataset"}), "a config of LLaMA-Factory's v1"),
    Mark(frozenset({"actor_rollout_ref"}), "a config of verl, which is for reinforcement learning"),
    Mark(frozenset({"data", "model", "optim", "trainer"}), "a config of verl"),
    Mark(frozenset({"exp_manager"}), "a config of NeMo"),
    Mark(frozenset({"trainer", "model", "name"}), "a config of NeMo"),
    Mark(frozenset({"step_scheduler"}), "a config of NeMo"),
    Mark(frozenset({"pretrain", "zero_stage"}), "a config of OpenRLHF"),
    Mark(frozenset({"pretrain", "input_key"}), "a config of OpenRLHF"),
    Mark(frozenset({"input_features", "output_features"}), "a config of Ludwig"),
    Mark(frozenset({"merge_method", "models"}), "a config of mergekit, which trains nothing"),
    Mark(frozenset({"merge_method", "slices"}), "a config of mergekit, which trains nothing"),
    Mark(frozenset({"task", "project_name"}), "a config of AutoTrain"),
    Mark(frozenset({"model", "data", "training"}), "a config of Oumi"),
    Mark(frozenset({"training", "lora"}), "a config of Unsloth Studio"),
    Mark(frozenset({"model", "iters"}), "a config of mlx-lm"),
    Mark(frozenset({"model", "training_file"}), "a fine-tuning job of OpenAI's API"),
    Mark(frozenset({"checkpoint_dir", "devices"}), "a config of LitGPT"),
    Mark(frozenset({"services"}), "a file of Docker Compose"),
)
FSDP = "settings of FSDP alone, which name neither model nor rows; write render.strategy: fsdp"
DATA_INFO = "LLaMA-Factory's dataset_info.json, which is read beside the training's own YAML"


def recognised(file: Path, values: dict[str, Any], source: str | None) -> Format:
    """Return the format of a file's values; `source` is its name, None to recognise it.

    Raises UserError if the file is of no known format, or if more than a third of its keys are none of the format's.
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
    """Say what a file that names no model looks like."""
    needed = ", ".join(f"{format.needed} of {format.title}" for format in FORMATS.values())
    counts = {format.title: _count(values, format.keys) for format in FORMATS.values()} | foreign
    best = max(counts, key=lambda title: counts[title])
    if not counts[best]:
        return f"none of its keys is known; {needed} is needed"
    if best in foreign and "model" in values and counts[best] > 1:
        return f"looks like a config of {best}, {NOT_READ}"
    return f"is not a training config that is read: {needed} is needed; if it is one, write --from {'|'.join(FORMATS)}"


def _other_kind(values: dict[str, Any]) -> str | None:
    """Return what a file is that is not a training config; None if nothing says so."""
    for mark in MARKS:
        if mark.keys <= values.keys():
            return mark.what if re.search("; |which ", mark.what) else f"{mark.what}, {NOT_READ}"
    for key, tool in (("_component_", "torchtune"), ("_target_", "NeMo or another tool that is built on Hydra")):
        if any(key == each for each in _all_keys(values)):
            return f"a config of {tool}, {NOT_READ}"
    if values and all(re.match(r"_|fsdp|xla", key) for key in values):
        return FSDP
    entries = list(values.values())
    if entries and all(
        isinstance(entry, dict) and {"file_name", "hf_hub_url", "ms_hub_url", "script_url"} & entry.keys()
        for entry in entries
    ):
        return DATA_INFO
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
