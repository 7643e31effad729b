"""The data sets of an axolotl config: row formats, prompts, columns and slices.

As in axolotl's src/axolotl/prompt_strategies/ and src/axolotl/utils/data/.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zerolora.data.formats.reading import TURN_KEYS
from zerolora.errors import shown
from zerolora.imports import templates
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    NO_EFFECT,
    Draft,
    NoEqual,
    Remark,
    Rule,
    Unlike,
    idle,
    lost,
    none,
    text,
    texts,
    unless_off,
)
from zerolora.imports.formats.shared import chat_templates
from zerolora.imports.formats.shared.sets import (
    BUILDERS,
    DATA_FILE,
    REMOTE,
    SCORES,
    DataSet,
    of_builder,
    unread,
    write_sets,
)

TEMPLATES = {
    "tokenizer_default": "chat",
    "alpaca": "alpaca",
    "chatml": "chatml",
    "llama3": "llama-3",
    "gemma": "gemma",
    "gemma3": "gemma",
    "gemma3n": "gemma",
    "mistral_v1": "mistral",
    "qwen_25": "chatml",
}
"""Our formats of the same text, which models without a chat template have too."""
WRITTEN = templates.texts("axolotl")
SYSTEM = {"qwen_25": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."}
"""Default system prompts of axolotl's templates, by its name; ours have none."""
OWN = {"qwen3": "the thoughts before the last answer are supervised here also if they are empty"}
"""Differences from templates that write the same text, by axolotl's name."""
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
"""AlpacaPrompter's text before an instruction without an input, used as a system prompt."""
ROLES = {
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant"),
    "system": ("system",),
    "tool": ("tool",),
}
"""Role names that our row formats, and axolotl, read without `roles`."""


READ: dict[str, tuple[str, ...]] = {
    "alpaca": ("instruction", "input", "output"),
    "messages": ("messages", "conversations", "tools"),
    "sharegpt": ("conversations", "tools"),
}
"""The fields of a row format that axolotl reads by default."""


class Kind(NamedTuple):
    """A row type of axolotl."""

    form: str
    columns: Mapping[str, str] = MappingProxyType({})
    template: str | None = None
    """The type's own prompt. None = that of chat_template."""
    system: str = ""
    differs: str = ""
    """Difference of our prompt."""
    reads: tuple[str, ...] = ()
    """Further fields that the type reads."""


STYLES = {
    "instruct": Kind(
        "alpaca",
        template="alpaca-newline",
    ),
    "chatml": Kind(
        "alpaca", template="chatml", system=ALPACA, differs="rows with an input have a longer system prompt there"
    ),
    "chat": Kind(
        "alpaca", template="vicuna", system=ALPACA, differs="SYSTEM:, USER: and ASSISTANT: are on separate lines there"
    ),
    "phi": Kind(
        "alpaca",
        template="chat",
        system=ALPACA,
        differs="the turns are Phi-3's there, and an input follows the end of one; chat, the model's own, is written",
    ),
}
"""Prompt styles of `type: alpaca:STYLE` (PromptStyle in axolotl's prompters.py)."""
KINDS = {
    "chat_template": Kind("messages"),
    "chat_template.default": Kind("messages"),
    "sharegpt": Kind("sharegpt"),
    "completion": Kind("text"),
    "pretrain": Kind("text"),
    "tokens": Kind("tokens"),
    "alpaca": STYLES["instruct"],
    "alpaca_instruct": STYLES["instruct"],
    "alpaca_chat": STYLES["chat"],
    "alpaca_chat.load_qa": STYLES["chat"]._replace(columns={"instruction": "question", "output": "answer"}),
    "alpaca_chat.load_camel_ai": STYLES["chat"]._replace(columns={"instruction": "message_1", "output": "message_2"}),
    "alpaca_w_system": STYLES["chat"]._replace(system="", reads=("system",)),
    "alpaca_w_system.load_instruct": STYLES["instruct"]._replace(reads=("system",)),
    "alpaca_w_system.load_chat": STYLES["chat"]._replace(system="", reads=("system",)),
    "alpaca_w_system.load_open_orca": STYLES["instruct"]._replace(
        columns={"instruction": "question", "output": "response", "system": "system_prompt"}
    ),
    "alpaca_w_system.load_open_orca_chatml": Kind(
        "alpaca", {"instruction": "question", "output": "response", "system": "system_prompt"}, "chatml"
    ),
}
REWARDS = re.compile(r"bradley_terry|stepwise_supervised|ebft|rwd\.")
PREFERENCES = re.compile(
    r"(chat_template|chatml|llama3|zephyr)\.(default|argilla|ultra|intel|prompt_pairs|icr|nectar)|chatml$|llama3$"
    r"|user_defined\.|passthrough"
)
"""Row types of `rl`; chat_template.default is one of other trainings too."""
ANSWERS = ("chosen", "rejected")
FIRST = "of a conversation of several turns, the first question and its answers are read there, the last here"
RAW = "texts get no template there, and messages the model's own; chat is written"


