"""The data sets of a LLaMA-Factory config, as described by dataset_info.json.

As in LLaMA-Factory's src/llamafactory/data/parser.py and loader.py.
"""

import os
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.imports.formats.import_format import FILL_IN, NO_EFFECT, Draft, Remark
from zerolora.imports.formats.shared.named_files import LARGEST_FILE
from zerolora.imports.formats.shared.preferences import CUT
from zerolora.imports.formats.shared.sets import DATA_FILE, REMOTE, SCORES, DataSet, unread, write_sets
from zerolora.json_file import read_foreign

INFO = "dataset_info.json"
JUDGED = {"dpo": "preference", "kto": "labelled"}
"""Our row format, by stage."""
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
"""Our fields of alpaca rows, by LLaMA-Factory's names."""
MEDIA = ("images", "videos", "audios")
PREFERENCES = ("chosen", "rejected", "kto_tag")
SHAREGPT = ("from", "value", "human", "gpt", "observation", "function_call", "system")
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
SAME_ROLES = {
    "observation_tag": ("observation", "tool", "function_response"),
    "function_tag": ("function_call", "function"),
    "system_tag": ("system",),
}
"""Role names that our row formats read without `roles`."""
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
HUBS = {"hf_hub_url": "the Hugging Face hub", "ms_hub_url": "ModelScope", "om_hub_url": "Modelers"}


def write_data(model: str, draft: Draft) -> list[str]:
    """Set the data set `rows` of the config; return a line for each difference and remaining task."""
    facts = draft.facts
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    packed = draft.config.get("pack", {}).get("packing", False)
    plain = facts.get("stage") == "pt"
    lines: list[str] = []
    too_long = "split" if plain else "drop" if packed else "truncate_turns"
    if "objective" in facts:
        too_long = "fail"
        lines.append(Remark(f"cutoff_len: {CUT}", NO_EFFECT))
    rows |= {"model": model, "format": "auto", "too_long": too_long, "check": "exact"}
    if plain:
        rows["loss"] = "everything"
        for key in ("template", "template_writes"):
            rows.pop(key, None)
    info, base, line = _info(draft)
    lines += line
    sets: list[DataSet] = []
    shares, mixed = _shares(draft)
    lines += mixed
    for key, held_out in (("dataset", False), ("eval_dataset", True)):
        names = facts.get(key, [])
        for number, name in enumerate(names):
            one, differs = _set(name, key, info, base, draft)
            one.held_out = held_out
            if shares and not held_out:
                one.weight = shares[number]
            if one.rows and (one.weight or held_out):
                one.at_most, one.rows = one.rows, None
                text = f"{key}: num_samples of {name} draws {one.at_most} rows there, repeating some if it has fewer"
                lines.append(Remark(f"{text}; at most the first {one.at_most} are used here"))
            sets.append(one)
            lines += differs
    return lines + write_sets(sets, draft, base)


def _shares(draft: Draft) -> tuple[list[float], list[str]]:
    """Return the weight of each training set, none if all rows are used, and a line for differences."""
    names, shares = draft.facts.get("dataset", []), draft.facts.get("probabilities", [])
    if len(shares) == len(names):
        return shares, []
    if shares:
        text = f"interleave_probs: {len(shares)} probabilities for {len(names)} data sets, so none is written"
        return [], [Remark(f"{text}; correct the weights of prepare.rows.sources", FILL_IN)]
    if draft.facts.get("mixed") == "interleave_under" and len(names) > 1:
        text = "mix_strategy: rows of the sets alternate there until the shortest set ends; here all rows are used"
        return [], [Remark(f"{text}; set weight in prepare.rows.sources for fractions")]
    return [], []


