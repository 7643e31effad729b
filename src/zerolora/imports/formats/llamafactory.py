"""llamafactory: LLaMA-Factory's YAML of a training.

Keys as in LLaMA-Factory's examples/ and src/llamafactory/hparams/; the others are of transformers' TrainingArguments.
"""

import math
import re
from typing import Any

from zerolora.errors import shown
from zerolora.imports import templates
from zerolora.imports.arguments import arguments
from zerolora.imports.formats import llamafactory_data, llamafactory_objective
from zerolora.imports.formats.import_format import (
    CHANGES,
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
    number,
    offered,
    only,
    same,
    text,
    texts,
    unless_off,
    unlike,
    whole,
)
from zerolora.imports.formats.shared import (
    adapter_keys,
    base_model_keys,
    chat_templates,
    computation,
    interval_keys,
    method_keys,
    scaffold,
    sharding,
    tracker_keys,
    training_arguments,
    untranslated_keys,
)

WITHOUT_BOS = re.compile(r"Qwen/")
"""Models whose tokenizer adds no BOS to a text, by the beginning of the repository's name."""
TEMPLATES = {
    "alpaca": "alpaca",
    "chatml": "chatml",
    "deepseek3": "deepseek-3",
    "empty": "plain",
    "gemma": "gemma",
    "gemma3": "gemma",
    "llama2": "llama-2",
    "llama3": "llama-3-verbatim",
    "mistral": "mistral",
    "qwen": "chatml",
    "qwen3_nothink": "chatml",
    "vicuna": "vicuna",
    "zephyr": "zephyr",
}
"""Our formats of the same text, which models without a chat template have too."""
WRITTEN = templates.texts("llamafactory")
BOS = "a BOS token, if the tokenizer adds one, starts a row only here"
DIFFERS = {
    "alpaca": f"Stanford's prompts here: ### Input: if a row has one, no line break after ### Response:, and {BOS}",
    "empty": f"the end-of-sequence token after an answer is supervised here but not there; {BOS}",
    "gemma": "surrounding whitespace is stripped here",
    "gemma3": "surrounding whitespace is stripped here",
    "llama2": "answers have a space before and after them here ([/INST] Hello) but not there",
    "vicuna": f"a space follows the system prompt and precedes an answer here but not there; {BOS}",
    "zephyr": "each turn ends with a line break here but not there",
}
"""Differences of our templates, by LLaMA-Factory's name (src/llamafactory/data/template.py)."""
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SYSTEM = {"qwen": QWEN, "zephyr": "You are Zephyr, a helpful assistant."}
"""Default system prompts that our templates lack."""
MULTIMODAL_TEMPLATES = """
dots_ocr ernie_vl gemma3n gemma4 gemma4n glm4_5v glm4v glm_ocr granite3_vision intern_s1 intern_vl keye_vl
kimi_vl lfm2_vl llama4 llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_video
llava_next_video_mistral llava_next_video_yi llava_next_yi mimo_vl minicpm_o minicpm_v minicpm_v_4_6 ministral3
mistral_small mllama moss_vl paligemma paligemma_chat pixtral qwen2_audio qwen2_omni qwen2_vl qwen3_5
qwen3_5_nothink qwen3_6 qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink video_llava yi_vl youtu_vl
"""
"""Names of templates with a plugin for images, video or audio (data/template.py), except gemma3."""
STAGES = {"rm": "a reward model", "ppo": "rewards"}
RL_ONLY = "used only with other stages"
OFT_ONLY = "used only with finetuning_type oft"
FREEZE_ONLY = "used only with finetuning_type freeze"
OPTIMIZER = "no such optimizer; docs/methods.md lists the available ones"
SERVING = "for serving and exporting"
MEGATRON = "for Megatron; set render.strategy"
LAUNCH = "`zerolora stage train` starts ranks itself, on a cluster by Slurm (docs/slurm.md)"


