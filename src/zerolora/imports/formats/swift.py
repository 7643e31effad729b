"""swift: ms-swift's commands `swift sft`, `swift pt` and `swift rlhf`, in a shell script or a YAML file.

Keys as in ms-swift's swift/arguments/, which build on transformers' TrainingArguments. A script is never run.
"""

import math
from typing import Any

from zerolora.errors import shown
from zerolora.imports.arguments import UNKNOWN, arguments, version
from zerolora.imports.formats import swift_data, swift_objective
from zerolora.imports.formats.import_format import (
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
    scaffold,
    sharding,
    training_arguments,
    untranslated_keys,
)

ATTENTION = {
    "flash_attn": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attention_4": "flash",
    "sdpa": "sdpa", "eager": "eager",
}  # fmt: skip
DEEPSPEED = {name: name for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")}
"""Names of ms-swift's own DeepSpeed JSONs (swift/config/), whose stage and offload are those of our strategies."""
METHOD = "used only with another tuner_type"
MEDIA = "rows with images, video or audio"
ROLLOUT = "used only with rewards, or to generate"
MODEL_FILES = idle("read from the model's files")
ACCUMULATED = 16
"""Rows of a step without gradient_accumulation_steps (TrainArgumentsMixin)."""


def _own() -> dict[str, Rule]:
    """Return the rules of ms-swift's own keys."""
    return {
        "model": base_model_keys.MODEL,
        "model_revision": base_model_keys.REVISION,
        "command": Rule("train.objective, prepare.rows.format", _command, "pt → plain text, rlhf → by rlhf_type"),
        **each("model_type template_backend model_kwargs use_hf hub_token check_model", MODEL_FILES),
        **each("use_chat_template local_repo_path", MODEL_FILES),
        "task_type": Rule("", _task, "causal_lm; others stop the import"),
        **each("num_labels problem_type", unless_off(unlike("a classifier"))),
        **each("max_model_len device_map max_memory experts_impl", idle("set hardware and render.strategy")),
        "torch_dtype": Rule("train.precision", _dtype, "bfloat16 → bf16, float16 and float32 → fp16"),
        "attn_impl": computation.attention(ATTENTION),
        "new_special_tokens": unless_off(same("prepare.rows.add_special_tokens", texts)),
        "rope_scaling": lost("put it into the model's config.json"),
        **each("tuner_type train_type sft_type", method_keys.one_of(("lora", "full"), "tuned", "others stop")),
        "tuner_backend": idle("adapters are zerolora's own"),
        "use_swift_lora": idle("adapters are zerolora's own"),
        **each("adapters ref_adapters", adapter_keys.ADAPTER),
        "ref_adapters": lost("the reference is the model that training starts from"),
        "lora_rank": same("train.lora.r", whole),
        "lora_bias": only("none", "biases are not trained"),
        "lora_dtype": lost("adapters are trained in fp32"),
        "target_modules": Rule("train.lora.targets", _targets),
        "target_regex": unless_off(same("train.lora.targets", text)),
        "target_parameters": lost("parameters outside modules, such as experts, get no adapter"),
        "modules_to_save": unless_off(same("train.lora.modules_to_save", texts)),
        "lorap_lr_ratio": unless_off(same("train.lora.plus_ratio", number)),
        "use_rslora": same("train.lora.rank_stabilized", flag),
        "use_dora": method_keys.DORA,
        "init_weights": method_keys.INITIAL,
        **each(
            "lora_ga_* fourier_* boft_* vera_* adapter_act adapter_length adalora_* llamapro_* reft_*", idle(METHOD)
        ),
        **each(
            "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters "
            "trainable_parameters_regex",
            unless_off(unlike("training part of the base weights")),
        ),
        "freeze_llm": unless_off(unlike("training only a vision tower")),
        **each("freeze_vit freeze_aligner", method_keys.frozen("vision tower")),
        **each("vit_lr aligner_lr vit_gradient_checkpointing norm_bbox", idle("a vision tower is never trained")),
        "quant_method": Rule("train.quantization.type", _quantized, "bnb; others are not available"),
        "quant_bits": unless_off(Rule("train.method, train.quantization.type", _bits, "4 → nf4, 8 → int8")),
        "bnb_4bit_quant_type": fact("kind", "train.quantization.type", text),
        "bnb_4bit_use_double_quant": fact("double_quantized", "train.quantization.double", flag),
        **each("bnb_4bit_compute_dtype bnb_4bit_quant_storage", idle("chosen by train.precision and the strategy")),
        "hqq_axis": idle("used only with hqq"),
        **swift_data.RULES,
        **swift_objective.RULES,
        "enable_thinking": unless_off(Rule("prepare.rows.template_arguments", _thinking)),
        **each("preserve_thinking response_prefix", lost("the template decides how reasoning is written")),
        "add_non_thinking_prefix": idle("an empty thought is written where the model's template writes it"),
        "disable_ignore_empty_think": unless_off(lost("a thought is supervised, also an empty one")),
        "agent_template": lost("the template formats tools"),
        **each("max_pixels MAX_PIXELS VIDEO_MAX_PIXELS FPS_MAX_FRAMES", idle(f"used only with {MEDIA}")),
        "packing": same("pack.packing", flag),
        "packing_length": unless_off(same("pack.capacity", whole)),
        **each("packing_num_proc packing_strategy lazy_tokenize", idle("packing considers all rows")),
        **each("padding_free padding_side", untranslated_keys.ISOLATED),
        "sequence_parallel_size": sharding.sequence_parallel(),
        "gradient_checkpointing": same("train.activation_checkpointing", flag),
        "router_aux_loss_coef": lost("the router's auxiliary loss is not used"),
        "enable_dft_loss": unlike("another loss (DFT)"),
        "enable_channel_loss": idle("telemetry has the loss of each step"),
        "loss_type": swift_objective.LOSS,
        "mrl_dims": unlike("embeddings"),
        "train_dataloader_shuffle": only(True, "rows are always shuffled by the seed"),
        "max_epochs": unless_zero(Rule("train.epochs", interval_keys.epochs)),
        "optimizer": lost("no plugins; docs/methods.md lists train.optimizer"),
        **each("callbacks external_plugins custom_register_path", lost("no code of a config is run")),
        "early_stop_interval": unless_zero(same("train.patience", whole)),
        **each("use_galore lisa_activated_layers", unless_zero(unlike("another optimizer or method (GaLore, LISA)"))),
        **each("galore_* lisa_step_interval", idle(METHOD)),
        "deepspeed": unless_off(sharding.strategy(DEEPSPEED)),
        "fsdp": unless_off(Rule("render.strategy", _fsdp, "fsdp2 → fsdp")),
        "zero_hpz_partition_size": lost("render.strategy: zero3_hpz keeps the weights within a machine"),
        "deepspeed_autotp_size": lost("ranks split rows, not layers"),
        "temperature": idle(ROLLOUT),
        "max_new_tokens": idle(ROLLOUT),
        **each("top_k top_p repetition_penalty num_beams stream stop_words logprobs top_logprobs", idle(ROLLOUT)),
        **each("structured_outputs_regex predict_with_generate eval_metric acc_strategy", untranslated_keys.EVALUATED),
        **each("eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config extra_eval_args",
               untranslated_keys.EVALUATED),
        **each("add_version create_checkpoint_symlink max_shard_size safe_serialization logging_dir", idle(
            "results are in results/<run>/")),
        **each("load_args load_data_args ignore_args_error strict", idle("the config has every key")),
        "resume_only_model": lost("a run resumes with its optimizer's states; use `continued` without them"),
        **each("use_flash_ckpt enable_npu_model_patch ds3_gather_for_generation use_logits_to_keep use_ray",
               idle("zerolora has its own")),
        "bf16": computation.precision("bf16"),
        "fp16": computation.precision("fp16"),
        "report_to": training_arguments.training_arguments()["report_to"],
        "swanlab_*": idle("the tracker writes offline (docs/telemetry.md)"),
        "NPROC_PER_NODE": fact("gpus", "hardware.gpus_per_node, train.ranks_per_node", whole),
        "NNODES": fact("nodes", "hardware.nodes, train.nodes", whole),
        "CUDA_VISIBLE_DEVICES": fact("visible", "hardware.gpus_per_node", lambda value: value),
        **each("nproc_per_node NODE_RANK MASTER_ADDR MASTER_PORT", untranslated_keys.LAUNCHER),
        "CELOSS_PARALLEL_SIZE": idle("the loss is always computed in chunks"),
        **each("PYTORCH_* NCCL_* OMP_* HF_* MODELSCOPE_* WANDB_* SWANLAB_* TOKENIZERS_* USE_HF ASCEND_*",
               idle("a variable of the command, not of the training")),
    }  # fmt: skip


def _command(value: Any, draft: Draft) -> str | None:
    if value not in ("sft", "pt", "rlhf"):
        raise Unlike(f"{shown(value)}: no training of text")
    draft.facts["command"] = value
    return None


def _task(value: Any, draft: Draft) -> str | None:
    if value not in (None, "causal_lm"):
        raise Unlike(f"{shown(value)}: training of a classifier, an embedding or a reranker")
    return None


def _dtype(value: Any, draft: Draft) -> str | None:
    types = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}
    if not isinstance(value, str) or value not in types:
        raise NoEqual(f"{shown(value)} is none of {', '.join(types)}")
    draft.facts |= {"dtype": value, "precision": types[value]}
    return None


