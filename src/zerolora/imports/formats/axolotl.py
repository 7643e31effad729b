"""axolotl: its YAML config (axolotl.yml).

Keys as in axolotl's examples/ and src/axolotl/utils/schemas/.
"""

import re
from typing import Any

from zerolora.errors import shown
from zerolora.imports.arguments import arguments
from zerolora.imports.formats import axolotl_data, axolotl_objective, axolotl_tokens
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    NO_EFFECT,
    Draft,
    Format,
    NoEqual,
    Remark,
    Rule,
    Unlike,
    each,
    fact,
    flag,
    idle,
    lost,
    named_fact,
    none,
    number,
    offered,
    only,
    same,
    text,
    texts,
    unless_off,
    unless_zero,
    unlike,
    whole,
)
from zerolora.imports.formats.shared import (
    adapter_keys,
    base_model_keys,
    computation,
    interval_keys,
    method_keys,
    optimizer_keys,
    scaffold,
    sharding,
    tracker_keys,
    training_arguments,
    untranslated_keys,
)
from zerolora.schedules import ONE_CYCLE

KERNELS = "a kernel for the same computation; zerolora has its own"
RL = "rewards and preferences"
PLUGINS = {
    "CutCrossEntropyPlugin": "",
    "LigerPlugin": "",
    "KernelsPlugin": "",
    "LMEvalPlugin": "",
    "SwanLabPlugin": "",
    "ExpertParallelPlugin": "",
    "DiffusionPlugin": "a diffusion objective",
    "KDPlugin": "distillation from a teacher",
    "NemoGymPlugin": RL,
    "HatcheryPlugin": "training by a remote service with its own losses",
    "LLMCompressorPlugin": "training sparse weights",
    "SpectrumPlugin": "training part of the base weights",
    "MoRAPlugin": "MoRA",
}
"""What a plugin trains instead, by its class; empty if it does not change the result."""
WARMUP = 0.03
"""Default fraction of warm-up steps."""
ATTENTION = {"flash_attention_2": "flash", "flash": "flash", "fa2": "flash", "sdpa": "sdpa", "eager": "eager"}
WHOLE = frozenset(
    {
        "chat_template_kwargs", "deepspeed", "lr_scheduler_kwargs", "lora_rank_pattern", "lora_alpha_pattern",
        "device_map", "qat", "diffusion",
        "hatchery", "llmcompressor", "mora", "ebft", "trl", "vllm",
    }
)  # fmt: skip
STORED = "fetch converts a quantized checkpoint to bf16 (docs/methods.md)"
MXFP4 = "Mxfp4Config"
CONVERTED = (MXFP4, "FineGrainedFP8Config")
CHECKPOINTED = re.compile(r"\(_checkpoint_wrapped_module\\?\.\)\?|_checkpoint_wrapped_module\\?\.")
LANGUAGE_MODEL = re.compile(r"(?<=\.)(language_model\\?\.)(?=\w)")
"""A whole part of a path in a regular expression, with the point after it."""
LONG = {"drop": "drop", "truncate": "truncate_right", "raise": "fail"}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def _own() -> dict[str, Rule]:
    """Return the rules of axolotl's own keys."""
    return {
        "base_model": base_model_keys.MODEL,
        "revision_of_model": base_model_keys.REVISION,
        "base_model_config": idle("the config in the model's directory is used"),
        **each("tokenizer_config tokenizer_use_fast", untranslated_keys.TOKENIZER),
        "model_type": Rule(
            "", _model_type, "read from the model's config.json; a classifier stops the import", NO_EFFECT
        ),
        "tokenizer_type": idle("read from the model's tokenizer files"),
        "tokenizer_legacy": lost("the tokenizer is loaded with transformers' defaults"),
        "tokenizer_use_mistral_common": lost("the tokenizer is transformers'"),
        "processor_type": untranslated_keys.MEDIA,
        **each(
            "is_llama_derived_model is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model",
            idle("read from the model's config.json"),
        ),
        **each("overrides_of_model_config model_config", lost("put it into the model's config.json")),
        "torch_dtype": idle("the precision is train.precision"),
        "reinit_weights": untranslated_keys.FROM_SCRATCH,
        "num_labels": unlike("a classifier"),
        "load_in_8bit": fact(
            "eight", "train.method, train.quantization.type", flag, "with an adapter: qlora with int8"
        ),
        "load_in_4bit": fact("four", "train.method, train.quantization.type", flag, "with an adapter: qlora with nf4"),
        "bnb_config_kwargs.bnb_4bit_use_double_quant": fact("double", "train.quantization.double", flag),
        "bnb_config_kwargs": none("train.quantization has type, double and storage"),
        "quantize_moe_experts": fact("experts", "", flag, "experts are quantized with nf4, and never with int8"),
        "model_quantization_config": unless_off(fact("stored_as", "", text, STORED)),
        "model_quantization_config_kwargs.dequantize": fact("dequantized", "", flag, STORED),
        "model_quantization_config_kwargs": none("set by train.quantization"),
        "gptq": unlike("a base that GPTQ quantized"),
        **each("gptq_groupsize gptq_model_v1 gptq_disable_exllama", idle("used only with GPTQ")),
        "use_onebitllms": unlike("weights of 1.58 bits"),
        "qat": unlike("quantization-aware training"),
        "quantization": idle("used by a later command; export.targets quantizes (docs/export.md)"),
        "strict": idle("unknown keys are always an error here"),
        "adapter": method_keys.one_of(("lora", "qlora"), "adapter", "no adapter → full"),
        "lora_model_dir": adapter_keys.ADAPTER,
        "rl_adapter_ref_model": unless_off(fact("adapter_in_reference", "", flag)),
        "lora_r": same("train.lora.r", whole),
        "lora_target_linear": fact("linear", "train.lora.targets", flag, "true → all-linear, in addition to a list"),
        "lora_target_modules": unless_off(Rule("train.lora.targets", _targets)),
        "lora_target_parameters": unless_off(fact("parameters", "train.lora.targets", texts, "experts' parameters")),
        "lora_modules_to_save": unless_off(same("train.lora.modules_to_save", texts)),
        "lora_rank_pattern": unless_off(same("train.lora.rank_pattern")),
        "lora_alpha_pattern": unless_off(same("train.lora.alpha_pattern")),
        "lora_fan_in_fan_out": idle("read from the model's modules"),
        "lora_on_cpu": idle("adapters are created on the training device"),
        **each(
            "peft_layers_to_transform peft_layers_pattern",
            lost("give the layers as a regular expression in train.lora.targets"),
        ),
        "peft_layer_replication": unlike("repeated layers"),
        "peft_trainable_token_indices": lost("prepare.rows.add_tokens trains the rows of added tokens"),
        "peft": none("train.lora.init has default, pissa and olora"),
        "peft_use_dora": method_keys.DORA,
        "peft_use_rslora": same("train.lora.rank_stabilized", flag),
        "peft_init_lora_weights": method_keys.INITIAL,
        **each(
            "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
            "gemma4_hybrid_attn_impl fused_attn_kernel flash_attn_rms_norm experts_implementation "
            "use_kernels use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels",
            idle(KERNELS),
        ),
        **each("relora relora_steps", unlike("ReLoRA, which merges and restarts the adapter")),
        **each(
            "relora_prune_ratio relora_cpu_offload relora_anneal_steps relora_warmup_steps",
            idle("used only with ReLoRA"),
        ),
        "lisa_n_layers": unlike("LISA, which trains a few layers at a time"),
        **each("lisa_step_interval lisa_layers_attribute", idle("used only with LISA")),
        **each("use_mora mora", unlike("MoRA")),
        **each("unfrozen_parameters spectrum_top_fraction", unlike("training part of the base weights")),
        "freeze_mm_modules": idle("a vision tower is never trained"),
        **each("image_size image_resize_algorithm", untranslated_keys.IMAGES),
        "nemo_gym_enabled": unlike(RL),
        **axolotl_objective.RULES,
        "reward_model": unlike("a reward model"),
        "process_reward_model": unlike("a process reward model"),
        "center_rewards_coefficient": idle("used only with a reward model"),
        "diffusion": unlike("a diffusion objective"),
        "kd_trainer": unlike("distillation from a teacher"),
        "hatchery": unlike("training by a remote service with its own losses"),
        "llmcompressor": unlike("training sparse weights"),
        "use_eaft": unlike("another loss (EAFT)"),
        "eaft_k": idle("used only with EAFT"),
        "trainer_cls": unlike("a custom trainer"),
        **axolotl_data.rules("datasets"),
        **axolotl_data.rules("pretraining_dataset"),
        **axolotl_data.rules("test_datasets"),
        "pretraining_dataset": Rule("prepare.rows.path", axolotl_data.pretraining, "rows of plain text"),
        "dataset_prepared_path": untranslated_keys.PREPARED_ROWS,
        **each("dataset_processes dataset_num_proc", untranslated_keys.WORKERS),
        "dataset_keep_in_memory": idle("files are streamed"),
        **each("dataset_shard_num dataset_shard_idx", none("all rows are used; sources.NAME.rows samples some")),
        "skip_prepare_dataset": lost("rows are always prepared before training"),
        **each(
            "streaming_multipack_buffer_size sample_packing_group_size sample_packing_bin_size sample_packing_eff_est",
            idle("packing considers all rows"),
        ),
        "push_dataset_to_hub": idle("prepared rows stay on this machine"),
        "hf_use_auth_token": untranslated_keys.TOKEN,
        "shuffle_merged_datasets": only(True, "rows are always shuffled by the seed"),
        "curriculum_sampling": untranslated_keys.SHUFFLED,
        "dataset_exact_deduplication": offered("prepare.rows.duplicates", "drop"),
        "val_set_size": Rule("prepare.rows.split.validation", scaffold.validation),
        "chat_template": Rule(
            "prepare.rows.template",
            axolotl_data.template,
            ", ".join(f"{old} → {new}" for old, new in axolotl_data.TEMPLATES.items() if old != new),
        ),
        "chat_template_jinja": none(
            "put the template into config/templates/ and name the file in prepare.rows.template", FILL_IN
        ),
        "chat_template_kwargs": unless_off(same("prepare.rows.template_arguments")),
        "default_system_message": unless_off(
            fact("system", "prepare.rows.system", text, "only with chat_template chatml")
        ),
        **axolotl_tokens.RULES,
        "tokens": unless_off(same("prepare.rows.add_tokens", texts)),
        "added_tokens_overrides": lost("prepare.rows.add_tokens adds tokens but renames none"),
        "fix_untrained_tokens": untranslated_keys.NEW_ROWS,
        "resize_token_embeddings_to_32x": idle("added tokens get as many rows as they need"),
        "mean_resizing_embeddings": idle("rows of added tokens are initialized to the mean of the others"),
        "train_on_inputs": fact("inputs", "prepare.rows.loss", flag, "true → everything"),
        "sequence_len": same("prepare.rows.max_length", whole),
        "eval_sequence_len": lost("validation rows have the same maximum length as training rows"),
        "min_sample_len": unless_zero(same("prepare.rows.min_length", whole)),
        "excess_length_strategy": named_fact("too_long", "prepare.rows.too_long", LONG),
        "sample_packing": same("pack.packing", flag),
        "eval_sample_packing": idle("validation rows are packed like training rows"),
        "sample_packing_sequentially": lost("packing chooses rows by their length"),
        "sample_packing_seq_len_multiplier": idle("set by pack.capacity"),
        "total_num_tokens": idle("counted by prepare"),
        "max_packed_sequence_len": lost("set pack.packing and pack.capacity"),
        "pretrain_multipack_attn": untranslated_keys.ISOLATED,
        "pretraining_sample_concatenation": lost("rows in a packed row do not attend to each other"),
        "batch_flattening": idle("pack.packing joins rows"),
        **each("pad_to_sequence_len pad_to_multiple_of", idle("a batch is padded to its longest row")),
        "use_pose": unlike("PoSE, which skips positions"),
        "gradient_accumulation_steps": fact(
            "accumulation", "train.global_batch", whole, "times micro_batch_size and the number of GPUs"
        ),
        "micro_batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        "batch_size": none("set train.global_batch", FILL_IN),
        "eval_batch_size": untranslated_keys.EVALUATION_BATCH,
        "num_epochs": Rule("train.epochs", interval_keys.epochs),
        "max_steps": unless_zero(interval_keys.steps("train.max_steps")),
        "optimizer": optimizer_keys.optimizer_rule(),
        **each("embedding_lr embedding_lr_scale lr_groups", lost("all weights have the same learning rate")),
        "lr_scheduler": Rule("train.schedule", _scheduler, "null → cosine"),
        "cosine_min_lr_ratio": fact("lowest", "train.schedule, train.schedule_options", number, "→ cosine_with_min_lr"),
        "cosine_constant_lr_ratio": Rule("", _constant),
        "lr_quadratic_warmup": lost("warm-up is linear"),
        "jagged_restart_steps": lost("the schedule does not restart"),
        "eta_min": idle("axolotl reads no such key; cosine_min_lr_ratio is its lowest rate"),
        "adam_eps": same("train.epsilon", number),
        **each("neftune_noise_alpha noisy_embedding_alpha", same("train.neftune_alpha", number)),
        "bfloat16": computation.pure("bf16"),
        "float16": computation.pure("fp16"),
        "fp32_norms": untranslated_keys.NORMS,
        "embeddings_skip_upcast": idle("frozen weights have the compute dtype"),
        "gradient_checkpointing": Rule("train.activation_checkpointing", _checkpointing),
        "gradient_checkpointing_kwargs.use_reentrant": untranslated_keys.REENTRANT,
        "selective_checkpointing": idle("a layer is recomputed as a whole"),
        "activation_offloading": unless_off(
            Rule("train.activation_offload", _offloading, "of the inputs of checkpointed layers")
        ),
        "layer_offloading": unless_off(idle("render.strategy zero3_offload keeps weights in host memory")),
        "flash_attention": offered("train.attention", "flash"),
        "sdp_attention": offered("train.attention", "sdpa"),
        "eager_attention": offered("train.attention", "eager"),
        "attn_implementation": computation.attention(ATTENTION),
        "attention": computation.attention(ATTENTION),
        **each(
            "flex_attention flex_attn_compile_kwargs xformers_attention flash_optimum",
            idle("train.attention has flash, sdpa and eager"),
        ),
        "sage_attention": lost("train.attention has flash, sdpa and eager; none of them quantizes"),
        "s2_attention": untranslated_keys.WHOLE_ROW,
        "scaling_softmax": lost("attention is the model's own"),
        **each(
            "flash_attn_cross_entropy chunked_cross_entropy cut_cross_entropy",
            idle("logits are computed for supervised tokens only, in chunks"),
        ),
        **each("flash_attn_fuse_qkv flash_attn_fuse_mlp", idle("zerolora replaces no modules of the model")),
        "tiled_mlp": idle("activations of a row are not split"),
        "llama4_linearized_experts": lost("experts are left as in the model"),
        "plugins": unless_off(
            Rule(
                "train.kernels",
                _plugins,
                "LigerPlugin → auto; no other kernel changes a result; others are reported or stop",
            )
        ),
        "liger_*": idle("train.kernels covers all parts that a model has"),
        **each(
            "sequence_parallel_degree context_parallel_size",
            sharding.sequence_parallel("by Ulysses here, by ring attention there"),
        ),
        "fsdp": unless_off(Rule("render.strategy", _strategy, "full_shard → fsdp")),
        **each("fsdp_version fsdp_config.fsdp_version", Rule("render.strategy", _version)),
        **each(
            "fsdp_config.fsdp_offload_params fsdp_config.offload_params",
            fact("offload", "render.strategy", flag, "true → fsdp_offload"),
        ),
        **each(
            "fsdp_config.fsdp_sharding_strategy fsdp_config.sharding_strategy",
            Rule("render.strategy", _sharding, "HYBRID_SHARD → fsdp_hybrid"),
        ),
        **each(
            "fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing",
            offered("train.activation_checkpointing", True),
        ),
        "fsdp_config": unless_off(idle(sharding.FSDP)),
        "dp_shard_size": idle("set hardware, train.nodes and train.ranks_per_node"),
        "dp_replicate_size": idle("set render.strategy: fsdp_hybrid"),
        "tensor_parallel_size": idle("ranks split rows, not layers; set render.strategy"),
        "expert_parallel_size": idle("ranks split rows, not experts; set render.strategy"),
        **each("expert_parallel_token_capacity expert_parallel_num_nvl_bytes", idle("ranks split rows, not experts")),
        **each("ddp device_map", idle("set render.strategy")),
        "accelerator_config": idle("gradients are summed once a step"),
        **each("max_memory gpu_memory_limit", idle("set hardware.gpu_memory")),
        **each("experimental_skip_move_to_device torchdistx_path", untranslated_keys.LOADED_IN_PARTS),
        "use_ray": idle("`zerolora stage train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"),
        "eval_steps": unless_zero(interval_keys.steps("train.validation_steps", share=True)),
        "save_steps": unless_zero(interval_keys.steps("train.checkpoint_steps", share=True)),
        "evals_per_epoch": unless_zero(
            Rule("train.validation_steps", interval_keys.evaluations, "a share of all steps")
        ),
        "eval_table_size": idle("the report shows report.examples answers"),
        "eval_max_new_tokens": same("evaluate.max_new_tokens", whole),
        **each("eval_causal_lm_metrics do_causal_lm_eval", idle("tasks are in docs/tasks.md")),
        "early_stopping_patience": unless_zero(same("train.patience", whole, "")),
        "metric_for_best_model": lost("the best model is chosen by validation loss"),
        **each(
            "loss_watchdog_threshold loss_watchdog_patience",
            idle("training always warns of rising losses (docs/telemetry.md)"),
        ),
        "saves_per_epoch": unless_zero(fact("saves", "train.checkpoint_steps", whole, "a share of all steps")),
        **each("save_first_step", idle("checkpoints are written by time as well: train.checkpoint_minutes")),
        "save_strategy": Rule("train.checkpoint_steps", interval_keys.saved, "epoch → a share of all steps"),
        "auto_resume_from_checkpoints": idle("a run resumes from its last checkpoint automatically (train.resume)"),
        "profiler_steps": idle("telemetry.csv has the parts of each step"),
        "debug": untranslated_keys.LOGS,
        **each("wandb_project use_wandb", tracker_keys.tracked("wandb")),
        "use_mlflow": tracker_keys.tracked("mlflow"),
        "use_tensorboard": tracker_keys.tracked("tensorboard"),
        **each(
            "wandb_* mlflow_* hf_mlflow_* swanlab_* comet_* trackio_* otel_* use_comet use_otel_metrics use_trackio",
            tracker_keys.OFFLINE,
        ),
        "test_value": idle("used only by axolotl's tests"),
    }


