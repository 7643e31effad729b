"""What the formats share: names of transformers' options, and the parts of a config that no tool's file names."""

import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zerolora.config.values import Name
from zerolora.errors import UserError, shown
from zerolora.files import read_json
from zerolora.imports.formats.base import Draft, NoEqual, Rule, flag, number, text
from zerolora.planner.user_config import layout_of
from zerolora.schedules import SCHEDULES
from zerolora.strategies import STRATEGIES

OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "paged_adamw": "paged_adamw",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion",
    "lion_32bit": "lion",
    "lion_pytorch": "lion",
}
"""transformers' names (transformers/training_args.py, OptimizerNames)."""
SCHEDULE_NAMES = {name: name for name in SCHEDULES}
ATTENTION = {"flash_attention_2": "flash", "flash": "flash", "fa2": "flash", "sdpa": "sdpa", "eager": "eager"}
COMMIT = re.compile(r"[0-9a-f]{40}")
LARGEST = 2**31  # of a whole number in the config
ROWS = 200
"""Validation rows for a share of unknown size, and test rows, which no other tool has."""


def schedule_rule() -> Rule:
    """Return the rule of a learning-rate schedule by transformers' name."""

    def translate(value: Any, draft: Draft) -> str | None:
        if text(value) not in SCHEDULES:
            raise NoEqual(f"{shown(value)} is no schedule of docs/optimizers.md; train.schedule keeps its default")
        draft.set("train.schedule", value)
        return None

    return Rule("train.schedule", translate)


def epochs(value: Any, draft: Draft) -> str | None:
    """Set train.epochs, a whole number."""
    count = number(value)
    if not 0 < count < 2**31:
        raise NoEqual(f"{shown(value)} is no number of epochs")
    rounded = max(1, round(count))
    draft.set("train.epochs", rounded)
    return None if rounded == count else f"{count:g} is rounded to {rounded}, since epochs are whole here"


def steps(path: str) -> Rule:
    """Return the rule of a number of steps; a share, or -1 for none, has no equal."""

    def translate(value: Any, draft: Draft) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise NoEqual(f"{shown(value)} is no number of steps, which {path} is")
        draft.set(path, int(value))
        return None

    return Rule(path, translate)


def validation(value: Any, draft: Draft) -> str | None:
    """Note the number of validation rows."""
    size = number(value)
    if size >= 1 and size == int(size):
        draft.facts["validation"] = int(size)
        return None
    draft.facts["validation"] = ROWS
    kind = "a share of the rows there, a number here" if size else "no rows there, some are needed here"
    return f"{kind}: {ROWS} is written; correct it"


def precision(name: str) -> Rule:
    """Return the rule of `bf16` or `fp16`."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value in ("auto", False):
            return None  # train.precision: auto, and the other key decides
        if value not in (True, "full"):
            raise NoEqual(f"{shown(value)} is none of true, false, auto")
        draft.set("train.precision", name)
        return None

    return Rule("train.precision", translate)


def offered(path: str, value_if_true: Any) -> Rule:
    """Return the rule of a flag that chooses a value of ours; false chooses nothing."""

    def translate(value: Any, draft: Draft) -> str | None:
        if flag(value):
            draft.set(path, value_if_true)
        return None

    return Rule(path, translate, f"true → {str(value_if_true).lower()}")


def model(key: str, draft: Draft) -> tuple[str, list[str]]:
    """Set the base model, which `key` of the file names; return its name in the config, and a line for each thing
    assumed."""
    lines = []
    if "model" not in draft.facts:
        lines.append(f"fetch: the file names no model ({key}); correct models/model")
    draft.key = key if "model" in draft.facts else ""
    name, revision = draft.facts.get("model", "model"), draft.facts.get("revision")
    ours = re.sub(r"[^a-z0-9]+", "-", Path(name).name.lower()).strip("-")[:60]
    try:
        TypeAdapter(Name).validate_python(ours)
    except ValidationError:
        ours = "model"
    if revision and COMMIT.fullmatch(revision) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        entry = {"repository": name, "revision": revision, "license": "unknown"}
        draft.set(f"fetch.hub.{ours}", entry)
        return ours, [*lines, f"fetch.hub.{ours}.license: the file does not name it; correct it"]
    is_path = name.startswith((".", "/", "~")) or Path(name).is_dir()
    path = name if is_path else f"models/{Path(name).name or 'model'}"
    draft.set(f"fetch.directory.{ours}", {"path": path, "license": "unknown"})
    lines.append(
        f"fetch.directory.{ours}: {path} is used where the file names {name}; save the model there, or name it in "
        "fetch.hub with its commit, and correct the license"
    )
    return ours, lines


def scaffold(draft: Draft) -> list[str]:
    """Fill in what no tool's file names: machine, test split and run. Returns a line for each thing assumed."""
    facts, config = draft.facts, draft.config
    lines = []
    draft.key = ""
    degree = facts.get("sequence_parallel", 1)
    hardware = {"device": "cuda", "gpus_per_node": degree, "gpu_memory": "80GiB", "compute_capability": 8.0}
    config["hardware"] = hardware
    lines.append(
        f"hardware: the file names no machine; {degree} GPU{'s' * (degree > 1)} of 80 GB is written: correct it, and "
        "train.nodes, train.ranks_per_node and train.global_batch with it"
    )
    train = config.setdefault("train", {})
    train["ranks_per_node"] = degree
    micro, accumulation = facts.get("micro_batch"), facts.get("accumulation", 1)
    if (micro or 1) * accumulation < LARGEST:
        train["global_batch"] = (micro or 1) * accumulation
        if micro:
            train["micro_batch"] = micro
    else:
        lines.append(f"train.global_batch: left out, since {micro or 1} x {accumulation} is more than there can be")
    if "warmup_steps" in train and "warmup_ratio" in train:
        del train["warmup_ratio"]
        lines.append("train.warmup_ratio: left out, since warmup_steps wins there")
    if betas := [key for key in ("beta1", "beta2") if key in facts]:
        draft.key = f"adam_{betas[0]}"
        draft.set("train.betas", [facts.get("beta1", 0.9), facts.get("beta2", 0.999)])
    data = config["prepare"]["rows"]
    data["split"] = {"validation": facts.get("validation", ROWS), "test": ROWS}
    lines.append(f"prepare.rows.split: {data['split']['validation']} validation and {ROWS} test rows; correct them")
    config["runs"] = {"imported": {"dataset": "rows"}}
    return lines


