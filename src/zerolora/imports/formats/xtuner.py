"""xtuner: XTuner's Python configs (0.2), parsed and never run, alone or with the command in a shell script.

Keys as in XTuner's xtuner/configs/, which are arguments of xtuner, mmengine, peft and transformers.
"""

import re
from collections.abc import Callable
from typing import Any

from zerolora.errors import shown
from zerolora.imports.arguments import arguments, version
from zerolora.imports.formats import xtuner_objective
from zerolora.imports.formats.import_format import (
    FILL_IN,
    NO_EFFECT,
    Draft,
    Format,
    NoEqual,
    Remark,
    Rule,
    Same,
    class_of,
    each,
    fact,
    flag,
    idle,
    lost,
    named,
    none,
    number,
    only,
    pair,
    same,
    text,
    texts,
    unless_off,
    unlike,
    whole,
)
from zerolora.imports.formats.shared import (
    base_model_keys,
    interval_keys,
    method_keys,
    scaffold,
    sharding,
    untranslated_keys,
)
from zerolora.imports.formats.shared.preferences import uncut
from zerolora.imports.formats.shared.sets import BUILDERS, DATA_FILE, REMOTE, DataSet, of_builder, write_sets

TEMPLATES = {
    "internlm2_chat": "chatml", "qwen_chat": "chatml", "minicpm3": "chatml", "llama3_chat": "llama-3-verbatim",
}  # fmt: skip
"""Our templates of the same text (xtuner/utils/templates.py), by name of PROMPT_TEMPLATE."""
MAPS = {
    "oasst1_map_fn": ("messages", "rows of ### Human: and ### Assistant: become messages"),
    "openai_map_fn": ("messages", ""),
    "alpaca_map_fn": ("alpaca", ""),
    "alpaca_zh_map_fn": ("alpaca", "its columns are instruction_zh, input_zh and output_zh"),
    "pretrain_map_fn": ("text", ""),
}
"""Our row format of a dataset_map_fn, and what to do with the rows."""
ALPACA = "a line break follows the instruction there, also without an input"
MODELS = {
    "LLaVAModel": "rows with images",
    "RewardModel": "a reward model",
}
MEANS = "the mean of each micro-batch's tokens there, of the global batch's here"
STRATEGIES = {f"deepspeed_{name}": name for name in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")}
HOOKS = ("DatasetInfoHook", "EvaluateChatHook", "VarlenAttnArgsToMessageHubHook", "ThroughputHook")
HOOKS_OF_EACH = ("timer", "logger", "param_scheduler", "sampler_seed")
CLASS = idle("a class of XTuner, with zerolora's own in its place")
WHOLE = (
    "tokenizer", "model.tokenizer", "model.llm.rope_scaling", "model.lora.rank_pattern", "model.lora.alpha_pattern",
    "train_dataloader.collate_fn", "custom_hooks", "env_cfg", "log_processor",
)  # fmt: skip
READERS = ("load_dataset", "load_jsonl_dataset")
FUNCTIONS = ("process_hf_dataset", "ConcatDataset", "build_preference_dataset")
SETS = ("train_dataloader.dataset", "train_dataloader.dataset.datasets[]")
START = 1e-3
"""Largest first factor of a warm-up that counts as 0."""


def _part(place: str, name: str, convert: Callable[[Any], Any], new: str) -> Rule:
    """Return the rule of a key of a schedule, for `_schedule`."""

    def translate(value: Any, draft: Draft) -> str | None:
        found = re.match(r"\w+\[([0-9]+)\]", draft.key)
        section = draft.facts.setdefault(place, {}).setdefault(int(found[1]) if found else 0, {})
        section[name] = convert(value)
        return None

    return Rule(new, translate)


def _schedules() -> dict[str, Rule]:
    new = "train.schedule, train.warmup_ratio"
    rules = {
        "type": _part("schedules", "type", str, new),
        "start_factor": _part("schedules", "start", number, new),
        "end": _part("schedules", "end", number, new),
        "begin": _part("schedules", "begin", number, new),
        "eta_min": _part("schedules", "lowest", number, "train.schedule_options"),
        "by_epoch": _part("schedules", "by_epoch", flag, new),
        "convert_to_iter_based": only(True, "the rate changes with each step"),
        "T_max": _part("schedules", "T_max", number, new),
    }
    return {f"{place}.{key}": rule for place in ("param_scheduler[]", "param_scheduler") for key, rule in rules.items()}


def _of_set(name: str, convert: Callable[[Any], Any], new: str, remark: str = "") -> Rule:
    """Return the rule of a key of a data set, for `_rows`."""

    def translate(value: Any, draft: Draft) -> str | None:
        _set_of(draft)[name] = convert(value)
        return None

    return Rule(new, translate, remark)


def _set_of(draft: Draft) -> dict[str, Any]:
    """Return the values of the data set that the draft's key belongs to."""
    found = re.search(r"datasets\[([0-9]+)\]", draft.key)
    values: dict[str, Any] = draft.facts.setdefault("sets", {}).setdefault(int(found[1]) if found else 0, {})
    return values


def _data_set(at: str) -> dict[str, Rule]:
    """Return the rules of a data set's section."""
    return {
        f"{at}.type": class_of(FUNCTIONS, "set prepare.rows to the rows that it returns"),
        f"{at}.dataset.type": class_of(READERS, "set prepare.rows to the rows that it returns"),
        **each(f"{at}.dataset.path {at}.dataset.data_dir", unless_off(_of_set("path", text, "prepare.rows.path"))),
        f"{at}.dataset.suffix": idle("only files of rows are read"),
        f"{at}.dataset.name": unless_off(_of_set("subset", text, "prepare.rows.path")),
        f"{at}.dataset.data_files": unless_off(_of_set("files", _files, "prepare.rows.path")),
        f"{at}.split": _of_set("split", text, "prepare.rows.sources"),
        f"{at}.max_length": same("prepare.rows.max_length", whole),
        f"{at}.dataset_map_fn": Rule("prepare.rows.format", _map),
        f"{at}.template_map_fn": lost("the template is prepare.rows.template"),
        f"{at}.template_map_fn.type": CLASS,
        f"{at}.template_map_fn.template": Rule("prepare.rows.template", _template),
        f"{at}.pack_to_max_length": fact("packing", "prepare.rows.concatenate", flag, "with use_varlen_attn packing"),
        f"{at}.shuffle_before_pack": Rule("prepare.rows.concatenate", _order, "true → shuffled, false → in_order"),
        f"{at}.use_varlen_attn": fact("isolated", "pack.packing", flag),
        **xtuner_objective.rules(at),
        f"{at}.max_dataset_length": unless_off(_of_set("most", whole, "prepare.rows.at_most")),
        f"{at}.input_ids_with_output": only(True, "answers are always part of a row"),
        f"{at}.with_image_token": unlike("rows with images"),
        f"{at}.do_dataset_tokenization": only(True, "rows are always tokenized by prepare"),
        f"{at}.rename_maps": lost("set prepare.rows.columns"),
        **each(f"{at}.remove_unused_columns {at}.map_num_proc", untranslated_keys.WORKERS),
        f"{at}.tokenizer": untranslated_keys.TOKENIZER,
    }


def _data() -> dict[str, Rule]:
    """Return the rules of the data."""
    return {
        **_data_set("train_dataloader.dataset"),
        **_data_set("train_dataloader.dataset.datasets[]"),
        "train_dataloader.batch_size": fact("micro_batch", "train.micro_batch, train.global_batch", whole),
        **each("train_dataloader.num_workers train_dataloader.persistent_workers", idle("rows are prepared before")),
        "train_dataloader.sampler.type": CLASS,
        "train_dataloader.sampler.shuffle": only(True, "rows are always shuffled by the seed"),
        "train_dataloader.collate_fn": CLASS,
        "train_dataloader.pin_memory": idle("rows are prepared before"),
    }


def _own() -> dict[str, Rule]:
    """Return the rules of the sections of a config, and of the flags of `xtuner train`."""
    llm, lora, quantized = "model.llm", "model.lora", "model.llm.quantization_config"
    return {
        "model.type": Rule("train.objective", _trainer, "SupervisedFinetune → sft, DPO → dpo or ipo, ORPO → orpo"),
        f"{llm}.type": Rule("", _model_class, "a class of causal language models"),
        f"{llm}.pretrained_model_name_or_path": base_model_keys.MODEL,
        f"{llm}.revision": base_model_keys.REVISION,
        f"{llm}.trust_remote_code": idle("code from model repositories is never run"),
        f"{llm}.torch_dtype": Rule("train.precision", _dtype, "of trained weights, which are fp32 here"),
        f"{quantized}.type": class_of(("BitsAndBytesConfig",), "only bitsandbytes is supported"),
        f"{quantized}.load_in_4bit": fact("four", "train.method, train.quantization.type", flag),
        f"{quantized}.load_in_8bit": fact("eight", "train.method, train.quantization.type", flag),
        f"{quantized}.bnb_4bit_use_double_quant": fact("double", "train.quantization.double", flag),
        f"{quantized}.bnb_4bit_quant_type": fact("kind", "train.quantization.type", text),
        f"{quantized}.bnb_4bit_compute_dtype": idle("train.precision is the compute type"),
        **each(
            f"{quantized}.bnb_4bit_quant_storage {quantized}.llm_int8_has_fp16_weight",
            lost("the strategy chooses the type that holds the codes"),
        ),
        **each(f"{quantized}.llm_int8_threshold", only(6.0, "the threshold of int8 is 6")),
        f"{quantized}.llm_int8_skip_modules": lost("all linear layers but the head are quantized"),
        f"{quantized}.llm_int8_enable_fp32_cpu_offload": lost("the strategy chooses what is offloaded"),
        f"{lora}.type": class_of(("LoraConfig",), "train.method has other methods"),
        f"{lora}.r": same("train.lora.r", whole),
        f"{lora}.lora_alpha": same("train.lora.alpha", number),
        f"{lora}.lora_dropout": same("train.lora.dropout", number),
        f"{lora}.target_modules": unless_off(same("train.lora.targets", method_keys.targets)),
        f"{lora}.modules_to_save": unless_off(same("train.lora.modules_to_save", texts)),
        f"{lora}.bias": only("none", "biases are not trained"),
        f"{lora}.task_type": only("CAUSAL_LM", "adapters of another task are not trained here"),
        f"{lora}.use_rslora": same("train.lora.rank_stabilized", flag),
        f"{lora}.use_dora": method_keys.DORA,
        f"{lora}.init_lora_weights": only(True, "set train.lora.init"),
        f"{lora}.rank_pattern": unless_off(same("train.lora.rank_pattern")),
        f"{lora}.alpha_pattern": unless_off(same("train.lora.alpha_pattern")),
        f"{lora}.fan_in_fan_out": idle("read from the model's modules"),
        **each(f"{lora}.inference_mode {lora}.peft_version", idle("not of a training")),
        "model.peft_model": lost("to start from an adapter, use `continued`"),
        "model.use_activation_checkpointing": same("train.activation_checkpointing", flag),
        "model.use_varlen_attn": fact("isolated", "pack.packing", flag),
        "model.max_position_embeddings": lost("put it into the model's config.json"),
        **each("tokenizer model.tokenizer", untranslated_keys.TOKENIZER),
        **_data(),
        "optim_wrapper.type": class_of(
            ("AmpOptimWrapper", "OptimWrapper", "DeepSpeedOptimWrapper"), "the optimizer is train.optimizer"
        ),
        "optim_wrapper.optimizer.type": named("train.optimizer", {"AdamW": "adamw"}),
        "optim_wrapper.optimizer.lr": same("train.learning_rate", number),
        "optim_wrapper.optimizer.betas": same("train.betas", pair),
        "optim_wrapper.optimizer.weight_decay": same("train.weight_decay", number),
        "optim_wrapper.optimizer.eps": same("train.epsilon", number),
        "optim_wrapper.clip_grad.max_norm": same("train.gradient_clipping", number),
        "optim_wrapper.clip_grad.error_if_nonfinite": idle("a gradient that is not finite skips the step, or stops"),
        "optim_wrapper.accumulative_counts": fact("accumulation", "train.global_batch", whole),
        "optim_wrapper.loss_scale": only("dynamic", "the loss scale of fp16 is dynamic"),
        "optim_wrapper.dtype": fact("amp", "train.precision", text, "without DeepSpeed, which takes that of the GPU"),
        **_schedules(),
        "train_cfg.type": CLASS,
        "train_cfg.max_epochs": same("train.epochs", whole),
        "train_cfg.max_iters": unless_off(same("train.max_steps", whole)),
        **each("val_cfg val_dataloader val_evaluator test_cfg test_dataloader test_evaluator",
               unless_off(none("its tasks are not those of zerolora (docs/tasks.md)", NO_EFFECT))),
        "custom_hooks": Rule("", _hooks, f"{', '.join(HOOKS)}: the report shows answers to held-out rows"),
        "default_hooks": idle("telemetry and checkpoints are zerolora's own"),
        "default_hooks.checkpoint.interval": Rule("train.checkpoint_steps", _saved),
        "default_hooks.checkpoint.by_epoch": fact("by_epoch", "train.checkpoint_steps", flag),
        "default_hooks.checkpoint.max_keep_ckpts": Rule("train.keep_checkpoints", interval_keys.kept, "-1 → all"),
        **each("env_cfg visualizer log_level log_processor work_dir launcher", untranslated_keys.LOGS),
        **each("load_from resume", lost("a run resumes from its own last checkpoint (train.resume)")),
        "randomness.seed": unless_off(same("train.seed", whole)),
        **each("randomness.deterministic randomness.diff_rank_seed", idle("docs/training.md says what is equal")),
        "sequence_parallel_size": sharding.sequence_parallel(),
        "deepspeed": sharding.strategy(STRATEGIES),
        "command": idle("the command"),
        "seed": same("train.seed", whole),
        **each("work-dir auto-resume", untranslated_keys.LOGS),
        "NPROC_PER_NODE": fact("gpus", "hardware.gpus_per_node, train.ranks_per_node", whole),
        "NNODES": fact("nodes", "hardware.nodes, train.nodes", whole),
        **each("CUDA_VISIBLE_DEVICES NODE_RANK PORT ADDR MASTER_* NCCL_* OMP_* HF_*", untranslated_keys.LAUNCHER),
    }  # fmt: skip


def _hooks(value: Any, draft: Draft) -> str | None:
    entries = value if isinstance(value, list) else [value]
    named = [str(entry.get("type")) if isinstance(entry, dict) else str(entry) for entry in entries]
    if others := [name for name in named if name not in HOOKS]:
        raise NoEqual(f"{', '.join(others)}: a hook that zerolora does not run")
    raise NoEqual("the report shows answers to held-out rows", NO_EFFECT)


def _dtype(value: Any, draft: Draft) -> str | None:
    draft.facts["dtype"] = str(value).rpartition(".")[2]
    return None


def _files(value: Any) -> list[str]:
    return texts(value.get("train", next(iter(value.values()), None)) if isinstance(value, dict) else value)


def _model_class(value: Any, draft: Draft) -> str | None:
    if not str(value).endswith("ForCausalLM.from_pretrained"):
        raise NoEqual(f"{shown(value)}: the model is a causal language model")
    raise Same


def _trainer(value: Any, draft: Draft) -> str | None:
    if str(value) in xtuner_objective.TRAINERS:
        draft.facts["trainer"] = str(value)
        return None
    return class_of(("SupervisedFinetune",), "another training than supervised fine-tuning", MODELS).translate(
        value, draft
    )


def _order(value: Any, draft: Draft) -> str | None:
    order = "shuffled" if flag(value) else "in_order"
    draft.facts.setdefault("orders", set()).add(order)
    return None


def _map(value: Any, draft: Draft) -> str | None:
    name = str(value)
    if name in xtuner_objective.READS:
        _set_of(draft)["pairs"] = name
        return None
    _of_set("form", lambda form: form, "").translate(MAPS.get(name, ("messages", "")), draft)
    if name not in MAPS:
        raise NoEqual(f"{shown(name)}: write the rows that it gives (docs/data.md)", FILL_IN)
    return ALPACA if MAPS[name][0] == "alpaca" else None


def _template(value: Any, draft: Draft) -> str | None:
    name = str(value).rpartition(".")[2]
    if name in TEMPLATES:
        draft.facts["template"] = TEMPLATES[name]
        return None
    draft.facts["template"] = "chat"
    return f"{shown(name)} has no equal: chat, the model's own chat template, is written"


def _saved(value: Any, draft: Draft) -> str | None:
    draft.facts["saved"] = whole(value)
    return None


def _finish(draft: Draft) -> list[str]:
    facts = draft.facts
    ours, lines = base_model_keys.model("model.llm.pretrained_model_name_or_path", draft)
    draft.key = ""
    adapter = bool(draft.config.get("train", {}).get("lora"))
    four, eight = facts.get("four", False), facts.get("eight", False)
    kind = facts.get("kind", "fp4") if four else "int8"
    method_keys.set_method(draft, adapter, kind if adapter and (four or eight) else None)
    train = draft.config["train"]
    if adapter:
        train["lora"].setdefault("targets", "all-linear")  # find_all_linear_names
    elif four or eight:
        draft.unlike.append(("model.llm.quantization_config", "a quantized base without an adapter"))
    elif facts.get("dtype") == "float16" and not facts.get("sharded"):
        lines.append(Remark("model.llm.torch_dtype: trained weights are float16 there, fp32 here"))
    if not facts.get("sharded") and (amp := facts.get("amp")):
        draft.key = "optim_wrapper.dtype"
        draft.set("train.precision", {"float16": "fp16", "bfloat16": "bf16"}.get(amp, "auto"))
    if "sharded" not in facts:
        lines.append(
            "render.strategy: the command's --deepspeed is not in the file; set it, e.g. deepspeed_zero2, or import a "
            "script with the command"
        )
    lines += sharding.set_strategy(draft, "deepspeed")
    lines += [*_schedule(draft), *xtuner_objective.set_objective(draft)]
    lines += [*_packed(draft), *_batches(draft), *_rows(ours, draft)]
    if "saved" in facts:
        draft.facts["saves"] = facts["saved"]
        if not facts.get("by_epoch", True):
            del facts["saves"]
            draft.set("train.checkpoint_steps", facts["saved"])
    return lines + scaffold.scaffold(draft)


def _schedule(draft: Draft) -> list[str]:
    """Set warm-up and schedule from mmengine's: a LinearLR that rises, then a CosineAnnealingLR; return a line for
    each difference."""
    parts = list(draft.facts.get("schedules", {}).values())
    epochs = draft.config["train"].get("epochs")
    draft.key = "param_scheduler"
    warm = next((part for part in parts if part.get("type") == "LinearLR"), None)
    falls = [part for part in parts if part is not warm]
    lines: list[str] = []
    warmed = warm.get("end", 0.0) if warm else 0.0
    if any(part.get("begin", 0) != begin for part, begin in ((warm or {}, 0), *((part, warmed) for part in falls[:1]))):
        return [Remark("param_scheduler: the rate rises or falls after a pause; train.schedule keeps its default")]
    if any(part.get("by_epoch", True) is False for part in parts) or not epochs:
        return [Remark("param_scheduler: counts steps; set train.schedule and train.warmup_steps")] if parts else []
    if warm is None:
        draft.set("train.warmup_ratio", 0.0)
    else:
        draft.set("train.warmup_ratio", warm.get("end", 0.0) / epochs)
        if warm.get("start", 1 / 3) > START:
            lines.append(
                Remark(f"param_scheduler: starts at {warm.get('start', 1 / 3):g} of the rate there, at 0 here")
            )
    if not falls:
        draft.set("train.schedule", "constant_with_warmup")
    elif [part.get("type") for part in falls] == ["CosineAnnealingLR"] and falls[0].get("end", epochs) == epochs:
        lowest, rate = falls[0].get("lowest", 0.0), draft.config["train"].get("learning_rate")
        draft.set("train.schedule", "cosine_with_min_lr" if lowest else "cosine")
        if lowest and rate:
            draft.set("train.schedule_options", {"min_lr": lowest})
    else:
        kinds = ", ".join(str(part.get("type")) for part in falls)
        lines.append(Remark(f"param_scheduler: {kinds} has no equal; train.schedule keeps its default"))
    return lines


def _packed(draft: Draft) -> list[str]:
    """Set packing, or the rows that are cut from others which are joined end to end."""
    facts, orders = draft.facts, draft.facts.get("orders", {"shuffled"})
    draft.key = ""
    if facts.get("objective"):
        if facts.get("isolated"):
            draft.set("pack.packing", True)
            draft.set("pack.capacity", facts.get("capacity", 16384))
        return []
    if not facts.get("packing", True):
        return []
    if facts.get("isolated"):
        draft.set("pack.packing", True)
        text = "a row is cut at the end of a packed row there, and joins another one here"
        return [Remark(f"train_dataloader.dataset.use_varlen_attn: {text}")]
    draft.set("prepare.rows.concatenate", min(orders))
    if len(orders) > 1:
        return [Remark("train_dataloader.dataset.shuffle_before_pack: of some data sets there, of all or none here")]
    return []


def _batches(draft: Draft) -> list[str]:
    """Set the mean of the loss: of a micro-batch of one row it is the mean of that row."""
    facts = draft.facts
    if facts.get("accumulation", 1) == 1 and facts.get("gpus", 1) == 1:
        return []
    if facts.get("objective"):
        return xtuner_objective.means(draft)
    if facts.get("micro_batch", 1) > 1 or (facts.get("packing", True) and facts.get("isolated")):
        return [Remark(f"optim_wrapper.accumulative_counts: the loss is {MEANS}")]
    draft.key = "optim_wrapper.accumulative_counts"
    draft.set("train.sft.mean", "row")
    return []


def _rows(model: str, draft: Draft) -> list[str]:
    """Set the data set `rows`; return a line for each assumption."""
    facts, lines, sets = draft.facts, list[str](), list[DataSet]()
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    named = [values for values in facts.get("sets", {}).values() if "path" in values or "files" in values]
    plain = bool(named) and all(values.get("form", ("auto", ""))[0] == "text" for values in named)
    rows |= {"model": model, "format": "auto", "too_long": "truncate_right", "check": "exact"}
    rows |= {"loss": "everything"} if plain else {"loss": "assistant", "template": facts.get("template", "chat")}
    if not named:
        draft.unlike.append(("train_dataloader", "its data set is none that `load_dataset` reads"))
    for values in named:
        form, todo = values.get("form", ("auto", ""))
        path, files = values.get("path", "json"), values.get("files", [])
        if path in BUILDERS and files:
            path, files = of_builder(files)
        local = not REMOTE.match(path) and (path.startswith((".", "/", "~")) or bool(DATA_FILE.search(path)))
        one = DataSet("train_dataloader.dataset", path, local, form=form, subset=values.get("subset"), files=files)
        one.split, one.at_most = values.get("split", "train"), values.get("most")
        if facts.get("objective"):
            one.form, one.ignore = "preference", xtuner_objective.unread_columns(values.get("pairs", ""))
        sets.append(one)
        lines += [f"prepare.rows.path: {todo}, of {path}: convert them (docs/data.md)"] if todo else []
    lines += write_sets(sets, draft)
    if facts.get("objective"):
        del rows["loss"]
        lines += uncut("train_dataloader.dataset.max_length", draft)
    return lines


def _arguments() -> dict[str, Any]:
    """Return the defaults of the arguments of a config's sections."""
    sections = {
        "model.llm.quantization_config": arguments("transformers", "BitsAndBytesConfig"),
        "model.lora": arguments("peft", "LoraConfig"),
        "model": arguments("xtuner", "DPO", "ORPO", "SupervisedFinetune"),
        "train_dataloader.dataset": arguments("xtuner", "build_preference_dataset", "process_hf_dataset"),
        "train_dataloader.dataset.datasets[]": arguments("xtuner", "process_hf_dataset"),
    }
    known = {f"{section}.{key}": default for section, keys in sections.items() for key, default in keys.items()}
    tops = {**dict.fromkeys(("visualizer", "load_from", "val_cfg", "val_dataloader", "val_evaluator")), "resume": False}
    return known | tops | {"randomness.seed": None, "sequence_parallel_size": 1}


FORMAT = Format(
    name="xtuner",
    title=f"XTuner {version('xtuner')}",
    needed="train_dataloader",
    arguments=_arguments(),
    whole=frozenset({
        *WHOLE, *(f"default_hooks.{hook}" for hook in HOOKS_OF_EACH),
        *(f"{each}.{key}" for each in SETS for key in ("tokenizer", "dataset.data_files")),
    }),
    defaults={},
    finish=_finish,
    shared={},
    own=_own(),
)  # fmt: skip
