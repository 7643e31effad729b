"""What the formats share: transformers' options, and the parts of our config that no tool's file contains."""

import math
import re
from collections.abc import Callable, Mapping
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
    Unlike,
    each,
    fact,
    flag,
    idle,
    lost,
    number,
    same,
    text,
    texts,
    unless_off,
    whole,
)
from zerolora.json_file import read_foreign
from zerolora.planner.user_config import layout_of
from zerolora.schedules import ONE_CYCLE, SCHEDULES
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
    "adamw_torch_8bit": "adamw_torch_8bit",
    "adamw_torch_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
}
"""transformers' names (transformers/training_args.py, OptimizerNames), and axolotl's."""
NEAR_OPTIMIZERS = {
    "ao_adamw_4bit": ("adamw_torch_4bit", "its blocks have 128 elements, here 256, as in transformers"),
    "ao_adamw_fp8": ("adamw_torch_8bit", "its moments are fp8, here integer codes of 8 bits"),
}
"""Optimizers with as many bits that quantize in another way."""
EVERY_STEP = idle("every step is logged (docs/telemetry.md)")
PREPARED = idle("rows are prepared before training")
PUBLISHED = idle("`zerolora push` publishes a finished run")
VALIDATED = idle("set by train.validation_steps")
OFFLINE = idle("the tracker writes offline to the run's directory (docs/telemetry.md)")
FSDP = "decided by zerolora's own FSDP strategies (docs/choice.md)"
TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard")
COMMIT = re.compile(r"[0-9a-f]{40}")
LARGEST = 2**31  # bound of integers in the config
LARGEST_FILE = 16 * 2**20  # bytes of a file of settings
ROWS = 200
"""Number of validation rows where that of a file cannot be read."""


def schedule_rule(one_cycle: bool = False) -> Rule:
    """Return the rule of a learning-rate schedule, by transformers' name; with `one_cycle`, the tool has that too."""

    def translate(value: Any, draft: Draft) -> str | None:
        if text(value) not in SCHEDULES or (value == ONE_CYCLE and not one_cycle):
            raise NoEqual(f"{shown(value)} is not a schedule of docs/methods.md; train.schedule keeps its default")
        draft.set("train.schedule", value)
        return None

    return Rule("train.schedule", translate)


def shared_rules() -> dict[str, Rule]:
    """Return the rules of the options that tools have in common, mostly transformers' TrainingArguments."""
    return {
        "trust_remote_code": idle("code from model repositories is never run"),
        "rope_scaling": lost("put it into the model's config.json"),
        "lora_alpha": same("train.lora.alpha", number),
        "lora_dropout": same("train.lora.dropout", number),
        "loraplus_lr_ratio": same("train.lora.plus_ratio", number),
        "loraplus_lr_embedding": lost("embedding rows use the learning rate of the second factor"),
        "eaft_alpha": idle("used only with EAFT"),
        "remove_unused_columns": idle("unused columns are listed in stats.json"),
        "streaming": idle("files are streamed"),
        "group_by_length": idle("rows of similar length share a batch, unless packing is on"),
        "output_dir": idle("results are in results/<run>/"),
        **each("hub_model_id hub_strategy", PUBLISHED),
        "auto_find_batch_size": idle("train.micro_batch: auto chooses it"),
        "optim_args": lost("train.betas and train.epsilon are the optimizers' options"),
        "optim_target_modules": lost("the optimizer updates all trained weights"),
        "lr_scheduler_kwargs": unless_off(same("train.schedule_options")),
        "learning_rate": same("train.learning_rate", number),
        "weight_decay": same("train.weight_decay", number),
        "max_grad_norm": same("train.gradient_clipping", number),
        "adam_beta1": fact("beta1", "train.betas", number),
        "adam_beta2": fact("beta2", "train.betas", number),
        "adam_epsilon": same("train.epsilon", number),
        "warmup_ratio": same("train.warmup_ratio", number),
        "warmup_steps": Rule("train.warmup_steps, train.warmup_ratio", _warmup, "a fraction → warmup_ratio"),
        "seed": same("train.seed"),
        "bf16": _precision("bf16"),
        "fp16": _precision("fp16"),
        "fp8": lost("train.precision has fp32, fp16 and bf16"),
        "tf32": idle("torch's own default"),
        "gradient_checkpointing_kwargs": idle("reentrant checkpointing is never used"),
        **each("torch_compile torch_compile_backend torch_compile_mode", idle("the model runs as in transformers")),
        "deepspeed": unless_off(Rule("render.strategy", deepspeed, "by its stage and offload")),
        "ddp_timeout": idle("the heartbeat reports ranks that hang"),
        "ddp_bucket_cap_mb": idle("computed here (docs/choice.md)"),
        "ddp_broadcast_buffers": idle("buffers of the model are not trained"),
        "ddp_find_unused_parameters": idle("all trained parameters are always used"),
        "low_cpu_mem_usage": idle("weights are always loaded in parts"),
        "local_rank": idle("set by the launcher"),
        "ray_num_workers": idle("set train.nodes and train.ranks_per_node"),
        **each("dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor", PREPARED),
        "eval_steps": unless_off(steps("train.validation_steps", share=True)),
        **each("eval_strategy evaluation_strategy", Rule("train.validation_steps", _evaluated, "by its interval")),
        "load_best_model_at_end": Rule("train.keep", _best, "true → best, false → last"),
        "save_steps": unless_off(steps("train.checkpoint_steps", share=True)),
        "save_total_limit": unless_off(same("train.keep_checkpoints", whole)),
        "save_only_model": idle("checkpoints always contain everything needed to resume"),
        "save_safetensors": idle("weights are always safetensors"),
        "resume_from_checkpoint": lost("a run resumes from its own last checkpoint (train.resume)"),
        **each("logging_steps include_tokens_per_second", EVERY_STEP),
        "use_swanlab": tracked("swanlab"),
    }


