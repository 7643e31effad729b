"""The adapter that a training continues from."""

from pathlib import Path
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import Draft, NoEqual, Remark, Rule, texts, unless_off
from zerolora.imports.formats.shared.named_files import exists

REFERENCE = (
    "the reference is the model without its adapter there, here the model with the adapter that training starts from"
)


def _adapter(value: Any, draft: Draft) -> str | None:
    named = texts(value)
    if len(named) > 1:
        raise NoEqual(f"{shown(value)}: all but the last are merged there; merge them into the model first")
    draft.facts["adapter_from"] = (draft.key, named[0])
    return None


ADAPTER = unless_off(Rule("continued.RUN.train.from_adapter", _adapter, "the run is in `continued`"))
"""The rule of a key that names the adapter."""


def run(draft: Draft) -> list[str]:
    """Set the run, in `continued` if it starts from an adapter; return a line for each assumption."""
    if "adapter_from" not in draft.facts:
        draft.config["runs"] = {"imported": {"dataset": "rows"}}
        return []
    key, name = draft.facts["adapter_from"]
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1 or exists(Path(name), Path.is_dir)
    own = {"results", "resources"} & {*Path(name).parts[:1]}  # whose adapters are those of runs and of fetch.adapter
    is_path = is_path and not own
    path = name if is_path else f"adapters/{Path(name).name}"
    draft.config["continued"] = {"imported": {"dataset": "rows", "train": {"from_adapter": path}}}
    lines = [
        f"{key}: {path} must have the rank, alpha and targets of train.lora; those of the adapter count there"
        + f"; bring {name} there, or name it in fetch.adapter with its commit" * (not is_path)
    ]
    if draft.config["train"].get("objective") in ("dpo", "ipo", "kto") and not draft.facts.get("adapter_in_reference"):
        lines.append(Remark(f"{key}: {REFERENCE}"))
    return lines
