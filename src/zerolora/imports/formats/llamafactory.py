"""llamafactory: LLaMA-Factory's YAML of a training.

Keys as in LLaMA-Factory's examples/ and src/llamafactory/hparams/; the others are of transformers' TrainingArguments.
"""

import math
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats import common, llamafactory_data
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
    fact,
    flag,
    idle,
    lost,
    number,
    same,
    text,
    texts,
    unless_off,
    unlike,
    whole,
)
from zerolora.imports.known_keys import LLAMAFACTORY, MULTIMODAL_TEMPLATES, TRAINING

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
BOS = "BOS, where the tokenizer adds one, stands before a row here alone"
DIFFERS = {
    "alpaca": f"Stanford's prompts here: ### Input: where a row has one, no line break behind ### Response:, and {BOS}",
    "deepseek": "a blank stands before an answer here (Assistant: Hello), none there",
    "empty": f"an end-of-sequence token behind an answer is learnt here, none there; {BOS}",
    "gemma": "blanks and line breaks around a text are left out here",
    "gemma3": "blanks and line breaks around a text are left out here",
    "llama2": "a blank stands before and behind an answer here ([/INST] Hello), none there",
    "llama3": "blanks and line breaks around a text are left out here",
    "vicuna": f"a blank stands behind the system prompt and before an answer here, none there; {BOS}",
    "zephyr": "a line break stands behind each turn here, none there",
}
"""What the template of ours writes otherwise, by their name (LLaMA-Factory's src/llamafactory/data/template.py)."""
SYSTEM = {"zephyr": "You are Zephyr, a helpful assistant."}
"""The system prompt of rows without one there, where the template of ours has none."""
TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard")
STAGES = {"rm": "a reward model", "ppo": "rewards", "dpo": "preferences", "kto": "preferences"}
RL_ONLY = "used with another stage alone"
OFT_ONLY = "used with finetuning_type oft alone"
FREEZE_ONLY = "used with finetuning_type freeze alone"
OPTIMIZER = "an optimizer that zerolora has not: docs/optimizers.md lists those it has"
SERVING = "of serving and exporting a model"
MEGATRON = "of Megatron; write render.strategy"
LAUNCH = "`zerolora train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"


def _stage(value: Any, draft: Draft) -> str | None:
    if value not in ("sft", "pt"):
        raise Unlike(
            f"{shown(value)}: {STAGES.get(value, 'no stage of LLaMA-Factory') if isinstance(value, str) else ''}"
        )
    draft.facts["stage"] = value
    return None


def _trains(value: Any, draft: Draft) -> str | None:
    if not flag(value):
        raise Unlike("false: the file asks for no training")
    return None


def _tuned(value: Any, draft: Draft) -> str | None:
    if value not in ("lora", "full"):
        raise Unlike(f"{shown(value)}, which is none of lora, full (docs/methods.md lists what train.method has)")
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


def _sets(name: str) -> Rule:
    def translate(value: Any, draft: Draft) -> str | None:
        draft.facts[name] = texts(value)
        return None

    return unless_off(Rule("prepare.rows.path, prepare.rows.sources", translate, "by dataset_info.json"))


def _folder(value: Any, draft: Draft) -> str | None:
    draft.facts["dataset_dir"] = value if isinstance(value, dict) else text(value)
    return None


def _probabilities(value: Any, draft: Draft) -> str | None:
    entries = value if isinstance(value, list) else texts(value) if isinstance(value, str) else [value]
    shares = [number(each) for each in entries]
    if not all(0 < share < math.inf for share in shares):
        raise NoEqual(
            f"{shown(value)} has a share that is not above 0; write sources.NAME.weight, or leave out a source"
        )
    draft.facts["probabilities"] = shares
    return "shares of the training rows here, probabilities of the next row's set there"


def _mixed(value: Any, draft: Draft) -> str | None:
    if value in ("concat", "interleave_under"):
        draft.facts["mixed"] = value
        return None
    raise NoEqual(f"{shown(value)} repeats or alternates rows; sources.NAME.weight and rows say how many are used")


def _template(value: Any, draft: Draft) -> str | None:
    if isinstance(value, str) and value in MULTIMODAL_TEMPLATES:
        raise Unlike(f"{shown(value)}, a template for rows with images, video or audio")
    if isinstance(value, str) and value in TEMPLATES:
        draft.set("prepare.rows.template", TEMPLATES[value])
        if value in SYSTEM:
            draft.facts["system"] = SYSTEM[value]
        return DIFFERS.get(value)
    draft.set("prepare.rows.template", "chat")
    return f"{shown(value)} has no equal: chat, the model's own chat template, is written"


