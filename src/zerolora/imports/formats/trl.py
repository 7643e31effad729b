"""trl-sft, trl-dpo, trl-kto and trl-orpo: YAML of TRL's commands, and of alignment-handbook's recipes.

Keys as in TRL's trl/trainer/*_config.py and trl/scripts/utils.py, and in alignment-handbook's src/alignment/configs.py,
which build on transformers' TrainingArguments.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.arguments import arguments, version
from zerolora.imports.formats import trl_data, trl_objective
from zerolora.imports.formats.import_format import (
    NO_EFFECT,
    Draft,
    Format,
    NoEqual,
    Remark,
    Rule,
    each,
    fact,
    flag,
    idle,
    lost,
    none,
    only,
    same,
    text,
    texts,
    unless_off,
    whole,
)
from zerolora.imports.formats.shared import (
    base_model_keys,
    computation,
    method_keys,
    scaffold,
    sharding,
    training_arguments,
    untranslated_keys,
)
from zerolora.imports.formats.shared.interval_keys import warmup_of_steps

ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "kernels-community/flash-attn2": "flash",
    "sdpa": "sdpa", "eager": "eager",
}  # fmt: skip
CLASSES = {"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "orpo": "ORPOConfig"}
"""The class of a trainer's arguments."""
HANDBOOK: dict[str, Any] = {
    "chat_template": None, "dataset_mixture": None, "dataset_mixture.datasets[].config": None,
    "dataset_mixture.datasets[].split": "train", "dataset_mixture.datasets[].columns": None,
    "dataset_mixture.datasets[].weight": 1.0, "dataset_mixture.seed": 0, "dataset_mixture.test_split_size": None,
}  # fmt: skip
"""alignment-handbook's arguments with their defaults (src/alignment/configs.py, 0.4.0)."""


def _own(trainer: str) -> dict[str, Rule]:
    """Return the rules of the keys of a trainer's commands."""
    rules = {
        "model_revision": Rule("fetch.hub", _revision),
        **each(
            "torch_dtype dtype", Rule("train.weights", _dtype, "bfloat16 → bf16 for method full, without DeepSpeed")
        ),
        "attn_implementation": computation.attention(ATTENTION),
        "use_flash_attention_2": Rule("train.attention", _flash, "true → flash"),
        "use_peft": fact("adapter", "train.method", flag, "true → lora, false → full"),
        "lora_r": same("train.lora.r", whole),
        "lora_target_modules": unless_off(same("train.lora.targets", method_keys.targets)),
        "lora_target_parameters": lost("parameters outside modules, such as experts, get no adapter"),
        "lora_modules_to_save": unless_off(same("train.lora.modules_to_save", texts)),
        "lora_task_type": only("CAUSAL_LM", "adapters of another task are not trained here"),
        "use_rslora": same("train.lora.rank_stabilized", flag),
        "use_dora": method_keys.DORA,
        "load_in_4bit": fact("four", "train.method, train.quantization.type", flag, "with an adapter: qlora with nf4"),
        "load_in_8bit": fact(
            "eight", "train.method, train.quantization.type", flag, "with an adapter: qlora with int8"
        ),
        "bnb_4bit_quant_type": fact("kind", "train.quantization.type", text),
        "use_bnb_nested_quant": fact("double", "train.quantization.double", flag),
        "bnb_4bit_quant_storage": Rule(
            "train.quantization.storage", _storage, "the type that holds 4-bit codes, which does not change them"
        ),
        "model_init_kwargs": none("the model is loaded as its config.json says"),
        "router_aux_loss_coef": lost("the router's auxiliary loss is not used"),
        "activation_offloading": unless_off(same("train.activation_offload", flag)),
        "torch_empty_cache_steps": idle("it frees memory only"),
        **each("pad_to_multiple_of pad_token padding_free", untranslated_keys.ISOLATED),
        "pad_token": unless_off(same("prepare.rows.pad_token", text)),
        **each("dataset_num_proc preprocessing_num_workers dataset_batch_size", untranslated_keys.WORKERS),
        "dataset_streaming": idle("files are streamed"),
        "ignore_bias_buffers": idle("buffers of the model are not trained"),
        "use_liger_kernel": computation.LIGER,
        **each("wandb_entity wandb_project wandb_run_group", idle("the tracker writes offline (docs/telemetry.md)")),
        **each("callbacks benchmarks hub_model_revision system_prompt", untranslated_keys.EVALUATED),
        "use_cache": idle("no cache is kept in training"),
        "env": idle("environment variables of the command"),
        **trl_data.RULES,
    }
    if trainer == "sft":
        return rules | trl_data.SFT_RULES
    return rules | trl_data.PAIR_RULES | trl_objective.RULES[trainer]