def _trains(value: Any, draft: Draft) -> str | None:
    if not flag(value):
        raise Unlike("false: the file does not train")
    return None


def _report(value: Any, draft: Draft) -> str | None:
    chosen = [each for each in texts(value) if each != "none"]
    if not chosen:
        return None
    known = [each for each in chosen if each in TRACKERS]
    if not known:
        raise NoEqual(f"{shown(value)} is not a tracker of docs/telemetry.md", NO_EFFECT)
    draft.set("train.tracker", known[0])
    several = f"; only {known[0]} of {', '.join(chosen)}" if len(chosen) > 1 else ""
    return Remark(f"the tracker writes offline{several}", NO_EFFECT)


def _strategy(value: Any, draft: Draft) -> str | None:
    draft.set("render.strategy", "fsdp_offload" if fsdp_offload(value, draft) else "fsdp")
    return None


def optimizer_rule() -> Rule:
    """Return the rule of an optimizer, by transformers' name."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in OPTIMIZERS | NEAR_OPTIMIZERS:
            raise NoEqual(f"{shown(value)} has no equal; train.optimizer keeps its default, adamw")
        if value in OPTIMIZERS:
            draft.set("train.optimizer", OPTIMIZERS[value])
            return None
        name, difference = NEAR_OPTIMIZERS[value]
        draft.set("train.optimizer", name)
        return f"{value} is nearest to {name}: {difference}"

    names = (OPTIMIZERS | {old: new for old, (new, _) in NEAR_OPTIMIZERS.items()}).items()
    return Rule("train.optimizer", translate, ", ".join(f"{old} → {new}" for old, new in names if old != new))


def only(wanted: Any, why: str) -> Rule:
    """Return the rule of a key that always has the value `wanted` here."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value != wanted:
            raise NoEqual(why)
        return None

    return Rule("", translate, f"{str(wanted).lower()} is always used here; otherwise: {why}")


def _warmup(value: Any, draft: Draft) -> str | None:
    """Set the warm-up: a number of steps, or a fraction of all steps."""
    if isinstance(value, float) and 0 < value < 1:
        draft.facts["warmup_share"] = value
    else:
        draft.set("train.warmup_steps", int(value) if isinstance(value, float) and value.is_integer() else value)
    return None


def epochs(value: Any, draft: Draft) -> str | None:
    """Set train.epochs."""
    count = number(value)
    if not 0 < count < 2**31:
        raise NoEqual(f"{shown(value)} is not a number of epochs")
    draft.set("train.epochs", int(count) if count == int(count) else count)
    return None


def steps(path: str, share: bool = False) -> Rule:
    """Return the rule for a number of steps, or also for a share of all steps; -1 means none."""
    group = CHANGES if path == "train.max_steps" else NO_EFFECT

    def translate(value: Any, draft: Draft) -> str | None:
        if value == -1:  # transformers' value for none
            return None
        is_share = share and isinstance(value, float) and 0 < value < 1
        try:
            draft.set(path, value if is_share else whole(value))
        except NoEqual:
            raise NoEqual(f"{shown(value)} is not a number of steps, which {path} is", group) from None
        return None

    return Rule(path, translate)