def _packing(value: Any, draft: Draft) -> str | None:
    draft.facts["packing"] = flag(value)
    return None


def _frozen(part: str) -> Rule:
    def translate(value: Any, draft: Draft) -> str | None:
        if not flag(value):
            raise Unlike(f"false: a training of the {part}")
        raise NoEqual(f"the {part} is never trained", NO_EFFECT)

    return Rule("", translate, f"true: the {part} is never trained; false stops the import", NO_EFFECT)


def _attention(value: Any, draft: Draft) -> str | None:
    if value == "auto":
        return None
    names = {"fa2": "flash", "sdpa": "sdpa", "disabled": "eager"}
    if not isinstance(value, str) or value not in names:
        raise NoEqual(f"{shown(value)} has no equal; train.attention stays auto", NO_EFFECT)
    draft.set("train.attention", names[value])
    return None


def _quantized(value: Any, draft: Draft) -> str | None:
    if value not in ("bnb", "bitsandbytes"):
        raise NoEqual(f"{shown(value)}: bitsandbytes alone quantizes here")
    return None


def _pure(value: Any, draft: Draft) -> str | None:
    if not flag(value):
        return None
    draft.facts["bf16"] = True
    return "trained weights are bf16 there, fp32 here"


def _report(value: Any, draft: Draft) -> str | None:
    chosen = [each for each in texts(value) if each != "none"]
    if not chosen:
        return None
    known = [each for each in chosen if each in TRACKERS]
    if not known:
        raise NoEqual(f"{shown(value)} is no tracker of docs/telemetry.md", NO_EFFECT)
    draft.set("train.tracker", known[0])
    several = f"; only {known[0]} of {', '.join(chosen)}" if len(chosen) > 1 else ""
    return Remark(f"the tracker writes offline{several}", NO_EFFECT)


def _strategy(value: Any, draft: Draft) -> str | None:
    draft.facts["sharded"] = True
    if not isinstance(value, list | str) or "full_shard" not in value:
        raise NoEqual(f"{shown(value)} is no sharding that zerolora has; write render.strategy", FILL_IN)
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
        lines.append(Remark("train.lora.alpha: twice the rank, as LLaMA-Factory takes it", NO_EFFECT))
    lines += [*_packed(draft), *_warmed_up(draft)]
    if "system" in facts and facts.get("stage") != "pt":
        draft.key = "template"
        draft.config.setdefault("prepare", {}).setdefault("rows", {}).setdefault("system", facts["system"])
    if common.set_precision(draft):
        text = "bf16: with fp16 off too, weights compute in the type of the model's files there; auto is written"
        lines.append(Remark(text, CHANGES))
    lines += common.set_strategy(draft, "deepspeed or fsdp")
    if "dataset" not in facts:
        draft.unlike.append(("dataset", "is missing: the file serves or exports a model, and trains nothing"))
    lines += llamafactory_data.write_data(ours, draft)
    return lines + common.scaffold(draft)


def _packed(draft: Draft) -> list[str]:
    """Set pack.packing, which is on by itself for plain text there."""
    facts = draft.facts
    plain, neat = facts.get("stage") == "pt", facts.get("neat", False)
    packing = neat or facts.get("packing", plain)
    if not packing:
        return []
    draft.key = "packing" if "packing" in facts else "neat_packing" if neat else ""
    draft.set("pack.packing", True)
    if neat:
        return []
    text = "rows of one packed row see each other there, unless neat_packing is on, and do not here"
    return [Remark(f"{draft.key or 'stage'}: {text}", CHANGES)]


def _warmed_up(draft: Draft) -> list[str]:
    """Leave out 0 warm-up steps beside a share, which transformers takes then."""
    train = draft.config["train"]
    if train.get("warmup_steps") != 0 or not train.get("warmup_ratio"):
        return []
    del train["warmup_steps"]
    draft.came_from.pop(("train", "warmup_steps"), None)
    return [Remark("warmup_steps: 0 left out, since warmup_ratio wins over it there", NO_EFFECT)]


