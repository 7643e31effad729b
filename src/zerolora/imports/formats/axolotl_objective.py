"""The preference objectives of an axolotl config: `rl` and its options.

As in axolotl's src/axolotl/core/builders/rl.py, with the defaults and losses of TRL's trainers.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    NO_EFFECT,
    Draft,
    Remark,
    Rule,
    Unlike,
    each,
    flag,
    idle,
    lost,
    number,
    texts,
    unless_off,
    unless_zero,
)
from zerolora.imports.formats.shared import untranslated_keys
from zerolora.imports.formats.shared.preferences import (
    CUT,
    LEFT_OUT,
    ChosenObjective,
    means,
    numbers,
    option,
    options_of,
    unused,
    write,
)

RL_ONLY = "used only with `rl`"
LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "robust": "robust", "sigmoid_norm": "length_normalized"}
"""Our train.dpo.loss, by TRL's loss_type; ipo is an objective here, and sft the term of sft_weight."""
BETA = "train.OBJECTIVE.beta"


def _named(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, str) or value not in CHOICES:
        raise Unlike(f"{shown(value)}: rewards, which train.objective does not have; it has {', '.join(CHOICES)}")
    draft.facts["rl"] = value
    return None


def _trl(value: Any, draft: Draft) -> str | None:
    if isinstance(value, dict) and value.get("beta") is not None:
        draft.facts.setdefault("options", {})["trl.beta"] = number(value["beta"])
    return None