def _evaluated(value: Any, draft: Draft) -> str | None:
    """Note when transformers validates: never, by steps or after each epoch."""
    if value in ("epoch", "no", False):
        draft.facts["evaluations"] = 1 if value == "epoch" else 0
    elif value != "steps":
        raise NoEqual(f"{shown(value)} is not a strategy of evaluation; set train.validation_steps", NO_EFFECT)
    return None


def _best(value: Any, draft: Draft) -> str | None:
    draft.facts["best"] = flag(value)
    return None


def evaluations(value: Any, draft: Draft) -> str | None:
    """Note the validations in each epoch."""
    draft.facts["evaluations"] = whole(value)
    return None


def set_validation(draft: Draft) -> None:
    """Set train.validation_steps from the validations in an epoch, and train.keep if the best adapter is not wanted."""
    train, facts = draft.config.setdefault("train", {}), draft.facts
    count = facts.get("evaluations")
    draft.key = ""
    if count == 0:
        train.pop("validation_steps", None)
    elif share := _share(count, train):
        draft.set("train.validation_steps", share)
    if "validation_steps" in train and facts.get("best") is False:
        draft.set("train.keep", "last")


def set_checkpoints(draft: Draft) -> None:
    """Set train.checkpoint_steps from the checkpoints in an epoch, which override a number of steps there."""
    train, facts = draft.config.setdefault("train", {}), draft.facts
    draft.key = ""
    if count := facts.get("saves", facts.get("saves_by_strategy")):
        train.pop("checkpoint_steps", None)
        if share := _share(count, train):
            draft.set("train.checkpoint_steps", share)


def saved(value: Any, draft: Draft) -> str | None:
    """Note whether transformers writes a checkpoint after each epoch."""
    if value == "best":
        raise NoEqual("checkpoints are written by time; train.keep: best publishes the best one", NO_EFFECT)
    if value != "epoch":
        raise NoEqual("checkpoints are written by time as well: train.checkpoint_minutes", NO_EFFECT)
    draft.facts["saves_by_strategy"] = 1
    return None


def _share(count: int | None, train: Mapping[str, Any]) -> float | None:
    """Return an interval as a share of all steps, None for none before the end.

    It is rounded down, as the interval in steps is rounded up from it.
    """
    intervals = (count or 0) * train.get("epochs", 1)
    return math.floor(10**6 / intervals) / 10**6 if intervals > 1 else None


def validation(value: Any, draft: Draft) -> str | None:
    """Store the number of validation rows, or their share."""
    draft.facts["validation"] = ROWS
    size = number(value)
    if not 0 <= size < LARGEST:
        raise NoEqual(f"{shown(value)} is neither a fraction nor a number of rows; {ROWS} is written", FILL_IN)
    if 0 < size < 1 or size == int(size):
        draft.facts["validation"] = size if 0 < size < 1 else int(size)
        return None
    return Remark(f"{size:g} is no whole number of rows: {ROWS} is written; correct it", CHANGES)


def _precision(name: str) -> Rule:
    """Return the rule of `bf16` or `fp16`, for `set_precision`."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value not in (True, False, "auto", "full"):
            raise NoEqual(f"{shown(value)} is none of true, false, auto")
        draft.facts[name] = value
        return None

    return Rule("train.precision", translate)


def pure(name: str) -> Rule:
    """Return the rule of a flag for training with 16-bit weights."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not flag(value):
            return None
        draft.facts[name] = True
        return f"trained weights are {name} there, fp32 here"

    return Rule("train.precision", translate, f"true → {name}; trained weights stay fp32")