def _scheduler(value: Any, draft: Draft) -> str | None:
    return optimizer_keys.schedule_rule(one_cycle=True).translate("cosine" if value is None else value, draft)


def _model_type(value: Any, draft: Draft) -> str | None:
    if "Classification" in text(value) or "Reward" in value:
        raise Unlike(f"{shown(value)}: a classifier")
    raise NoEqual("read from the model's config.json", NO_EFFECT)


def _targets(value: Any, draft: Draft) -> str | None:
    """Note the targets. A regular expression also matches the paths of a class without what axolotl's may have: the
    language model inside one of images, and the wrapper of a checkpointed layer."""
    if not isinstance(value, str) or "," in value:
        draft.facts["targets"] = texts(value)
        return None
    expression = CHECKPOINTED.sub("", text(value))
    expression = LANGUAGE_MODEL.sub(r"(\1)?", expression)
    draft.facts["targets"] = expression
    other = re.search(r"language_model(?!\\?\.\)\?)|_checkpoint_wrapped_module", expression)
    return f"{other[0]} is in paths of the class that axolotl loads; name those of the class here" if other else None


def _stored(draft: Draft) -> list[str]:
    """Return a line if a quantized checkpoint stays quantized there."""
    kind = draft.facts.get("stored_as")
    if kind is None or (kind in CONVERTED and draft.facts.get("dequantized")):
        return []
    return [Remark(f"model_quantization_config: {kind}: without dequantize the base stays quantized there; {STORED}")]


