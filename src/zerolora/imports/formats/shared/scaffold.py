"""What no tool's file contains: machine, test split and run."""

import functools
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import CHANGES, FILL_IN, NO_EFFECT, Draft, NoEqual, Remark, number
from zerolora.imports.formats.shared import adapter_keys
from zerolora.imports.formats.shared.interval_keys import set_checkpoints, set_validation
from zerolora.machine import this_machine
from zerolora.units import counted

GPU = {"device": "cuda", "gpu_memory": "80GiB", "compute_capability": 8.0}
"""A GPU of a file that is for more of them than this machine has, if it has none."""
MIXTURE = (
    "of a mixture of experts, all-linear adapts the experts and no router here, there as the versions of transformers "
    "and peft do (docs/methods.md); list the modules of such a model"
)
LARGEST = 2**31  # bound of integers in the config
ROWS = 200
"""Number of validation rows where that of a file cannot be read."""


def validation(value: Any, draft: Draft) -> str | None:
    """Store the number of validation rows, or their share."""
    draft.facts["validation"] = ROWS
    size = number(value)
    if not 0 <= size < LARGEST:
        raise NoEqual(f"{shown(value)} is neither a fraction nor a number of rows; {ROWS} is written", FILL_IN)
    if 0 < size < 1 or size == int(size):
        draft.facts["validation"] = size if 0 < size < 1 else int(size)
        return None
    return Remark(f"{size:g} is no whole number of rows: {ROWS} is written; correct it", CHANGES)


@functools.cache
def _here() -> dict[str, Any]:
    """Return this machine, which is asked once: an import translates a file several times."""
    return this_machine.hardware()


def _machine(draft: Draft) -> list[str]:
    """Set the section hardware: this machine, or as many GPUs as the file says, and a rank on each; return its line."""
    config = draft.config
    train = config.setdefault("train", {})
    degree = train.get("sequence_parallel", 1)
    said, nodes = draft.facts.get("gpus", degree if degree > 1 else None), draft.facts.get("nodes", 1)
    hardware = {**_here()}
    if draft.facts.get("cuda") and hardware["device"] == "cpu":
        said = said or 1
    if draft.facts.get("cpu"):
        hardware = {"device": "cpu", "host_memory": hardware["host_memory"]}
    if said and said != hardware.get("gpus_per_node"):
        hardware = {**GPU, **(hardware if hardware["device"] == "cuda" else {}), "gpus_per_node": said}
        text = f"hardware: the file is for {counted(said, 'GPU')}, not those of this machine; correct their memory"
    else:
        gpus = counted(hardware["gpus_per_node"], "GPU") if "gpus_per_node" in hardware else "no GPU"
        text = f"hardware: that of this machine, which has {gpus}; correct it where another one trains"
    if nodes > 1:
        hardware["nodes"] = train["nodes"] = nodes
    config["hardware"] = hardware
    train["ranks_per_node"] = hardware.get("gpus_per_node", 1)
    return [f"{text}, and train.nodes, train.ranks_per_node and train.global_batch with it"]


def _ranks(train: dict[str, Any]) -> int:
    return int(train["ranks_per_node"]) * int(train.get("nodes", 1))


def scaffold(draft: Draft) -> list[str]:
    """Set what no tool's file contains: machine, test split and run. Returns a line for each assumption."""
    facts, config = draft.facts, draft.config
    draft.key = ""
    lines = _machine(draft)
    train = config["train"]
    micro, accumulation = facts.get("micro_batch"), facts.get("accumulation", 1)
    rows = (micro or 1) * accumulation * (_ranks(train) // train.get("sequence_parallel", 1))
    if rows < LARGEST:
        train["global_batch"] = rows
        if micro:
            train["micro_batch"] = micro
    else:
        text = f"train.global_batch: left out, since {micro or 1} x {accumulation} is too large"
        lines.append(Remark(text, CHANGES))
    if "warmup_share" in facts:
        draft.key = "warmup_steps"
        draft.set("train.warmup_ratio", facts["warmup_share"])
        draft.key = ""
    if "warmup_steps" in train and "warmup_ratio" in train:
        del train["warmup_ratio"]
        lines.append(Remark("train.warmup_ratio: left out, since warmup_steps overrides it there", NO_EFFECT))
    if betas := [key for key in ("beta1", "beta2") if key in facts]:
        draft.key = f"adam_{betas[0]}"
        draft.set("train.betas", [facts.get("beta1", 0.9), facts.get("beta2", 0.999)])
    set_validation(draft)
    set_checkpoints(draft)
    data = config["prepare"]["rows"]
    held_out = any(source.get("split") == "validation" for source in data.get("sources", {}).values())
    data["split"] = {"validation": 0 if held_out else facts.get("validation", 0), "test": 0}
    if held_out or data["split"]["validation"]:
        text = "prepare.rows.split: there are no test rows, as there; the validation rows are evaluated"
    else:
        text = "prepare.rows.split: no rows are held out, as there; nothing is evaluated"
        if "validation_steps" in train:  # without effect there
            for key in {"validation_steps", "patience", "keep"} & train.keys():
                del train[key]
    lines.append(Remark(text, NO_EFFECT))
    if train.get("lora", {}).get("targets") == "all-linear":
        lines.append(f"train.lora.targets: {MIXTURE}")
    return [*lines, *adapter_keys.run(draft)]
