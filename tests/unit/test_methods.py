"""Every method of the registry: its estimate, and for trainable methods, what is built and merged as in peft."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from zerolora import bounded
from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.method import TrainableMethod
from zerolora.methods.peft_format import read_alike
from zerolora.methods.registry import METHODS, TRAINABLE, create, of_directory
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.read_spec import read_model_spec
from zerolora.testing import check_method

ROOT = Path(__file__).resolve().parents[2]
NO_METHODS = {
    *("__init__", "adapter_check", "adapter_config", "experts", "lora_init", "method", "peft_format"),
    *(
        "quantized_base",
        "registry",
        "token_rows",
        "low_rank",
        "low_rank_trace",
        "listed_experts",
        "without_gradient",
        "lora_updates",
        "updates",
        "peft_method",
    ),
}
FILES = {path.stem for path in (ROOT / "src/zerolora/methods").glob("*.py")} - NO_METHODS


def test_every_file_is_a_method() -> None:
    assert set(METHODS) == FILES
    assert all(issubclass(method, TrainableMethod) == method.trains for method in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["smollm2-135m", "gpt2", "mixtral-8x7b"])
def test_it_is_estimated(name: str, model: str) -> None:
    # peft has no DoRA of experts.
    targets = ("q_proj", "v_proj") if "dora" in name and model == "mixtral-8x7b" else "all-linear"
    spec = TrainingSpec("zero2", create(name, targets=targets), 1, 2, 1, 1, 64, False, "sdpa", "bf16")
    model_spec = read_model_spec(ROOT / f"config/recipes/models/{model}.json")
    parameters = spec.parameters(model_spec)
    assert 0 < parameters.largest_trained <= parameters.trained <= max(model_spec.parameters, parameters.frozen)
    prediction = predict(model_spec, spec)
    assert prediction.gpu["total"] > parameters.frozen_bytes
    # Adam's moments, on two ranks.
    assert prediction.gpu["moments"] == parameters.trained * 8 // 2


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank_stabilized": {"lora": {"r": 4, "alpha": 6.0, "rank_stabilized": True}},
    "patterns": {
        "lora": {
            "r": 4,
            "targets": r".*(q_proj|down_proj|up_proj)",
            "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2},
            "alpha_pattern": {"layers.0.*": 3.0},
        }
    },
    "some_layers": {"lora": {"r": 4, "targets": r"model\.layers\.1\..*_proj"}},
    "embedding": {"lora": {"r": 4, "targets": ["embed_tokens", "v_proj"]}},
    "names": {"lora": {"r": 4, "targets": ["v_proj", "0.mlp.down_proj"]}, "ia3": {"targets": ["v_proj", "up_proj"]}},
    "saved": {
        "lora": {"r": 4, "modules_to_save": ["lm_head", "norm"]},
        "ia3": {"modules_to_save": ["lm_head", "norm"]},
    },
}


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_builds_and_merges_as_peft_does(name: str, variant: str, untied_model: Path, tmp_path: Path) -> None:
    """Built, counted by the estimate, filled with noise, saved, and merged by peft and by `updates`."""
    check_method(TRAINABLE[name], MethodSections.model_validate(VARIANTS[variant]), untied_model, tmp_path)


@pytest.fixture(scope="module")
def untied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with an untied head and nonzero attention biases."""
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings, config.attention_bias = False, True
    torch.manual_seed(2)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": {"targets": ["q_proj", "query"]}}, "train.lora.targets: 'query' is not in the model; choose from"),
        ({"lora": {"targets": "query.*"}}, "train.lora.targets 'query.*' does not fit the model"),
        ({"lora": {"modules_to_save": ["classifier"]}}, "train.lora.modules_to_save: 'classifier' is not in the model"),
        (
            {"lora": {"modules_to_save": ["lm_head"]}},
            "train.lora.modules_to_save: lm_head shares its weight with another",
        ),
        (
            {"lora": {"targets": ["embed_tokens"]}},
            "train.lora.targets: model.embed_tokens shares its weight with another",
        ),
        ({"lora": {"rank_pattern": {"query": 2}}}, "train.lora.rank_pattern: 'query' matches no adapted module"),
        ({"lora": {"alpha_pattern": {"q": 2.0}}}, "train.lora.alpha_pattern: 'q' matches no adapted module"),
    ],
)
def test_unmatched_module_is_one_line(tiny_model: Path, settings: dict[str, Any], said: str) -> None:
    """peft would ignore it or raise a traceback. The estimate, without weights, refuses it too."""
    from transformers import AutoModelForCausalLM

    sections = MethodSections.model_validate(settings)
    with pytest.raises(UserError) as raised:
        TRAINABLE["lora"].build(AutoModelForCausalLM.from_pretrained(tiny_model), sections)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError):
        TRAINABLE["lora"].of(sections).parameters(read_model_spec(tiny_model), 4)