def _set_targets(draft: Draft) -> list[str]:
    lines = _set_modules(draft)
    if parameters := draft.facts.get("parameters"):
        draft.key = "lora_target_parameters"
        modules = draft.config["train"].get("lora", {}).get("targets", [])
        if isinstance(modules, str) and modules != "all-linear":
            ends = "|".join(map(re.escape, parameters))
            draft.set("train.lora.targets", rf"({modules})|(.*\.)?({ends})")
        elif isinstance(modules, list):
            draft.set("train.lora.targets", [*modules, *parameters])
        else:
            lines.append(Remark("lora_target_parameters: all-linear has all experts, gate and up with twice the rank"))
    return lines


def _set_modules(draft: Draft) -> list[str]:
    named, linear = draft.facts.get("targets"), draft.facts.get("linear", False)
    draft.key = "lora_target_linear" if linear else "lora_target_modules"
    if linear and draft.facts.get("stored_as") == MXFP4:  # gpt-oss, whose experts and router are no linear modules
        draft.set("train.lora.targets", list(LINEAR[:4]))
    elif linear:
        draft.set("train.lora.targets", "all-linear")
    if linear:
        if named is None or (isinstance(named, list) and all(name.split(".")[-1] in LINEAR for name in named)):
            return []
        return [
            Remark(
                f"lora_target_modules: with lora_target_linear, all linear layers and {shown(named)} there; all-linear "
                "is written: list the names if one of these is not a linear layer"
            )
        ]
    if named is not None:
        draft.set("train.lora.targets", named)
    return []


