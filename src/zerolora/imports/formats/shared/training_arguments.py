"""The table of keys that several tools take from transformers, mostly its TrainingArguments."""

from typing import Any

from zerolora.imports.formats.import_format import (
    Draft,
    NoEqual,
    Rule,
    Same,
    Unlike,
    each,
    fact,
    flag,
    idle,
    lost,
    number,
    only,
    same,
    unless_off,
    unless_zero,
    whole,
)
from zerolora.imports.formats.shared import untranslated_keys
from zerolora.imports.formats.shared.base_model_keys import MODEL, REVISION
from zerolora.imports.formats.shared.computation import LIGER, precision
from zerolora.imports.formats.shared.interval_keys import best, epochs, evaluated, kept, saved, steps, warmup
from zerolora.imports.formats.shared.optimizer_keys import optimizer_rule, schedule_rule
from zerolora.imports.formats.shared.sharding import FSDP, deepspeed, fsdp
from zerolora.imports.formats.shared.tracker_keys import report, tracked

EVERY_STEP = idle("every step is logged (docs/telemetry.md)")
PREPARED = idle("rows are prepared before training")
PUBLISHED = idle("`zerolora push` publishes a finished run")
VALIDATED = idle("set by train.validation_steps")


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
        "group_by_length": same("train.group_by_length", flag),
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
        "warmup_steps": Rule("train.warmup_steps, train.warmup_ratio", warmup, "a fraction → warmup_ratio"),
        "seed": same("train.seed"),
        "bf16": precision("bf16"),
        "fp16": precision("fp16"),
        "fp8": lost("train.precision has fp32, fp16 and bf16"),
        "tf32": idle("torch's own default"),
        "gradient_checkpointing_kwargs": untranslated_keys.REENTRANT,
        **each("torch_compile torch_compile_backend torch_compile_mode", idle("the model runs as in transformers")),
        "deepspeed": unless_off(Rule("render.strategy", deepspeed, "by its stage and offload")),
        "ddp_timeout": idle("the heartbeat reports ranks that hang"),
        "ddp_bucket_cap_mb": idle("computed here (docs/choice.md)"),
        "ddp_broadcast_buffers": idle("buffers of the model are not trained"),
        "ddp_find_unused_parameters": idle("all trained parameters are always used"),
        "low_cpu_mem_usage": untranslated_keys.LOADED_IN_PARTS,
        "local_rank": untranslated_keys.LAUNCHER,
        "ray_num_workers": idle("set train.nodes and train.ranks_per_node"),
        **each("dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor", PREPARED),
        "eval_steps": unless_off(steps("train.validation_steps", share=True)),
        **each("eval_strategy evaluation_strategy", Rule("train.validation_steps", evaluated, "by its interval")),
        "load_best_model_at_end": Rule("train.keep", best, "true → best, false → last"),
        "save_steps": unless_off(steps("train.checkpoint_steps", share=True)),
        "save_total_limit": unless_zero(Rule("train.keep_checkpoints", kept, "-1 → all")),
        "save_only_model": idle("checkpoints always contain everything needed to resume"),
        "save_safetensors": idle("weights are always safetensors"),
        "resume_from_checkpoint": lost("a run resumes from its own last checkpoint (train.resume)"),
        **each("logging_steps include_tokens_per_second", EVERY_STEP),
        "use_swanlab": tracked("swanlab"),
    }