def attention(names: Mapping[str, str]) -> Rule:
    """Return the rule of an attention implementation; an empty name is the default."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in names:
            raise NoEqual(f"{shown(value)} has no equal; train.attention stays auto", NO_EFFECT)
        if names[value]:
            draft.set("train.attention", names[value])
        return None

    renamed = ", ".join(f"{old} → {new}" for old, new in names.items() if new not in ("", old))
    return Rule("train.attention", translate, renamed)


def set_precision(draft: Draft) -> bool:
    """Set train.precision from `bf16` and `fp16`; return whether the file disables both."""
    chosen = [name for name in ("bf16", "fp16") if draft.facts.get(name) in (True, "full")]
    if chosen:
        draft.key = chosen[0]
        draft.set("train.precision", chosen[0])
    return not chosen and draft.facts.get("bf16") is False and draft.facts.get("fp16", False) is False


def set_strategy(draft: Draft, key: str) -> list[str]:
    """Set render.strategy if it is not set yet; `key` is the option for it in the file.

    Without sharding it is DDP, or stage 0 for fp16, which needs DeepSpeed's loss scaling.
    """
    if "strategy" in draft.config.get("render", {}):
        return []
    draft.key = ""
    if draft.facts.get("sharded"):
        draft.set("render.strategy", "auto")
        return [Remark(f"render.strategy: {key} shards the model in a way that has no equal here; auto is written")]
    fp16 = draft.config.get("train", {}).get("precision") == "fp16"
    draft.set("render.strategy", "zero0" if fp16 else "ddp")
    return []


def offered(path: str, value_if_true: Any) -> Rule:
    """Return the rule of a flag that chooses a value here if true."""

    def translate(value: Any, draft: Draft) -> str | None:
        if flag(value):
            draft.set(path, value_if_true)
        return None

    return Rule(path, translate, f"true → {str(value_if_true).lower()}")


def kernels(value: Any, draft: Draft) -> str | None:
    """Translate a flag that turns liger-kernel's kernels on, which these tools too leave out where a model has none."""
    draft.set("train.kernels", "auto" if flag(value) else "off")
    return None


LIGER = Rule("train.kernels", kernels, "true → auto, false → off")


def tracked(name: str) -> Rule:
    """Return the rule of a key that enables a tracker."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.set("train.tracker", name)
        return Remark(OFFLINE.remark, NO_EFFECT)

    return unless_off(Rule("train.tracker", translate, f"→ {name}, offline", NO_EFFECT))


def fsdp_offload(value: Any, draft: Draft) -> bool:
    """Return whether the option `fsdp` offloads to the host. Raises NoEqual unless it shards in full."""
    draft.facts["sharded"] = True
    if not isinstance(value, list | str) or "full_shard" not in value:
        raise NoEqual(f"{shown(value)} is not a sharding of zerolora; set render.strategy", FILL_IN)
    return "offload" in value


def model(key: str, draft: Draft) -> tuple[str, list[str]]:
    """Set the base model from `key`; return its name in the config, and a line for each assumption."""
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
    is_path = name.startswith((".", "/", "~")) or _exists(Path(name), Path.is_dir)
    path = name if is_path else f"models/{Path(name).name or 'model'}"
    draft.set(f"fetch.directory.{ours}", {"path": path, "license": "unknown"})
    lines.append(
        f"fetch.directory.{ours}: {path} is used for {name}; save the model there, or name it in fetch.hub with its "
        "commit, and correct the license"
    )
    return ours, lines


def scaffold(draft: Draft) -> list[str]:
    """Set what no tool's file contains: machine, test split and run. Returns a line for each assumption."""
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
        text = f"train.global_batch: left out, since {micro or 1} x {accumulation} is too large"
        lines.append(Remark(text, CHANGES))
    if "warmup_share" in facts:
        draft.key = "warmup_steps"
        draft.set("train.warmup_ratio", facts["warmup_share"])
        draft.key = ""
    if "warmup_steps" in train and "warmup_ratio" in train:
        del train["warmup_ratio"]
        lines.append(Remark("train.warmup_ratio: left out, since warmup_steps overrides it there", NO_EFFECT))
    if betas := [key for key in ("beta1", "beta2") if key in facts]:
        draft.key = f"adam_{betas[0]}"
        draft.set("train.betas", [facts.get("beta1", 0.9), facts.get("beta2", 0.999)])
    set_validation(draft)
    set_checkpoints(draft)
    data = config["prepare"]["rows"]
    held_out = any(source.get("split") == "validation" for source in data.get("sources", {}).values())
    data["split"] = {"validation": 0 if held_out else facts.get("validation", 0), "test": 0}
    if held_out or data["split"]["validation"]:
        text = "prepare.rows.split: there are no test rows, as there; the validation rows are evaluated"
    else:
        text = "prepare.rows.split: no rows are held out, as there; nothing is evaluated"
        if "validation_steps" in train:  # without effect there
            for key in {"validation_steps", "patience", "keep"} & train.keys():
                del train[key]
    lines.append(Remark(text, NO_EFFECT))
    config["runs"] = {"imported": {"dataset": "rows"}}
    return lines


