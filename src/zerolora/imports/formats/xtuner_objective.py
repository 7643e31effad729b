"""The preference trainings of an XTuner config (0.2): its models DPO and ORPO, and their rows.

As in XTuner's xtuner/model/dpo.py, xtuner/model/orpo.py and xtuner/dataset/preference_dataset.py.
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    Draft,
    Remark,
    Rule,
    fact,
    idle,
    number,
    only,
    text,
    unlike,
    whole,
)
from zerolora.imports.formats.shared import untranslated_keys
from zerolora.imports.formats.shared.preferences import ChosenObjective, option, options_of, unused, write
from zerolora.imports.formats.shared.sets import SCORES, unread

TRAINERS = ("DPO", "ORPO")
LOSSES = {"sigmoid": "dpo", "hinge": "dpo", "robust": "dpo", "ipo": "ipo"}
"""Our objective of a loss_type of DPO."""
READS = {
    "orpo_dpo_mix_40k_map_fn": ("chosen", "rejected"),
    "intel_orca_dpo_map_fn": ("system", "question", "chosen", "rejected"),
}
"""The columns that a dataset_map_fn reads."""


def rules(at: str) -> dict[str, Rule]:
    """Return the rules of the model's options, and of those of the data set `at`."""
    return {
        "model.loss_type": option("train.objective, train.dpo.loss", text, "ipo → ipo, others → dpo"),
        "model.beta": option("train.dpo.beta, train.ipo.beta, train.orpo.beta", number),
        "model.label_smoothing": option("train.dpo.label_smoothing", number),
        "model.ref_llm": unlike("another reference than the model that training starts from"),
        f"{at}.is_dpo": only(True, "rows are pairs of answers"),
        f"{at}.is_reward": unlike("a reward model"),
        f"{at}.is_reference": unlike("a reward model"),
        f"{at}.reward_token_id": idle("used only with a reward model"),
        f"{at}.max_response_length": idle("used only with a reward model"),
        f"{at}.max_packed_length": fact("capacity", "pack.capacity", whole),
        f"{at}.num_proc": untranslated_keys.WORKERS,
    }


def unread_columns(name: str) -> list[str]:
    """Return the columns of a pair that a dataset_map_fn does not read; without one rows are as XTuner has them."""
    return unread("preference", [*READS.get(name, ("prompt", "chosen", "rejected")), *SCORES])


def set_objective(draft: Draft) -> list[str]:
    """Set the objective of DPO or ORPO and its section; return a line for each option that it does not use."""
    if "trainer" not in draft.facts:
        return unused(draft, (), "used only with DPO and ORPO")
    options = {key.removeprefix("model."): value for key, value in options_of(draft).items()}
    loss, smoothing = options.get("loss_type", "sigmoid"), options.get("label_smoothing", 0.0)
    objective = "orpo" if draft.facts["trainer"] == "ORPO" else LOSSES.get(loss)
    if objective is None:
        draft.unlike.append(("model.loss_type", f"{shown(loss)}: a preference loss that train.objective does not have"))
        return []
    sections: dict[str, dict[str, Any]] = {"dpo": {"loss": loss, "sft_weight": 0.0}, "ipo": {"sft_weight": 0.0}}
    section, used = {"beta": options.get("beta", 0.1)} | sections.get(objective, {}), {"beta"}
    if objective != "orpo":
        used.add("loss_type")
    lines = list[str]()
    if loss in ("sigmoid", "robust") and objective == "dpo":
        used.add("label_smoothing")
        if loss == "robust":
            section["label_smoothing"] = smoothing
        elif smoothing:
            lines.append(Remark("model.label_smoothing: conservative DPO has no equal; robust has another loss"))
    draft.facts["dropout"] = True
    choice = ChosenObjective(objective, section, {f"model.{name}" for name in used}, lines)
    return write(choice, "model.type", f"not used by {objective}", draft)


def means(draft: Draft) -> list[str]:
    """Return a line for each mean over a micro-batch there that is of the global batch here: over the pairs of a packed
    row, and of ORPO's cross-entropy."""
    lines: list[str] = []
    if draft.facts.get("isolated"):
        lines.append(Remark("optim_wrapper.accumulative_counts: the loss is the mean of each packed row's pairs there, "
                            "of the global batch's here"))  # fmt: skip
    if draft.facts["objective"] == "orpo":
        lines.append(Remark("optim_wrapper.accumulative_counts: the cross-entropy is the mean of each micro-batch's "
                            "tokens there, of the global batch's here"))  # fmt: skip
    return lines
