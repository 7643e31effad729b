"""Embedding and head that share a weight and differ after a merge: the head becomes a tensor of its own.

peft adapts, or saves, one of the two modules and leaves the base's weight to the other (peft#2777). Merged into the
shared weight, the adapter would change both. Where it changes both alike (ensure_weight_tying) the weight stays shared.
"""

from collections.abc import Container, Mapping
from pathlib import Path

from zerolora.files import read_object, write_json
from zerolora.methods.lora import Product, Replacement, Then
from zerolora.methods.method import Update
from zerolora.tensor_file import equal, whole

KEY = "tie_word_embeddings"


def untied_copies(
    updates: Mapping[str, Update], tied: Mapping[str, str], stored: Container[str]
) -> tuple[dict[str, Update], dict[str, str]]:
    """Return the updates to apply, and those of `tied`, the weight by its copy, that are two weights after the merge.

    `stored` has the weights that the base's files contain.
    """
    result, untied = dict(updates), {}
    for copy, name in tied.items():
        one, other = updates.get(name), updates.get(copy)
        if (one is None and other is None) or (other is not None and other.optional):
            continue
        if one is None or other is None or not _alike(one, other):
            untied[copy] = name
        elif copy not in stored:
            del result[copy]
    return result, untied


def write_untied(model: Path) -> None:
    """Write to the config.json of directory `model` that embedding and head are two weights."""
    config = read_object(model / "config.json", "save_pretrained")
    for part in (config, config.get("text_config") or {}):
        if part is config or KEY in part:
            part[KEY] = False
    write_json(model / "config.json", config)


def _alike(one: Update, other: Update) -> bool:
    """Return whether two updates turn one weight into the same."""
    if isinstance(one, Then) and isinstance(other, Then):
        return len(one.updates) == len(other.updates) and all(map(_alike, one.updates, other.updates))
    if isinstance(one, Replacement) and isinstance(other, Replacement):
        return equal(one.trained, other.trained)
    if not (isinstance(one, Product) and isinstance(other, Product)) or one.scale != other.scale:
        return False
    if "magnitude_vector" in one.parts or "magnitude_vector" in other.parts:
        return False  # a norm for each column of the one, for each row of the other
    (left, right), (first, second) = one.factors, other.factors
    if one.turned == other.turned:
        return equal(left, first) and equal(right, second)
    return equal(whole(left).T, second) and equal(whole(right).T, first)