def _in_template(template: str) -> dict[str, Kind]:
    """Return the row types of a template for `rl: dpo`, by the name behind its module."""
    texts = Kind("preference", template=template)
    asked = {"icr": "input", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
    every = ("prompt", "input", "question", "instruction", "chosen_response", "rejected_response")
    return {
        **dict.fromkeys(("default", "argilla"), texts._replace(reads=(*ANSWERS, *every, "system"))),
        "argilla_chat": texts._replace(reads=ANSWERS, differs=FIRST),
        **{name: texts._replace(reads=(*ANSWERS, field, "system")) for name, field in asked.items()},
    }


def _labelled(template: str) -> dict[str, Kind]:
    """Return the row types of a template for `rl: kto`."""
    texts = Kind("labelled", template=template)
    asked = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
    return {
        "argilla_chat": texts._replace(reads=("completion", "label"), differs=FIRST),
        **{name: texts._replace(reads=("completion", "label", field, "system")) for name, field in asked.items()},
    }


MODULES = {"chatml": "chatml", "llama3": "llama-3-verbatim"}
"""The template of the row types in a module, by its name."""
PAIRS = {
    "chat_template.default": Kind("preference", reads=("messages", *ANSWERS)),
    "chat_template.argilla_chat": Kind("preference", reads=ANSWERS),
    "passthrough.default": Kind("preference", reads=("prompt", *ANSWERS), differs=RAW),
    "user_defined.default": Kind("preference", template="plain", reads=("prompt", *ANSWERS)),
    **{f"{module}.{name}": kind for module, own in MODULES.items() for name, kind in _in_template(own).items()},
}
BY_OBJECTIVE = {
    **dict.fromkeys(("dpo", "ipo", "simpo"), PAIRS),
    "orpo": {"chat_template.argilla": Kind("preference", reads=("prompt", *ANSWERS, "system"))},
    "kto": {
        "user_defined.default": Kind("labelled", template="plain", reads=("prompt", "completion", "label")),
        "passthrough.default": Kind("labelled", reads=("prompt", "completion", "label"), differs=RAW),
        **{f"{module}.{name}": kind for module, own in MODULES.items() for name, kind in _labelled(own).items()},
    },
}
"""Row types by our objective (axolotl's prompt_strategies/dpo, orpo and kto)."""
USER_DEFINED = ("prompt", "chosen", "rejected", "completion", "label")
"""Fields of a user-defined row type of `rl`."""


def rules(section: str) -> dict[str, Rule]:
    """Return the rules of the entries of `datasets`, `pretraining_dataset` or `test_datasets`."""
    columns = "prepare.rows.columns"
    entries: dict[str, Rule] = {
        "path": _of_set("path", text, "prepare.rows.path", "a Hub data set needs a commit here"),
        "type": Rule("prepare.rows.format, prepare.rows.template", _type),
        "split": _of_set("split", text, "prepare.rows.sources", "train[:1000] → at_most"),
        "name": _of_set("subset", text, "prepare.rows.path", "the subset to download"),
        "revision": _of_set("revision", text, "fetch.data", "a commit of 40 digits"),
        "data_files": _of_set("files", texts, "prepare.rows.path, prepare.rows.sources"),
        "field": _of_set("field", text, columns, "for completion rows: {text: FIELD}"),
        "text_column": _of_set("field", text, columns, "{text: COLUMN}"),
        "field_messages": _of_set("messages", text, columns, "{messages: COLUMN}"),
        "field_chosen": _of_set("chosen", text, columns, "{chosen: COLUMN}"),
        "field_rejected": _of_set("rejected", text, columns, "{rejected: COLUMN}"),
        "field_tools": _of_set("tools", text, columns, "{tools: COLUMN}"),
        "message_field_role": _of_set("role", text, columns),
        "message_field_content": _of_set("content", text, columns),
        "message_property_mappings.role": _of_set("role", text, columns, "from with value → sharegpt"),
        "message_property_mappings.content": _of_set("content", text, columns),
        **{
            f"message_property_mappings.{key}": _of_set(f"turn {key}", text, columns)
            for key in TURN_KEYS
            if key not in ("role", "content", "from", "value")
        },
        "message_property_mappings": none("not a key of a turn that zerolora reads (docs/data.md)"),
        **{f"roles.{role}": role_names(role) for role in ROLES},
        "roles": none("turns have the roles system, user, assistant and tool"),
        "roles_to_train": Rule("prepare.rows.loss", _trained, "one loss for all data sets here"),
        "train_on_eos": Rule("", _eos, "always turn here"),
        "train_on_eot": Rule("", _eos, "always turn here"),
        "type.field_instruction": _of_set("instruction", text, columns),
        "type.field_input": _of_set("input", text, columns),
        "type.field_output": _of_set("output", text, columns),
        "type.field_system": _of_set("system", text, columns),
        **{f"type.field_{field}": _of_set(field, text, columns, f"{{{field}: COLUMN}}") for field in USER_DEFINED},
        **{
            f"type.{field}_format": none("write the prompt as a Jinja file, and name it in prepare.rows.template")
            for field in ("prompt", "chosen", "rejected", "completion")
        },
        "type.format": none("write the prompt as a Jinja file, and name it in prepare.rows.template (docs/data.md)"),
        "type.no_input_format": none("write the prompt as a Jinja file (docs/data.md)"),
        "type.system_prompt": none("set prepare.rows.system", FILL_IN),
        "type.system_format": none("write the prompt as a Jinja file (docs/data.md)"),
        "chat_template": unless_off(Rule("prepare.rows.template", _own_template, "one for all data sets")),
        "chat_template_jinja": lost("a data set has one template, prepare.rows.template"),
        "conversation": lost("a data set has one template, prepare.rows.template"),
        "ds_type": idle("determined by the file's suffix"),
        "trust_remote_code": idle("code from data set repositories is never run"),
        "shards": lost("all rows are used; sources.NAME.rows samples some"),
        "shards_idx": none("all rows are used; sources.NAME.rows samples some"),
        "preprocess_shards": idle("files are streamed"),
        "drop_system_message": _of_set("without system", bool, "prepare.rows.drop_system", "of all data sets or none"),
        "input_transform": lost("rows are read unchanged"),
        "message_field_training": _of_set("turn train", text, columns, "{train: KEY}"),
        "message_field_training_detail": lost("turns are supervised as a whole or not at all"),
        "split_thinking": lost("reasoning is supervised where the row format has it (docs/data.md)"),
        "field_thinking": _of_set("turn reasoning_content", text, columns, "{reasoning_content: KEY}"),
        "template_thinking_key": idle("templates get reasoning as reasoning_content and under its other names"),
        "logprobs_field": none("used only with distillation", NO_EFFECT),
        "temperature": none("used only with distillation", NO_EFFECT),
        "train_on_split": lost("name the files of that split in prepare.rows.path"),
        "skip": lost("rows are drawn by the seed"),
    }
    return {f"{section}[].{key}": rule for key, rule in entries.items()}


def _own_template(value: Any, draft: Draft) -> str | None:
    """Note the template of a data set, which `_template_of_sets` makes that of all."""
    _values(draft)["template"] = text(value)
    return None


def _template_of_sets(named: Mapping[str, dict[str, Any]], draft: Draft) -> list[str]:
    """Set the template to the data sets' own, as far as they have one; return a line if there are several."""
    held = {key: values for key, values in named.items() if not key.startswith("test_datasets")} or named
    own = {values.get("template") for values in held.values()}
    key = next((key for key, values in held.items() if "template" in values), "")
    if not key or own == {draft.facts.get("template_there")}:
        return []
    line = Remark(f"{key}.chat_template: data sets have several templates there; prepare.rows.template is that of all")
    if len(own) > 1:
        return [line]
    for fact in ("template", "template_system", "template_writes"):
        draft.facts.pop(fact, None)
    try:
        remark = template(own.pop(), draft)
    except NoEqual as reason:
        remark = str(reason)
    group = remark.group if isinstance(remark, Remark) else CHANGES
    return [Remark(f"{key}.chat_template: {remark}", group)] if remark else []


def template(value: Any, draft: Draft) -> str | None:
    """Store the chat template, which row types with their own prompt do not use."""
    draft.facts["template_there"] = value
    if not isinstance(value, str):
        raise NoEqual(f"{shown(value)} is not the name of a template")
    name = value.removeprefix("tokenizer_default_fallback_")
    if value not in TEMPLATES and value in WRITTEN:
        draft.facts |= {"template": "chat", "template_writes": WRITTEN[value]}
        return OWN.get(value, chat_templates.COMPARED)
    if value in SYSTEM:
        draft.facts["template_system"] = SYSTEM[value]
    if value not in TEMPLATES and name == value:
        draft.facts["template"] = "chat"
        return f"{shown(value)} has no equal: chat, the model's own chat template, is written"
    draft.facts["template"] = "chat" if name != value else TEMPLATES[value]
    return None


def pretraining(value: Any, draft: Draft) -> str | None:
    """Store a plain-text data set that is given as a path."""
    draft.facts.setdefault("sets", {})["pretraining_dataset"] = {"path": text(value), "kind": KINDS["pretrain"]}
    return None


def write_data(model: str, draft: Draft) -> list[str]:
    """Set the data set `rows` of the config; return a line for each difference and remaining task."""
    facts = draft.facts
    rows = draft.config.setdefault("prepare", {}).setdefault("rows", {})
    rows |= {"model": model, "format": "auto", "too_long": facts.get("too_long", "drop"), "check": "exact"}
    if "stop" in facts:
        rows["stop_tokens"] = list(dict.fromkeys(facts["stop"]))
    named: dict[str, dict[str, Any]] = facts.get("sets", {})
    lines: list[str] = []
    sets, kinds = [], []
    for key, values in named.items():
        kind, line = _kind(key, values, draft)
        lines += line
        sets.append(_set(key, values, kind))
        kinds.append(kind)
    lines += [*_template_of_sets(named, draft), *_without_system(named, draft)]
    if "objective" in facts:
        text = "answers alone are compared, there too"
        lines += [Remark(f"{key}.roles_to_train: {text}", NO_EFFECT) for key in named if "trained" in named[key]]
    else:
        lines += _loss(named, draft)
    lines += _prompt(kinds, draft)
    trained = [one for one in sets if not one.held_out]
    if trained and all(one.form == "text" for one in trained):
        rows["too_long"] = facts.get("too_long", "split")
        rows["loss"] = "everything"
    return lines + write_sets(sets, draft)


def _without_system(named: Mapping[str, dict[str, Any]], draft: Draft) -> list[str]:
    """Leave out the system prompts of all conversations; return a line if only some data sets do there."""
    dropped = [values.get("without system", False) for values in named.values()]
    if not any(dropped):
        return []
    draft.key = next(key for key, values in named.items() if values.get("without system"))
    draft.set("prepare.rows.drop_system", True)
    text = "of some data sets there, of all here"
    return [] if all(dropped) else [Remark(f"{draft.key}.drop_system_message: {text}")]


def _kind(key: str, values: dict[str, Any], draft: Draft) -> tuple[Kind, list[str]]:
    """Return the row type of a data set, and a line if `rl` has none of this name."""
    name, objective = values.get("type", ""), draft.facts.get("objective")
    if objective is None:
        if name in MODULES:
            text = f"{shown(name)} is a type of rl only; set prepare.rows.format and template"
            return Kind("auto"), [Remark(f"{key}.type: {text}")]
        if PREFERENCES.match(name) and "kind" not in values:
            draft.unlike.append((f"{key}.type", f"{shown(name)}: rows of preferences"))
        return values.get("kind") or _without_type(key, values), []
    kinds = BY_OBJECTIVE[draft.facts["rl"]]
    if not name:
        name = "user_defined.default" if any(field in values for field in USER_DEFINED) else "passthrough.default"
    kind = kinds.get(name if "." in name else f"{name}.default")
    if kind:
        return kind, []
    text = f"{shown(name)} is not a type of rl: {draft.facts['rl']} that has an equal; convert the rows to docs/data.md"
    return Kind("labelled" if objective == "kto" else "preference"), [Remark(f"{key}.type: {text}")]


def _without_type(key: str, values: dict[str, Any]) -> Kind:
    """Return the row type if `type` is a section or missing."""
    if key.startswith("pretraining"):
        return KINDS["pretrain"]
    if "instruction" in values or "output" in values:
        return Kind("alpaca", template="alpaca", differs="axolotl formats the rows of a custom type by its format")
    return Kind("auto")


def _loss(named: Mapping[str, dict[str, Any]], draft: Draft) -> list[str]:
    """Set the loss from train_on_inputs and the roles_to_train of the data sets."""
    draft.key = "train_on_inputs"
    inputs = draft.facts.get("inputs")
    if inputs:
        draft.set("prepare.rows.loss", "everything")
        return []
    if inputs is not None:
        draft.set("prepare.rows.loss", "assistant")
    trained = {key: _roles(values) for key, values in named.items()}
    first = next(iter(trained.values()), ["assistant"])
    if first != ["assistant"]:
        draft.key = f"{next(iter(trained))}.roles_to_train"
        draft.set("prepare.rows.loss", first)
    if other := next((key for key, roles in trained.items() if set(roles) != set(first)), None):
        theirs, ours = (", ".join(roles) for roles in (trained[other], first))
        text = f"{other}.roles_to_train: trains the roles {theirs} there, but {ours} in all data sets here"
        return [Remark(f"{text}; correct prepare.rows.loss, or prepare separate data sets")]
    return []


def _roles(values: Mapping[str, Any]) -> list[str]:
    """Return the trained roles of a data set by our names; only the assistant for types with their own prompt."""
    kind = values.get("kind", KINDS["chat_template"])
    if "trained" not in values or kind.template or kind.form == "text":
        return ["assistant"]
    ours = {name: role for role, names in ROLES.items() for name in names} | values.get("roles", {})
    return list(dict.fromkeys(ours.get(name, name) for name in values["trained"]))


def _prompt(kinds: list[Kind], draft: Draft) -> list[str]:
    """Set the template: that of row types with their own prompt, otherwise chat_template."""
    facts, rows = draft.facts, draft.config["prepare"]["rows"]
    own = list(dict.fromkeys((kind.template, kind.system) for kind in kinds if kind.template))
    chosen = facts.get("template", "chat")
    lines: list[str] = []
    if "system" in facts:
        lines.append(_default_system("" if own or "template_system" in facts else chosen, draft))
    for differs in dict.fromkeys(kind.differs for kind in kinds if kind.differs):
        lines.append(Remark(f"prepare.rows.template: {differs}"))
    if not own:
        rows["template"] = chosen
        if "template_writes" in facts:
            lines += chat_templates.compare(facts["template_writes"], draft)
        if "template_system" in facts:
            draft.key = "chat_template"
            draft.set("prepare.rows.system", facts["template_system"])
        return lines
    rows["template"], system = own[0]
    if system:
        rows.setdefault("system", system)
    others = [f"{name}" for name, _ in own[1:]]
    if any(not kind.template and kind.form not in ("alpaca", "text") for kind in kinds):
        others.append(chosen)
    if others:
        lines.append(
            Remark(
                f"prepare.rows.template: data sets have different prompts there ({rows['template']}, "
                f"{', '.join(others)}), but one here: {rows['template']} is written"
            )
        )
    elif "template" in facts and facts["template"] != rows["template"]:
        text = f"chat_template: not used by the data sets' types, whose prompt is {rows['template']}"
        lines.append(Remark(text, NO_EFFECT))
    return lines


def _default_system(template: str, draft: Draft) -> str:
    """Set the default system prompt if axolotl's template uses it; return a line."""
    if template != "chatml":
        return Remark("default_system_message: used only with chat_template chatml there; left out", NO_EFFECT)
    draft.key = "default_system_message"
    draft.set("prepare.rows.system", draft.facts["system"])
    text = "used for all rows without a system prompt here; there only in versions whose chatml has a default"
    return Remark(f"default_system_message: {text}")


def _set(key: str, values: dict[str, Any], kind: Kind) -> DataSet:
    """Return a data set of the config."""
    path, files = values.get("path", ""), values.get("files", [])
    if path in BUILDERS and files:
        path, files = of_builder(files)
    local = not REMOTE.match(path) and (
        path.startswith((".", "/", "~")) or bool(DATA_FILE.search(path)) or path.count("/") > 1
    )
    form, columns = kind.form, dict(kind.columns)
    ignore: list[str] = []
    if form in ("preference", "labelled"):
        columns = _judged(values)
        ignore = unread(form, [*(columns.get(field, field) for field in kind.reads), *SCORES]) if kind.reads else []
    elif form == "messages":
        form, columns = _messages(values)
    elif form == "text" and values.get("field", "text") != "text":
        columns["text"] = values["field"]
    elif form == "sharegpt" and "messages" in values:
        columns["conversations"] = values["messages"]
    elif form == "alpaca":
        fields = ("instruction", "input", "output", "system")
        columns |= {field: values[field] for field in fields if values.get(field, field) != field}
    if "tools" in values and form in ("messages", "sharegpt") and values["tools"] != "tools":
        columns["tools"] = values["tools"]
    return DataSet(
        key=key,
        path=path or "rows.json",
        local=local,
        form=form,
        columns=columns,
        roles=values.get("roles", {}),
        ignore=ignore or _unread(form, (*kind.reads, *columns, *columns.values())),
        split=values.get("split"),
        subset=values.get("subset"),
        revision=values.get("revision"),
        files=[Path(file).name if local and Path(file).is_absolute() else file for file in files],
        held_out=key.startswith("test_datasets"),
    )


def _unread(form: str, read: Iterable[str]) -> list[str]:
    """Return the fields of a row format that axolotl does not read."""
    return unread(form, [*READ[form], *read]) if form in READ else []


def _messages(values: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return format and columns of conversations by the names of a message's keys."""
    role, content = values.get("role", "role"), values.get("content", "content")
    column = values.get("messages", "messages")
    columns = {key.removeprefix("turn "): value for key, value in values.items() if key.startswith("turn ")}
    if (role, content) == ("from", "value"):
        form, columns["conversations"] = "sharegpt", column
    else:
        form, columns["messages"] = "messages", column
        columns |= {"role": role, "content": content}
    return form, {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _judged(values: dict[str, Any]) -> dict[str, str]:
    """Return the columns of preference data by the names in the file."""
    names = [*USER_DEFINED, "messages", "role", "content"]
    if (values.get("role"), values.get("content")) == ("from", "value"):
        names = [*USER_DEFINED, "messages"]
    return {name: values[name] for name in names if values.get(name, name) != name}


def _of_set(name: str, convert: Callable[[Any], Any], new: str, remark: str = "") -> Rule:
    """Return the rule of a data set's key, for `write_data`."""

    def translate(value: Any, draft: Draft) -> str | None:
        _values(draft)[name] = convert(value)
        return None

    return unless_off(Rule(new, translate, remark))


def _values(draft: Draft) -> dict[str, Any]:
    """Return the values of the data set that the draft's key belongs to."""
    entry = re.match(r"\w+\[[0-9]+\]", draft.key)
    name = entry[0] if entry else draft.key
    values: dict[str, Any] = draft.facts.setdefault("sets", {}).setdefault(name, {})
    return values


def _type(value: Any, draft: Draft) -> str | None:
    if value is None:  # only tokenized rows need none (utils/data/wrappers.py)
        _values(draft)["kind"] = KINDS["tokens"]
        return None
    name = text(value)
    if REWARDS.match(name):
        raise Unlike(f"{shown(name)}: rows of rewards")
    _values(draft)["type"] = name
    base, _, style = name.partition(":")
    kind = KINDS.get(base.removesuffix(".load"))
    if base == "alpaca" and style:
        kind = STYLES.get(style)
    if kind is None and PREFERENCES.match(name):
        return None  # `rl` decides
    if kind is None:
        raise NoEqual(f"{shown(name)} is not a row format here: convert the rows to a format of docs/data.md")
    _values(draft)["kind"] = kind
    return None


def role_names(role: str) -> Rule:
    """Return the rule of the names of a role."""

    def translate(value: Any, draft: Draft) -> str | None:
        roles = _values(draft).setdefault("roles", {})
        roles |= {name: role for name in texts(value) if name not in ROLES[role]}
        return None

    return Rule("prepare.rows.roles", translate, f"{', '.join(ROLES[role])} need no key")


def _trained(value: Any, draft: Draft) -> str | None:
    _values(draft)["trained"] = texts(value)
    return None


def _eos(value: Any, draft: Draft) -> str | None:
    if value != "turn":
        raise NoEqual(f"{shown(value)} has no equal: the end of each trained turn is supervised")
    return None
