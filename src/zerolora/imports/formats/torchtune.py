"""torchtune: YAML of torchtune's recipes lora_finetune and lora_dpo.

Keys as in torchtune's recipes/configs/; a section with `_component_` has the arguments of that function or class.
"""

import re
from typing import Any

from zerolora.errors import shown
from zerolora.imports.arguments import arguments, version
from zerolora.imports.formats.import_format import (
    FILL_IN,
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
    named,
    named_fact,
    none,
    number,
    only,
    pair,
    same,
    text,
    unless_off,
    unlike,
    whole,
)
from zerolora.imports.formats.shared import base_model_keys, method_keys, scaffold, sharding, untranslated_keys
from zerolora.imports.formats.shared.preferences import ChosenObjective, uncut, write
from zerolora.imports.formats.shared.sets import DATA_FILE, REMOTE, DataSet, write_sets

OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "bitsandbytes.optim.AdamW": "adamw", "bitsandbytes.optim.PagedAdamW": "paged_adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit", "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
}  # fmt: skip
LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
"""Of which the mean is that of all tokens of a step (recipes/lora_finetune_single_device.py)."""
LONG = {"right": "truncate_right", "left": "truncate_left"}
STYLES = {"openai": "messages", "sharegpt": "sharegpt"}
MODULES = {"output_proj": "o_proj"}
"""Our names of attention's layers where they differ; mlp and output are flags there."""
MLP = ("gate_proj", "up_proj", "down_proj")
DATA = {
    "alpaca_dataset": ("alpaca", "tatsu-lab/alpaca", True), "alpaca_cleaned_dataset": ("alpaca", "yahma/alpaca-cleaned",
    True), "chat_dataset": ("messages", None, False), "instruct_dataset": ("prompt", None, False),
    "preference_dataset": ("preference", None, False),
    "stack_exchange_paired_dataset": ("preference", "lvwerra/stack-exchange-paired", False),
    "text_completion_dataset": ("text", None, True),
    "slimorca_dataset": ("sharegpt", "Open-Orca/SlimOrca-Dedup", False),
}  # fmt: skip
"""Our row format, the default source and the default of train_on_input, by builder."""
PAIRED = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
"""Columns of stack_exchange_paired_dataset."""
ALPACA = "Stanford's prompt is the user's turn there; the instruction and its input are, here"
TURNS = "turns have the form of torchtune's tokenizer there; chat, the model's own template, is written"
LENGTH = 2048
"""max_length that is written where rows have any length there."""


def _data(section: str) -> dict[str, Rule]:
    """Return the rules of `dataset` or `dataset_val`."""
    new = "prepare.rows.path, prepare.rows.sources"

    def part(name: str, convert: Any) -> Rule:
        def translate(value: Any, draft: Draft) -> str | None:
            draft.facts.setdefault("sets", {}).setdefault(section, {})[name] = convert(value)
            return None

        return unless_off(Rule(new, translate))

    return {
        f"{section}._component_": Rule("prepare.rows.format", _builder(section), ", ".join(DATA)),
        f"{section}.source": part("source", text),
        f"{section}.data_files": part("files", text),
        f"{section}.split": part("split", text),
        f"{section}.subset": part("subset", text),
        f"{section}.name": part("subset", text),
        f"{section}.packed": fact("packed", "pack.packing", flag),
        f"{section}.train_on_input": fact("on_input", "prepare.rows.loss", flag, "true → everything"),
        f"{section}.conversation_column": part("messages", text),
        f"{section}.conversation_style": named_fact("style", "prepare.rows.format", STYLES),
        f"{section}.column": part("text", text),
        f"{section}.column_map": unless_off(none("set prepare.rows.columns", FILL_IN)),
        f"{section}.new_system_prompt": unless_off(same("prepare.rows.system", text)),
        f"{section}.filter_fn": lost("all rows are used"),
        f"{section}.split_across_pack": lost("a row is never cut in packing"),
        f"{section}.add_eos": only(True, "an answer always ends with its end token"),
    }