def _beta(options: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the beta of a section, and the key that it is from. orpo_alpha is that of every `rl` without another."""
    keys = [key for key in ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha") if key in options]
    if "dpo_beta" in keys and not options.get("rl_beta"):
        keys = [key for key in keys if key != "rl_beta"]
    return {"beta": options[keys[0]] if keys else 0.1}, set(keys[:1])


def _dpo(options: dict[str, Any]) -> ChosenObjective:
    section, used = _beta(options)
    losses = options.get("dpo_loss_type", ["sigmoid"])
    weights = options.get("dpo_loss_weights", [1.0] * len(losses))
    trained = [(loss, weight) for loss, weight in zip(losses, weights, strict=False) if loss != "sft"]
    known = [loss for loss, weight in trained if loss in (*LOSSES, "ipo") and weight == 1.0]
    if len(losses) != len(weights) or len(known) != 1 or len(trained) != 1:
        known = [*LOSSES, "ipo"]
        raise Unlike(f"{', '.join(losses)}: is not one of {', '.join(known)} with the weight 1, alone or with sft")
    loss = known[0]
    used |= {"dpo_loss_type", "dpo_loss_weights", "dpo_use_weighting", "rpo_alpha"}
    section["sft_weight"] = dict(zip(losses, weights, strict=True)).get("sft", 0.0) + options.get("rpo_alpha", 0.0)
    lines = [Remark("dpo_use_weighting: pairs have no weight here (WPO)")] if options.get("dpo_use_weighting") else []
    if loss == "ipo":
        return ChosenObjective("ipo", section, used, [*lines])
    if loss == "robust":
        used.add("dpo_label_smoothing")
        if smoothing := options.get("dpo_label_smoothing"):
            if not 0 < smoothing < 0.5:
                raise Unlike(
                    f"robust with dpo_label_smoothing {smoothing:g}, which must be more than 0 and less than 0.5"
                )
            section["label_smoothing"] = smoothing
        else:
            loss = "sigmoid"  # the same without smoothing
    return ChosenObjective("dpo", {"loss": LOSSES[loss], **section}, used, [*lines])


def _ipo(options: dict[str, Any]) -> ChosenObjective:
    section, used = _beta(options)
    return ChosenObjective("ipo", {**section, "sft_weight": options.get("rpo_alpha", 0.0)}, {*used, "rpo_alpha"})


def _simpo(options: dict[str, Any]) -> ChosenObjective:
    section, used = _beta(options)
    section |= {"gamma": options.get("simpo_gamma", 0.5), "sft_weight": options.get("cpo_alpha", 1.0)}
    missing = "train.simpo.gamma: the file has no simpo_gamma, without which axolotl fails; 0.5 is written"
    return ChosenObjective(
        "simpo", section, {*used, "simpo_gamma", "cpo_alpha"}, [missing] * ("simpo_gamma" not in options)
    )


def _orpo(options: dict[str, Any]) -> ChosenObjective:
    section, used = _beta(options)
    return ChosenObjective("orpo", {**section, "prompt_loss": True}, used)


def _kto(options: dict[str, Any]) -> ChosenObjective:
    section, used = _beta(options)
    for key in ("desirable_weight", "undesirable_weight"):
        section[key] = options.get(f"kto_{key}") or 1.0
        used.add(f"kto_{key}")
    return ChosenObjective("kto", section, used)


CHOICES = {"dpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo, "kto": _kto}
"""The objective, by the name of `rl` and the options of the file."""


def set_objective(draft: Draft) -> list[str]:
    """Set the objective that `rl` names; return a line for each option that it does not use, or that differs."""
    name = draft.facts.get("rl")
    if name and draft.unlike:
        draft.unlike.append(("rl", f"{shown(name)}: {LEFT_OUT}"))
    if name is None or draft.unlike:
        return unused(draft, (), RL_ONLY)
    try:
        choice = CHOICES[name](options_of(draft))
    except Unlike as reason:
        draft.unlike += [("dpo_loss_type", str(reason)), ("rl", f"{shown(name)}: {LEFT_OUT}")]
        return unused(draft, (), RL_ONLY)
    lines = [*write(choice, "rl", f"not used by rl: {name}", draft), *means(choice, "rl", draft)]
    if draft.facts.get("too_long") == "truncate_right":
        draft.facts["too_long"] = "fail"
        lines.append(Remark(f"excess_length_strategy: {CUT}", NO_EFFECT))
    if draft.facts.pop("inputs", None):
        lines.append(Remark("train_on_inputs: answers alone are compared, there too", NO_EFFECT))
    return lines


RULES = {
    "rl": unless_zero(
        Rule("train.objective", _named, f"{', '.join(CHOICES)}, with the defaults of TRL; others stop the import")
    ),
    "trl": unless_off(Rule(BETA, _trl, "its beta; the rest is used only with rewards")),
    **each("vllm ebft", unless_off(idle(RL_ONLY))),
    **each("rl_beta dpo_beta", option(BETA, number, "0.1 if left out")),
    "orpo_alpha": option(BETA, number, "if no other key has it, with every rl"),
    "simpo_gamma": option("train.simpo.gamma", number),
    "cpo_alpha": option("train.simpo.sft_weight", number, "1.0 if left out"),
    "rpo_alpha": option("train.dpo.sft_weight", number),
    "kto_desirable_weight": option("train.kto.desirable_weight", number),
    "kto_undesirable_weight": option("train.kto.undesirable_weight", number),
    "dpo_loss_type": option(
        "train.dpo.loss, train.dpo.sft_weight",
        texts,
        "sigmoid_norm → length_normalized, ipo → objective ipo, sft → sft_weight; others stop the import",
    ),
    "dpo_loss_weights": option("train.dpo.sft_weight", numbers, "that of sft; the other must be 1"),
    "dpo_label_smoothing": option("train.dpo.label_smoothing", number, "with dpo_loss_type robust"),
    "dpo_use_weighting": option("", flag, "pairs have no weight (WPO)"),
    **each(
        "dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep",
        idle("logits are computed for supervised tokens only, in chunks"),
    ),
    "dpo_norm_loss": lost("train.dpo.loss has length_normalized, of differences to the reference"),
    "dpo_generate_during_eval": untranslated_keys.EVALUATED,
    "precompute_ref_log_probs": idle("the reference is always computed before training"),
    "max_prompt_len": idle("not read by TRL's trainers of dpo, ipo, simpo, orpo and kto"),
}