def _info(draft: Draft) -> tuple[dict[str, Any] | None, Path, list[str]]:
    """Return dataset_info.json, the data directory, and a line if the file is missing."""
    folder = draft.facts.get("dataset_dir", "data")
    if isinstance(folder, dict):
        return folder, Path("data"), []
    if folder == "ONLINE":
        return None, Path("data"), []
    if folder.startswith("REMOTE:"):
        text = f"the data sets are described by {INFO} of the repository {folder[7:]}: put it into data/, set"
        return None, Path("data"), [f"dataset_dir: {text} dataset_dir: data, and import again"]
    start = Path(draft.facts["folder"])
    for above in (start, *start.parents[:3]):
        file = above / folder / INFO
        try:
            if file.is_file():
                return read_foreign(file, "correct the file", LARGEST_FILE), _here(file.parent), []
        except (OSError, ValueError):
            break
        except UserError as error:
            return None, Path(folder), [Remark(f"dataset_dir: {error}", FILL_IN)]
    text = f"{folder}/{INFO}, which describes paths and columns of the rows, is not here"
    return None, Path(folder), [f"dataset_dir: {text}: put it there and import again, or correct prepare.rows"]


def _here(folder: Path) -> Path:
    """Return a directory relative to the working directory, if it is below it."""
    return Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder


def _set(name: str, key: str, info: dict[str, Any] | None, base: Path, draft: Draft) -> tuple[DataSet, list[str]]:
    """Return a data set by its name, and a line for each difference."""
    at_most = draft.facts.get("samples")
    plain = draft.facts.get("stage") == "pt"
    online = draft.facts.get("dataset_dir") == "ONLINE"
    form = "text" if plain else _judged_form(draft) or "auto"
    if info is None:
        file = name if online or DATA_FILE.search(name) else f"{name}.json"
        path = name if online else str(base / file)
        return DataSet(key, path, not online, form=form, at_most=at_most), []
    entry = info.get(name)
    if not isinstance(entry, dict):
        text = f"{key}: {shown(name)} is not a data set of {INFO}; correct its source"
        return DataSet(key, str(base / name), True, form=form, at_most=at_most), [Remark(text, FILL_IN)]
    one, lines = _where(name, key, entry, base)
    one.subset, one.split = _text(entry, "subset"), _text(entry, "split")
    one.form = form
    rows = entry.get("num_samples")
    if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0:
        one.rows = min(rows, at_most) if at_most else rows
    else:
        one.at_most = at_most
    for reason in _other(name, entry, _judged_form(draft)):
        draft.unlike.append((key, reason))
    columns = entry["columns"] if isinstance(entry.get("columns"), dict) else {}
    if plain:
        text = _text(columns, "prompt") or ("" if columns else "instruction")
        one.columns = {"text": text} if text and text != "text" else {}
    elif _judged_form(draft):
        lines += _judged(name, key, entry, columns, one)
    elif entry.get("formatting", "alpaca") == "alpaca":
        _alpaca(columns, one)
    else:
        lines += _turns(name, key, entry, columns, one)
    return one, lines


def _where(name: str, key: str, entry: dict[str, Any], base: Path) -> tuple[DataSet, list[str]]:
    """Return a data set with its path, by LLaMA-Factory's order of precedence."""
    for field, hub in HUBS.items():
        if repository := _text(entry, field):
            folder = _text(entry, "folder")
            one = DataSet(key, repository, False, files=[f"{folder}/*"] if folder else [], name=name)
            return one, [] if hub == HUBS["hf_hub_url"] else [f"{key}: {name} is on {hub}; fetch.data is not for it"]
    if script := _text(entry, "script_url"):
        return DataSet(key, str(base / script), True, name=name), [
            f"{key}: {name} is created by a script, which is never run: bring its rows"
        ]
    if cloud := _text(entry, "cloud_file_name"):
        return DataSet(key, cloud, False, name=name), []
    file = _text(entry, "file_name")
    if file and REMOTE.match(file):
        return DataSet(key, file, False), []
    if file is None:
        return DataSet(key, str(base / name), True), [f"{key}: the entry of {name} in {INFO} names no file; correct it"]
    return DataSet(key, str(base / file), True), []


def _judged_form(draft: Draft) -> str:
    """Return the row format of a preference objective, "" without one."""
    return JUDGED[draft.facts["stage"]] if "objective" in draft.facts else ""


def _other(name: str, entry: dict[str, Any], judged: str) -> list[str]:
    """Return why the rows of an entry are not of the row format `judged`, if any, or for supervised fine-tuning on
    text."""
    columns = entry.get("columns") if isinstance(entry.get("columns"), dict) else {}
    assert isinstance(columns, dict)
    reasons = []
    if media := [field for field in MEDIA if columns.get(field)]:
        reasons.append(f"{name}: rows with {' and '.join(media)}")
    if judged:
        return reasons
    if entry.get("ranking") is True or any(columns.get(field) for field in PREFERENCES):
        reasons.append(f"{name}: rows of preferences")
    return reasons


