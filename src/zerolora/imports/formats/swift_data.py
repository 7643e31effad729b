"""The data sets of an ms-swift command: `hub/name:subset#rows`, or a path with `#rows`.

As in ms-swift's swift/dataset/dataset_syntax.py and swift/arguments/base_args/data_args.py.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    FILL_IN,
    NO_EFFECT,
    Draft,
    NoEqual,
    Remark,
    Rule,
    each,
    fact,
    idle,
    lost,
    named_fact,
    none,
    only,
    same,
    text,
    texts,
    unless_off,
    whole,
)
from zerolora.imports.formats.shared import scaffold, untranslated_keys
from zerolora.imports.formats.shared.preferences import uncut
from zerolora.imports.formats.shared.sets import DATA_FILE, REMOTE, DataSet, write_sets

SOURCES = "prepare.rows.path, prepare.rows.sources"
LONG = {"delete": "drop", "left": "truncate_left", "right": "truncate_right", "split": "split"}
LOSSES = {"default": "assistant", "last_round": "last", "all": "everything"}
MOST = 2048
"""max_length that is written where it is the model's."""
THOUGHTS = (
    "chat, the model's own, is written; before an answer of a model that may think, ms-swift writes an empty thought "
    "and does not supervise it: compare results/data/rows/mask.html"
)
FORMS = {"kto": "labelled"}


def _named(value: Any) -> list[str]:
    return [text(one) for one in value] if isinstance(value, list) else texts(value)


def _loss(value: Any, draft: Draft) -> str | None:
    name = text(value)
    parts = name.split("+")
    if parts[0] not in LOSSES:
        raise NoEqual(f"{shown(name)} weights parts of an answer; all tokens have the same weight")
    draft.facts["loss"] = LOSSES[parts[0]]
    if [part for part in parts[1:] if part != "ignore_empty_think"]:
        return f"{shown(name)}: all supervised tokens have the same weight"
    return "an empty thought is supervised here" if len(parts) > 1 else None


def _columns(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, dict) or not all(isinstance(one, str) for pair in value.items() for one in pair):
        raise NoEqual(f"{shown(value)} is not a section of columns")
    draft.facts["columns"] = {ours: theirs for theirs, ours in value.items()}
    raise NoEqual(f"{shown(value)}: names the standard column of each; set prepare.rows.columns", FILL_IN)


def _replaced(value: Any, draft: Draft) -> str | None:
    said = f"{shown(value)} replaces {{{{{draft.key.rpartition('_')[2].upper()}}}}} in rows there"
    raise NoEqual(f"{said}; replace it in yours", FILL_IN)


RULES = {
    "dataset": unless_off(fact("dataset", SOURCES, _named, "name#500 → rows")),
    "val_dataset": unless_off(fact("val_dataset", SOURCES, _named, "validation rows")),
    **each("cached_dataset cached_val_dataset", unless_off(none("rows are always prepared; name the data set"))),
    "split_dataset_ratio": Rule("prepare.rows.split.validation", scaffold.validation),
    "data_seed": same("prepare.rows.seed"),
    **each("dataset_num_proc load_from_cache_file download_mode", untranslated_keys.WORKERS),
    "dataset_shuffle": only(True, "rows are always shuffled by the seed"),
    "val_dataset_shuffle": idle("the order of validation rows changes nothing"),
    **each("streaming shuffle_buffer_size", idle("files are streamed")),
    "interleave_prob": lost("set weight of prepare.rows.sources"),
    "stopping_strategy": idle("used only with interleave_prob"),
    "columns": unless_off(Rule("prepare.rows.columns", _columns)),
    "disable_auto_column_mapping": idle("columns are read by name, or named in prepare.rows.columns"),
    **each("model_name model_author", unless_off(Rule("", _replaced, "{{NAME}} and {{AUTHOR}} of rows", FILL_IN))),
    "custom_dataset_info": unless_off(none("describes data sets; name their files", FILL_IN)),
    "template": unless_off(none("chat, the model's own chat template, is written; others are files in "
                                "prepare.rows.template", FILL_IN)),
    "system": unless_off(same("prepare.rows.system", text)),
    "max_length": unless_off(fact("max_length", "prepare.rows.max_length", whole, "the model's own if left out")),
    "truncation_strategy": unless_off(named_fact("too_long", "prepare.rows.too_long", LONG)),
    "loss_scale": Rule("prepare.rows.loss", _loss, "default → assistant, last_round → last, all → everything"),
    "is_binary_loss_scale": idle("all supervised tokens have the same weight"),
}  # fmt: skip


def write_data(model: str, draft: Draft) -> list[str]:
    """Set the data set `rows` of the config; return a line for each assumption and difference."""
    facts, lines = draft.facts, list[str]()
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    plain, objective = facts.get("command") == "pt", facts.get("objective")
    rows |= {"model": model, "format": "auto", "too_long": facts.get("too_long", "drop"), "check": "exact"}
    rows["max_length"] = facts.get("max_length", MOST)
    if "max_length" not in facts:
        lines.append(f"prepare.rows.max_length: the model's own there; {MOST} is written, correct it")
    loss = facts.get("loss", "everything" if plain else "assistant")
    if objective is None:
        rows["loss"] = loss
    elif "loss" in facts and loss != "last":
        lines.append(Remark("loss_scale: answers alone are compared, there too", NO_EFFECT))
    lines += uncut("truncation_strategy", draft)
    if not plain:
        rows["template"] = "chat"
        lines.append(f"prepare.rows.template: {THOUGHTS}")
    sets = [_set("dataset", name, plain, draft) for name in facts.get("dataset", [])]
    for name in facts.get("val_dataset", []):
        sets.append(_set("val_dataset", name, plain, draft))
        sets[-1].held_out, sets[-1].at_most, sets[-1].rows = True, sets[-1].rows, None
    if not sets:
        draft.unlike.append(("dataset", "is missing: the command names no data set"))
    held_out = "val_dataset" in facts or facts.get("validation", 0)
    if held_out and facts.get("evaluations") != 0 and "validation_steps" not in draft.config["train"]:
        draft.set("train.validation_steps", draft.config["train"].get("checkpoint_steps", 500))
    return lines + write_sets(sets, draft)


def _set(key: str, named: str, plain: bool, draft: Draft) -> DataSet:
    """Return a data set by its name there."""
    path, _, count = named.rpartition("#") if "#" in named else (named, "", "")
    path = path.removeprefix("HF::").removeprefix("MS::")
    local = not REMOTE.match(path) and (path.startswith((".", "/", "~")) or bool(DATA_FILE.search(path)))
    subset = None
    if not local and ":" in path:
        path, _, subset = path.partition(":")
    form = "text" if plain else "auto"
    if objective := draft.facts.get("objective"):
        form = FORMS.get(objective, "preference")
    return DataSet(
        key=key, path=path, local=local, form=form, subset=subset, rows=int(count) if count.isdigit() else None
    )
