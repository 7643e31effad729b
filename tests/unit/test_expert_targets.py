"""What targets mean in mixtures of experts and beside Mamba: the same in every family, in peft, and merged.

Each family takes a second: its tiny model is trained, saved, read by peft, and merged.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.methods.peft_format import ADAPTER, CONFIG, adapted_paths, portable, read_alike
from zerolora.methods.registry import TRAINABLE, of_directory
from zerolora.model.architecture import built_on_meta
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec
from zerolora.train.engines.engine import trained

sys.path.insert(0, str(ROOT / "docs"))
import target_table

LORA = TRAINABLE["lora"]
LEFT_OUT = {
    "afmoe": {"router.gate"},
    "falcon_h1": {"mamba.out_proj"},
    "hunyuan_v1_moe": {"gate.wg"},
    "jamba": {"mamba.dt_proj"},
    "jetmoe": {"router.layer"},
    "llama4_text": {"feed_forward.router"},
    "longcat_flash": {"router.classifier"},
    "nemotron_h": {"mixer.out_proj"},
    "phimoe": {"mlp.router"},
}
"""Linear modules that all-linear leaves out, by family."""
WITHOUT_EXPERTS = ("falcon_h1", "llama")


def settings(**lora: Any) -> MethodSections:
    return MethodSections.model_validate({"lora": {"r": 4, **lora}})


def config_of(family: str) -> dict[str, Any]:
    return target_table.SMALL | target_table.FAMILIES[family] | {"model_type": family}


def plan_of(family: str) -> ModelSpec:
    return from_config(config_of(family), Path("config.json"))


def built(family: str, **lora: Any) -> Any:
    """Return peft's model around a family's tiny model."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family].from_dict(config_of(family))
    return LORA.build(AutoModelForCausalLM.from_config(config, dtype=torch.float32), settings(**lora))


def ends(paths: list[str]) -> set[str]:
    """Return the last two words of paths."""
    return {".".join(path.split(".")[-2:]) for path in paths}


@pytest.mark.parametrize("family", target_table.FAMILIES)
def test_all_linear_means_the_same_trained_planned_read_and_merged(family: str, tmp_path: Path) -> None:
    model = built(family)
    adapted, base = adapted_paths(model), copy.deepcopy(model).unload()
    linears = [path for path, each in base.named_modules() if isinstance(each, torch.nn.Linear)]
    left_out = [path for path in linears if path not in adapted and base.get_submodule(path) is not base.lm_head]
    assert ends(left_out) == LEFT_OUT.get(family, set())
    stacked = [path for path, each in base.named_parameters() if each.dim() == 3 and "conv" not in path]
    assert sorted(set(adapted) - set(linears)) == sorted(stacked)
    assert bool(stacked) == (family not in WITHOUT_EXPERTS)

    counted = LORA.of(settings()).parameters(plan_of(family), 2)
    assert counted.trained == sum(each.numel() for each in trained(model).values())

    with torch.no_grad():
        for name, each in trained(model).items():
            each.copy_(torch.randn_like(each) / (10 if "lora_B" in name else 3))
    save_file(LORA.published(model, trained(model)), tmp_path / ADAPTER)
    write_json(tmp_path / CONFIG, portable(read_alike(model), {"name": "base", "revision": None}))
    weights = {name: each.clone() for name, each in base.state_dict().items()}
    ours, plain = logits(model), logits(base)
    assert (plain - ours).abs().max() > 0.01
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path)), ours, rtol=0, atol=1e-4)

    updates = of_directory(tmp_path).updates(tmp_path, built_on_meta(model.config))
    merged = AutoModelForCausalLM.from_config(base.config, dtype=torch.float32)
    merged.load_state_dict(
        {key: updates[key].applied(each) if key in updates else each for key, each in weights.items()}
    )
    torch.testing.assert_close(logits(merged), ours, rtol=0, atol=1e-4)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.arange(3, 20)[None]).logits
    return result


NAMED: list[tuple[str, list[str], set[str]]] = [
    ("deepseek_v3", ["shared_experts.down_proj"], {"shared_experts.down_proj"}),
    ("deepseek_v3", ["mlp.down_proj"], {"mlp.down_proj"}),
    ("deepseek_v3", ["experts.down_proj"], {"experts.down_proj"}),
    ("deepseek_v3", ["down_proj"], {"experts.down_proj", "mlp.down_proj", "shared_experts.down_proj"}),
    ("mixtral", ["w1", "w3"], {"experts.gate_up_proj"}),
    ("mixtral", ["gate", "w2"], {"gate.weight", "experts.down_proj"}),
    ("qwen3_moe", ["gate_proj", "up_proj"], {"experts.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"}),
    ("jamba", ["experts.gate_up_proj"], {"experts.gate_up_proj"}),
    ("afmoe", ["router.gate"], {"router.gate"}),
]


