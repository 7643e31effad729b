"""The data sets of TRL's and alignment-handbook's configs.

As in TRL's trl/scripts/utils.py and its trainers, and in alignment-handbook's src/alignment/data.py.
"""

import re
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    NO_EFFECT,
    Draft,
    NoEqual,
    Remark,
    Rule,
    each,
    fact,
    flag,
    idle,
    lost,
    named_fact,
    none,
    number,
    only,
    same,
    text,
    texts,
    unless_off,
    unlike,
    whole,
)
from zerolora.imports.formats.shared.preferences import CUT
from zerolora.imports.formats.shared.sets import DATA_FILE, REMOTE, DataSet, write_sets

FORMS = {"sft": "auto", "dpo": "preference", "orpo": "preference", "kto": "labelled"}
SOURCES = "prepare.rows.path, prepare.rows.sources"
RAW = "rows of texts get no template there, and messages the model's own; chat is written"


def _of_set(name: str, convert: Any, new: str, remark: str = "") -> Rule:
    """Return the rule of a key of a data set in a mixture."""

    def translate(value: Any, draft: Draft) -> str | None:
        entry = re.match(r"[\w.]+\[[0-9]+\]", draft.key)
        assert entry
        draft.facts.setdefault("sets", {}).setdefault(entry[0], {})[name] = convert(value)
        return None

    return unless_off(Rule(new, translate, remark))


def _mixer(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, dict):
        raise NoEqual(f"{shown(value)} is not a section of data sets with their fractions")
    draft.facts["mixer"] = {text(name): number(share) for name, share in value.items()}
    return None


LONG = {"keep_start": "truncate_right", "keep_end": "truncate_left"}


def _share(value: Any) -> float:
    share = number(value)
    if not 0 < share <= 1:
        raise NoEqual(f"{shown(value)} is no fraction of a data set's rows; all are used")
    return share


def _length(value: Any, draft: Draft) -> str | None:
    if value is None:
        raise NoEqual("null: rows are never cut there; set prepare.rows.max_length to your longest row", CHANGES)
    draft.set("prepare.rows.max_length", whole(value))
    return None


def _template(value: Any, draft: Draft) -> str | None:
    if value is None:
        return None
    raise NoEqual(
        f"put the template of {shown(value)} into config/templates/, and name it in prepare.rows.template", FILL_IN
    )


def _loss(value: Any) -> str | None:
    if value not in (None, "nll", "chunked_nll"):
        unlike(f"another loss than the cross-entropy ({value})").translate(value, Draft())
    return None


RULES = {
    "dataset_name": fact("dataset_name", SOURCES, text),
    "dataset_config": unless_off(fact("dataset_config", "prepare.rows.path", text, "the subset to download")),
    "dataset_train_split": fact("train_split", SOURCES, text),
    "dataset_test_split": fact("test_split", SOURCES, text, "with eval_strategy: the validation rows"),
    **{
        f"{section}.{key}": rule
        for section, key, rule in (
            *(("datasets[]", key, _of_set(name, text, SOURCES)) for key, name in
              (("path", "path"), ("name", "subset"), ("split", "split"), ("data_dir", "folder"))),
            ("datasets[]", "data_files", _of_set("files", texts, SOURCES)),
            ("datasets[]", "columns", _of_set("columns", texts, "prepare.rows.format")),
            ("datasets[]", "fraction", lost("set weight of prepare.rows.sources")),
            *(("dataset_mixture.datasets[]", key, _of_set(name, text, SOURCES)) for key, name in
              (("id", "path"), ("config", "subset"), ("split", "split"))),
            ("dataset_mixture.datasets[]", "columns", _of_set("columns", texts, "prepare.rows.format")),
            ("dataset_mixture.datasets[]", "weight", _of_set("at_most", _share, SOURCES, "a fraction → at_most")),
        )
    },
    "dataset_mixture.test_split_size": fact("validation_share", "prepare.rows.split.validation", number),
    "dataset_mixture.seed": same("prepare.rows.seed"),
    "test_split_size": unless_off(fact("validation_share", "prepare.rows.split.validation", number)),
    "dataset_mixer": Rule(SOURCES, _mixer, "a fraction below 1 → at_most"),
    "dataset_splits": fact("splits", SOURCES, texts, "train… for training, test… for validation"),
    "dataset_configs": fact("configs", "prepare.rows.path", texts),
    "dataset_kwargs": none("rows are always tokenized, with the template's special tokens"),
    "chat_template": unless_off(
        none("put the template into config/templates/ and name the file in prepare.rows.template", FILL_IN)
    ),
    "max_length": Rule("prepare.rows.max_length", _length),
    "truncation_mode": named_fact("too_long", "prepare.rows.too_long", LONG),
    "auto_insert_empty_system_msg": only(False, "a system prompt is not added to rows"),
}  # fmt: skip
SFT_RULES = {
    "max_seq_length": Rule("prepare.rows.max_length", _length),
    "packing": fact("packing", "pack.packing", flag),
    "packing_strategy": fact("packing_strategy", "pack.packing", text, "wrapped → prepare.rows.concatenate"),
    "eval_packing": idle("validation rows are packed like training rows"),
    "num_of_sequences": idle("packing considers all rows"),
    "dataset_text_field": fact("text_field", "prepare.rows.columns", text, "{text: COLUMN}"),
    "completion_only_loss": unless_off(fact("completion", "prepare.rows.loss", flag, "true → assistant")),
    "assistant_only_loss": fact("assistant", "prepare.rows.loss", flag, "true → assistant, false → everything"),
    "chat_template_path": Rule("prepare.rows.template", _template),
    "eos_token": unless_off(fact("eos", "prepare.rows.stop_tokens", text)),
    "loss_type": Rule("", lambda value, draft: _loss(value), "nll; others stop the import"),
    "shuffle_dataset": idle("rows are always shuffled by the seed"),
}
PAIR_RULES = {
    **each("max_prompt_length max_completion_length max_target_length", unless_off(idle(CUT))),
}