def _own() -> dict[str, Rule]:
    """Return the rules of the keys of a recipe's config."""
    return {
        "model._component_": Rule("train.method", _model, "lora_… → lora, qlora_… → qlora, others → full"),
        "model.lora_attn_modules": fact("attention", "train.lora.targets", _layers, "output_proj → o_proj"),
        "model.apply_lora_to_mlp": fact("mlp", "train.lora.targets", flag, f"true → {', '.join(MLP)}"),
        "model.apply_lora_to_output": fact("output", "train.lora.targets", flag, "true → lm_head"),
        "model.lora_rank": same("train.lora.r", whole),
        "model.lora_alpha": same("train.lora.alpha", number),
        "model.lora_dropout": same("train.lora.dropout", number),
        "model.use_dora": method_keys.DORA,
        "model.quantize_base": fact("quantized", "train.method", flag, "true → qlora"),
        **each("model.decoder_trainable model.encoder_trainable model.fusion_trainable model.image_size",
               unlike("rows with images")),
        "checkpointer.checkpoint_dir": base_model_keys.MODEL,
        "checkpointer": idle("all files of the model's directory are read"),
        "checkpointer.adapter_checkpoint": lost("to start from an adapter, use `continued`"),
        "checkpointer.recipe_checkpoint": lost("a run resumes from its own last checkpoint (train.resume)"),
        "tokenizer._component_": idle("the tokenizer in the model's directory is used"),
        **each("tokenizer.path tokenizer.merges_file tokenizer.special_tokens_path", untranslated_keys.TOKENIZER),
        "tokenizer.max_seq_len": unless_off(fact("length", "prepare.rows.max_length", whole)),
        "tokenizer.prompt_template": lost("put the prompt into a Jinja file, and name it in prepare.rows.template"),
        "tokenizer.truncation_type": named_fact("too_long", "prepare.rows.too_long", LONG),
        **_data("dataset"),
        **_data("dataset_val"),
        "run_val_every_n_steps": unless_off(same("train.validation_steps", whole)),
        "batch_size_val": untranslated_keys.EVALUATION_BATCH,
        "collate_fn": idle("batches are zerolora's own"),
        "seed": unless_off(same("train.seed", whole)),
        "shuffle": only(True, "rows are always shuffled by the seed"),
        "optimizer._component_": named("train.optimizer", OPTIMIZERS),
        "optimizer.lr": same("train.learning_rate", number),
        "optimizer.weight_decay": same("train.weight_decay", number),
        "optimizer.betas": same("train.betas", pair),
        "optimizer.eps": same("train.epsilon", number),
        "optimizer.fused": idle("the same computation"),
        "optimizer_in_bwd": lost("gradients of a step are summed before the optimizer"),
        "lr_scheduler._component_": Rule("train.schedule", _schedule, "get_cosine_schedule_with_warmup → cosine"),
        "lr_scheduler.num_warmup_steps": same("train.warmup_steps"),
        "lr_scheduler.num_cycles": only(0.5, "the cosine falls once, to 0"),
        "loss._component_": Rule("train.objective", _loss, f"{', '.join(LOSSES)} → sft, DPOLoss → dpo; others stop"),
        "loss.beta": fact("beta", "train.dpo.beta", number),
        "loss.label_smoothing": lost("conservative DPO has no equal; robust has another loss"),
        "loss.ignore_index": idle("tokens without loss are masked"),
        "loss.num_output_chunks": idle("logits are computed in chunks"),
        **each("teacher_model teacher_checkpointer kd_loss kd_ratio", unlike("distillation from a teacher")),
        "quantizer": unlike("quantization-aware training"),
        "epochs": same("train.epochs", whole),
        "batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        "gradient_accumulation_steps": fact("accumulation", "train.global_batch", whole),
        "max_steps_per_epoch": unless_off(fact("most", "train.max_steps", whole, "times epochs")),
        "clip_grad_norm": Rule("train.gradient_clipping", _clipped, "null → 0"),
        "compile": same("train.compile", flag),
        "dtype": Rule("train.precision, train.weights", _dtype, "bf16, fp16, fp32, also of adapters"),
        "device": Rule("hardware.device", _device, "cpu → cpu"),
        "enable_activation_checkpointing": same("train.activation_checkpointing", flag),
        "enable_activation_offloading": unless_off(same("train.activation_offload", flag)),
        "fsdp_cpu_offload": fact("offload", "render.strategy", flag, "true → fsdp_offload"),
        **each("fsdp_reshard_after_forward custom_sharded_layers fsdp data_parallel_shard_dim "
               "data_parallel_replicate_dim", idle(sharding.FSDP)),
        **each("tensor_parallel_dim tensor_parallel_plan context_parallel_dim",
               idle("set train.sequence_parallel and render.strategy")),
        "resume_from_checkpoint": lost("a run resumes from its own last checkpoint (train.resume)"),
        **each("save_adapter_weights_only enable_async_checkpointing keep_last_n_checkpoints save_every_n_steps",
               idle("checkpoints are written by time: train.checkpoint_minutes")),
        **each("metric_logger log_every_n_steps log_peak_memory_stats log_level profile_memory profiler",
               idle("telemetry has every step (docs/telemetry.md)")),
        **each("output_dir checkpoint_dir model_type", idle("results are in results/<run>/")),
        "cudnn_deterministic_mode": idle("docs/training.md says what is equal"),
        **each("low_cpu_ram", untranslated_keys.LOADED_IN_PARTS),
    }  # fmt: skip


