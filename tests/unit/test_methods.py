"""Every method of the registry: its estimate, and for one that trains, what it builds and merges beside peft's."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerolora.config import schema
from zerolora.errors import UserError
from zerolora.memory.predict import predict
from zerolora.memory.read_spec import read_model_spec
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.base import TrainableMethod
from zerolora.methods.lora import LoraMethod
from zerolora.methods.registry import METHODS, create

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem for path in (ROOT / "src/zerolora/methods").glob("*.py")} - {"__init__", "base", "registry"}
TRAINABLE = [name for name, method in METHODS.items() if method.trains]


def test_every_file_is_a_method() -> None:
    assert set(METHODS) == FILES
    assert all(issubclass(method, TrainableMethod) == method.trains for method in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["smollm2-135m", "gpt2", "mixtral-8x7b"])
def test_it_is_estimated(name: str, model: str) -> None:
    spec = TrainingSpec("zero2", create(name), 1, 2, 1, 1, 64, False, "sdpa", "bf16")
    model_spec = read_model_spec(ROOT / f"config/recipes/models/{model}.json")
    parameters = spec.parameters(model_spec)
    assert 0 < parameters.largest_trained <= parameters.trained <= max(model_spec.parameters, parameters.frozen)
    prediction = predict(model_spec, spec)
    assert prediction.gpu["total"] > parameters.frozen_bytes
    # Adam's moments of what is trained, on two ranks.
    assert prediction.gpu["moments"] == parameters.trained * 8 // 2


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_it_builds_and_merges_what_peft_does(
    name: str, rank_stabilized: bool, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    method = METHODS[name]
    assert issubclass(method, TrainableMethod)
    settings = schema.Lora(r=4, alpha=6.0, rank_stabilized=rank_stabilized)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    weights = copy.deepcopy(base.state_dict())
    torch.manual_seed(1)
    wrapped = method.build(base, settings)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    assert sum(map(torch.Tensor.numel, trained)) == create(name, r=4).parameters(read_model_spec(tiny_model), 4).trained
    for parameter in trained:
        torch.nn.init.normal_(parameter)
    save_file(get_peft_model_state_dict(wrapped), tmp_path / "adapter.safetensors")
    config = json.loads(json.dumps(wrapped.peft_config["default"].to_dict(), default=list))
    updates = method.updates(tmp_path / "adapter.safetensors", config)
    expected = wrapped.merge_and_unload().state_dict()
    assert updates.keys() <= weights.keys()
    for weight, value in weights.items():
        update = updates[weight].tensor() if weight in updates else torch.zeros_like(value)
        assert (weight in updates) == bool(update.any())
        torch.testing.assert_close(value + update, expected[weight])


def test_the_documentation_lists_every_method() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.M))
    assert rows == {name: "yes" if method.trains else "estimated only" for name, method in METHODS.items()}


def test_an_unknown_method_is_one_line() -> None:
    with pytest.raises(UserError, match=r"--method loha: write one of dora, full, ia3, lora, qlora"):
        create("loha")


def test_an_adapter_without_a_factor_is_named(tmp_path: Path) -> None:
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter.safetensors")
    updates = LoraMethod.updates(tmp_path / "adapter.safetensors", {"r": 2, "lora_alpha": 2})
    with pytest.raises(UserError, match=r"the adapter has no lora_B for q_proj\.weight; train it again"):
        updates["q_proj.weight"].tensor()
