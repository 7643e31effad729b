"""What the formats share: names of transformers' options, and the parts of a config that no tool's file names."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zerolora.config.values import Name
from zerolora.errors import UserError, shown
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    NO_EFFECT,
    Draft,
    NoEqual,
    Remark,
    Rule,
    flag,
    idle,
    number,
    same,
    text,
    unless_off,
    whole,
)
from zerolora.imports.known_keys import TRAINING
from zerolora.json_file import read_foreign
from zerolora.planner.user_config import layout_of
from zerolora.schedules import SCHEDULES
from zerolora.strategies import STRATEGIES
from zerolora.units import counted

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
NEAR_OPTIMIZERS = {"adamw_torch_8bit": "adamw_8bit"}
"""Optimizers whose states have as many bits, from another library."""
ATTENTION = {"flash_attention_2": "flash", "flash": "flash", "fa2": "flash", "sdpa": "sdpa", "eager": "eager"}
COMMIT = re.compile(r"[0-9a-f]{40}")
LARGEST = 2**31  # of a whole number in the config
LARGEST_FILE = 16 * 2**20  # bytes of a file of settings
ROWS = 200
"""Validation rows for a share of unknown size, and test rows, which no other tool has."""


def schedule_rule() -> Rule:
    """Return the rule of a learning-rate schedule by transformers' name."""

    def translate(value: Any, draft: Draft) -> str | None:
        if text(value) not in SCHEDULES:
            raise NoEqual(f"{shown(value)} is not a schedule of docs/optimizers.md; train.schedule keeps its default")
        draft.set("train.schedule", value)
        return None

    return Rule("train.schedule", translate)


def training_rules() -> dict[str, Rule]:
    """Return the rules of transformers' arguments that change nothing of what is trained."""
    every_step = idle("each step is written (docs/telemetry.md)")
    again = idle("a stage runs again when its inputs change")
    by_time = idle("checkpoints are written by time: train.checkpoint_minutes")
    before = idle("rows are prepared before training")
    published = idle("`zerolora push` publishes a finished run")
    rules = {
        "overwrite_output_dir": again,
        "save_strategy": by_time,
        "save_on_each_node": by_time,
        "save_total_limit": unless_off(same("train.keep_checkpoints", whole)),
        "save_safetensors": idle("weights are always safetensors"),
        "eval_strategy": idle("only train.validation_steps sets it"),
        "evaluation_strategy": idle("only train.validation_steps sets it"),
        "eval_on_start": idle("only train.validation_steps sets it"),
        "eval_delay": idle("only train.validation_steps sets it"),
        "eval_accumulation_steps": idle("chosen by evaluate.batch: auto"),
        "load_best_model_at_end": idle("train.keep: best is the default"),
        "metric_for_best_model": idle("the validation loss chooses the best"),
        "greater_is_better": idle("the validation loss chooses the best"),
        "group_by_length": idle("rows of similar length share a batch, unless packing is on"),
        "auto_find_batch_size": idle("train.micro_batch: auto chooses it"),
        "tf32": idle("torch's own default"),
        "torch_compile": idle("the model runs as transformers has it"),
        "torch_compile_backend": idle("the model runs as transformers has it"),
        "torch_compile_mode": idle("the model runs as transformers has it"),
        "use_liger_kernel": idle("logits are computed of supervised tokens alone, in chunks"),
        "remove_unused_columns": idle("columns that a form does not read are named in stats.json"),
        "full_determinism": idle("docs/training.md lists what is the same in every run"),
        "local_rank": idle("set by the launcher"),
        "ddp_backend": idle("set by the launcher"),
        "ddp_find_unused_parameters": idle("parameters that are trained are always used"),
        "ddp_bucket_cap_mb": idle("computed here (docs/rendering.md)"),
        "ddp_broadcast_buffers": idle("a model's buffers are not trained"),
        "disable_tqdm": every_step,
        "include_num_input_tokens_seen": every_step,
        "include_tokens_per_second": every_step,
    }
    rules |= {name: every_step for name in sorted(TRAINING) if name.startswith(("logging_", "log_"))}
    rules |= {name: published for name in sorted(TRAINING) if name.startswith(("hub_", "push_to_hub"))}
    return rules | {name: before for name in sorted(TRAINING) if name.startswith("dataloader_")}


def optimizer_rule() -> Rule:
    """Return the rule of an optimizer by transformers' name."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in OPTIMIZERS | NEAR_OPTIMIZERS:
            raise NoEqual(f"{shown(value)} has no equal; train.optimizer keeps its default, adamw")
        if value in OPTIMIZERS:
            draft.set("train.optimizer", OPTIMIZERS[value])
            return None
        draft.set("train.optimizer", NEAR_OPTIMIZERS[value])
        return f"{value} is torchao's; {NEAR_OPTIMIZERS[value]} is bitsandbytes' nearest"

    names = (OPTIMIZERS | NEAR_OPTIMIZERS).items()
    return Rule("train.optimizer", translate, ", ".join(f"{old} → {new}" for old, new in names if old != new))


def only(wanted: Any, why: str) -> Rule:
    """Return the rule of a key that has one value here, which needs no key."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value != wanted:
            raise NoEqual(why)
        return None

    return Rule("", translate, f"{str(wanted).lower()} is what happens here; with another value: {why}")