def _model(value: Any, draft: Draft) -> str | None:
    name = text(value).rpartition(".")[2]
    if re.search(r"vision|clip|llama4|reward|classifier", name):
        raise Unlike(f"{name}: a model of images, or a classifier")
    draft.facts["builder"] = name
    return None


def _builder(section: str) -> Any:
    def translate(value: Any, draft: Draft) -> str | None:
        name = text(value).rpartition(".")[2]
        if "multimodal" in value:
            raise Unlike(f"{name}: rows with images")
        draft.facts.setdefault("sets", {}).setdefault(section, {})["builder"] = name
        if name not in DATA:
            raise NoEqual(f"{shown(name)}: convert its rows to a format of docs/data.md")
        return None

    return translate


def _layers(value: Any) -> list[str]:
    return [text(each) for each in value] if isinstance(value, list) else [text(value)]


def _schedule(value: Any, draft: Draft) -> str | None:
    if str(value).rpartition(".")[2] != "get_cosine_schedule_with_warmup":
        raise NoEqual(f"{shown(value)} is not a schedule of docs/methods.md; train.schedule keeps its default")
    draft.set("train.schedule", "cosine")
    return None


def _loss(value: Any, draft: Draft) -> str | None:
    name = str(value).rpartition(".")[2]
    if name != "DPOLoss" and name not in LOSSES and name != "CrossEntropyLoss":
        raise Unlike(f"{name}: another loss")
    draft.facts["loss"] = name
    return None


def _clipped(value: Any, draft: Draft) -> str | None:
    draft.set("train.gradient_clipping", 0.0 if value is None else number(value))
    return None


def _dtype(value: Any, draft: Draft) -> str | None:
    if value not in ("bf16", "fp16", "fp32"):
        raise NoEqual(f"{shown(value)} is none of bf16, fp16, fp32")
    draft.set("train.precision", value)
    if value == "bf16":
        draft.set("train.weights", value)
    return "adapters are trained in fp16 there, in fp32 here" if value == "fp16" else None


def _device(value: Any, draft: Draft) -> str | None:
    draft.facts |= {"cpu": value == "cpu", "cuda": value == "cuda"}
    if value not in ("cpu", "cuda"):
        raise NoEqual(f"{shown(value)} is none of cpu, cuda")
    return None


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = base_model_keys.model("checkpointer.checkpoint_dir", draft)
    name = facts.get("builder", "")
    adapter = name.startswith(("lora_", "qlora_"))
    quantized = adapter and (name.startswith("qlora_") or facts.get("quantized", False))
    facts["double"] = True
    draft.key = "model._component_"
    method_keys.set_method(draft, adapter, "nf4" if quantized else None)
    if quantized:
        lines.append(Remark("model._component_: torchao's NF4 there, whose scales are quantized in another way"))
    if adapter:
        lines += _targets(name, draft)
    if "lr_scheduler._component_" not in facts and "schedule" not in draft.config["train"]:
        draft.set("train.schedule", "constant")
    if "gradient_clipping" not in draft.config["train"]:
        draft.set("train.gradient_clipping", 0.0)
    draft.config["train"].setdefault("weight_decay", 0.01)  # of torch's AdamW
    if facts.get("most"):
        draft.key = "max_steps_per_epoch"
        draft.set("train.max_steps", facts["most"] * draft.config["train"].get("epochs", 1))
        if draft.config["train"].get("epochs", 1) > 1:
            lines.append(Remark("max_steps_per_epoch: each epoch ends there; here the whole training after as many"))
    draft.key = ""
    if facts.get("offload"):
        draft.set("render.strategy", "fsdp_offload")
    lines += sharding.set_strategy(draft, "fsdp")
    lines.append("render.strategy: of one GPU; set fsdp for `tune run --nproc_per_node`, with hardware")
    if facts.get("loss") == "DPOLoss":
        section = {"loss": "sigmoid", "beta": facts.get("beta", 0.1), "sft_weight": 0.0}
        facts["dropout"] = True
        lines += write(ChosenObjective("dpo", section, set()), "loss._component_", "", draft)
    facts.setdefault("best", False)
    return lines + _rows(ours, draft) + scaffold.scaffold(draft)


