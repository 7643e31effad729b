"""The preference objectives of TRL's trainers, and their options.

As in TRL's trl/trainer/dpo_trainer.py and kto_trainer.py, and trl/experimental/orpo/orpo_trainer.py.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    Draft,
    NoEqual,
    Remark,
    Rule,
    each,
    idle,
    lost,
    number,
    only,
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
    write,
)

LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "robust": "robust", "sigmoid_norm": "length_normalized"}
"""Our train.dpo.loss, by loss_type; ipo is an objective here, and sft the term of sft_weight."""
LOGITS = idle("the reference's log probabilities are computed before training, logits in chunks")
REFERENCE = lost("the reference stays the model that training starts from")


def _sampled(value: Any, draft: Draft) -> str | None:
    draft.facts["shuffled"] = value == "random"
    if value not in ("random", "sequential"):
        raise NoEqual(f"{shown(value)}: rows are always shuffled by the seed")
    return None


SHARED = {
    "beta": option("train.OBJECTIVE.beta", number, "0.1 if left out"),
    "disable_dropout": DROPOUT,
    **each("precompute_ref_log_probs precompute_ref_batch_size use_logits_to_keep base_model_attribute_name", LOGITS),
    **each("generate_during_eval is_encoder_decoder label_pad_token_id padding_value", idle("used there only")),
    **each("sync_ref_model", unless_off(unlike("a reference that follows the model"))),
    **each("ref_model_mixup_alpha ref_model_sync_steps", idle("used only with sync_ref_model")),
    **each("ref_model_init_kwargs model_adapter_name ref_adapter_name force_use_ref_model", REFERENCE),
}
RULES: dict[str, dict[str, Rule]] = {
    "dpo": SHARED
    | {
        "loss_type": option(
            "train.dpo.loss, train.dpo.sft_weight",
            texts,
            "sigmoid_norm → length_normalized, ipo → objective ipo, sft → sft_weight; others stop the import",
        ),
        "loss_weights": unless_off(option("train.dpo.sft_weight", numbers, "that of sft; the other must be 1")),
        "label_smoothing": option("train.dpo.label_smoothing", number, "with loss_type robust"),
        "rpo_alpha": unless_off(option("train.dpo.sft_weight", number)),
        "reference_free": unlike("DPO without a reference"),
        "f_divergence_type": only("reverse_kl", "the divergence is the reverse KL"),
        "f_alpha_divergence_coef": idle("used only with another f_divergence_type"),
        "discopop_tau": idle("used only with loss_type discopop"),
        "ld_alpha": lost("all tokens of an answer have the same weight"),
        "use_weighting": lost("pairs have no weight (WPO)"),
    },
    "kto": SHARED
    | {
        "loss_type": option("train.objective", texts, "kto; others stop the import"),
        "desirable_weight": option("train.kto.desirable_weight", number),
        "undesirable_weight": option("train.kto.undesirable_weight", number),
        "train_sampling_strategy": Rule("", _sampled, "always random here"),
    },
    "orpo": SHARED,
}
"""The rules of the options of each trainer."""


def set_objective(trainer: str, draft: Draft) -> list[str]:
    """Set the objective of a trainer; return a line for each difference."""
    options = options_of(draft)
    if draft.unlike:
        draft.unlike.append(("beta", f"{trainer}: {LEFT_OUT}"))
        return []
    choice = {"dpo": _dpo, "kto": _kto, "orpo": _orpo}[trainer](options, draft)
    if choice is None:
        draft.unlike.append(("loss_type", f"{trainer}: {LEFT_OUT}"))
        return []
    choice.lines += means(choice, "beta", draft)
    if trainer == "kto" and not draft.facts.get("shuffled"):
        choice.lines.append(Remark("train_sampling_strategy: rows keep their order there; here the seed shuffles them"))
    return write(choice, "", "", draft)


def _dpo(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    losses = options.get("loss_type", ["sigmoid"])
    weights = options.get("loss_weights", [1.0] * len(losses))
    section: dict[str, Any] = {"beta": options.get("beta", 0.1)}
    if len(losses) != len(weights):
        draft.unlike.append(("loss_weights", f"{len(weights)} weights for {len(losses)} losses"))
        return None
    terms = dict(zip(losses, weights, strict=True))
    section["sft_weight"] = terms.pop("sft", 0.0) + options.get("rpo_alpha", 0.0)
    if len(terms) != 1 or next(iter(terms)) not in (*LOSSES, "ipo") or set(terms.values()) != {1.0}:
        known = ", ".join([*LOSSES, "ipo"])
        draft.unlike.append(("loss_type", f"{', '.join(losses)}: is not one of {known} with the weight 1, or with sft"))
        return None
    loss, lines = next(iter(terms)), list[str]()
    used = {"beta", "loss_type", "loss_weights", "rpo_alpha"}
    if smoothing := options.get("label_smoothing"):
        used.add("label_smoothing")
        if loss == "robust" and 0 < smoothing < 0.5:
            section["label_smoothing"] = smoothing
        elif loss == "sigmoid":
            lines.append(Remark("label_smoothing: conservative DPO has no equal; robust has another loss"))
    elif loss == "robust":
        loss = "sigmoid"  # the same without smoothing
    if loss == "ipo":
        return ChosenObjective("ipo", section, used, lines)
    return ChosenObjective("dpo", {"loss": LOSSES[loss], **section}, used, lines)


def _kto(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    loss = options.get("loss_type", ["kto"])
    if loss != ["kto"]:
        draft.unlike.append(("loss_type", f"{', '.join(loss)}, where the objective kto has one loss"))
        return None
    section = {key: options.get(key, 1.0) for key in ("desirable_weight", "undesirable_weight")}
    return ChosenObjective("kto", {"beta": options.get("beta", 0.1), **section}, {"beta", "loss_type", *section})


def _orpo(options: dict[str, Any], draft: Draft) -> ChosenObjective | None:
    return ChosenObjective("orpo", {"beta": options.get("beta", 0.1), "prompt_loss": True}, {"beta"})