def _targets(value: Any, draft: Draft) -> str | None:
    named = texts(value) if not isinstance(value, list) else [text(one) for one in value]
    if set(named) & {"all-router", "all-embedding"}:
        raise NoEqual(f"{shown(value)}: name the modules")
    draft.set("train.lora.targets", "all-linear" if "all-linear" in named else named)
    return None


def _quantized(value: Any, draft: Draft) -> str | None:
    if value not in (None, "bnb"):
        raise NoEqual(f"{shown(value)}: only bitsandbytes is supported")
    return None


def _bits(value: Any, draft: Draft) -> str | None:
    if value not in (4, 8):
        raise NoEqual(f"{shown(value)} is none of 4, 8")
    draft.facts["bits"] = value
    return None


def _thinking(value: Any, draft: Draft) -> str | None:
    draft.set("prepare.rows.template_arguments", {"enable_thinking": flag(value)})
    return None


def _fsdp(value: Any, draft: Draft) -> str | None:
    if value == "fsdp2":
        draft.facts["sharded"] = True
        draft.set("render.strategy", "fsdp")
        return None
    return sharding.fsdp(value, draft)


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = base_model_keys.model("model", draft)
    tuned, bits = facts.get("tuned", "lora"), facts.get("bits")
    draft.key = "tuner_type" if "tuned" in facts else ""
    adapter = tuned == "lora"
    facts["double"] = facts.get("double_quantized", True)
    method_keys.set_method(draft, adapter, ("int8" if bits == 8 else facts.get("kind", "nf4")) if bits else None)
    train = draft.config["train"]
    if not adapter and bits:
        draft.unlike.append(("quant_bits", "a quantized base without an adapter"))
    if bits == 8:
        train["quantization"].pop("double", None)
    lines += _defaults(draft, adapter) + _machine(draft) + _precision(draft, adapter)
    lines += interval_keys.warmup_of_steps(draft)
    lines += sharding.set_strategy(draft, "deepspeed or fsdp")
    lines += swift_objective.set_objective(draft)
    lines += swift_data.write_data(ours, draft)
    facts.setdefault("best", False)
    return lines + scaffold.scaffold(draft)