def _checkpointing(value: Any, draft: Draft) -> str | None:
    if value in ("offload", "offload_disk"):
        draft.set("train.activation_offload", True)
        return Remark("activations go to host memory", NO_EFFECT)
    draft.set("train.activation_checkpointing", True if value == "unsloth" else flag(value))
    return None


def _offloading(value: Any, draft: Draft) -> str | None:
    if value not in (True, "legacy", "disk", "hidden_states"):
        raise NoEqual(f"{shown(value)} is none of true, legacy, disk, hidden_states")
    draft.set("train.activation_offload", True)
    if draft.config["train"].get("activation_checkpointing") is False:
        del draft.config["train"]["activation_checkpointing"]
    return Remark("the inputs of checkpointed layers go to host memory", NO_EFFECT)


def _strategy(value: Any, draft: Draft) -> str | None:
    offload = sharding.fsdp_offload(value, draft)
    draft.facts |= {"fsdp": True, "offload": draft.facts.get("offload", False) or offload}
    return None


def _sharding(value: Any, draft: Draft) -> str | None:
    draft.facts["sharded"] = True
    if value not in ("FULL_SHARD", "HYBRID_SHARD"):
        raise NoEqual(f"{shown(value)} is not a sharding of zerolora; set render.strategy", FILL_IN)
    draft.facts |= {"fsdp": True, "hybrid": value == "HYBRID_SHARD"}
    return None


