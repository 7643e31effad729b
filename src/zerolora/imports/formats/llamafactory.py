"""llamafactory: LLaMA-Factory's YAML of a training.

Keys as in LLaMA-Factory's examples/ and src/llamafactory/hparams/; the others are of transformers' TrainingArguments.
"""

from pathlib import Path
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats import common
from zerolora.imports.formats.base import (
    Draft,
    Format,
    NoEqual,
    Rule,
    fact,
    flag,
    named,
    none,
    number,
    same,
    text,
    texts,
    whole,
)

TEMPLATES = {
    "alpaca": "alpaca",
    "chatml": "chatml",
    "deepseek": "deepseek",
    "deepseek3": "deepseek-3",
    "empty": "plain",
    "gemma": "gemma",
    "gemma3": "gemma",
    "llama2": "llama-2",
    "llama3": "llama-3",
    "mistral": "mistral",
    "phi": "phi-3",
    "phi4": "phi-4",
    "vicuna": "vicuna",
    "zephyr": "zephyr",
}
TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard")
STAGE = "zerolora does supervised fine-tuning only (stage: sft)"


def _only(wanted: Any, otherwise: str) -> Rule:
    """Return the rule of a key that has one value here, which needs no key."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value != wanted:
            raise NoEqual(otherwise)
        return None

    return Rule("", translate, f"{str(wanted).lower()} is what happens here; otherwise: {otherwise}")


def _tuned(value: Any, draft: Draft) -> str | None:
    if value not in ("lora", "full"):
        raise NoEqual(f"{shown(value)} is none of lora, full; train.method says what there is (docs/methods.md)")
    draft.facts["tuned"] = value
    return None


def _target(value: Any, draft: Draft) -> str | None:
    draft.set("train.lora.targets", "all-linear" if value == "all" else texts(value))
    return None


def _bits(value: Any, draft: Draft) -> str | None:
    if value not in (4, 8):
        raise NoEqual(f"{shown(value)} is none of 4, 8")
    draft.facts["bits"] = value
    return None


def _sets(value: Any, draft: Draft) -> str | None:
    draft.facts["datasets"] = texts(value)
    return "names of dataset_info.json there, files below dataset_dir here"


def _template(value: Any, draft: Draft) -> str | None:
    if isinstance(value, str) and value in TEMPLATES:
        draft.set("prepare.rows.template", TEMPLATES[value])
        return None
    draft.set("prepare.rows.template", "chat")
    return f"{shown(value)} has no equal: chat, the model's own chat template, is written"


def _attention(value: Any, draft: Draft) -> str | None:
    if value == "auto":
        return None
    names = {"fa2": "flash", "sdpa": "sdpa", "disabled": "eager"}
    if not isinstance(value, str) or value not in names:
        raise NoEqual(f"{shown(value)} has no equal; train.attention stays auto")
    draft.set("train.attention", names[value])
    return None


def _report(value: Any, draft: Draft) -> str | None:
    chosen = [each for each in texts(value) if each != "none"]
    if not chosen:
        return None
    known = [each for each in chosen if each in TRACKERS]
    if not known:
        raise NoEqual(f"{shown(value)} is no tracker of docs/telemetry.md")
    draft.set("train.tracker", known[0])
    return "the tracker writes offline" + (f"; only {known[0]} of {', '.join(chosen)}" if len(chosen) > 1 else "")


def _strategy(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, list | str) or "full_shard" not in value:
        raise NoEqual(f"{shown(value)} is no sharding that zerolora has; write render.strategy")
    draft.set("render.strategy", "fsdp_offload" if "offload" in value else "fsdp")
    return None


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = common.model("model_name_or_path", draft)
    draft.key = "finetuning_type" if "tuned" in facts else ""
    tuned, bits = facts.get("tuned", "lora"), facts.get("bits")
    method = "full" if tuned == "full" else ("q" if bits else "") + ("dora" if facts.get("dora") else "lora")
    draft.set("train.method", method)
    if bits and tuned != "full":
        draft.set("train.quantization.type", "int8" if bits == 8 else facts.get("type", "nf4"))
        if "double" in facts:
            draft.set("train.quantization.double", facts["double"])
    if facts.get("pissa"):
        iterations = facts.get("iterations", 16)
        draft.key = "pissa_init"
        draft.set("train.lora.init", "pissa" if iterations == -1 else f"pissa_niter_{iterations}")
    lora = draft.config.get("train", {}).get("lora", {})
    if tuned == "lora" and "alpha" not in lora:
        draft.key = ""
        draft.set("train.lora.alpha", 2.0 * lora.get("r", 8))
        lines.append("train.lora.alpha: twice the rank, as LLaMA-Factory takes it")
    if "strategy" not in draft.config.get("render", {}):
        draft.set("render.strategy", "ddp")
    lines += _data(ours, draft)
    return lines + common.scaffold(draft)


def _data(model: str, draft: Draft) -> list[str]:
    facts = draft.facts
    folder, sets, most = facts.get("dataset_dir", "data"), facts.get("datasets", ["rows"]), facts.get("samples")
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    rows |= {"model": model, "format": "auto", "too_long": "truncate_right", "check": "exact"}
    files = [name if Path(name).suffix else f"{name}.json" for name in sets]
    if len(files) == 1 and not most:
        rows["path"] = f"{folder}/{files[0]}"
    else:
        rows["path"] = folder
        draft.key = "dataset"
        draft.set("prepare.rows.sources", {name: ({"rows": most} if most else {}) for name in files})
    places = ", ".join(f"{folder}/{name}" for name in files)
    lines = [f"prepare.rows: bring the rows to {places}; dataset_info.json is not read"]
    return (
        [*lines, "prepare.rows.sources: a source with fewer rows than max_samples repeats them here"] if most else lines
    )


FORMAT = Format(
    name="llamafactory",
    title="LLaMA-Factory",
    defaults={
        "cutoff_len": 2048,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-5,
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.0,
        "max_grad_norm": 1.0,
    },
    finish=_finish,
    rules={
        "model_name_or_path": fact("model", "fetch.directory or fetch.hub", text, "a hub model needs a commit here"),
        "model_revision": fact("revision", "fetch.hub", text),
        "adapter_name_or_path": none("a run that goes on from an adapter is in `continued` (train.from_adapter)"),
        "trust_remote_code": none("code of a model's repository is never run"),
        "image_max_pixels": none("rows are text; a vision tower is carried through"),
        "video_max_pixels": none("rows are text; a vision tower is carried through"),
        "quantization_bit": Rule("train.method, train.quantization.type", _bits, "4 → qlora with nf4, 8 → with int8"),
        "quantization_method": _only("bitsandbytes", "bitsandbytes alone quantizes here"),
        "quantization_type": fact("type", "train.quantization.type", text),
        "double_quantization": fact("double", "train.quantization.double", flag),
        "stage": _only("sft", STAGE),
        "do_train": _only(True, "the pipeline always trains"),
        "do_eval": none("validation loss is always computed at the end"),
        "do_predict": none("held-out rows are always answered (evaluate)"),
        "predict_with_generate": none("held-out rows are always answered (evaluate)"),
        "pref_beta": none(STAGE),
        "pref_loss": none(STAGE),
        "pref_ftx": none(STAGE),
        "reward_model": none(STAGE),
        "finetuning_type": Rule("train.method", _tuned),
        "lora_rank": same("train.lora.r", whole),
        "lora_alpha": same("train.lora.alpha", number),
        "lora_dropout": same("train.lora.dropout", number),
        "lora_target": Rule("train.lora.targets", _target, "all → all-linear"),
        "additional_target": same("train.lora.modules_to_save", texts),
        "use_rslora": same("train.lora.rank_stabilized", flag),
        "use_dora": fact("dora", "train.method", flag, "true → dora, or qdora"),
        "loraplus_lr_ratio": same("train.lora.plus_ratio", number),
        "pissa_init": fact("pissa", "train.lora.init", flag, "true → pissa_niter_16"),
        "pissa_iter": fact("iterations", "train.lora.init", lambda value: value if value == -1 else whole(value)),
        "pissa_convert": none("what is published always fits the original model"),
        "freeze_vision_tower": none("a vision tower is never trained"),
        "freeze_multi_modal_projector": none("a vision tower is never trained"),
        "dataset": Rule("prepare.rows.path, prepare.rows.sources", _sets),
        "dataset_dir": fact("dataset_dir", "prepare.rows.path", text),
        "eval_dataset": none("a source may be a split: prepare.rows.sources.NAME.split"),
        "template": Rule("prepare.rows.template", _template),
        "default_system": same("prepare.rows.system", text),
        "cutoff_len": same("prepare.rows.max_length", whole),
        "max_samples": fact(
            "samples", "prepare.rows.sources.NAME.rows", whole, "for each source; a smaller one repeats rows here"
        ),
        "train_on_prompt": common.offered("prepare.rows.loss", "everything"),
        "mask_history": common.offered("prepare.rows.loss", "last"),
        "packing": same("pack.packing", flag),
        "neat_packing": common.offered("pack.packing", True),
        "val_size": Rule("prepare.rows.split.validation", common.validation, "a share there, a number here"),
        "overwrite_cache": none("a stage runs again when its inputs change"),
        "preprocessing_num_workers": none("prepare uses all cores; `--workers` limits it"),
        "dataloader_num_workers": none("rows are prepared before training"),
        "tokenized_path": none("prepared rows are in results/data/"),
        "add_tokens": same("prepare.rows.add_tokens", texts),
        "add_special_tokens": same("prepare.rows.add_special_tokens", texts),
        "resize_vocab": none("added tokens always get rows in embedding and head"),
        "output_dir": none("results are in results/<run>/"),
        "overwrite_output_dir": none("a stage runs again when its inputs change"),
        "logging_steps": none("each step is written (docs/telemetry.md)"),
        "save_steps": common.steps("train.checkpoint_steps"),
        "save_strategy": none("checkpoints are written by time as well: train.checkpoint_minutes"),
        "save_only_model": none("a checkpoint always holds what a run needs to resume"),
        "plot_loss": none("the report always has the curve"),
        "report_to": Rule("train.tracker", _report),
        "run_name": none("runs are named in the section runs"),
        "per_device_train_batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        "gradient_accumulation_steps": fact(
            "accumulation", "train.global_batch", whole, "times batch size and number of GPUs"
        ),
        "per_device_eval_batch_size": none("chosen by evaluate.batch: auto"),
        "learning_rate": same("train.learning_rate", number),
        "num_train_epochs": Rule("train.epochs", common.epochs, "a whole number here"),
        "max_steps": common.steps("train.max_steps"),
        "lr_scheduler_type": common.schedule_rule(),
        "warmup_ratio": same("train.warmup_ratio", number),
        "warmup_steps": same("train.warmup_steps"),
        "weight_decay": same("train.weight_decay", number),
        "max_grad_norm": same("train.gradient_clipping", number),
        "optim": named("train.optimizer", common.OPTIMIZERS),
        "adam_beta1": fact("beta1", "train.betas", number),
        "adam_beta2": fact("beta2", "train.betas", number),
        "adam_epsilon": same("train.epsilon", number),
        "neftune_noise_alpha": same("train.neftune_alpha", number),
        "seed": same("train.seed"),
        "bf16": common.precision("bf16"),
        "fp16": common.precision("fp16"),
        "pure_bf16": none("trained weights are fp32 under LoRA"),
        "flash_attn": Rule("train.attention", _attention, "fa2 → flash, disabled → eager"),
        "gradient_checkpointing": same("train.activation_checkpointing", flag),
        "disable_gradient_checkpointing": common.offered("train.activation_checkpointing", False),
        "enable_liger_kernel": none("zerolora has no Liger kernels"),
        "use_unsloth": none("zerolora has no Unsloth kernels"),
        "shift_attn": none("train.attention has flash, sdpa and eager"),
        "rope_scaling": none("write it into the model's config.json"),
        "deepspeed": Rule("render.strategy", common.deepspeed, "by its stage and offload"),
        "fsdp": Rule("render.strategy", _strategy, "full_shard → fsdp"),
        "ddp_timeout": none("ranks that fall silent are named by the heartbeat"),
        "eval_strategy": none("train.validation_steps alone says when"),
        "eval_steps": common.steps("train.validation_steps"),
        "resume_from_checkpoint": none("a run resumes from its last checkpoint by itself (train.resume)"),
        "ray_run_name": none("`zerolora train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"),
        "ray_storage_path": none("`zerolora train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"),
        "ray_num_workers": none("write train.nodes and train.ranks_per_node"),
        "resources_per_worker": none("write hardware"),
        "placement_strategy": none("`zerolora train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"),
    },
)
