"""What the formats share for preference objectives: the objective's section, and what these tools switch off for it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from zerolora.imports.formats.import_format import NO_EFFECT, Draft, Remark, Rule, fact, flag, number, texts

BATCHES = "of each micro-batch there, of the global batch here"
CUT = "longer rows lose a part of the prompt or of an answer there; they are refused here (prepare.rows.too_long: fail)"
LEFT_OUT = "preferences: left out with the rest that supervised fine-tuning does not have"


@dataclass
class ChosenObjective:
    """An objective, its section, the options of the file that it uses, and a line for each difference."""

    objective: str
    section: dict[str, Any]
    used: set[str]
    lines: list[str] = field(default_factory=list)


def option(new: str, convert: Callable[[Any], Any], remark: str = "") -> Rule:
    """Return the rule of an option of an objective, which `finish` combines with others; `new` lists our keys."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.facts.setdefault("options", {})[draft.key] = convert(value)
        return None

    return Rule(new, translate, remark)


def numbers(value: Any) -> list[float]:
    """Return a list of numbers, also from one or from text. Raises NoEqual for anything else."""
    entries = texts(value) if isinstance(value, str) else value
    return [number(each) for each in (entries if isinstance(entries, list) else [entries])]


DROPOUT = fact("dropout", "train.lora.dropout", lambda value: not flag(value), "true → 0.0")
"""The rule of a flag that switches dropout off."""


def options_of(draft: Draft) -> dict[str, Any]:
    """Return the options of objectives in the file, by key."""
    result: dict[str, Any] = draft.facts.get("options", {})
    return result


def unused(draft: Draft, used: Collection[str], why: str) -> list[str]:
    """Return a line for each option that the objective does not use."""
    return [Remark(f"{key}: {why}", NO_EFFECT) for key in options_of(draft) if key not in used]


def write(choice: ChosenObjective, key: str, why: str, draft: Draft) -> list[str]:
    """Set the objective, which the file's `key` names, and its section; return all lines. why: that of an option which
    it does not use."""
    draft.facts["objective"] = choice.objective
    draft.key = key
    dropped = [] if draft.facts.get("dropout") else without_dropout(draft)
    draft.set("train.objective", choice.objective)
    for name, value in choice.section.items():
        draft.set(f"train.{choice.objective}.{name}", value)
    return [*choice.lines, *dropped, *unused(draft, choice.used, why)]


def means(choice: ChosenObjective, key: str, draft: Draft) -> list[str]:
    """Return a line, for the file's `key`, if a mean of the loss is of each micro-batch there."""
    if draft.facts.get("accumulation", 1) == 1:
        return []
    if choice.objective == "kto":
        return [Remark(f"{key}: the mean change of other rows' answers, which is subtracted, is {BATCHES}")]
    if choice.objective == "orpo" or choice.section.get("sft_weight"):
        return [Remark(f"{key}: the mean cross-entropy of the tokens is {BATCHES}")]
    return []


def without_dropout(draft: Draft) -> list[str]:
    """Set the adapter's dropout to 0, as these trainers do; return a line if it is not 0 in the file."""
    lora = draft.config.get("train", {}).get("lora", {})
    if not lora.get("dropout"):
        return []
    text = f"lora_dropout: {lora['dropout']} is switched off by this trainer there, so 0.0 is written"
    lora["dropout"] = 0.0
    return [Remark(text, NO_EFFECT)]


def uncut(key: str, draft: Draft) -> list[str]:
    """Refuse longer rows of a preference objective where the file cuts their answers; return a line for its `key`."""
    rows = draft.config["prepare"]["rows"]
    if "objective" not in draft.facts or rows.get("too_long") not in ("truncate_right", "truncate_turns", "split"):
        return []
    rows["too_long"] = "fail"
    return [Remark(f"{key}: {CUT}", NO_EFFECT)]


def without_loss(draft: Draft, key: str) -> list[str]:
    """Remove the choice of supervised roles, which preference objectives do not use; `key` is that of the file."""
    rows = draft.config.get("prepare", {}).get("rows", {})
    if rows.pop("loss", "assistant") == "assistant":
        return []
    return [Remark(f"{key}: answers alone are compared, there too", NO_EFFECT)]
