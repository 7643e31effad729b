"""A loss that is not finite before any update names the weight, or the range of the precision."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from zerolora.errors import UserError
from zerolora.train.isolation import check_loss
from zerolora.train.loop import Loop
from zerolora.train.loss import make_chunked
from zerolora.train.non_finite import check_finite, first_loss

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def rank() -> Iterator[None]:
    """Set up a process group of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def base(tiny_model: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)
    make_chunked(loaded)
    return loaded


def adapted(base: Any) -> Any:
    config = LoraConfig(r=2, target_modules=["up_proj"], modules_to_save=["v_proj"])
    return get_peft_model(base, config).get_base_model()


def spoil(model: Any, name: str, value: float) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_base_weight_is_named(base: Any, value: float) -> None:
    spoil(base, UP, value)
    model = adapted(base)
    with pytest.raises(UserError) as error:
        check_loss(model, model, CPU, "fp32")
    assert str(error.value) == (
        f"'{UP}' of the base model: NaN or infinite in its files; fetch the model again, or another one"
    )
    with pytest.raises(UserError, match=f"'{UP}' of the base model: NaN or infinite in fp16, whose largest number is"):
        check_finite(model, "fp16")


def test_nonfinite_module_to_save_belongs_to_the_base(base: Any) -> None:
    spoil(base, "model.layers.0.self_attn.v_proj.weight", math.nan)
    with pytest.raises(UserError, match=r"layers.0.self_attn.v_proj.* of the base model"):
        check_finite(adapted(base), "fp32")


def test_nonfinite_factor_belongs_to_the_adapter(base: Any) -> None:
    model = adapted(base)
    spoil(model, "model.layers.0.mlp.up_proj.lora_A.default.weight", math.nan)
    with pytest.raises(UserError, match=r"'model.layers.0.mlp.up_proj.lora_A.default.weight' of the adapter: NaN"):
        check_loss(model, model, CPU, "fp32")
    check_finite(model, "fp32", trained=False)


def test_nonfinite_loss_of_a_finite_model_has_another_reason(base: Any) -> None:
    model = adapted(base)
    assert check_loss(model, model, CPU, "fp32")
    check_finite(model, "fp32")
    assert "activations leave the range of fp16; set train.precision: bf16" in str(first_loss(math.nan, "fp16"))
    assert "learning_rate" not in str(first_loss(math.inf, "fp32"))


@pytest.mark.parametrize("steps", [0, 4])
def test_nonfinite_base_weight_used_late_is_named(base: Any, steps: int) -> None:
    """As with the embedding of a token that first occurs in a later step; the adapter is NaN by then."""
    spoil(base, "model.embed_tokens.weight", math.nan)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["up_proj"]))
    spoil(model, "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", math.nan)
    loop: Any = SimpleNamespace(
        engine=SimpleNamespace(module=model), plan=SimpleNamespace(precision="fp32"), step=steps
    )
    with pytest.raises(UserError, match=r"'model.embed_tokens.weight' of the base model: NaN or infinite in its files"):
        Loop._not_finite(loop, math.nan)
    base.get_input_embeddings().weight.data.zero_()
    reason = "lower train.learning_rate" if steps else "loss is nan at step 1, before any update"
    assert reason in str(Loop._not_finite(loop, math.nan))


@pytest.mark.parametrize("double", [False, True])
def test_nonfinite_constants_of_a_quantized_weight_are_named(tmp_path: Path, tiny_model: Path, double: bool) -> None:
    """Codes are integers: only their constants can be NaN."""
    from transformers import BitsAndBytesConfig

    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()

    def loaded(directory: Path) -> Any:
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=double)
        return AutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, device_map={"": "cpu"})

    check_finite(loaded(tiny_model), "fp32")
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights[UP][2, 3] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"'{UP}' of the base model: NaN or infinite"):
        check_finite(loaded(model), "fp32")
