"""axolotl: its YAML config (axolotl.yml).

Keys as in axolotl's examples/ and src/axolotl/utils/schemas/.
"""

import re
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
    "tokenizer_default": "chat",
    "alpaca": "alpaca",
    "chatml": "chatml",
    "llama3": "llama-3",
    "gemma": "gemma",
    "gemma3": "gemma",
    "mistral_v1": "mistral",
    "phi_3": "phi-3",
    "phi_4": "phi-4",
}
FORMS = {
    "alpaca": "alpaca",
    "alpaca_chat.load_qa": "alpaca",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "input_output": "prompt",
}
TOKENS = "tokens come from the model's own tokenizer, as its files have them"
FSDP = "decided by zerolora's own FSDP strategies (docs/choice.md)"
WANDB = "the tracker writes offline into the run's own folder (docs/telemetry.md)"
EVERY_STEP = "each step is written (docs/telemetry.md)"
DATA = "write it as prepare.rows.columns (docs/data.md)"


def _adapter(value: Any, draft: Draft) -> str | None:
    if value not in ("lora", "qlora"):
        raise NoEqual(f"{shown(value)} is none of lora, qlora; train.method says what there is (docs/methods.md)")
    draft.facts["adapter"] = value
    return None


def _targets(value: Any, draft: Draft) -> str | None:
    if isinstance(value, str) and "," not in value:
        draft.set("train.lora.targets", text(value))
        return "a regular expression there matches names, here whole paths" if re.search(r"[\\*()|]", value) else None
    draft.set("train.lora.targets", texts(value))
    return None


def _initial(value: Any, draft: Draft) -> str | None:
    if value in (True, "default"):
        return None
    if not isinstance(value, str) or not re.fullmatch(r"pissa(_niter_[0-9]+)?|olora", value):
        raise NoEqual(f"{shown(value)} is no start that zerolora has; train.lora.init keeps its default")
    draft.set("train.lora.init", value)
    return None


def _checkpointing(value: Any, draft: Draft) -> str | None:
    if value in ("offload", "offload_disk"):
        draft.set("train.activation_offload", True)
        return "activations go to host memory"
    draft.set("train.activation_checkpointing", True if value == "unsloth" else flag(value))
    return None


def _attention(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, str) or value not in common.ATTENTION:
        raise NoEqual(f"{shown(value)} has no equal; train.attention stays auto")
    draft.set("train.attention", common.ATTENTION[value])
    return None


def _inputs(value: Any, draft: Draft) -> str | None:
    draft.set("prepare.rows.loss", "everything" if flag(value) else "assistant")
    return None


def _stop(value: Any, draft: Draft) -> str | None:
    draft.facts["stop"] = [*texts(value), *draft.facts.get("stop", [])]
    return None


def _eos(value: Any, draft: Draft) -> str | None:
    draft.facts["stop"] = [*draft.facts.get("stop", []), text(value)]
    return "ends an answer here, and does not change the tokenizer"


def _strategy(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, list | str) or "full_shard" not in value:
        raise NoEqual(f"{shown(value)} is no sharding that zerolora has; write render.strategy")
    draft.facts["fsdp"] = True
    return None


def _sharding(value: Any, draft: Draft) -> str | None:
    if value not in ("FULL_SHARD", "HYBRID_SHARD"):
        raise NoEqual(f"{shown(value)} is no sharding that zerolora has; write render.strategy")
    draft.facts |= {"fsdp": True, "hybrid": value == "HYBRID_SHARD"}
    return None


def _version(value: Any, draft: Draft) -> str | None:
    if value not in (1, 2):
        raise NoEqual(f"{shown(value)} is none of 1, 2")
    draft.facts["fsdp"] = True
    return "FSDP2 is what runs here" if value == 1 else None


def _shared(value: Any, draft: Draft) -> str | None:
    degree = whole(value)
    draft.facts["sequence_parallel"] = degree
    draft.set("train.sequence_parallel", degree)
    return "by Ulysses here, by ring attention there"


def _path(value: Any, draft: Draft) -> str | None:
    draft.facts.setdefault("datasets", []).append({"path": text(value), "key": draft.key})
    return None


def _of_data(name: str) -> Any:
    def translate(value: Any, draft: Draft) -> str | None:
        draft.facts.setdefault("details", {})[draft.key] = (name, value)
        return None

    return translate