def training_arguments() -> dict[str, Rule]:
    """Return the rules of the options of transformers' TrainingArguments and of its scripts, which several tools take
    unchanged."""
    return {
        **shared_rules(),
        "model_name_or_path": MODEL,
        "model_revision": REVISION,
        "train_sampling_strategy": Rule("train.group_by_length", _grouped, "group_by_length → true, random → false"),
        "length_column_name": idle("lengths are counted by `prepare`"),
        "do_train": Rule("", _trains, "the pipeline always trains; false stops the import"),
        "do_eval": idle("validation loss is always computed at the end"),
        "label_smoothing_factor": lost("the loss has no label smoothing"),
        "report_to": Rule("train.tracker", report),
        "run_name": idle("runs are named in `runs`"),
        "per_device_train_batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        "gradient_accumulation_steps": fact(
            "accumulation", "train.global_batch", whole, "times batch size and number of GPUs"
        ),
        "per_device_eval_batch_size": untranslated_keys.EVALUATION_BATCH,
        "num_train_epochs": Rule("train.epochs", epochs),
        "max_steps": unless_zero(steps("train.max_steps")),
        "lr_scheduler_type": schedule_rule(),
        "optim": optimizer_rule(),
        "neftune_noise_alpha": unless_off(same("train.neftune_alpha", number)),
        "data_seed": lost("the rows' order depends on train.seed, their split on prepare.rows.seed"),
        "gradient_checkpointing": same("train.activation_checkpointing", flag),
        "fsdp": unless_off(Rule("render.strategy", fsdp, "full_shard → fsdp")),
        **each(
            "fsdp_config fsdp_transformer_layer_cls_to_wrap",
            idle(FSDP),
        ),
        "ddp_backend": untranslated_keys.LAUNCHER,
        "overwrite_output_dir": untranslated_keys.RERUN,
        "save_strategy": Rule("train.checkpoint_steps", saved, "epoch → a share of all steps"),
        "save_on_each_node": idle("one rank writes checkpoints"),
        **each("eval_on_start eval_delay", VALIDATED),
        "eval_accumulation_steps": untranslated_keys.EVALUATION_BATCH,
        **each("metric_for_best_model greater_is_better", idle("the best model is chosen by validation loss")),
        "use_liger_kernel": LIGER,
        "liger_kernel_config": idle("train.kernels covers all parts that a model has"),
        "average_tokens_across_devices": only(True, "the loss is the mean of all tokens of a global batch"),
        "accelerator_config": idle("gradients are summed once a step; rows are shuffled by the seed"),
        "activation_checkpointing": Rule("train.activation_checkpointing", _checkpointed),
        "activation_checkpointing_kwargs": untranslated_keys.REENTRANT,
        "ddp_static_graph": idle("all trained parameters are always used"),
        "parallelism_config": lost("set train.sequence_parallel and render.strategy"),
        "ignore_data_skip": idle("a run resumes at the row where it stopped"),
        "restore_callback_states_from_checkpoint": idle("patience continues where it stopped"),
        "enable_jit_checkpoint": idle("a run that Slurm ends writes a checkpoint"),
        "label_names": idle("rows have one column of labels"),
        "use_cpu": Rule("hardware.device", _on_cpu, "true → cpu"),
        "use_cache": idle("no cache is kept in training"),
        "torch_empty_cache_steps": idle("it frees memory only"),
        **each("debug skip_memory_metrics project trackio_*", EVERY_STEP),
        **each(
            "batch_eval_metrics bf16_full_eval fp16_full_eval eval_do_concat_batches eval_use_gather_object "
            "include_for_metrics prediction_loss_only generation_config generation_max_length generation_num_beams "
            "sortish_sampler",
            untranslated_keys.EVALUATED,
        ),
        "full_determinism": idle("docs/training.md lists what is reproducible"),
        **each("do_predict predict_with_generate", untranslated_keys.EVALUATED),
        **each("disable_tqdm include_num_input_tokens_seen logging_* log_*", EVERY_STEP),
        **each("hub_* push_to_hub push_to_hub_*", PUBLISHED),
        "dataloader_*": PREPARED,
    }


def _grouped(value: Any, draft: Draft) -> str | None:
    if value not in ("random", "group_by_length"):
        raise NoEqual("rows are always shuffled by the seed")
    draft.set("train.group_by_length", value == "group_by_length")
    return None


def _checkpointed(value: Any, draft: Draft) -> str | None:
    if value is not None:
        draft.set("train.activation_checkpointing", bool(value))
    return None


def _on_cpu(value: Any, draft: Draft) -> str | None:
    draft.facts["cpu"] = flag(value)
    return None


def _trains(value: Any, draft: Draft) -> str | None:
    if not flag(value):
        raise Unlike("false: the file does not train")
    raise Same
