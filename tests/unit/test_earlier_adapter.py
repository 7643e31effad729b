"""Adapters of peft that training can continue from, by the config keys that give their tensors a meaning."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal
from peft import IA3Config, LoraConfig, VeraConfig

from zerolora.errors import UserError
from zerolora.methods import lora_init
from zerolora.methods.method import TrainableMethod
from zerolora.methods.peft_format import CONFIG, portable
from zerolora.methods.registry import TRAINABLE
from zerolora.train.earlier_adapter import HARMLESS, KIND, check_meaning

BASE = {"name": "./base", "revision": None}
OURS = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")


def method_of(config: Any) -> type[TrainableMethod]:
    """Return the first method whose adapters have a config of this type."""
    return next(method for method in TRAINABLE.values() if method.peft_type == config.peft_type.value)


def check(directory: Path, config: Any) -> None:
    check_meaning(directory, config, method_of(config))


def written(folder: Path, config: Any, **changed: Any) -> Path:
    (folder / CONFIG).write_text(json.dumps(portable(config, BASE) | changed))
    return folder


# As peft writes them: tensors of another base, of some positions only, or combined in another way.
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", each) for each in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq")),
        ("init_lora_weights", "PiSSA"),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 2}),
        ("arrow_config", {"top_k": 3}),
        ("corda_config", {"corda_method": "ipm"}),
        ("eva_config", {"rho": 2.0}),
        ("lora_ga_config", {"scale": "unit"}),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("lora_bias", True),
        ("bias", "all"),
        ("megatron_config", {"a": 1}),
        ("ensure_weight_tying", True),
        ("trainable_token_indices", {"embed_tokens": [5]}),
        ("of_a_newer_peft", "x"),
    ],
)
def test_adapter_with_tensors_of_another_meaning_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    line = refusal(check, written(tmp_path, OURS, **{key: value}), OURS)
    assert f"{CONFIG}: {key} is {value!r}, with which its tensors mean" in line


@pytest.mark.parametrize(("key", "setting"), [("r", "vera.r"), ("projection_prng_key", "vera.projection_seed")])
def test_another_vera_is_refused_with_its_config_key(tmp_path: Path, key: str, setting: str) -> None:
    ours = VeraConfig(r=8, projection_prng_key=5, task_type="CAUSAL_LM")
    with pytest.raises(UserError, match=f"{key} is 0?4?, and this run's is .*; set train.{setting} as that"):
        check(written(tmp_path, ours, **{key: 4 if key == "r" else 0}), ours)


@pytest.mark.parametrize("config", [LoraConfig, IA3Config, VeraConfig])
def test_every_key_of_peft_is_compared_harmless_or_refused(tmp_path: Path, config: type[Any]) -> None:
    """A key added by a later peft is refused where it is set."""
    ours = config(task_type="CAUSAL_LM")
    for key in {field.name for field in dataclasses.fields(config)} - HARMLESS - {*KIND, *method_of(ours).meaning}:
        with pytest.raises(UserError, match=f"{key} is 'other'"):
            check(written(tmp_path, ours, **{key: "other"}), ours)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": "orthogonal"},
        {"lora_dropout": 0.3, "base_model_name_or_path": "someone/model", "peft_version": "0.21.2"},
        {"of_a_newer_peft": None, "another": False},
    ],
)
def test_adapter_of_equal_meaning_is_accepted(tmp_path: Path, changed: dict[str, Any]) -> None:
    check(written(tmp_path, OURS, **changed), OURS)


def test_published_pissa_adapter_is_accepted_at_twice_its_rank(tmp_path: Path) -> None:
    published = lora_init.doubled(portable(OURS, BASE))
    (tmp_path / CONFIG).write_text(json.dumps(published))
    check(tmp_path, LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UserError, match="r is 8, and this run's is 4"):
        check(tmp_path, OURS)


@pytest.mark.parametrize(
    "ours",
    [
        LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [258, 259]}),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    ],
    ids=["token rows", "ia3"],
)
def test_same_config_is_accepted(tmp_path: Path, ours: Any) -> None:
    check(written(tmp_path, ours), ours)