def _own() -> dict[str, Rule]:
    """Return the rules of LLaMA-Factory's own keys."""
    return {
        "adapter_name_or_path": adapter_keys.ADAPTER,
        "adapter_folder": lost("adapter_name_or_path is a path here; correct train.from_adapter"),
        "create_new_adapter": lost(
            "the adapter is merged and a new one trained there; merge it first (`zerolora merge`)"
        ),
        "use_fast_tokenizer": untranslated_keys.TOKENIZER,
        "split_special_tokens": lost("special tokens in a text are refused"),
        **each("image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches", untranslated_keys.IMAGES),
        "media_dir": untranslated_keys.MEDIA,
        **each(
            "video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video", unlike("rows with video")
        ),
        "audio_sampling_rate": unlike("rows with audio"),
        "train_from_scratch": untranslated_keys.FROM_SCRATCH,
        "mixture_of_depths": unlike("a mixture of depths"),
        "quantization_bit": unless_off(
            Rule("train.method, train.quantization.type", _bits, "4 → qlora with nf4, 8 → with int8")
        ),
        "quantization_method": Rule("", _quantized, "always bnb here"),
        "quantization_type": fact("type", "train.quantization.type", text),
        "double_quantization": fact("double", "train.quantization.double", flag),
        "quantization_device_map": idle("set render.strategy"),
        "stage": Rule(
            "prepare.rows.format, train.objective",
            _stage,
            "pt → plain text, dpo → by pref_loss; others stop the import",
        ),
        "compute_accuracy": untranslated_keys.EVALUATED,
        "max_new_tokens": same("evaluate.max_new_tokens", whole),
        **llamafactory_objective.RULES,
        **each(
            "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model_quantization_bit "
            "reward_model_adapters reward_model_quantization_bit reward_model_type",
            idle(RL_ONLY),
        ),
        "reward_model": unlike("a reward model"),
        "use_dft_loss": unlike("another loss (DFT)"),
        "use_asft_loss": unlike("another loss (ASFT)"),
        "asft_alpha": idle("used only with ASFT"),
        "use_eaft_loss": unlike("another loss (EAFT)"),
        "moe_aux_loss_coef": lost("the router's auxiliary loss is not used"),
        "finetuning_type": method_keys.one_of(("lora", "full"), "tuned", "freeze and oft stop the import"),
        "use_llama_pro": unlike("training added layers"),
        **each("oft_rank oft_block_size oft_target module_dropout", idle(OFT_ONLY)),
        **each("freeze_trainable_layers freeze_trainable_modules freeze_extra_modules", idle(FREEZE_ONLY)),
        "lora_rank": same("train.lora.r", whole),
        "lora_target": Rule("train.lora.targets", _target, "all → all-linear"),
        "additional_target": unless_off(same("train.lora.modules_to_save", texts)),
        "use_rslora": same("train.lora.rank_stabilized", flag),
        "use_dora": method_keys.DORA,
        "pissa_init": fact("pissa", "train.lora.init", flag, "true → pissa_niter_16"),
        "pissa_iter": fact("iterations", "train.lora.init", lambda value: value if value == -1 else whole(value)),
        "pissa_convert": idle("the saved adapter always fits the original model"),
        **each("freeze_vision_tower freeze_multi_modal_projector", method_keys.frozen("vision tower")),
        "freeze_language_model": unlike("training only the vision tower"),
        "dataset": _sets("dataset"),
        "eval_dataset": _sets("eval_dataset"),
        "dataset_dir": fact("dataset_dir", "prepare.rows.path", _folder, "its dataset_info.json is read"),
        "eval_on_each_dataset": idle("all validation rows have one loss"),
        "mix_strategy": Rule("", _mixed, "always concat here"),
        "interleave_probs": unless_off(Rule("prepare.rows.sources.NAME.weight", _probabilities)),
        "buffer_size": idle("rows are shuffled across the whole data set"),
        "data_shared_file_system": idle("stages share the results directory"),
        "template": Rule(
            "prepare.rows.template",
            _template,
            ", ".join(f"{old} → {new}" for old, new in TEMPLATES.items() if old != new) + "; others → chat",
        ),
        "default_system": unless_off(same("prepare.rows.system", text)),
        "tool_format": lost("the template formats tools"),
        "enable_thinking": only(True, "reasoning is supervised where a row has it (docs/data.md)"),
        "preserve_thinking": lost("earlier reasoning is supervised as the template renders it"),
        "cutoff_len": same("prepare.rows.max_length", whole),
        "max_samples": unless_off(fact("samples", "prepare.rows.sources.NAME.at_most", whole, "for each source")),
        "train_on_prompt": offered("prepare.rows.loss", "everything"),
        "mask_history": offered("prepare.rows.loss", "last"),
        "ignore_pad_token_for_loss": only(True, "padding is never supervised"),
        "packing": fact("packing", "pack.packing", flag, "rows attend to each other there without neat_packing"),
        "neat_packing": fact("neat", "pack.packing", flag),
        "block_diag_attn": untranslated_keys.ISOLATED,
        "val_size": Rule("prepare.rows.split.validation", scaffold.validation),
        "disable_shuffling": untranslated_keys.SHUFFLED,
        "overwrite_cache": untranslated_keys.RERUN,
        **each("preprocessing_batch_size preprocessing_num_workers", untranslated_keys.WORKERS),
        "tokenized_path": untranslated_keys.PREPARED_ROWS,
        "add_tokens": unless_off(same("prepare.rows.add_tokens", texts)),
        "add_special_tokens": unless_off(same("prepare.rows.add_special_tokens", texts)),
        **each(
            "new_special_tokens_config init_special_tokens",
            untranslated_keys.NEW_ROWS,
        ),
        "resize_vocab": idle("added tokens always get rows in embedding and head"),
        "plot_loss": idle("the report always has the curve"),
        "swanlab_*": tracker_keys.OFFLINE,
        **each("use_galore use_apollo use_badam use_muon use_adam_mini", lost(OPTIMIZER)),
        **each("galore_* apollo_* badam_*", idle("used only with an optimizer that zerolora lacks")),
        "pure_bf16": computation.pure("bf16"),
        "upcast_layernorm": untranslated_keys.NORMS,
        "upcast_lmhead_output": idle("losses are computed in fp32"),
        "flash_attn": computation.attention({"auto": "", "fa2": "flash", "sdpa": "sdpa", "disabled": "eager"}),
        "disable_gradient_checkpointing": offered("train.activation_checkpointing", False),
        "use_reentrant_gc": untranslated_keys.REENTRANT,
        "enable_liger_kernel": computation.LIGER,
        **each("use_v1_kernels use_unsloth", idle("zerolora has its own kernels")),
        "use_unsloth_gc": idle("train.activation_offload keeps activations in host memory"),
        "shift_attn": untranslated_keys.WHOLE_ROW,
        "early_stopping_steps": unless_off(same("train.patience", whole)),
        **each(
            "ray_run_name ray_storage_path ray_init_kwargs placement_strategy master_addr master_port", idle(LAUNCH)
        ),
        "resources_per_worker": idle("set hardware"),
        **each("use_kv_cache offload_folder", idle(SERVING)),
        **each("export_* infer_* vllm_* sglang_*", idle(SERVING)),
        **each("use_kt kt_*", idle("for KTransformers; set render.strategy")),
        **each(
            "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
            "sequence_parallel use_distributed_optimizer bias_activation_fusion apply_rope_fusion "
            "overlap_param_gather overlap_grad_reduce moe_grouped_gemm moe_token_dispatcher_type "
            "recompute_granularity use_mca use_megatron_bridge use_hyper_parallel",
            idle(MEGATRON),
        ),
        "context_parallel_size": idle("set train.sequence_parallel"),
        "include_effective_tokens_per_second": training_arguments.EVERY_STEP,
        **each("hf_hub_token ms_hub_token om_hub_token", untranslated_keys.TOKEN),
        "cache_dir": idle("models are in resources/models/"),
        "print_param_status": untranslated_keys.LOGS,
    }