def _form(value: Any, draft: Draft) -> str | None:
    # chat_template rows may be of two forms, which the first row tells.
    kind = text(value).partition(":")[0]
    if kind not in FORMS:
        raise NoEqual(f"{shown(value)} is no form of rows here; prepare.rows.format is auto, and detects it")
    draft.facts.setdefault("forms", []).append("auto" if kind == "chat_template" else FORMS[kind])
    return "the form is detected by the rows' fields" if kind == "chat_template" else None


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = common.model("base_model", draft)
    adapter, eight = facts.get("adapter"), facts.get("eight", False)
    quantized = adapter == "qlora" or (adapter and (eight or facts.get("four", False)))
    method = "full" if not adapter else ("q" if quantized else "") + ("dora" if facts.get("dora") else "lora")
    draft.key = "adapter" if adapter else ""
    draft.set("train.method", method)
    if not adapter and (eight or facts.get("four", False)):
        lines.append("train.method: load_in_8bit and load_in_4bit are for adapters alone; all weights are trained")
    if quantized:
        draft.set("train.quantization.type", "int8" if eight and not facts.get("four", False) else "nf4")
    if facts.get("fsdp"):
        draft.key = "fsdp"
        kind = "fsdp_hybrid" if facts.get("hybrid") else "fsdp"
        draft.set("render.strategy", f"{kind}_offload" if facts.get("offload") else kind)
    elif "strategy" not in draft.config.get("render", {}):
        draft.set("render.strategy", "ddp")
    lines += _data(ours, draft)
    return lines + common.scaffold(draft)


def _data(model: str, draft: Draft) -> list[str]:
    facts = draft.facts
    sets = facts.get("datasets", [])
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    forms = set(facts.get("forms", []))
    rows |= {"model": model, "format": forms.pop() if len(forms) == 1 else "auto", "too_long": "drop", "check": "exact"}
    if "stop" in facts:
        rows["stop_tokens"] = list(dict.fromkeys(facts["stop"]))
    if "template" not in rows:
        rows["template"] = "alpaca" if rows["format"] == "alpaca" else "chat"
    if len(sets) > 1:
        names = list(dict.fromkeys(Path(each["path"]).name for each in sets))
        rows["path"] = "data/imported"
        draft.key = "datasets"
        draft.set("prepare.rows.sources", {name: {} for name in names})
        return [
            f"prepare.rows: bring the rows to data/imported/, each data set in the file or folder {', '.join(names)}"
        ]
    path = sets[0]["path"] if sets else "rows.json"
    local = path.startswith((".", "/")) or Path(path).suffix in (".json", ".jsonl", ".parquet", ".csv")
    rows["path"] = path if local and sets else f"data/{Path(path).name or 'rows.json'}"
    if local and sets:
        return []
    return [f"prepare.rows.path: bring the rows of {path} to {rows['path']}, or name them in fetch.data with a commit"]


def _tracked(name: str) -> Rule:
    def translate(value: Any, draft: Draft) -> str | None:
        draft.set("train.tracker", name)
        return "the tracker writes offline into the run's own folder"

    return Rule("train.tracker", translate, WANDB)