def _defaults(draft: Draft, adapter: bool) -> list[str]:
    """Set the learning rate and the adapter that ms-swift has by default; return a line."""
    train, written = draft.config["train"], list[str]()
    values: dict[str, Any] = {"learning_rate": 1e-4 if adapter else 1e-5}
    if adapter:
        values |= {"lora.r": 8, "lora.alpha": 32.0, "lora.dropout": 0.05, "lora.targets": "all-linear"}
    draft.key = ""
    for path, value in values.items():
        section = train.get("lora", {}) if path.startswith("lora.") else train
        if path.rpartition(".")[2] not in section:
            draft.set(f"train.{path}", value)
            written.append(f"{path} {value}")
    return [Remark(f"train: {', '.join(written)}, ms-swift's defaults", NO_EFFECT)] if written else []


def _machine(draft: Draft) -> list[str]:
    """Note the GPUs of the command, and the accumulation that gives 16 rows a step without one; return a line."""
    facts = draft.facts
    visible = facts.get("visible")
    seen = len(str(visible).split(",")) if visible is not None else 0
    if "gpus" not in facts and seen:
        facts["gpus"] = 1
    lines: list[str] = []
    if seen > 1 and facts["gpus"] == 1:
        text = f"{seen} GPUs hold a part of the layers each there, without NPROC_PER_NODE; one rank is written"
        lines.append(Remark(f"CUDA_VISIBLE_DEVICES: {text}", NO_EFFECT))
    if "accumulation" not in facts:
        ranks = facts.get("gpus", 1) * facts.get("nodes", 1)
        facts["accumulation"] = max(1, math.ceil(ACCUMULATED / facts.get("micro_batch", 1) / ranks))
        text = (
            f"gradient_accumulation_steps: {facts['accumulation']}, for {ACCUMULATED} rows a step, ms-swift's default"
        )
        lines.append(Remark(text, NO_EFFECT))
    return lines


def _precision(draft: Draft, adapter: bool) -> list[str]:
    facts = draft.facts
    if computation.set_precision(draft):
        draft.set("train.precision", "fp32")
    elif "precision" in facts and "precision" not in draft.config["train"]:
        draft.key = "torch_dtype"
        draft.set("train.precision", facts["precision"])
    if adapter or facts.get("sharded") or facts.get("dtype", "bfloat16") != "bfloat16":
        return []
    draft.key = "torch_dtype" if "dtype" in facts else ""
    draft.set("train.weights", "bf16")
    text = "train.weights: bf16 is written, the type of most models' files, in which they are trained there; correct it"
    return [] if "dtype" in facts else [text]


KNOWN = (
    arguments("transformers", "Seq2SeqTrainingArguments")
    | arguments("swift", "RLHFArguments")
    | arguments("swift", "SftArguments")
)
FORMAT = Format(
    name="swift",
    title=f"ms-swift {version('swift')}",
    needed="model",
    arguments=KNOWN | {"loss_scale": UNKNOWN, "truncation_strategy": None},
    whole=frozenset(
        {"deepspeed", "fsdp_config", "lr_scheduler_kwargs", "columns", "model_kwargs", "gradient_checkpointing_kwargs",
         "eval_dataset_args", "eval_generation_config", "extra_eval_args", "device_map", "max_memory", "rope_scaling",
         "accelerator_config"}
    ),
    defaults={
        "per_device_train_batch_size": 1, "num_train_epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 0,
        "max_grad_norm": 1.0, "weight_decay": 0.1, "adam_beta2": 0.95,
    },
    finish=_finish,
    shared={key: rule for key, rule in training_arguments.training_arguments().items() if key != "model_name_or_path"},
    own=_own(),
)  # fmt: skip