def _alpaca(columns: dict[str, Any], one: DataSet) -> None:
    """Set format and columns of alpaca rows. With `columns`, LLaMA-Factory reads only the listed fields."""
    one.form = "alpaca"
    fields = {"prompt": "instruction", "query": "input", "response": "output"} if not columns else {}
    fields |= {theirs: column for theirs in ALPACA if (column := _text(columns, theirs))}
    one.columns = {ALPACA[theirs]: column for theirs, column in fields.items() if ALPACA[theirs] != column}
    one.ignore = unread("alpaca", [*(ALPACA[theirs] for theirs in fields), *fields.values(), "instruction", "output"])


def _judged(name: str, key: str, entry: dict[str, Any], columns: dict[str, Any], one: DataSet) -> list[str]:
    """Set columns and roles of preference data, of which LLaMA-Factory reads only the listed fields; return a line for
    each difference."""
    form, lines = one.form, list[str]()
    fields = {"chosen": "chosen", "rejected": "rejected"} if form == "preference" else {"kto_tag": "label"}
    flagged = entry.get("ranking") is True or form == "labelled"
    if missing := ["ranking: true"] * (not flagged) + [field for field in fields if not _text(columns, field)]:
        text = f"{name} has no {' and '.join(missing)} in {INFO}, without which LLaMA-Factory has no rows; correct it"
        lines.append(f"{key}: {text}")
    if entry.get("formatting", "alpaca") == "alpaca":
        fields |= {theirs: ours for theirs, ours in ALPACA.items() if form == "labelled" or theirs != "response"}
        known, one.columns = [], {}
    else:
        lines += _turns(name, key, entry, columns, one)
        field = "messages" if one.form == "messages" else "conversations"
        known = [one.columns.get(field, field)]
        known += [each for each in ("system", "tools") if _text(columns, each)]
    read = {ours: column for theirs, ours in fields.items() if (column := _text(columns, theirs))}
    one.columns |= {ours: column for ours, column in read.items() if ours != column}
    known += [*read.values(), *one.columns.values(), *SCORES]
    one.form, one.ignore = form, unread(form, known) if columns else []
    return lines


def _turns(name: str, key: str, entry: dict[str, Any], columns: dict[str, Any], one: DataSet) -> list[str]:
    """Set format, columns and roles of conversations by the tags of a message."""
    given = entry["tags"] if isinstance(entry.get("tags"), dict) else None
    tags = dict(zip(TAGS, SHAREGPT, strict=True)) if given is None else {tag: given.get(tag) for tag in TAGS}
    column = _text(columns, "messages") or "conversations"
    role, content = _text(tags, "role_tag") or "from", _text(tags, "content_tag") or "value"
    one.form = "messages" if (role, content) == ("role", "content") else "sharegpt"
    field = "messages" if one.form == "messages" else "conversations"
    one.columns = {} if column == field else {field: column}
    one.columns |= {each: value for each in ("system", "tools") if (value := _text(columns, each)) and value != each}
    if one.form == "sharegpt":
        one.columns |= {ours: tag for ours, tag in (("from", role), ("value", content)) if ours != tag}
    read = [each for each in ("system", "tools") if _text(columns, each)]
    one.ignore = unread(one.form, ["messages", "conversations", *read, *one.columns.values()])
    known = {"user_tag": ("user", "human"), "assistant_tag": ("assistant", "gpt"), **SAME_ROLES}
    others = {tag: value for tag, names in known.items() if (value := _text(tags, tag)) and value not in names}
    one.roles = {value: ROLES[tag] for tag, value in others.items() if tag in ROLES}
    if "function_tag" in others:
        text = f"{key}: rename the turns {others['function_tag']} of {name}, which call tools, to function_call"
        return [Remark(text, FILL_IN)]
    return []


def _text(values: dict[str, Any], key: str) -> str | None:
    value = values.get(key)
    return value if isinstance(value, str) and value else None