@pytest.mark.parametrize(("family", "targets", "meant"), NAMED)
def test_a_name_means_all_that_has_it(family: str, targets: list[str], meant: set[str], tmp_path: Path) -> None:
    model = built(family, targets=targets)
    assert ends(adapted_paths(model)) == meant
    counted = LORA.of(settings(targets=targets)).parameters(plan_of(family), 2)
    assert counted.trained == sum(each.numel() for each in trained(model).values())
    save_file(LORA.published(model, trained(model)), tmp_path / ADAPTER)
    write_json(tmp_path / CONFIG, portable(read_alike(model), {"name": "base", "revision": None}))
    ours, theirs = sorted(adapted_paths(model)), adapted_paths(PeftModel.from_pretrained(model.unload(), tmp_path))
    # peft reads some linear modules as their weights.
    assert sorted(path.removesuffix(".weight") for path in theirs) == [path.removesuffix(".weight") for path in ours]


@pytest.mark.parametrize(
    ("targets", "rows"),
    [("all-linear", (8, 4)), (["w1", "w2", "w3"], (8, 4)), (["experts.gate_up_proj", "experts.down_proj"], (4, 4))],
)
def test_what_holds_gate_and_up_has_twice_the_rank(targets: Any, rows: tuple[int, int]) -> None:
    """Of each of four experts, at the same scale; named itself, it has r, as in peft."""
    model = built("mixtral", targets=targets)
    experts = model.get_base_model().model.layers[0].mlp.experts
    wrappers = {each.parameter_name: each for each in (experts, experts.base_layer)}
    ordered = [wrappers[name] for name in ("gate_up_proj", "down_proj")]
    assert tuple(each.lora_A["default"].weight.shape[0] // 4 for each in ordered) == rows
    assert len({each.scaling["default"] for each in ordered}) == 1


def test_what_has_no_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.lora\.targets: 'gate' is not in the model"):
        LORA.of(settings(targets=["q_proj", "gate"])).parameters(
            from_config(config_of("llama"), Path("config.json")), 2
        )


@pytest.mark.parametrize("targets", ["all-linear", ["q_a_proj", "gate_proj", "up_proj", "down_proj"]])
def test_an_adapter_by_peft_alone_keeps_pefts_meaning(targets: Any, tmp_path: Path) -> None:
    """peft adapts the routed experts and the router where it is asked for DeepSeek's gate_proj, and no other MLP."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIG_MAPPING["deepseek_v3"].from_dict(config_of("deepseek_v3")))
    weights = {name: each.clone() for name, each in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, each in trained(model).items():
            each.copy_(torch.randn_like(each) / (10 if "lora_B" in name else 3))
    model.save_pretrained(str(tmp_path))
    updates = of_directory(tmp_path).updates(tmp_path, built_on_meta(base.config))
    assert not any("shared_experts" in name for name in updates)
    merged = model.merge_and_unload().state_dict()
    for name, each in weights.items():
        torch.testing.assert_close(updates[name].applied(each) if name in updates else each, merged[name])


def test_a_regular_expression_chooses_layers_of_a_mixture(tmp_path: Path) -> None:
    """peft alone would adapt what it names in every layer; the published config has the paths."""
    model = built("deepseek_v3", targets=r"model\.layers\.2\..*(o_proj|shared_experts\.down_proj|experts\.down_proj)")
    expected = {"model.layers.2.self_attn.o_proj", "model.layers.2.mlp.shared_experts.down_proj"}
    assert set(adapted_paths(model)) == expected | {"model.layers.2.mlp.experts.down_proj"}
    save_file(LORA.published(model, trained(model)), tmp_path / ADAPTER)
    write_json(tmp_path / CONFIG, portable(read_alike(model), {"name": "base", "revision": None}))
    read = PeftModel.from_pretrained(model.unload(), tmp_path)
    assert {path.removesuffix(".weight") for path in adapted_paths(read)} == {
        *expected,
        "model.layers.2.mlp.experts.down_proj",
    }
