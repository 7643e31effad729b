"""The preference objectives of `swift rlhf`, and their options.

As in ms-swift's swift/arguments/rlhf_args.py and swift/rlhf_trainers/.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    Draft,
    Remark,
    Rule,
    Unlike,
    each,
    idle,
    lost,
    number,
    only,
    text,
    texts,
    unless_off,
    unlike,
)
from zerolora.imports.formats.shared.preferences import (
    DROPOUT,
    LEFT_OUT,
    ChosenObjective,
    means,
    numbers,
    option,
    options_of,
    unused,
    write,
)

LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "robust": "robust"}
"""Our train.dpo.loss, by loss_type; ipo is an objective here, and sft the term of sft_weight."""
OTHERS = "used only with another rlhf_type"
LOSS = unless_off(option("train.dpo.loss, train.dpo.sft_weight", texts, "with rlhf_type dpo; others stop the import"))
DEFAULT_BETA = {"simpo": 2.0}
"""beta without the key (RLHFArguments._init_simpo), 0.1 for others."""


def _type(value: Any, draft: Draft) -> str | None:
    if not isinstance(value, str) or value not in CHOICES:
        raise Unlike(f"{shown(value)}: no objective of zerolora, which has {', '.join(CHOICES)}")
    draft.facts["rlhf"] = value
    return None


RULES = {
    "rlhf_type": Rule("train.objective", _type, "dpo, orpo, simpo and kto; others stop the import"),
    "beta": unless_off(option("train.OBJECTIVE.beta", number, "0.1 if left out, 2.0 with simpo")),
    "label_smoothing": option("train.dpo.label_smoothing", number, "with loss_type robust"),
    "loss_weights": unless_off(option("train.dpo.sft_weight", numbers, "that of sft; the other must be 1")),
    "rpo_alpha": unless_off(option("train.dpo.sft_weight", number)),
    "cpo_alpha": option("train.simpo.sft_weight", number, "1.0 if left out"),
    "simpo_gamma": option("train.simpo.gamma", number, "1.0 if left out"),
    "desirable_weight": option("train.kto.desirable_weight", number),
    "undesirable_weight": option("train.kto.undesirable_weight", number),
    "disable_dropout": DROPOUT,
    "ld_alpha": lost("all tokens of an answer have the same weight"),
    "reference_free": unlike("DPO without a reference"),
    **each("ref_model ref_model_type ref_model_revision", unless_off(option("", text, "the reference is the start"))),
    "ref_adapter_name": idle("the reference is the model that training starts from"),
    "f_divergence_type": only("reverse_kl", "the divergence is the reverse KL"),
    **each("discopop_tau center_rewards_coefficient lmbda seq_kd sft_alpha gamma lam", idle(OTHERS)),
    **each("reward_* teacher_* offload_teacher_model gkd_logits_topk num_generations kl_coef cliprange* vf_coef",
           idle(OTHERS)),
    **each("num_ppo_epochs whiten_rewards num_mini_batches local_rollout_forward_batch_size num_sample_generations",
           idle(OTHERS)),
    **each("response_length missing_eos_penalty log_completions num_iterations max_completion_length", idle(OTHERS)),
    **each("precompute_ref_log_probs max_prompt_length", idle("the reference is always computed before training")),
}  # fmt: skip


def set_objective(draft: Draft) -> list[str]:
    """Set the objective of `swift rlhf`; return a line for each difference and for options without use."""
    facts, options = draft.facts, options_of(draft)
    if facts.get("command", "rlhf" if "rlhf" in facts else "sft") != "rlhf":
        if "loss_type" in options:
            draft.unlike.append(
                ("loss_type", f"another loss than the cross-entropy ({', '.join(options['loss_type'])})")
            )
        return unused(draft, {"loss_type"}, "used only by `swift rlhf`")
    name = facts.get("rlhf", "dpo")
    if draft.unlike:
        draft.unlike.append(("rlhf_type", f"{name}: {LEFT_OUT}"))
        return unused(draft, (), OTHERS)
    choice = CHOICES[name](options, draft)
    if choice is None:
        draft.unlike.append(("rlhf_type", f"{name}: {LEFT_OUT}"))
        return []
    if "ref_model" in options:
        choice.used |= {"ref_model", "ref_model_type", "ref_model_revision"}
        choice.lines.append(Remark("ref_model: the reference is the model that training starts from"))
    choice.lines += means(choice, "rlhf_type", draft)
    return write(choice, "rlhf_type", f"not used by rlhf_type {name}", draft)


def _beta(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {"beta": options.get("beta", DEFAULT_BETA.get(name, 0.1))}


def _dpo(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    losses = options.get("loss_type", ["sigmoid"])
    weights = options.get("loss_weights", [1.0] * len(losses))
    terms = dict(zip(losses, weights, strict=False))
    section = _beta(options, "dpo")
    section["sft_weight"] = terms.pop("sft", 0.0) + options.get("rpo_alpha", 0.0)
    smoothing = options.get("label_smoothing", 0.0)
    loss = next(iter(terms), "")
    if len(losses) != len(weights) or len(terms) != 1 or loss not in (*LOSSES, "ipo") or terms[loss] != 1.0:
        known = ", ".join([*LOSSES, "ipo"])
        draft.unlike.append(("loss_type", f"{', '.join(losses)}: is not one of {known} with the weight 1, or with sft"))
        return None
    lines: list[str] = []
    used = {"beta", "loss_type", "loss_weights", "rpo_alpha", "label_smoothing"}
    if smoothing and loss == "sigmoid":
        lines.append(Remark("label_smoothing: conservative DPO has no equal; robust has another loss"))
    if loss == "ipo":
        return ChosenObjective("ipo", section, used, lines)
    if loss == "robust" and smoothing:
        section["label_smoothing"] = smoothing
    elif loss == "robust":
        loss = "sigmoid"  # the same without smoothing
    return ChosenObjective("dpo", {"loss": LOSSES[loss], **section}, used, lines)


def _simpo(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    section = _beta(options, "simpo")
    section |= {"gamma": options.get("simpo_gamma", 1.0), "sft_weight": options.get("cpo_alpha", 1.0)}
    return ChosenObjective("simpo", section, {"beta", "simpo_gamma", "cpo_alpha"})


def _orpo(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    # its trainer passes the labels as the inputs of the cross-entropy, in which prompts are masked
    return ChosenObjective("orpo", {**_beta(options, "orpo"), "prompt_loss": False}, {"beta"})


def _kto(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    weights = {key: options.get(key, 1.0) for key in ("desirable_weight", "undesirable_weight")}
    return ChosenObjective("kto", {**_beta(options, "kto"), **weights}, {"beta", *weights})


CHOICES = {"dpo": _dpo, "orpo": _orpo, "simpo": _simpo, "kto": _kto}