def _targets(name: str, draft: Draft) -> list[str]:
    """Set the adapted layers by the names of transformers' models; return a line where these may differ."""
    facts = draft.facts
    named = [MODULES.get(each, each) for each in facts.get("attention", [])]
    named += [*(MLP if facts.get("mlp") else ()), *(["lm_head"] if facts.get("output") else [])]
    draft.key = "model.lora_attn_modules"
    draft.set("train.lora.targets", named or "all-linear")
    if "phi" in name:
        return [Remark("model.lora_attn_modules: Phi's layers are joined here: name qkv_proj and gate_up_proj")]
    return []


def _rows(model: str, draft: Draft) -> list[str]:
    """Set the data set `rows`; return a line for each assumption and difference."""
    facts, lines = draft.facts, list[str]()
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    rows |= {"model": model, "format": "auto", "too_long": facts.get("too_long", "truncate_right"), "check": "exact"}
    rows["max_length"] = facts.get("length", LENGTH)
    if "length" not in facts:
        lines.append(f"prepare.rows.max_length: rows have any length there; {LENGTH} is written: correct it")
    sets: list[DataSet] = []
    for key, values in facts.get("sets", {}).items():
        if key == "dataset_val" and "validation_steps" not in draft.config["train"]:
            continue
        sets.append(_set(key, values, draft))
    first = facts.get("sets", {}).get("dataset", {}).get("builder", "")
    form, _, on_input = DATA.get(first, ("auto", None, False))
    if "objective" not in facts:
        rows["loss"] = "everything" if facts.get("on_input", on_input) else "assistant"
    if form == "alpaca":
        lines.append(Remark(f"dataset._component_: {ALPACA}"))
    lines += uncut("tokenizer.truncation_type", draft)
    if form != "text":
        rows["template"] = "chat"
        lines.append(Remark(f"tokenizer._component_: {TURNS}"))
    if facts.get("packed"):
        draft.key = "dataset.packed"
        draft.set("pack.packing", True)
    if not sets:
        draft.unlike.append(("dataset", "is missing: the file names no data set"))
    return lines + write_sets(sets, draft)


def _set(key: str, values: dict[str, Any], draft: Draft) -> DataSet:
    form, source, _ = DATA.get(values.get("builder", ""), ("auto", None, False))
    path, files = values.get("source") or source or "rows.json", []
    if path in ("json", "csv", "parquet", "text") and "files" in values:
        path = values["files"]
    elif "files" in values:
        files = [values["files"]]
    local = not REMOTE.match(path) and (path.startswith((".", "/", "~")) or bool(DATA_FILE.search(path)))
    form = draft.facts.get("style", form) if form == "messages" else form
    if draft.facts.get("objective"):
        form = "preference"
    one = DataSet(key, path, local, form=form, subset=values.get("subset"), split=values.get("split"), files=files)
    if values.get("builder") == "stack_exchange_paired_dataset":
        one.columns = dict(PAIRED)
    if column := values.get("messages"):
        one.columns = {"conversations" if form == "sharegpt" else "messages": column}
    if form == "text" and values.get("text", "text") != "text":
        one.columns = {"text": values["text"]}
    one.held_out = key == "dataset_val"
    return one


def _arguments() -> dict[str, Any]:
    """Return the defaults of the arguments of a recipe, and of the components that most configs name."""
    sections = {
        "model": arguments("torchtune", "lora_llama3_1_8b"),
        "dataset": arguments("torchtune", "alpaca_dataset", "chat_dataset", "preference_dataset"),
        "lr_scheduler": arguments("torchtune", "get_cosine_schedule_with_warmup"),
        "loss": arguments("torchtune", "DPOLoss"),
    }
    left_out = ("dataset.tokenizer", "dataset.source", "dataset.train_on_input", "lr_scheduler.optimizer")
    known = {f"{section}.{key}": default for section, keys in sections.items() for key, default in keys.items()}
    known |= arguments("torchtune", "cfg") | {"seed": None, "max_steps_per_epoch": None, "tokenizer.max_seq_len": None}
    known["checkpointer.recipe_checkpoint"], known["resume_from_checkpoint"] = None, False
    return {key: default for key, default in known.items() if key not in left_out}


FORMAT = Format(
    name="torchtune",
    title=f"torchtune {version('torchtune')}",
    needed="checkpointer",
    arguments=_arguments(),
    whole=frozenset({"profiler", "metric_logger", "teacher_model", "teacher_checkpointer", "quantizer", "kd_loss",
                     "checkpointer.checkpoint_files", "dataset.column_map", "dataset_val.column_map",
                     "tokenizer.prompt_template"}),
    defaults={},
    finish=_finish,
    shared={},
    own=_own(),
)  # fmt: skip