def warmup_rule() -> Rule:
    """Return the rule of a number of warm-up steps, which may be a share of all steps."""

    def translate(value: Any, draft: Draft) -> str | None:
        if isinstance(value, float) and 0 < value < 1:
            draft.facts["warmup_share"] = value
        else:
            draft.set("train.warmup_steps", int(value) if isinstance(value, float) and value.is_integer() else value)
        return None

    return Rule("train.warmup_steps, train.warmup_ratio", translate, "a share → warmup_ratio")


def epochs(value: Any, draft: Draft) -> str | None:
    """Set train.epochs, a whole number."""
    count = number(value)
    if not 0 < count < 2**31:
        raise NoEqual(f"{shown(value)} is not a number of epochs")
    rounded = max(1, round(count))
    draft.set("train.epochs", rounded)
    return None if rounded == count else f"{count:g} is rounded to {rounded}, since epochs are whole here"


def steps(path: str) -> Rule:
    """Return the rule of a number of steps; -1 is none, and a share has no equal."""
    group = CHANGES if path == "train.max_steps" else NO_EFFECT

    def translate(value: Any, draft: Draft) -> str | None:
        if value == -1 and not isinstance(value, bool):  # transformers' word for no such number
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < LARGEST:
            raise NoEqual(f"{shown(value)} is not a number of steps, which {path} is", group)
        if value != int(value):
            raise NoEqual(f"{shown(value)} is not a number of steps, which {path} is", group)
        draft.set(path, int(value))
        return None

    return Rule(path, translate)


def validation(value: Any, draft: Draft) -> str | None:
    """Note the number of validation rows."""
    size = number(value)
    if not 0 <= size < LARGEST:
        raise NoEqual(f"{shown(value)} is neither a share nor a number of rows; {ROWS} is written", FILL_IN)
    if size >= 1 and size == int(size):
        draft.facts["validation"] = int(size)
        return None
    draft.facts["validation"] = ROWS
    if not size:
        return Remark(f"no rows there, some are needed here: {ROWS} is written, which are not trained on", CHANGES)
    return Remark(f"{size:g} of the rows there, a number here: {ROWS} is written, whatever the rows are; correct it")


def precision(name: str) -> Rule:
    """Return the rule of `bf16` or `fp16`, which `set_precision` combines."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value not in (True, False, "auto", "full"):
            raise NoEqual(f"{shown(value)} is none of true, false, auto")
        draft.facts[name] = value
        return None

    return Rule("train.precision", translate)


def set_precision(draft: Draft) -> bool:
    """Set train.precision as `bf16` and `fp16` say; return whether the file switches both off."""
    chosen = [name for name in ("bf16", "fp16") if draft.facts.get(name) in (True, "full")]
    if chosen:
        draft.key = chosen[0]
        draft.set("train.precision", chosen[0])
    return not chosen and draft.facts.get("bf16") is False and draft.facts.get("fp16", False) is False


def set_strategy(draft: Draft, key: str) -> list[str]:
    """Set render.strategy where the file names none that is known; `key` is what it would be named by.

    Weights and states of each rank are whole there: as DDP, or as stage 0 where fp16 needs DeepSpeed's loss scaling.
    """
    if "strategy" in draft.config.get("render", {}):
        return []
    draft.key = ""
    if draft.facts.get("sharded"):
        draft.set("render.strategy", "auto")
        return [Remark(f"render.strategy: {key} shards the model in a way that has no name here; auto is written")]
    fp16 = draft.config.get("train", {}).get("precision") == "fp16"
    draft.set("render.strategy", "zero0" if fp16 else "ddp")
    return []


def offered(path: str, value_if_true: Any) -> Rule:
    """Return the rule of a flag that chooses a value of ours; false chooses nothing."""

    def translate(value: Any, draft: Draft) -> str | None:
        if flag(value):
            draft.set(path, value_if_true)
        return None

    return Rule(path, translate, f"true → {str(value_if_true).lower()}")


def tracked(name: str) -> Rule:
    """Return the rule of a key that turns on a tracker."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.set("train.tracker", name)
        return Remark("the tracker writes offline into the run's own folder (docs/telemetry.md)", NO_EFFECT)

    return unless_off(Rule("train.tracker", translate, f"→ {name}, offline", NO_EFFECT))


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
    is_path = name.startswith((".", "/", "~")) or _is_directory(Path(name))
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
        f"hardware: the file names no machine; {counted(degree, 'GPU')} of 80 GB is written: correct it, and "
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
        text = f"train.global_batch: left out, since {micro or 1} x {accumulation} is more than there can be"
        lines.append(Remark(text, CHANGES))
    if "warmup_share" in facts:
        draft.key = "warmup_steps"
        draft.set("train.warmup_ratio", facts["warmup_share"])
        draft.key = ""
    if "warmup_steps" in train and "warmup_ratio" in train:
        del train["warmup_ratio"]
        lines.append(Remark("train.warmup_ratio: left out, since warmup_steps wins there", NO_EFFECT))
    if betas := [key for key in ("beta1", "beta2") if key in facts]:
        draft.key = f"adam_{betas[0]}"
        draft.set("train.betas", [facts.get("beta1", 0.9), facts.get("beta2", 0.999)])
    data = config["prepare"]["rows"]
    held_out = any(source.get("split") == "validation" for source in data.get("sources", {}).values())
    data["split"] = {"validation": 0 if held_out else facts.get("validation", ROWS), "test": ROWS}
    lines.append(
        f"prepare.rows.split: {data['split']['validation']} validation and {ROWS} test rows are held out of training; "
        "correct them"
    )
    config["runs"] = {"imported": {"dataset": "rows"}}
    return lines