def _stage(value: Any, draft: Draft) -> str | None:
    if value not in ("sft", "pt", "dpo", "kto"):
        raise Unlike(
            f"{shown(value)}: {STAGES.get(value, 'no stage of LLaMA-Factory') if isinstance(value, str) else ''}"
        )
    draft.facts["stage"] = value
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
    return unless_off(fact(name, "prepare.rows.path, prepare.rows.sources", texts, "by dataset_info.json"))


def _folder(value: Any) -> Any:
    return value if isinstance(value, dict) else text(value)


def _probabilities(value: Any, draft: Draft) -> str | None:
    entries = value if isinstance(value, list) else texts(value) if isinstance(value, str) else [value]
    shares = [number(each) for each in entries]
    if not all(0 < share < math.inf for share in shares):
        raise NoEqual(
            f"{shown(value)} has a probability that is not above 0; set sources.NAME.weight, or omit a source"
        )
    draft.facts["probabilities"] = shares
    return "fractions of the training rows here, sampling probabilities there"


def _mixed(value: Any, draft: Draft) -> str | None:
    if value in ("concat", "interleave_under"):
        draft.facts["mixed"] = value
        return None
    raise NoEqual(f"{shown(value)} repeats or alternates rows; use sources.NAME.weight and rows")


def _template(value: Any, draft: Draft) -> str | None:
    if isinstance(value, str) and value in MULTIMODAL_TEMPLATES.split():
        raise Unlike(f"{shown(value)}, a template for rows with images, video or audio")
    if isinstance(value, str) and value in TEMPLATES:
        draft.set("prepare.rows.template", TEMPLATES[value])
        if value in SYSTEM:
            draft.facts["system"] = SYSTEM[value]
        return DIFFERS.get(value)
    if isinstance(value, str) and value in WRITTEN:
        chat_templates.compare(WRITTEN[value], draft)
        return chat_templates.COMPARED
    draft.set("prepare.rows.template", "chat")
    return f"{shown(value)} has no equal: chat, the model's own chat template, is written"