FORMAT = Format(
    name="llamafactory",
    title="LLaMA-Factory",
    keys=LLAMAFACTORY | TRAINING,
    needed="model_name_or_path",
    whole=frozenset({"deepspeed", "dataset_dir", "fsdp_config", "lr_scheduler_kwargs", "vllm_config", "sglang_config"}),
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
        "adapter_name_or_path": lost("a run that starts from an adapter is in `continued` (train.from_adapter)"),
        "adapter_folder": lost("a run that starts from an adapter is in `continued` (train.from_adapter)"),
        "create_new_adapter": lost("train.from_adapter trains the adapter itself"),
        "trust_remote_code": idle("code of a model's repository is never run"),
        "use_fast_tokenizer": idle("the tokenizer is the one beside the weights"),
        "split_special_tokens": lost("special tokens in a text are refused"),
        "image_max_pixels": unlike("rows with images"),
        "image_min_pixels": unlike("rows with images"),
        "image_do_pan_and_scan": unlike("rows with images"),
        "crop_to_patches": unlike("rows with images"),
        "media_dir": unlike("rows with images, video or audio"),
        "video_max_pixels": unlike("rows with video"),
        "video_min_pixels": unlike("rows with video"),
        "video_fps": unlike("rows with video"),
        "video_maxlen": unlike("rows with video"),
        "use_audio_in_video": unlike("rows with video"),
        "audio_sampling_rate": unlike("rows with audio"),
        "train_from_scratch": unlike("weights that start at random"),
        "mixture_of_depths": unlike("a mixture of depths"),
        "quantization_bit": unless_off(
            Rule("train.method, train.quantization.type", _bits, "4 → qlora with nf4, 8 → with int8")
        ),
        "quantization_method": Rule("", _quantized, "bnb is what happens here; others are not"),
        "quantization_type": fact("type", "train.quantization.type", text),
        "double_quantization": fact("double", "train.quantization.double", flag),
        "quantization_device_map": idle("write render.strategy"),
        "stage": Rule("prepare.rows.format", _stage, "sft; pt → plain text; others stop the import"),
        "do_train": Rule("", _trains, "the pipeline always trains; false stops the import"),
        "do_eval": idle("validation loss is always computed at the end"),
        "do_predict": idle("held-out rows are always answered (evaluate)"),
        "predict_with_generate": idle("held-out rows are always answered (evaluate)"),
        "max_new_tokens": same("evaluate.max_new_tokens", whole),
        **{
            name: idle(RL_ONLY)
            for name in (
                "pref_beta",
                "pref_loss",
                "pref_ftx",
                "pref_bco_weight",
                "dpo_label_smoothing",
                "kto_chosen_weight",
                "kto_rejected_weight",
                "simpo_gamma",
                "ppo_buffer_size",
                "ppo_epochs",
                "ppo_score_norm",
                "ppo_target",
                "ppo_whiten_rewards",
                "ref_model",
                "ref_model_adapters",
                "ref_model_quantization_bit",
                "reward_model_adapters",
                "reward_model_quantization_bit",
                "reward_model_type",
                "ld_alpha",
            )
        },
        "reward_model": unlike("rewards of a model"),
        "use_dft_loss": unlike("another loss (DFT)"),
        "use_asft_loss": unlike("another loss (ASFT)"),
        "asft_alpha": idle("of ASFT alone"),
        "use_eaft_loss": unlike("another loss (EAFT)"),
        "eaft_alpha": idle("of EAFT alone"),
        "label_smoothing_factor": lost("the loss is that of the right token alone"),
        "moe_aux_loss_coef": lost("a router's own loss is not trained"),
        "finetuning_type": Rule("train.method", _tuned, "freeze and oft stop the import"),
        "use_llama_pro": unlike("a training of added layers"),
        **{name: idle(OFT_ONLY) for name in ("oft_rank", "oft_block_size", "oft_target", "module_dropout")},
        **{
            name: idle(FREEZE_ONLY)
            for name in ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
        },
        "lora_rank": same("train.lora.r", whole),
        "lora_alpha": same("train.lora.alpha", number),
        "lora_dropout": same("train.lora.dropout", number),
        "lora_target": Rule("train.lora.targets", _target, "all → all-linear"),
        "additional_target": unless_off(same("train.lora.modules_to_save", texts)),
        "use_rslora": same("train.lora.rank_stabilized", flag),
        "use_dora": fact("dora", "train.method", flag, "true → dora, or qdora"),
        "loraplus_lr_ratio": same("train.lora.plus_ratio", number),
        "loraplus_lr_embedding": lost("rows of the embedding have the rate of the second factor"),
        "pissa_init": fact("pissa", "train.lora.init", flag, "true → pissa_niter_16"),
        "pissa_iter": fact("iterations", "train.lora.init", lambda value: value if value == -1 else whole(value)),
        "pissa_convert": idle("what is published always fits the original model"),
        "freeze_vision_tower": _frozen("vision tower"),
        "freeze_multi_modal_projector": _frozen("vision tower"),
        "freeze_language_model": unlike("a training of the vision tower alone"),
        "dataset": _sets("dataset"),
        "eval_dataset": _sets("eval_dataset"),
        "dataset_dir": Rule("prepare.rows.path", _folder, "its dataset_info.json is read"),
        "eval_on_each_dataset": idle("losses of all validation rows are one"),
        "mix_strategy": Rule("", _mixed, "concat is what happens here"),
        "interleave_probs": unless_off(Rule("prepare.rows.sources.NAME.weight", _probabilities)),
        "streaming": idle("files are streamed"),
        "buffer_size": idle("rows are shuffled over all of a data set"),
        "data_shared_file_system": idle("stages share the results' folder"),
        "template": Rule(
            "prepare.rows.template",
            _template,
            ", ".join(f"{old} → {new}" for old, new in TEMPLATES.items() if old != new) + "; others → chat",
        ),
        "default_system": unless_off(same("prepare.rows.system", text)),
        "tool_format": lost("tools are written by the template"),
        "enable_thinking": common.only(True, "a thought is learnt where a row has one (docs/data.md)"),
        "preserve_thinking": lost("what the template writes of an earlier thought is what is learnt"),
        "cutoff_len": same("prepare.rows.max_length", whole),
        "max_samples": unless_off(fact("samples", "prepare.rows.sources.NAME.at_most", whole, "for each source")),
        "train_on_prompt": common.offered("prepare.rows.loss", "everything"),
        "mask_history": common.offered("prepare.rows.loss", "last"),
        "ignore_pad_token_for_loss": common.only(True, "padding is never learnt"),
        "packing": Rule("pack.packing", _packing, "rows see each other there without neat_packing"),
        "neat_packing": fact("neat", "pack.packing", flag),
        "block_diag_attn": idle("rows of one packed row do not see each other"),
        "val_size": Rule("prepare.rows.split.validation", common.validation, "a share there, a number here"),
        "disable_shuffling": lost("rows are always shuffled by the seed"),
        "overwrite_cache": idle("a stage runs again when its inputs change"),
        "preprocessing_batch_size": idle("prepare uses all cores; `--workers` limits it"),
        "preprocessing_num_workers": idle("prepare uses all cores; `--workers` limits it"),
        "tokenized_path": idle("prepared rows are in results/data/"),
        "add_tokens": unless_off(same("prepare.rows.add_tokens", texts)),
        "add_special_tokens": unless_off(same("prepare.rows.add_special_tokens", texts)),
        "new_special_tokens_config": lost("rows of added tokens start as the mean of the others"),
        "init_special_tokens": lost("rows of added tokens start as the mean of the others"),
        "resize_vocab": idle("added tokens always get rows in embedding and head"),
        "output_dir": idle("results are in results/<run>/"),
        "save_steps": unless_off(common.steps("train.checkpoint_steps")),
        "save_only_model": idle("a checkpoint always holds what a run needs to resume"),
        "plot_loss": idle("the report always has the curve"),
        "compute_accuracy": idle("held-out rows are always answered (evaluate)"),
        "report_to": Rule("train.tracker", _report),
        "use_swanlab": common.tracked("swanlab"),
        **{
            name: idle("the tracker writes offline into the run's own folder (docs/telemetry.md)")
            for name in sorted(LLAMAFACTORY)
            if name.startswith("swanlab_")
        },
        "run_name": idle("runs are named in the section runs"),
        "per_device_train_batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        "gradient_accumulation_steps": fact(
            "accumulation", "train.global_batch", whole, "times batch size and number of GPUs"
        ),
        "per_device_eval_batch_size": idle("chosen by evaluate.batch: auto"),
        "learning_rate": same("train.learning_rate", number),
        "num_train_epochs": Rule("train.epochs", common.epochs, "a whole number here"),
        "max_steps": unless_off(common.steps("train.max_steps")),
        "lr_scheduler_type": common.schedule_rule(),
        "lr_scheduler_kwargs": unless_off(same("train.schedule_options")),
        "warmup_ratio": same("train.warmup_ratio", number),
        "warmup_steps": common.warmup_rule(),
        "weight_decay": same("train.weight_decay", number),
        "max_grad_norm": same("train.gradient_clipping", number),
        "optim": common.optimizer_rule(),
        "optim_args": lost("train.betas and train.epsilon are the optimizers' options"),
        "optim_target_modules": lost("an optimizer sees all trained weights"),
        **{name: lost(OPTIMIZER) for name in ("use_galore", "use_apollo", "use_badam", "use_muon", "use_adam_mini")},
        **{
            name: idle("of an optimizer that zerolora has not")
            for name in sorted(LLAMAFACTORY)
            if name.startswith(("galore_", "apollo_", "badam_"))
        },
        "adam_beta1": fact("beta1", "train.betas", number),
        "adam_beta2": fact("beta2", "train.betas", number),
        "adam_epsilon": same("train.epsilon", number),
        "neftune_noise_alpha": unless_off(same("train.neftune_alpha", number)),
        "seed": same("train.seed"),
        "data_seed": lost("the rows' order depends on train.seed, their split on prepare.rows.seed"),
        "bf16": common.precision("bf16"),
        "fp16": common.precision("fp16"),
        "pure_bf16": Rule("train.precision", _pure, "true → bf16; trained weights are fp32"),
        "fp8": lost("train.precision has fp32, fp16 and bf16"),
        "upcast_layernorm": lost("norms have the model's type"),
        "upcast_lmhead_output": idle("losses are computed in fp32"),
        "flash_attn": Rule("train.attention", _attention, "fa2 → flash, disabled → eager"),
        "gradient_checkpointing": same("train.activation_checkpointing", flag),
        "disable_gradient_checkpointing": common.offered("train.activation_checkpointing", False),
        "gradient_checkpointing_kwargs": idle("checkpoints are never reentrant"),
        "use_reentrant_gc": idle("checkpoints are never reentrant"),
        "enable_liger_kernel": idle("logits are computed of supervised tokens alone, in chunks"),
        "use_v1_kernels": idle("zerolora has kernels of its own"),
        "use_unsloth": idle("zerolora has kernels of its own"),
        "use_unsloth_gc": idle("train.activation_offload keeps activations in host memory"),
        "shift_attn": lost("train.attention sees all of a row"),
        "rope_scaling": lost("write it into the model's config.json"),
        "deepspeed": unless_off(Rule("render.strategy", common.deepspeed, "by its stage and offload")),
        "fsdp": unless_off(Rule("render.strategy", _strategy, "full_shard → fsdp")),
        "fsdp_config": idle("decided by zerolora's own FSDP strategies (docs/choice.md)"),
        "fsdp_transformer_layer_cls_to_wrap": idle("decided by zerolora's own FSDP strategies (docs/choice.md)"),
        "ddp_timeout": idle("ranks that fall silent are named by the heartbeat"),
        "eval_steps": unless_off(common.steps("train.validation_steps")),
        "early_stopping_steps": unless_off(same("train.patience", whole)),
        "resume_from_checkpoint": lost("a run resumes from its own last checkpoint (train.resume)"),
        "ray_run_name": idle(LAUNCH),
        "ray_storage_path": idle(LAUNCH),
        "ray_init_kwargs": idle(LAUNCH),
        "ray_num_workers": idle("write train.nodes and train.ranks_per_node"),
        "resources_per_worker": idle("write hardware"),
        "placement_strategy": idle(LAUNCH),
        "master_addr": idle(LAUNCH),
        "master_port": idle(LAUNCH),
        **{
            name: idle(SERVING)
            for name in sorted(LLAMAFACTORY)
            if name.startswith(("export_", "infer_", "vllm_", "sglang_")) or name in ("use_kv_cache", "offload_folder")
        },
        "use_kt": idle("of KTransformers; write render.strategy"),
        **{
            name: idle("of KTransformers; write render.strategy")
            for name in sorted(LLAMAFACTORY)
            if name.startswith("kt_")
        },
        **{
            name: idle(MEGATRON)
            for name in (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "expert_model_parallel_size",
                "sequence_parallel",
                "use_distributed_optimizer",
                "bias_activation_fusion",
                "apply_rope_fusion",
                "overlap_param_gather",
                "overlap_grad_reduce",
                "moe_grouped_gemm",
                "moe_token_dispatcher_type",
                "recompute_granularity",
                "use_mca",
                "use_megatron_bridge",
                "use_hyper_parallel",
            )
        },
        "context_parallel_size": idle("write train.sequence_parallel"),
        "hf_hub_token": idle("the hub's token is that of its own command"),
        "ms_hub_token": idle("the hub's token is that of its own command"),
        "om_hub_token": idle("the hub's token is that of its own command"),
        "cache_dir": idle("models are in resources/models/"),
        "low_cpu_mem_usage": idle("weights are always loaded in parts"),
        "print_param_status": idle("results/logs/ has all output"),
        "include_effective_tokens_per_second": idle("each step is written (docs/telemetry.md)"),
        **common.training_rules(),
    },
)