def _version(value: Any, draft: Draft) -> str | None:
    if value not in (1, 2):
        raise NoEqual(f"{shown(value)} is none of 1, 2", NO_EFFECT)
    draft.facts["fsdp"] = True
    return Remark("FSDP2 is what runs here", NO_EFFECT) if value == 1 else None


def _plugins(value: Any, draft: Draft) -> str | None:
    unknown = []
    for plugin in texts(value):
        name = plugin.rpartition(".")[2]
        what = PLUGINS.get(name)
        if name == "LigerPlugin":
            computation.kernels(True, draft)
        if what:
            raise Unlike(f"{shown(plugin)}: {what}")
        if what is None:
            unknown.append(plugin)
    if unknown:
        raise NoEqual(f"zerolora has no plugins: {', '.join(map(shown, unknown))}")
    if draft.config.get("train", {}).get("kernels"):
        return None
    raise NoEqual(KERNELS, NO_EFFECT)


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = base_model_keys.model("base_model", draft)
    lines += [*axolotl_tokens.token_lines(draft), *_stored(draft)]
    adapter, eight = facts.get("adapter"), facts.get("eight", False)
    quantized = adapter == "qlora" or (adapter and (eight or facts.get("four", False)))
    kind = "int8" if eight and not facts.get("four", False) else "nf4"
    draft.key = "adapter" if adapter else ""
    method_keys.set_method(draft, bool(adapter), kind if quantized else None)
    if quantized and facts.get("experts", kind == "nf4") != (kind == "nf4"):
        which = "are" if kind == "nf4" else "are not"
        lines.append(Remark(f"quantize_moe_experts: stacked experts {which} quantized with {kind}", CHANGES))
    if adapter:
        lines += _set_targets(draft)
    if not adapter and (eight or facts.get("four", False)):
        text = "train.method: load_in_8bit and load_in_4bit need an adapter; all weights are trained"
        lines.append(Remark(text, NO_EFFECT))
    if computation.set_precision(draft) and not eight:
        draft.key = "bf16"
        draft.set("train.precision", "fp32")
    if facts.get("fsdp"):
        draft.key = "fsdp"
        kind = "fsdp_hybrid" if facts.get("hybrid") else "fsdp"
        draft.set("render.strategy", f"{kind}_offload" if facts.get("offload") else kind)
    lines += sharding.set_strategy(draft, "deepspeed or fsdp")
    lines += _trained_in(draft, bool(adapter), bool(quantized))
    lines += [*_schedule(draft), *_cycled(draft), *_warmed_up(draft)]
    lines += [
        *axolotl_objective.set_objective(draft),
        *axolotl_data.write_data(ours, draft),
        *axolotl_tokens.ends(draft),
    ]
    _keep_best(draft)
    return lines + scaffold.scaffold(draft)