def write_data(trainer: str, model: str, draft: Draft) -> list[str]:
    """Set the data set `rows` of the config; return a line for each assumption and difference."""
    facts = draft.facts
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    rows |= {"model": model, "format": "auto", "template": "chat", "check": "exact"}
    rows["too_long"] = facts.get("too_long", "truncate_right")
    sets, lines = _sets(draft)
    if "eos" in facts:
        rows["stop_tokens"] = [facts["eos"]]
    if trainer == "sft":
        lines += _supervised(sets, draft)
    else:
        rows["too_long"] = "fail"
        lines.append(Remark(f"max_length: {CUT}", NO_EFFECT))
        lines.append(f"prepare.rows.template: {RAW}; set plain for texts")
    for one in sets:
        if one.form == "auto" and "objective" in facts:
            one.form = FORMS[trainer]
    if not sets:
        draft.unlike.append(("dataset_name", "is missing: the file names no data set"))
    return lines + write_sets(sets, draft)


def _supervised(sets: list[DataSet], draft: Draft) -> list[str]:
    """Set what is supervised and packed; return a line for each assumption and difference."""
    facts, rows, lines = draft.facts, draft.config["prepare"]["rows"], list[str]()
    if facts.get("packing") and facts.get("packing_strategy") == "wrapped":
        draft.key = "packing_strategy"
        draft.set("prepare.rows.concatenate", "in_order")
    elif facts.get("packing"):
        draft.key = "packing"
        draft.set("pack.packing", True)
        if draft.config["train"].get("attention") != "flash":
            lines.append(Remark("packing: without flash attention, rows in a packed row attend to each other there"))
    if facts.get("assistant") or facts.get("completion"):
        rows["loss"] = "assistant"
        return lines
    rows["loss"] = "everything"
    if "text_field" in facts and facts["text_field"] != "messages":
        for one in sets:
            one.form = "text"
            one.columns = {} if facts["text_field"] == "text" else {"text": facts["text_field"]}
        rows.pop("template")
    elif all(one.form == "auto" for one in sets) and "completion" not in facts:
        text = (
            "everything is written, which rows of texts or messages train there; set assistant for rows with a prompt"
        )
        lines.append(f"prepare.rows.loss: {text} and a completion")
    return lines


def _sets(draft: Draft) -> tuple[list[DataSet], list[str]]:
    """Return the data sets of a file, and a line for each difference."""
    facts, lines = draft.facts, list[str]()
    evaluated = facts.get("evaluations") != 0 and facts.get("evaluates", False)
    sets: list[DataSet] = []
    for key, values in facts.get("sets", {}).items():
        one = _data_set(key, values.get("path", "rows.json"), values.get("subset"), values.get("split"))
        one.files = [f"{values['folder']}/*"] if "folder" in values else values.get("files", [])
        one.form = _form(values.get("columns", []))
        if values.get("at_most", 1.0) < 1:
            one.at_most = values["at_most"]
            lines.append(Remark(f"{key}.weight: a random part of the rows there, the first {one.at_most:.0%} here"))
        sets.append(one)
    if sets:
        if share := facts.get("validation_share"):
            facts["validation"] = share if 0 < share < 1 else int(share)
        return sets, lines
    if "mixer" in facts:
        return _mixed(draft)
    if "dataset_name" in facts:
        name, subset = facts["dataset_name"], facts.get("dataset_config")
        sets.append(_data_set("dataset_name", name, subset, facts.get("train_split", "train")))
        if evaluated:
            sets.append(_data_set("dataset_test_split", name, subset, facts.get("test_split", "test")))
            sets[-1].held_out = True
    return sets, lines


def _mixed(draft: Draft) -> tuple[list[DataSet], list[str]]:
    """Return the data sets of alignment-handbook's former dataset_mixer, whose fractions are of training rows."""
    facts, lines, sets = draft.facts, list[str](), list[DataSet]()
    configs = facts.get("configs", [])
    for number_, (name, share) in enumerate(facts["mixer"].items()):
        for split in facts.get("splits", ["train", "test"]):
            subset = configs[number_] if number_ < len(configs) else None
            one = _data_set("dataset_mixer", name, subset, split)
            one.held_out = "test" in split
            if share < 1 and not one.held_out:
                one.at_most = share
            sets.append(one)
    return sets, lines


def _data_set(key: str, path: str, subset: str | None, split: str | None) -> DataSet:
    local = not REMOTE.match(path) and (
        path.startswith((".", "/", "~")) or bool(DATA_FILE.search(path)) or path.count("/") > 1
    )
    return DataSet(key=key, path=path, local=local, subset=subset, split=split)


def _form(columns: list[str]) -> str:
    """Return the row format that the selected columns show."""
    return "messages" if "messages" in columns else "text" if columns == ["text"] else "auto"