def deepspeed(value: Any, draft: Draft) -> str | None:
    """Set the strategy that a DeepSpeed JSON describes, or, if it is not on this machine, its name."""
    path = text(value)
    for folder in (draft.facts["folder"], *Path(draft.facts["folder"]).parents[:3]):
        if (found := Path(folder) / path).is_file():
            try:
                draft.set("render.strategy", strategy_of(read_json(found, "a text editor")))
            except UserError as error:
                raise NoEqual(f"{found}: {error}") from None
            return "the strategy that this file describes; its sizes are computed here (docs/rendering.md)"
    name = Path(path).name.lower()
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name)
    if not stage:
        raise NoEqual(f"{shown(path)} is not here, and its name says no stage; write render.strategy")
    offload = ("cpu", "cpu") if "all" in name or (stage[1] == "3" and name.endswith("offload_config.json")) else None
    if offload is None and "param" in name:
        offload = ("gpu", "cpu")
    if offload is None and "offload" in name:
        offload = ("cpu", "gpu")
    strategy = _named(int(stage[1]), *(offload or ("gpu", "gpu")))
    draft.set("render.strategy", strategy)
    return f"{path} is not here; its name says {strategy}"


def strategy_of(user: Any) -> str:
    """Return the strategy that is nearest to a DeepSpeed JSON. Raises NoEqual if it is none."""
    if not isinstance(user, dict) or not isinstance(user.get("zero_optimization", {}), dict):
        raise NoEqual("is no DeepSpeed config")
    zero = user.get("zero_optimization", {})
    if not isinstance(stage := zero.get("stage", 0), int) or stage not in (0, 1, 2, 3):
        raise NoEqual(f"stage {shown(stage)} is none of 0, 1, 2, 3")
    try:
        layout = layout_of(user).strategy
    except (AttributeError, TypeError, ValueError, OverflowError, KeyError):
        raise NoEqual("zero_optimization has values that DeepSpeed refuses") from None
    return _named(stage, layout.optimizer, layout.parameters, layout.within_node, layout.quantized)


def _named(stage: int, optimizer: str, parameters: str, within_node: bool = False, quantized: bool = False) -> str:
    """Return the strategy of DeepSpeed with a stage and placements."""
    wanted = (stage, optimizer, parameters, within_node, quantized)
    for name, layout in STRATEGIES.items():
        if layout.engine == "deepspeed" and wanted == (
            layout.stage, layout.optimizer, layout.parameters, layout.within_node, layout.quantized,
        ):  # fmt: skip
            return name
    raise NoEqual(f"stage {stage} with the optimizer on {optimizer} and weights on {parameters} is no named strategy")