def _quantized(value: Any, draft: Draft) -> str | None:
    if value not in ("bnb", "bitsandbytes"):
        raise NoEqual(f"{shown(value)}: only bitsandbytes is supported")
    return None


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = base_model_keys.model("model_name_or_path", draft)
    draft.key = "finetuning_type" if "tuned" in facts else ""
    tuned, bits = facts.get("tuned", "lora"), facts.get("bits")
    kind = "int8" if bits == 8 else facts.get("type", "nf4")
    method_keys.set_method(draft, tuned == "lora", kind if bits and tuned == "lora" else None)
    if facts.get("pissa"):
        iterations = facts.get("iterations", 16)
        draft.key = "pissa_init"
        draft.set("train.lora.init", "pissa" if iterations == -1 else f"pissa_niter_{iterations}")
    lora = draft.config.get("train", {}).get("lora", {})
    if tuned == "lora" and "alpha" not in lora:
        draft.key = ""
        draft.set("train.lora.alpha", 2.0 * lora.get("r", 8))
        lines.append(Remark("train.lora.alpha: twice the rank, LLaMA-Factory's default", NO_EFFECT))
    lines += [*_packed(draft), *interval_keys.warmup_of_steps(draft)]
    if "system" in facts and facts.get("stage") != "pt":
        draft.key = "template"
        draft.config.setdefault("prepare", {}).setdefault("rows", {}).setdefault("system", facts["system"])
    if computation.set_precision(draft):
        text = "bf16: with fp16 off too, weights have the dtype of the model's files there; auto is written"
        lines.append(Remark(text, CHANGES))
    lines += [*sharding.set_strategy(draft, "deepspeed or fsdp"), *computation.set_weights(draft)]
    if "dataset" not in facts:
        draft.unlike.append(("dataset", "is missing: the file serves or exports a model and trains nothing"))
    lines += [*llamafactory_objective.set_objective(draft), *llamafactory_data.write_data(ours, draft)]
    facts.setdefault("best", False)  # of transformers; axolotl loads the best where it can
    return lines + scaffold.scaffold(draft)


def _packed(draft: Draft) -> list[str]:
    """Set pack.packing, or for plain text the rows that are cut from all, as LLaMA-Factory does by default."""
    facts = draft.facts
    if facts.get("stage") in ("dpo", "kto"):
        return []
    plain, neat = facts.get("stage") == "pt", facts.get("neat", False)
    packing = neat or facts.get("packing", plain)
    if not packing:
        return []
    draft.key = "packing" if "packing" in facts else "neat_packing" if neat else ""
    if plain and not neat:  # data/processor/pretrain.py
        draft.set("prepare.rows.concatenate", "in_order")
        if WITHOUT_BOS.match(facts.get("model", "")):
            return []
        text = "a text begins with the tokenizer's BOS here, if it adds one; there only each joined row does"
        return [Remark(f"{draft.key or 'stage'}: {text}", CHANGES)]
    draft.set("pack.packing", True)
    if neat:
        return []
    text = "rows in a packed row attend to each other there unless neat_packing is on, but not here"
    return [Remark(f"{draft.key or 'stage'}: {text}", CHANGES)]


FORMAT = Format(
    name="llamafactory",
    title="LLaMA-Factory",
    needed="model_name_or_path",
    arguments=arguments("transformers", "Seq2SeqTrainingArguments") | arguments("llamafactory"),
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
    shared=training_arguments.training_arguments(),
    own=_own(),
)
