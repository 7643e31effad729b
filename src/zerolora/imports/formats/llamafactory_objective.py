"""The preference objectives of a LLaMA-Factory config: the stages dpo and kto, and their options.

As in LLaMA-Factory's src/llamafactory/train/dpo/trainer.py and kto/trainer.py.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    Draft,
    Remark,
    each,
    number,
    text,
    unless_off,
)
from zerolora.imports.formats.shared.preferences import (
    LEFT_OUT,
    ChosenObjective,
    means,
    option,
    options_of,
    unused,
    without_loss,
    write,
)

OBJECTIVES = {"sigmoid": "dpo", "hinge": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""Our objective, by pref_loss of stage dpo."""
RL_ONLY = "used only with other stages"
MEANS = "the mean of each answer's mean of its tokens there, the mean of all tokens here"


def set_objective(draft: Draft) -> list[str]:
    """Set the objective of stages dpo and kto; return a line for each option that it does not use, or that differs."""
    stage, options = draft.facts.get("stage"), options_of(draft)
    if stage in ("dpo", "kto") and draft.unlike:
        draft.unlike.append(("stage", f"{shown(stage)}: {LEFT_OUT}"))
    if stage not in ("dpo", "kto") or draft.unlike:
        return unused(draft, (), RL_ONLY)
    loss = options.get("pref_loss", "sigmoid")
    if stage == "dpo" and loss not in OBJECTIVES:
        reason = f"{shown(loss)}, which is none of {', '.join(OBJECTIVES)}"
        draft.unlike += [("pref_loss", reason), ("stage", f"{shown(stage)}: {LEFT_OUT}")]
        return unused(draft, (), RL_ONLY)
    choice = _kto(options) if stage == "kto" else _dpo(options)
    if stage == "kto":
        choice.lines += means(choice, "stage", draft)
    lines = write(choice, "stage", f"not used by stage {stage} with {choice.objective}", draft)
    return [*lines, *without_loss(draft, "train_on_prompt or mask_history")]


def _kto(options: dict[str, Any]) -> ChosenObjective:
    section = {
        "beta": options.get("pref_beta", 0.1),
        "desirable_weight": options.get("kto_chosen_weight", 1.0),
        "undesirable_weight": options.get("kto_rejected_weight", 1.0),
    }
    lines: list[str] = [Remark("pref_ftx: kto has no SFT term")] if options.get("pref_ftx") else []
    used = {"pref_beta", "pref_ftx", "kto_chosen_weight", "kto_rejected_weight"}
    return ChosenObjective("kto", section, used | _reference(options, lines), lines)


def _dpo(options: dict[str, Any]) -> ChosenObjective:
    loss, weight = options.get("pref_loss", "sigmoid"), options.get("pref_ftx", 0.0)
    choice = ChosenObjective(
        OBJECTIVES[loss], {"beta": options.get("pref_beta", 0.1)}, {"pref_beta", "pref_loss", "pref_ftx"}
    )
    section, lines, name = choice.section, choice.lines, choice.objective
    if name == "orpo":
        section["prompt_loss"] = False
        lines.append(Remark(f"pref_loss: the cross-entropy is {MEANS}"))
    else:
        section["sft_weight"] = weight
    if weight:
        lines.append(Remark(f"pref_ftx: the SFT term is {MEANS}" if name != "orpo" else "pref_ftx: orpo has its own"))
    if name == "simpo":
        section["gamma"] = options.get("simpo_gamma", 0.5)
        choice.used.add("simpo_gamma")
    if name == "dpo":
        section["loss"] = loss
        if options.get("dpo_label_smoothing"):
            choice.used.add("dpo_label_smoothing")
            text = "conservative DPO has no equal, since robust has another loss; 0.0 is written"
            lines.append(Remark(f"dpo_label_smoothing: {text}"))
    if options.get("ld_alpha") is not None:
        choice.used.add("ld_alpha")
        lines.append(Remark("ld_alpha: all tokens of an answer have the same weight"))
    if name in ("dpo", "ipo"):
        choice.used |= _reference(options, lines)
        if options.get("pref_bco_weight"):
            choice.used.add("pref_bco_weight")
            lines.append(Remark("pref_bco_weight: no objective has a BCO term"))
    return choice


def _reference(options: dict[str, Any], lines: list[str]) -> set[str]:
    """Return the options that name another reference, and add a line for each."""
    named = [key for key in ("ref_model", "ref_model_adapters") if key in options]
    lines += [Remark(f"{key}: the reference is the model that training starts from") for key in named]
    return set(named)


RULES = {
    "pref_beta": option("train.OBJECTIVE.beta", number, "0.1 if left out"),
    "pref_loss": option(
        "train.objective, train.dpo.loss",
        text,
        ", ".join(f"{old} → {new}" for old, new in OBJECTIVES.items() if old != new)
        + "; kto_pair stops the import of stage dpo",
    ),
    "pref_ftx": option("train.OBJECTIVE.sft_weight", number, f"0.0 if left out; {MEANS}"),
    "pref_bco_weight": option("", number, "no objective has a BCO term"),
    "dpo_label_smoothing": option("", number, "conservative DPO has no equal"),
    "kto_chosen_weight": option("train.kto.desirable_weight", number),
    "kto_rejected_weight": option("train.kto.undesirable_weight", number),
    "simpo_gamma": option("train.simpo.gamma", number),
    "ld_alpha": option("", number, "all tokens of an answer have the same weight"),
    **each(
        "ref_model ref_model_adapters",
        unless_off(option("", text, "the reference is the model that training starts from")),
    ),
}
