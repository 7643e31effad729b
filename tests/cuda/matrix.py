"""The cases of training on a GPU, made of the registries: each family with flash attention and with another one, and
method, optimizer, activation checkpointing, objective, packing and precision drawn for them so that each pair of values
that meet in one computation has a case. The product of all would be 300 times as many."""

import functools
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import test_models
from test_shapes import CASES

from zerolora.methods.registry import TRAINABLE
from zerolora.model.families import FAMILIES
from zerolora.optimizers import OPTIMIZERS
from zerolora.train.objectives import OBJECTIVES
from zerolora.types import Attention, Precision

Case = tuple[str, str, dict[str, Any]]
"""A name, what is done, and its arguments."""
CHECKPOINTING: dict[str, dict[str, bool]] = {
    "kept": {},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"activation_checkpointing": True, "activation_offload": True},
}
METHODS: dict[str, dict[str, Any]] = {name: {"method": name} for name in TRAINABLE} | {
    "qlora int8": {"method": "qlora", "quantization": {"type": "int8"}}
}
FACTORS: dict[str, Iterable[str]] = {
    "attention": get_args(Attention),
    "method": METHODS,
    "optimizer": OPTIMIZERS,
    "checkpointing": CHECKPOINTING,
    "objective": OBJECTIVES,
    "packed": ("packed", "unpacked"),
    "precision": get_args(Precision),
}
# Values of DeepSeek's heads that differ in size from queries, as in the published models.
MODELS = {**test_models.FAMILIES, "deepseek_v3": test_models.FAMILIES["deepseek_v3"] | {"v_head_dim": 16}}
DECODERS = sorted({*FAMILIES, *MODELS})
"""Families of the registry, and others that are trained in tests."""
Choice = tuple[str, ...]
"""A value of each of FACTORS."""


REFUSED = {
    ("bloom", "flash"): "computes with the mask of its attention",
    ("falcon", "flash"): "has its attention built in",
    ("gemma2", "flash"): "does not support the softcap",
}
"""What is said of an attention that a family does not have."""
WITHOUT_SDPA = ("bloom", "gemma2", "gpt_oss")
EXPERTS = ("deepseek_v3", "mixtral", "qwen3_moe")
"""Families whose experts an adapter targets; peft has no DoRA of them."""
WITH_TOWERS = ("gemma3", "qwen2_5_vl")
"""Families with parts beside the language model, as one for images."""


LARGE = ("gemma3", "qwen2_5_vl")
"""Families whose cases have the published vocabulary."""


def refusal(name: str, choice: Choice) -> str | None:
    """Return what is said of a case that is refused."""
    family, attention = name.split()[:2]
    if family in EXPERTS and "dora" in choice[1]:
        return "does not work with use_dora"
    if family in WITH_TOWERS and choice[1] == "vera":
        return "adapts all parts of a model"
    return REFUSED.get((family, attention))


def pairs(choice: Choice) -> set[frozenset[tuple[str, str]]]:
    """Return each pair of values of factors that meet: an optimizer sees trained weights and their type alone, and an
    objective the logits."""
    apart = {frozenset({"method", "objective"}), *(frozenset({"optimizer", each}) for each in FACTORS)}
    apart -= {frozenset({"optimizer", "precision"})}
    values = zip(FACTORS, choice, strict=True)
    return {
        frozenset({one, other})
        for one, other in itertools.combinations(values, 2)
        if frozenset({one[0], other[0]}) not in apart
    }


def attentions(family: str) -> tuple[str, str]:
    """Return flash, and sdpa or eager, which differ from each other in the form of the mask."""
    eager = DECODERS.index(family) % 3 == 0 or family in WITHOUT_SDPA
    return "flash", "eager" if eager else "sdpa"


@functools.cache
def drawn() -> dict[str, Choice]:
    """Return the choice of each case, by family and attention: the one with the most pairs that no case has yet. The
    pairs that are left then are in further cases."""
    all_of = {choice: pairs(choice) for choice in itertools.product(*FACTORS.values())}
    everything = set().union(*all_of.values())
    left, again, chosen = set(everything), set(everything), {}
    for number in (1, 2, 3):
        for family, attention in [(decoder, each) for decoder in DECODERS for each in attentions(decoder)]:
            name = f"{family} {attention}{f' {number}' * (number > 1)}"
            possible = [each for each in all_of if each[0] == attention and not (family in LARGE and is_paged(each))]
            best = max(possible, key=lambda choice: (len(all_of[choice] & left), len(all_of[choice] & again)))
            if number > 1 and (refusal(name, best) or not all_of[best] & left):
                continue
            chosen[name] = best
            if not refusal(name, best):
                left -= all_of[best]
                again = (again - all_of[best]) or set(everything)
    return chosen


def is_paged(choice: Choice) -> bool:
    """Return whether an optimizer of all weights pages its states, for which bitsandbytes needs a GPU from 100,000
    numbers on."""
    return choice[1] == "full" and choice[2].startswith("paged")


def config_of(family: str) -> dict[str, Any]:
    """Return the family's first case that a model can compute with, in two layers."""
    from transformers import CONFIG_MAPPING

    if family in MODELS:
        return MODELS[family] | {"vocab_size": 300}
    for case in CASES:
        config = CONFIG_MAPPING[family](**case) if case["model_type"] == family else None
        heads = getattr(config, "num_attention_heads", 1)
        if config and not (
            heads % (getattr(config, "num_key_value_heads", None) or heads) or config.hidden_size % heads
        ):
            return case | {name: 2 for name in ("num_hidden_layers", "n_layer") if name in case}
    raise AssertionError(f"no case of {family} in test_shapes.py computes")


def write_models(folder: Path, tiny_model: Path) -> Iterator[tuple[str, Any]]:
    """Write a model of each family with drawn weights, and yield it with its family."""
    import torch
    from transformers import CONFIG_MAPPING

    from zerolora.model.architecture import auto_class

    for family in DECODERS:
        shutil.copytree(tiny_model, folder / family, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
        shutil.copy(tiny_model / "tokenizer_config.json", folder / family)
        config = CONFIG_MAPPING[family](**config_of(family))
        torch.manual_seed(0)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / family)
        yield family, model


def trainings(folder: Path) -> list[Case]:
    """Return the cases of training of models in `folder`."""
    cases: list[Case] = []
    for name, choice in drawn().items():
        settings = dict(zip(FACTORS, choice, strict=True))
        objective, packed = settings.pop("objective"), settings.pop("packed") == "packed"
        checkpointing = CHECKPOINTING[settings.pop("checkpointing")]
        chosen = settings | METHODS[settings["method"]] | checkpointing
        weights = str(folder / name.split()[0])
        cases.append(
            (name, "train", {"weights": weights, "settings": chosen, "packed": packed, "objective": objective})
        )
    return cases