FORMAT = Format(
    name="axolotl",
    title="axolotl",
    defaults={"sequence_len": 512, "num_epochs": 1, "lr_scheduler": "cosine", "max_grad_norm": 1.0},
    finish=_finish,
    rules={
        "base_model": fact("model", "fetch.directory or fetch.hub", text, "a hub model needs a commit here"),
        "revision_of_model": fact("revision", "fetch.hub", text),
        "base_model_config": none("the config is the one beside the weights"),
        "tokenizer_config": none("the tokenizer is the one beside the weights"),
        "model_type": none("read from the model's config.json"),
        "tokenizer_type": none("read from the model's tokenizer files"),
        "processor_type": none("rows are text; a vision tower is carried through"),
        "is_llama_derived_model": none("read from the model's config.json"),
        "is_falcon_derived_model": none("read from the model's config.json"),
        "is_mistral_derived_model": none("read from the model's config.json"),
        "trust_remote_code": none("code of a model's repository is never run"),
        "load_in_8bit": fact(
            "eight", "train.method, train.quantization.type", flag, "with an adapter: qlora with int8"
        ),
        "load_in_4bit": fact("four", "train.method, train.quantization.type", flag, "with an adapter: qlora with nf4"),
        "strict": none("unknown keys are always an error here"),
        "adapter": Rule("train.method", _adapter, "no adapter → full"),
        "lora_model_dir": none("a run that goes on from an adapter is in `continued` (train.from_adapter)"),
        "lora_r": same("train.lora.r", whole),
        "lora_alpha": same("train.lora.alpha", number),
        "lora_dropout": same("train.lora.dropout", number),
        "lora_target_linear": common.offered("train.lora.targets", "all-linear"),
        "lora_target_modules": Rule("train.lora.targets", _targets),
        "lora_modules_to_save": same("train.lora.modules_to_save", texts),
        "lora_fan_in_fan_out": none("read from the model's modules"),
        "peft_use_dora": fact("dora", "train.method", flag, "true → dora, or qdora"),
        "peft_use_rslora": same("train.lora.rank_stabilized", flag),
        "peft_init_lora_weights": Rule("train.lora.init", _initial),
        "loraplus_lr_ratio": same("train.lora.plus_ratio", number),
        "lora_mlp_kernel": none("zerolora has no kernels of its own for LoRA"),
        "lora_qkv_kernel": none("zerolora has no kernels of its own for LoRA"),
        "lora_o_kernel": none("zerolora has no kernels of its own for LoRA"),
        "unfrozen_parameters": none("train.method full trains all weights, an adapter none of them"),
        "datasets[].path": Rule("prepare.rows.path", _path, "a hub data set needs a commit here"),
        "datasets[].type": Rule("prepare.rows.format", _form),
        "datasets[].split": none("all rows of a file are used; prepare.rows.split draws validation and test"),
        "datasets[].field_messages": none(DATA),
        "datasets[].message_field_role": none(DATA),
        "datasets[].message_field_content": none(DATA),
        "datasets[].message_property_mappings": none(DATA),
        "datasets[].roles": none(DATA),
        "datasets[].data_files": none("name the files in prepare.rows.sources"),
        "datasets[].ds_type": none("read from the file's ending"),
        "test_datasets": none("a source may be a split: prepare.rows.sources.NAME.split"),
        "dataset_prepared_path": none("prepared rows are in results/data/"),
        "dataset_processes": none("prepare uses all cores; `--workers` limits it"),
        "shuffle_merged_datasets": none("rows are always shuffled by the seed"),
        "dataset_exact_deduplication": common.offered("prepare.rows.duplicates", "drop"),
        "val_set_size": Rule("prepare.rows.split.validation", common.validation, "a share there, a number here"),
        "chat_template": named("prepare.rows.template", TEMPLATES),
        "chat_template_jinja": none(
            "put the template into config/templates/ and name the file in prepare.rows.template"
        ),
        "eot_tokens": Rule("prepare.rows.stop_tokens", _stop),
        "special_tokens.pad_token": same("prepare.rows.pad_token", text),
        "special_tokens.eos_token": Rule("prepare.rows.stop_tokens", _eos),
        "special_tokens.bos_token": none(TOKENS),
        "special_tokens.unk_token": none(TOKENS),
        "tokens": same("prepare.rows.add_tokens", texts),
        "train_on_inputs": Rule("prepare.rows.loss", _inputs, "true → everything"),
        "sequence_len": same("prepare.rows.max_length", whole),
        "sample_packing": same("pack.packing", flag),
        "eval_sample_packing": none("validation rows are packed as training rows are"),
        "pad_to_sequence_len": none("a batch is padded to its longest row"),
        "group_by_length": none("rows of similar length share a batch, unless packing is on"),
        "output_dir": none("results are in results/<run>/"),
        "hub_model_id": none("`zerolora push` publishes a finished run"),
        "gradient_accumulation_steps": fact(
            "accumulation", "train.global_batch", whole, "times micro_batch_size and the number of GPUs"
        ),
        "micro_batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        "eval_batch_size": none("chosen by evaluate.batch: auto"),
        "num_epochs": Rule("train.epochs", common.epochs, "a whole number here"),
        "max_steps": common.steps("train.max_steps"),
        "optimizer": named("train.optimizer", common.OPTIMIZERS),
        "lr_scheduler": common.schedule_rule(),
        "learning_rate": same("train.learning_rate", number),
        "weight_decay": same("train.weight_decay", number),
        "max_grad_norm": same("train.gradient_clipping", number),
        "adam_beta1": fact("beta1", "train.betas", number),
        "adam_beta2": fact("beta2", "train.betas", number),
        "adam_epsilon": same("train.epsilon", number),
        "warmup_ratio": same("train.warmup_ratio", number),
        "warmup_steps": same("train.warmup_steps"),
        "neftune_noise_alpha": same("train.neftune_alpha", number),
        "seed": same("train.seed"),
        "bf16": common.precision("bf16"),
        "fp16": common.precision("fp16"),
        "tf32": none("torch's own default"),
        "gradient_checkpointing": Rule("train.activation_checkpointing", _checkpointing),
        "gradient_checkpointing_kwargs.use_reentrant": none("checkpoints are never reentrant"),
        "flash_attention": common.offered("train.attention", "flash"),
        "sdp_attention": common.offered("train.attention", "sdpa"),
        "eager_attention": common.offered("train.attention", "eager"),
        "attn_implementation": Rule("train.attention", _attention, "flash_attention_2 → flash"),
        "attention": Rule("train.attention", _attention),
        "xformers_attention": none("train.attention has flash, sdpa and eager"),
        "s2_attention": none("train.attention has flash, sdpa and eager"),
        "flash_attn_cross_entropy": none("logits are computed of supervised tokens alone, in chunks"),
        "flash_attn_rms_norm": none("zerolora has no kernel of its own for norms"),
        "flash_attn_fuse_qkv": none("zerolora changes no module of the model"),
        "flash_attn_fuse_mlp": none("zerolora changes no module of the model"),
        "plugins": none("zerolora has no plugins"),
        "liger_rope": none("zerolora has no Liger kernels"),
        "liger_rms_norm": none("zerolora has no Liger kernels"),
        "liger_glu_activation": none("zerolora has no Liger kernels"),
        "liger_fused_linear_cross_entropy": none("logits are computed of supervised tokens alone, in chunks"),
        "sequence_parallel_degree": Rule("train.sequence_parallel", _shared),
        "context_parallel_size": Rule("train.sequence_parallel", _shared),
        "deepspeed": Rule("render.strategy", common.deepspeed, "by its stage and offload"),
        "fsdp": Rule("render.strategy", _strategy, "full_shard → fsdp"),
        "fsdp_version": Rule("render.strategy", _version),
        "fsdp_config.fsdp_offload_params": fact("offload", "render.strategy", flag, "true → fsdp_offload"),
        "fsdp_config.offload_params": fact("offload", "render.strategy", flag, "true → fsdp_offload"),
        "fsdp_config.fsdp_sharding_strategy": Rule("render.strategy", _sharding, "HYBRID_SHARD → fsdp_hybrid"),
        "fsdp_config": none(FSDP),
        "ddp_find_unused_parameters": none("parameters that are trained are always used"),
        "local_rank": none("set by the launcher"),
        "use_ray": none("`zerolora train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"),
        "ray_num_workers": none("write train.nodes and train.ranks_per_node"),
        "evals_per_epoch": none("write train.validation_steps, a number of steps"),
        "eval_steps": common.steps("train.validation_steps"),
        "eval_table_size": none("the report shows report.examples answers"),
        "eval_max_new_tokens": same("evaluate.max_new_tokens", whole),
        "early_stopping_patience": same("train.patience", whole, "needs eval_steps too"),
        "loss_watchdog_threshold": none("training warns of rising losses by itself (docs/telemetry.md)"),
        "loss_watchdog_patience": none("training warns of rising losses by itself (docs/telemetry.md)"),
        "saves_per_epoch": none("checkpoints are written by time: train.checkpoint_minutes"),
        "save_steps": common.steps("train.checkpoint_steps"),
        "save_total_limit": none("old checkpoints are removed (docs/checkpoints.md)"),
        "save_first_step": none("checkpoints are written by time: train.checkpoint_minutes"),
        "resume_from_checkpoint": none("a run resumes from its last checkpoint by itself (train.resume)"),
        "logging_steps": none(EVERY_STEP),
        "debug": none("results/logs/ has all output"),
        "wandb_project": _tracked("wandb"),
        "use_tensorboard": common.offered("train.tracker", "tensorboard"),
        "wandb_entity": none(WANDB),
        "wandb_watch": none(WANDB),
        "wandb_name": none(WANDB),
        "wandb_run_id": none(WANDB),
        "wandb_log_model": none(WANDB),
        "rl": none("zerolora does supervised fine-tuning only"),
    },
)