def deepspeed(value: Any, draft: Draft) -> str | None:
    """Set the strategy nearest to a DeepSpeed JSON, or to its name if the file is missing."""
    draft.facts["sharded"] = True
    if isinstance(value, dict):
        return _described_by(value, draft)
    path = text(value)
    for folder in (draft.facts["folder"], *Path(draft.facts["folder"]).parents[:3]):
        if _exists(file := Path(folder) / path, Path.is_file):
            try:
                return _described_by(read_foreign(file, "correct the file", LARGEST_FILE), draft)
            except UserError as error:
                raise NoEqual(str(error), FILL_IN) from None
    name = Path(path).name.lower()
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name)
    if not stage:
        raise NoEqual(f"{shown(path)} is not here, and its name names no stage; set render.strategy", FILL_IN)
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
    sizes = "its sizes are computed here (docs/choice.md)"
    return Remark(f"{strategy}, as the JSON describes{differs}; {sizes}", CHANGES if differs else NO_EFFECT)


def _exists(path: Path, check: Callable[[Path], bool]) -> bool:
    with suppress(OSError, ValueError):  # a name that is too long, or has a null character
        return check(path)
    return False


def strategy_of(user: Any) -> tuple[str, str]:
    """Return the strategy nearest to a DeepSpeed JSON, and the difference. Raises NoEqual if there is none."""
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
    if layout.optimizer not in DEVICES or layout.parameters not in DEVICES:
        raise NoEqual(f"an offload device is none of {', '.join(DEVICES)}")
    name, differs = _nearest(stage, layout.optimizer, layout.parameters, layout.within_node, layout.quantized)
    return (
        name,
        f"{differs} but for zero_quantized_gradients; {QUANTIZED_GRADIENTS}" if layout.quantized_gradients else differs,
    )


QUANTIZED_GRADIENTS = "on several nodes in fp16, set render.strategy: zero3_qgz"
DEVICES = ("gpu", "cpu", "nvme")


def _nearest(
    stage: int, optimizer: str, parameters: str, within_node: bool = False, quantized: bool = False
) -> tuple[str, str]:
    """Return the DeepSpeed strategy with a stage and devices, or one that needs no more GPU memory, and the difference.
    Raises NoEqual if there is none."""
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


TRAINING_ARGUMENTS: dict[str, Rule] = {
    **shared_rules(),
    "model_name_or_path": fact("model", "fetch.directory or fetch.hub", text, "a Hub model needs a commit here"),
    "model_revision": fact("revision", "fetch.hub", text),
    "do_train": Rule("", _trains, "the pipeline always trains; false stops the import"),
    "do_eval": idle("validation loss is always computed at the end"),
    "label_smoothing_factor": lost("the loss has no label smoothing"),
    "report_to": Rule("train.tracker", _report),
    "run_name": idle("runs are named in `runs`"),
    "per_device_train_batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
    "gradient_accumulation_steps": fact(
        "accumulation", "train.global_batch", whole, "times batch size and number of GPUs"
    ),
    "per_device_eval_batch_size": idle("chosen by evaluate.batch: auto"),
    "num_train_epochs": Rule("train.epochs", epochs),
    "max_steps": unless_off(steps("train.max_steps")),
    "lr_scheduler_type": schedule_rule(),
    "optim": optimizer_rule(),
    "neftune_noise_alpha": unless_off(same("train.neftune_alpha", number)),
    "data_seed": lost("the rows' order depends on train.seed, their split on prepare.rows.seed"),
    "gradient_checkpointing": same("train.activation_checkpointing", flag),
    "fsdp": unless_off(Rule("render.strategy", _strategy, "full_shard → fsdp")),
    **each(
        "fsdp_config fsdp_transformer_layer_cls_to_wrap",
        idle(FSDP),
    ),
    "ddp_backend": idle("set by the launcher"),
    "overwrite_output_dir": idle("stages rerun when their inputs change"),
    "save_strategy": Rule("train.checkpoint_steps", saved, "epoch → a share of all steps"),
    "save_on_each_node": idle("one rank writes checkpoints"),
    **each("eval_on_start eval_delay", VALIDATED),
    "eval_accumulation_steps": idle("chosen by evaluate.batch: auto"),
    **each("metric_for_best_model greater_is_better", idle("the best model is chosen by validation loss")),
    "use_liger_kernel": LIGER,
    "full_determinism": idle("docs/training.md lists what is reproducible"),
    **each("do_predict predict_with_generate", idle("held-out rows are always evaluated")),
    **each("disable_tqdm include_num_input_tokens_seen logging_* log_*", EVERY_STEP),
    **each("hub_* push_to_hub push_to_hub_*", PUBLISHED),
    "dataloader_*": PREPARED,
}
"""The options of transformers' TrainingArguments and of its scripts, which several tools take unchanged."""