def _revision(value: Any, draft: Draft) -> str | None:
    if value == "main":
        return None
    return base_model_keys.REVISION.translate(value, draft)


def _dtype(value: Any, draft: Draft) -> str | None:
    if value not in ("auto", "bfloat16", "float16", "float32", None):
        raise NoEqual(f"{shown(value)} is no dtype of train.precision")
    draft.facts["dtype"] = value
    return None


def _flash(value: Any, draft: Draft) -> str | None:
    draft.set("train.attention", "flash" if flag(value) else "sdpa")
    return None


def _storage(value: Any, draft: Draft) -> str | None:
    raise NoEqual(f"{shown(value)}: the codes are the same; FSDP chooses it here", NO_EFFECT)


def _finish(trainer: str, draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = base_model_keys.model("model_name_or_path", draft)
    adapter, four, eight = (facts.get(key, False) for key in ("adapter", "four", "eight"))
    kind = facts.get("kind", "nf4") if four else "int8"
    draft.key = "use_peft" if "adapter" in facts else ""
    method_keys.set_method(draft, adapter, kind if adapter and (four or eight) else None)
    train = draft.config["train"]
    if adapter:
        draft.key = ""
        lora = train.get("lora", {})
        for name, value in (("r", 16), ("alpha", 32.0), ("dropout", 0.05)):
            if name not in lora:
                draft.set(f"train.lora.{name}", value)
    elif four or eight:
        draft.unlike.append(("load_in_4bit", "a quantized base without an adapter (use_peft)"))
    if adapter and "targets" not in train["lora"]:
        draft.set("train.lora.targets", ["q_proj", "v_proj"])
        text = "q_proj and v_proj are written, peft's default for most types of model; name those of others"
        lines.append(f"train.lora.targets: {text} (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of peft)")
    if computation.set_precision(draft):
        draft.key = "bf16"
        draft.set("train.precision", "fp32")
    lines += warmup_of_steps(draft)
    lines += sharding.set_strategy(draft, "deepspeed or fsdp")
    lines += _trained_in(draft, adapter, four or eight)
    if trainer != "sft":
        lines += trl_objective.set_objective(trainer, draft)
    lines += trl_data.write_data(trainer, ours, draft)
    facts.setdefault("best", False)
    return lines + scaffold.scaffold(draft)


def _trained_in(draft: Draft, adapter: bool, quantized: bool) -> list[str]:
    """Set the type of trained weights: of an adapter fp32, or bf16 on a quantized base, otherwise that in which they
    are loaded; return a line for each assumption."""
    dtype = "bfloat16" if adapter and quantized else None if adapter else draft.facts.get("dtype")
    if dtype == "float16":
        return [Remark("dtype: trained weights are float16 there unless DeepSpeed keeps fp32 ones, and fp32 here")]
    lines = computation.set_weights(draft, "bf16" if dtype == "bfloat16" else "")
    if "weights" in draft.config["train"]:
        text = "as the file names no DeepSpeed config; set fp32 if the command has one, which keeps fp32 weights"
        lines.append(f"train.weights: bf16 is written, {text}, with its render.strategy")
    return lines


def _format(trainer: str) -> Format:
    known = arguments("transformers", "Seq2SeqTrainingArguments")
    known |= arguments("trl", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig")
    known |= arguments("trl", CLASSES[trainer]) | HANDBOOK
    rate = known["learning_rate"]
    return Format(
        name=f"trl-{trainer}",
        title=f"TRL {version('trl')} ({trainer.upper()})",
        needed="model_name_or_path",
        arguments=known | {"lr_scheduler_kwargs": None},
        whole=frozenset(
            {"model_init_kwargs", "deepspeed", "fsdp_config", "lr_scheduler_kwargs", "dataset_kwargs", "dataset_mixer",
             "env", "accelerator_config", "gradient_checkpointing_kwargs"}
        ),
        defaults={
            "per_device_train_batch_size": 8, "learning_rate": rate, "num_train_epochs": 3,
            "lr_scheduler_type": "linear", "warmup_steps": 0, "max_grad_norm": 1.0, "max_length": 1024,
        },
        finish=lambda draft: _finish(trainer, draft),
        shared=training_arguments.training_arguments(),
        own=_own(trainer),
    )  # fmt: skip


FORMATS = [_format(trainer) for trainer in CLASSES]