def _trained_in(draft: Draft, adapter: bool, quantized: bool) -> list[str]:
    """Set the type of trained weights: adapters are fp32, but those of a quantized base in TRL's trainers, and all
    weights are bf16 as they are loaded (src/axolotl/loaders/model.py)."""
    facts, train = draft.facts, draft.config["train"]
    if adapter:
        if facts.get("pure", ("", ""))[1] == "bf16":
            del facts["pure"]
        return computation.set_weights(draft, "bf16" if quantized and "rl" in facts else "")
    if train.get("precision", "bf16") != "bf16":
        return computation.set_weights(draft)
    if train.get("attention") != "flash" and draft.config["render"]["strategy"] == "ddp":
        text = "bf16: norms and embeddings are trained in fp32 there, other weights in bf16, here all in fp32"
        return [Remark(text)]
    return computation.set_weights(draft, "bf16")


def _keep_best(draft: Draft) -> None:
    """Note whether axolotl publishes the best adapter: unless told not to, if it saves whenever it validates, or at
    multiples of that (core/builders/base.py, _configure_save_and_eval_strategy)."""
    facts, train = draft.facts, draft.config.get("train", {})
    evaluations, saves = facts.get("evaluations"), facts.get("saves")
    by_epoch = bool(evaluations and saves and evaluations % saves == 0)
    steps = train.get("checkpoint_steps"), train.get("validation_steps")
    by_steps = all(isinstance(each, int) for each in steps) and steps[0] % steps[1] == 0
    facts.setdefault("best", by_epoch or by_steps or "patience" in train)