def deepspeed(value: Any, draft: Draft) -> str | None:
    """Set the strategy that a DeepSpeed JSON describes, or, if it is not on this machine, its name."""
    draft.facts["sharded"] = True
    if isinstance(value, dict):
        return _described_by(value, draft)
    path = text(value)
    for folder in (draft.facts["folder"], *Path(draft.facts["folder"]).parents[:3]):
        if _is_file(file := Path(folder) / path):
            try:
                return _described_by(read_foreign(file, "correct the file", LARGEST_FILE), draft)
            except UserError as error:
                raise NoEqual(str(error), FILL_IN) from None
    name = Path(path).name.lower()
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name)
    if not stage:
        raise NoEqual(f"{shown(path)} is not here, and its name names no stage; write render.strategy", FILL_IN)
    offload = ("cpu", "cpu") if "all" in name or (stage[1] == "3" and name.endswith("offload_config.json")) else None
    if offload is None and "param" in name:
        offload = ("gpu", "cpu")
    if offload is None and "offload" in name:
        offload = ("cpu", "gpu")
    strategy, differs = _nearest(int(stage[1]), *(offload or ("gpu", "gpu")))
    draft.set("render.strategy", strategy)
    return Remark(f"{path} is not here; its name says {strategy}{differs}: correct it", FILL_IN)


def _described_by(user: Any, draft: Draft) -> str | None:
    strategy, differs = strategy_of(user)
    draft.set("render.strategy", strategy)
    sizes = "its sizes are computed here (docs/rendering.md)"
    return Remark(f"{strategy}, as the JSON describes{differs}; {sizes}", CHANGES if differs else NO_EFFECT)


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # a name that is too long, or has a null character
        return path.is_file()
    return False


def _is_directory(path: Path) -> bool:
    with suppress(OSError, ValueError):  # as above
        return path.is_dir()
    return False


def strategy_of(user: Any) -> tuple[str, str]:
    """Return the strategy that is nearest to a DeepSpeed JSON, and what differs. Raises NoEqual if none is near."""
    if not isinstance(user, dict) or not isinstance(user.get("zero_optimization", {}), dict):
        raise NoEqual("is not a DeepSpeed config")
    zero = dict(user.get("zero_optimization", {}))
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.get(old) is True:
            zero[new] = {"device": "cpu"}
    if not isinstance(stage := zero.get("stage", 0), int) or stage not in (0, 1, 2, 3):
        raise NoEqual(f"stage {shown(stage)} is none of 0, 1, 2, 3")
    try:
        layout = layout_of({"zero_optimization": zero}).strategy
    except (AttributeError, TypeError, ValueError, OverflowError, KeyError):
        raise NoEqual("zero_optimization has values that DeepSpeed refuses") from None
    if layout.optimizer not in PLACES or layout.parameters not in PLACES:
        raise NoEqual(f"an offload device is none of {', '.join(PLACES)}")
    return _nearest(stage, layout.optimizer, layout.parameters, layout.within_node, layout.quantized)


PLACES = ("gpu", "cpu", "nvme")


def _nearest(
    stage: int, optimizer: str, parameters: str, within_node: bool = False, quantized: bool = False
) -> tuple[str, str]:
    """Return the strategy of DeepSpeed with a stage and placements, or one that needs no more memory of the GPU, and
    what differs. Raises NoEqual if there is none."""
    wanted = [((stage, optimizer, parameters, within_node, quantized), "")]
    if within_node and quantized:
        wanted.append(((stage, optimizer, parameters, False, True), " but for zero_hpz_partition_size"))
    if stage == 3 and parameters != "gpu" and optimizer == "gpu":
        wanted.append(((3, parameters, parameters, False, False), ", with the optimizer's states offloaded as well"))
    if stage == 3 and {optimizer, parameters} == {"cpu", "nvme"}:
        wanted.append(((3, "nvme", "nvme", False, False), ", with both on NVMe"))
    for layout, differs in wanted:
        for name, known in STRATEGIES.items():
            if known.engine == "deepspeed" and layout == (
                known.stage, known.optimizer, known.parameters, known.within_node, known.quantized,
            ):  # fmt: skip
                return name, differs
    raise NoEqual(f"stage {stage} with the optimizer on {optimizer} and weights on {parameters} is no named strategy")