@pytest.mark.parametrize(
    "lora",
    [{"targets": r"(.*\.)?(\w+)+!"}, {"rank_pattern": {r"(\w+)+!": 2}}, {"alpha_pattern": {r"(\w+)+!": 2.0}}],
    ids=str,
)
def test_endless_expression_is_one_line(
    tiny_model: Path, lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    model = read_model_spec(tiny_model)
    (module,) = (each for each in model.modules if each.name == "q_proj")
    long = dataclasses.replace(module, path="model.layers.{}.self_attn.q_projection_of_the_first_kind")
    model = dataclasses.replace(model, modules=(long, *model.modules))
    method = TRAINABLE["lora"].of(MethodSections.model_validate({"lora": lora}))
    with pytest.raises(UserError, match=r"train\.lora: targets, rank_pattern or alpha_pattern: takes more than 0\.2 s"):
        method.parameters(model, 4)


@pytest.mark.parametrize("name", ["qlora", "qdora"])
@pytest.mark.parametrize("saved", ["down_proj", "self_attn.q_proj", "mlp"])
def test_quantized_module_cannot_be_trained_in_full(name: str, saved: str, untied_model: Path) -> None:
    """Codes have no gradient. The estimate refuses it too; a head is not quantized and may be trained."""
    sections = MethodSections.model_validate({"lora": {"targets": ["k_proj"], "modules_to_save": [saved, "lm_head"]}})
    with pytest.raises(UserError) as raised:
        TRAINABLE[name].build(built_on_meta(config_of(untied_model)), sections)
    method = name.removeprefix("q")
    said = f"is quantized with method: {name}, and cannot be trained as a whole; leave it out, or set method: {method}"
    assert re.fullmatch(rf"train\.lora\.modules_to_save: model\.layers\.\d\..*{said}", str(raised.value))
    with pytest.raises(UserError, match=rf"layers\.0\..*{said}" if saved != "mlp" else "'mlp' is not in the model"):
        TRAINABLE[name].of(sections).parameters(read_model_spec(untied_model), 4)


SHARED = {
    "deepseek_v3": ("shared_experts", "0"),
    "qwen3_next": ("shared_expert", None),
    "qwen2_moe": ("shared_expert", None),
}
"""Name of a family's shared experts, and a layer without any."""


@pytest.fixture(scope="module", params=SHARED)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return the config of a small mixture with shared experts, and its directory."""
    from transformers import CONFIG_MAPPING

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 4, "vocab_size": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    sizes |= {"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "n_group": 1, "topk_group": 1}
    sizes |= {"shared_expert_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
    sizes |= {"layer_types": ["full_attention"] * 2}
    config = CONFIG_MAPPING[request.param](**sizes)
    folder = tmp_path_factory.mktemp(request.param)
    config.save_pretrained(folder)
    return config, folder


@pytest.mark.parametrize(
    "names",
    [["gate", "up", "down"], ["up"], ["1.up"]],
    ids=["all", "one", "one layer"],
)
def test_shared_experts_are_adapted_by_name(names: list[str], mixture: tuple[Any, Path]) -> None:
    """peft alone would adapt the routed experts instead. Estimate and saved config agree."""
    from peft import LoraConfig, get_peft_model

    config, folder = mixture
    shared, dense = SHARED[config.model_type]
    paths = [each.replace("up", f"mlp.{shared}.up") if "." in each else f"{shared}.{each}" for each in names]
    settings = MethodSections.model_validate({"lora": {"r": 4, "targets": [f"{each}_proj" for each in paths]}})
    method = TRAINABLE["lora"]
    built = method.build(built_on_meta(config), settings)
    trained = {key: tensor for key, tensor in built.named_parameters() if tensor.requires_grad}
    adapted = {key.partition(".layers.")[2].partition(".lora_")[0] for key in trained}
    layers = {"1"} if names == ["1.up"] or dense else {"0", "1"}
    leaves = [each.rpartition(".")[2] for each in names]
    assert adapted == {f"{layer}.mlp.{shared}.{leaf}_proj" for layer in layers for leaf in leaves}
    counted = method.of(settings).parameters(read_model_spec(folder), 4)
    assert sum(tensor.numel() for tensor in trained.values()) == counted.trained
    own = LoraConfig(**{key: value for key, value in read_alike(built).to_dict().items() if value})
    again = get_peft_model(built_on_meta(config), own)
    assert {key for key, tensor in again.named_parameters() if tensor.requires_grad} == trained.keys()


def test_quantized_shared_experts_count_as_others(mixture: tuple[Any, Path]) -> None:
    config, folder = mixture
    settings = MethodSections.model_validate({"lora": {"targets": [f"{SHARED[config.model_type][0]}.up_proj"]}})
    trained = [
        TRAINABLE[name].of(settings).parameters(read_model_spec(folder), 2).trained for name in ("lora", "qlora")
    ]
    assert trained[0] == trained[1] > 0


def test_docs_list_every_method() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.M))
    assert rows == {name: "yes" if method.trains else "estimated only" for name, method in METHODS.items()}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"type": "nf4"}, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
        ({"type": "fp4", "double": False}, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
        ({"type": "int8"}, {"load_in_8bit": True}),
    ],
)
def test_quantized_bytes_match_bitsandbytes(settings: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Wide enough that the 256-entry table of each doubly quantized weight is a small part."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8
    )
    source: Any = LlamaForCausalLM(config)
    source.to(torch.bfloat16).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
    )
    held: dict[int, int] = {}
    for module in model.modules():
        tensors = [*module.parameters(recurse=False)]
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        for each in (state, state.state2 if state else None):
            tensors += [value for value in vars(each).values() if isinstance(value, torch.Tensor)] if each else []
        tensors += [module.state.SCB, module.weight.SCB] if hasattr(module, "state") else []
        held |= {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each is not None
        }
    method = TRAINABLE["qlora"].of(MethodSections.model_validate({"quantization": settings}))
    counted = method.parameters(read_model_spec(tmp_path), 2).frozen_bytes
    assert counted == pytest.approx(sum(held.values()), rel=0.02)


def test_unknown_method_is_one_line() -> None:
    with pytest.raises(UserError, match=r"--method loha: use one of dora, full, ia3, lora, qdora, qlora, vera"):
        create("loha")


def test_adapter_of_another_kind_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "PREFIX_TUNING"}))
    with pytest.raises(UserError, match=r"peft_type is 'PREFIX_TUNING', which cannot be merged; .* of IA3, LORA"):
        of_directory(tmp_path)