def _constant(value: Any, draft: Draft) -> str | None:
    draft.facts["constant_from"] = number(value)
    raise NoEqual("no schedule falls to a fraction of the peak and stays there")


def _schedule(draft: Draft) -> list[str]:
    """Set the schedule for cosine_min_lr_ratio: transformers' cosine_with_min_lr has the same formula."""
    lowest = draft.facts.get("lowest")
    if lowest is None:
        return []
    draft.key = "cosine_min_lr_ratio"
    if draft.config["train"].get("schedule") != "cosine":
        return [Remark("cosine_min_lr_ratio: used only with lr_scheduler cosine", NO_EFFECT)]
    if "constant_from" in draft.facts:
        return [
            Remark("cosine_min_lr_ratio: no schedule falls to a fraction of the peak and stays there; cosine is kept")
        ]
    draft.set("train.schedule", "cosine_with_min_lr")
    draft.set("train.schedule_options", {"min_lr_rate": lowest})
    return []


def _cycled(draft: Draft) -> list[str]:
    """Set one_cycle as axolotl does (src/axolotl/core/trainers/mixins/scheduler.py): it rises in the warm-up unless
    pct_start is set, and torch's OneCycleLR cycles the first beta unless cycle_momentum is false."""
    train = draft.config["train"]
    if train.get("schedule") != ONE_CYCLE:
        return []
    options = train.get("schedule_options")
    options = options if isinstance(options, dict) else {}
    if "pct_start" in options:
        for key in ("warmup_steps", "warmup_ratio"):
            train.pop(key, None)
        draft.facts.pop("warmup_share", None)
    cycled = options.pop("cycle_momentum", True)
    momenta = [options.pop(key, default) for key, default in (("max_momentum", 0.95), ("base_momentum", 0.85))]
    if cycled is False:
        return []
    text = f"lr_scheduler: one_cycle also moves Adam's first beta from {momenta[0]} to {momenta[1]} and back there"
    return [Remark(f"{text}; here it stays that of train.betas (cycle_momentum: false)", CHANGES)]


def _warmed_up(draft: Draft) -> list[str]:
    """Set axolotl's default warm-up (src/axolotl/core/builders/base.py)."""
    train = draft.config["train"]
    if train.get("warmup_steps") == 1:  # builders/base.py, too
        train["warmup_steps"] = 2
        return [Remark("warmup_steps: 2 is written, which axolotl makes of 1", NO_EFFECT)]
    if {"warmup_steps", "warmup_ratio"} & train.keys() or "warmup_share" in draft.facts:
        return []
    if train.get("schedule") == ONE_CYCLE and "pct_start" in train.get("schedule_options", {}):
        return []
    draft.key = ""
    draft.set("train.warmup_ratio", WARMUP)
    return [Remark(f"train.warmup_ratio: {WARMUP} is written, axolotl's default; there at most 100 steps")]


FORMAT = Format(
    name="axolotl",
    title="axolotl",
    needed="base_model",
    whole=WHOLE,
    arguments=arguments("axolotl"),
    defaults={"sequence_len": 512, "num_epochs": 1, "lr_scheduler": "cosine", "max_grad_norm": 1.0},
    finish=_finish,
    shared=training_arguments.shared_rules(),
    own=_own(),
)
