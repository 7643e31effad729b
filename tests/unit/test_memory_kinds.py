"""The estimate of what is more than a dense decoder: experts, adapters of experts, lifted weights, and the reserve.

Counts are compared with what peft builds on the meta device; bytes with the traces, in test_memory.py.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.config import schema
from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.memory import reserve
from zerolora.memory.estimate import Capacity, estimated
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods import experts
from zerolora.methods.dora import DoraMethod
from zerolora.methods.lora import LoraMethod
from zerolora.methods.qlora import QloraMethod
from zerolora.methods.registry import METHODS, TRAINABLE, create
from zerolora.model.architecture import built_on_meta, takes_own_attention
from zerolora.model.families import FAMILIES
from zerolora.model.meta_device import build_on_meta
from zerolora.model.read_spec import from_config, read_model_spec
from zerolora.model.spec import ModelSpec, from_json, to_json
from zerolora.strategies import STRATEGIES
from zerolora.units import GIB, counted, parse_bytes

MODELS = ROOT / "config/recipes/models"
WHERE = Path("config.json")
VISION: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        **{"model_type": "gemma3_text", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
        **{"num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 99, "pad_token_id": 0, "head_dim": 16},
    },
    "vision_config": {
        **{"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "vision_use_head": False},
    },
}
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 99,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "num_key_value_heads": 6},
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 40, "head_dim": 16, "num_hidden_layers": 4},
    "deepseek_v2": {**LATENT, "n_shared_experts": 2, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "n_shared_experts": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1},
}


def spec_of(family: str) -> ModelSpec:
    return from_config(SMALL | MIXTURES[family] | {"model_type": family}, WHERE)


@pytest.fixture(scope="module")
def mixtures() -> dict[str, ModelSpec]:
    return {family: spec_of(family) for family in MIXTURES}


QUANTIZED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    **{name: MIXTURES[name] for name in ("deepseek_v3", "gpt_oss")},
    **{name: {} for name in ("llama", "gemma3_text", "gpt2")},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 80, "head_dim": 8},
    "t5": {"d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 3, "num_heads": 6},
}


@pytest.mark.parametrize("family", QUANTIZED)
def test_what_is_counted_as_quantized_is_what_transformers_quantizes(family: str) -> None:
    """It leaves subclasses of Linear, the routers of phimoe and llama4, and what a class keeps in fp32, as T5 does."""
    config = SMALL | QUANTIZED[family] | {"model_type": family}
    spec = from_config(config, WHERE)
    model = build_on_meta(config, WHERE)
    quantized = sum(model.get_submodule(path).weight.numel() for path in quantizable_paths(model))
    assert QloraMethod().replaced(spec) == quantized > 0
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    left = {module.name for module in spec.linears if not module.quantizable}
    assert left == {"phimoe": {"router"}, "llama4_text": {"router"}, "t5": {"wo"}}.get(family, set())


ADAPTED: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in MIXTURES),
    ("qwen3_moe", {"targets": ["q_proj", "gate_proj", "up_proj"], "rank_pattern": {"gate_up_proj": 3}}),
    ("mixtral", {"targets": ["w2", "v_proj"]}),
    ("mixtral", {"targets": ["experts.gate_up_proj", "v_proj"]}),
    ("gpt_oss", {"targets": ["experts.gate_up_proj", "experts.down_proj", "q_proj"]}),
]


@pytest.mark.parametrize(
    ("family", "options"), ADAPTED, ids=[f"{name}-{number}" for number, (name, _) in enumerate(ADAPTED)]
)
def test_every_tensor_of_an_adapter_is_peft_s(
    family: str, options: dict[str, Any], mixtures: dict[str, ModelSpec]
) -> None:
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = MethodSections.model_validate({"lora": {"r": 4, **options}})
    with torch.device("meta"):
        base = built_on_meta(CONFIG_MAPPING[family].from_dict(SMALL | MIXTURES[family]))
        model = LoraMethod.build(base, settings)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert Counter(LoraMethod.of(settings).adapted(mixtures[family])[0]) == Counter(map(torch.numel, trained.values()))
    assert not any("router" in name or ".gate." in name for name in trained), "the router stays frozen"


def test_the_families_whose_experts_peft_adapts() -> None:
    from peft.utils import transformers_weight_conversion as conversion
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    layouts = vars(conversion)["_MODEL_TO_CONVERSION_PATTERN"]
    assert {
        family: conversion._MOE_TARGET_MODULE_MAPPING[layout]
        for family, layout in layouts.items()
        if layout in conversion._MOE_TARGET_MODULE_MAPPING and family in CONFIG_MAPPING
        if get_checkpoint_conversion_mapping(family) is not None
    } == experts.FAMILIES


REFUSED = [
    (LoraMethod(dropout=0.1), "mlp.experts.gate_up_proj is a parameter, which peft adapts without dropout only"),
    (DoraMethod(), "is a parameter, for which peft has no DoRA"),
    (LoraMethod(targets=r".*layers\.1\..*_proj"), "is a regular expression, which cannot select layers of a"),
    (LoraMethod(targets=("gate_proj",)), "keeps gate_proj and up_proj in one parameter; write both or neither"),
]


@pytest.mark.parametrize(("method", "message"), REFUSED)
def test_what_peft_refuses_is_one_line(method: Any, message: str, mixtures: dict[str, ModelSpec]) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        method.parameters(mixtures["qwen3_moe"], 2)


def test_layers_of_two_kinds(mixtures: dict[str, ModelSpec]) -> None:
    model = mixtures["deepseek_v3"]
    assert [count for _, count in model.layer_kinds] == [1, 2]
    dense, sparse = ({module.name for module in modules} for modules, _ in model.layer_kinds)
    assert "experts" not in dense and "experts" in sparse
    assert model.latent == (16, 8, 12)
    # A layer with experts is the larger one; all layers and the rest are the model.
    layers = {
        number: sum(each.parameters for each in model.in_layers if number in each.numbers)
        for number in range(model.layers)
    }
    assert model.layer_parameters == layers[2] > layers[0]
    rest = sum(module.parameters * module.count for module in model.modules if not module.stack)
    assert sum(layers.values()) + rest == model.parameters
    for each in mixtures.values():
        assert from_json(json.loads(json.dumps(to_json(each)))) == each


def training(**changes: Any) -> TrainingSpec:
    base = TrainingSpec("zero2", LoraMethod(), 1, 2, 1, 1, 1024, True, "sdpa", "bf16")
    return replace(base, **changes)


def test_more_layers_of_either_kind_need_more() -> None:
    config = SMALL | MIXTURES["deepseek_v3"] | {"model_type": "deepseek_v3", "num_hidden_layers": 8}
    totals = [
        predict(from_config(config | {"first_k_dense_replace": dense}, WHERE), training()).gpu["total"]
        for dense in (6, 3, 1)
    ]
    assert totals == sorted(totals)


# --- laws of the terms ---

SPECS = {
    name: read_model_spec(MODELS / f"{name}.json")
    for name in ("llama-3-70b", "gpt2", "falcon-7b", "t5-3b", "gemma-2-9b")
}
TERMS = ("model_states", "activations", "logits", "buffers", "reserve")


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, TrainingSpec]:
    model = draw(st.sampled_from(sorted(SPECS)))
    methods = [name for name in sorted(METHODS) if model != "falcon-7b" or not TRAINABLE[name].quantizes()]
    return model, training(
        strategy=draw(st.sampled_from(list(STRATEGIES))),
        method=create(draw(st.sampled_from(methods)), r=draw(st.sampled_from([1, 64]))),
        nodes=draw(st.integers(1, 4)),
        ranks_per_node=draw(st.integers(1, 8)),
        micro_batch=draw(st.integers(1, 8)),
        accumulation=draw(st.sampled_from([1, 4])),
        length=draw(st.integers(8, 8192)),
        activation_checkpointing=draw(st.booleans()),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        loss=draw(st.sampled_from(["full", "supervised", "fused"])),
        on_cpu=draw(st.booleans()),
        reserve=draw(st.sampled_from([None, 0, GIB])),
    )


FULL = training(strategy="zero1", method=create("full"), length=4096, activation_checkpointing=False)


@given(runs())
@example(("llama-3-70b", FULL))
@settings(max_examples=150, deadline=None)
def test_terms_add_up_and_none_is_negative(run: tuple[str, TrainingSpec]) -> None:
    """llama-3-70b, full, zero1 on two GPUs once had -65.7 GiB of activations."""
    name, spec = run
    prediction = predict(SPECS[name], spec)
    for part in (prediction.gpu, prediction.host, prediction.disk):
        assert all(value >= 0 for value in part.values() if not isinstance(value, str))
    gpu = prediction.gpu
    assert sum(gpu[term] for term in TERMS) == gpu["total"] == max(prediction.phases.values())
    if spec.reserve is None and not spec.on_cpu:
        assert sum(value for term, value in gpu.items() if term.startswith("reserve_")) == gpu["reserve"]


# --- the reserve ---


def test_the_reserve_is_context_nccl_and_a_share_of_the_tensors() -> None:
    small = read_model_spec(MODELS / "smollm2-135m.json")
    alone, two = (predict(small, training(ranks_per_node=ranks)).gpu for ranks in (1, 2))
    assert alone["reserve_nccl"] == 0 < two["reserve_nccl"]
    assert alone["reserve_context"] == two["reserve_context"] == reserve.CONTEXT
    tensors = alone["total"] - alone["reserve"]
    assert alone["reserve_allocator"] == pytest.approx(reserve.UNUSED * tensors, abs=1)
    assert alone["reserve"] < 0.6 * GIB
    # Sharding within a node takes groups of ranks of its own.
    hybrid = predict(small, training(strategy="zero3_hpz", nodes=2)).gpu
    assert hybrid["reserve_nccl"] == 3 * two["reserve_nccl"]
    assert predict(small, training(reserve=0)).gpu["reserve"] == 0
    assert predict(small, training(on_cpu=True)).gpu["reserve"] == 0


def test_a_reserve_of_nothing_can_be_written() -> None:
    assert schema.Estimate().reserve is None
    assert schema.Estimate(reserve="0GiB").reserve == "0GiB"
    assert parse_bytes("0GiB", zero=True) == 0
    with pytest.raises(ValueError, match="write a size with its unit"):
        parse_bytes("0GiB")
    with pytest.raises(ValueError, match="write a size with its unit, as in 2GiB or 0GiB"):
        schema.Estimate.model_validate({"reserve": 0})


# --- kernels of CUDA, and weights that peft lifts ---


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_softmax_of_eager_attention_has_cuda_s_temporary(precision: Any) -> None:
    model = read_model_spec(MODELS / "llama-3.2-1b.json")
    spec = training(attention="eager", precision=precision, loss="fused", logits=8, length=2048, reserve=0)
    on_gpu, on_cpu = (predict(model, replace(spec, on_cpu=each)).phases["backward"] for each in (False, True))
    scores = model.heads * 2048**2
    # In fp16 CUDA's kernel reads the scores and returns their gradient as they are, where the CPU's takes fp32.
    assert on_gpu - on_cpu == pytest.approx({"fp16": 4 - 2, "bf16": 4, "fp32": 4}[precision] * scores, rel=0.02)


def test_peft_lifts_what_is_not_quantized_but_not_under_deepspeed() -> None:
    model = read_model_spec(MODELS / "llama-3-8b.json")
    ours, lifted = QloraMethod(), QloraMethod(prepared_by="peft")
    rest = model.parameters - sum(module.inputs * module.outputs * module.count for module in model.linears)
    assert lifted.parameters(model, 2).frozen_bytes - ours.parameters(model, 2).frozen_bytes == 2 * rest
    for strategy, equal in (("ddp", False), ("zero2", True)):
        totals = {predict(model, training(strategy=strategy, method=each)).gpu["total"] for each in (ours, lifted)}
        assert (len(totals) == 1) == equal
    with pytest.raises(UserError, match="transformers quantizes none of a falcon's modules"):
        ours.parameters(SPECS["falcon-7b"], 2)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_vision_tower_counts_as_it_is(kind: Any, tmp_path: Path) -> None:
    """Of a real Gemma-3 that transformers reads through bitsandbytes: tower and projector too, their norms not."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig

    config = AutoConfig.for_model(**VISION)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": False}
    quantization = BitsAndBytesConfig(**(four if kind == "nf4" else {"load_in_8bit": True}))
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": "cpu"}
    )
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        held += 0 if state is None else state.absmax.numel() * 4
        scales = getattr(getattr(module, "weight", None), "SCB", None)
        held += 0 if scales is None else scales.numel() * 4
    method = QloraMethod(quantization=kind, double_quantization=False)
    assert method.parameters(read_model_spec(tmp_path), 2).frozen_bytes == pytest.approx(held, rel=0.005)


# --- what cannot be, and what is assumed ---


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload", "fsdp"])
def test_each_rank_reads_a_quantized_model_whole(strategy: str) -> None:
    """Llama-3-70B in 4 bits on eight GPUs: a GPU must hold all of it while it is read, whatever it keeps."""
    model = read_model_spec(MODELS / "llama-3-70b.json")
    spec = replace(FULL, strategy=strategy, method=QloraMethod(), ranks_per_node=8, length=64)
    quantized, lora = predict(model, spec), predict(model, replace(spec, method=LoraMethod()))
    whole = spec.parameters(model).frozen_bytes
    assert whole > 35e9
    assert quantized.gpu["total"] >= quantized.phases["loading"] > whole
    assert lora.phases["loading"] < 141e9 / 8 + 3e9
    if strategy != "zero3_offload":  # whose host holds shards too
        assert quantized.host["loading"] == 8 * lora.host["loading"]
    said = "loading: each rank reads the quantized base model whole before it keeps its shard"
    assert said in estimated(model, spec, Capacity(80 * GIB, 512 * GIB))["notes"]
    assert said not in estimated(model, replace(spec, strategy="zero2"), Capacity(80 * GIB, 512 * GIB))["notes"]


@pytest.mark.parametrize("method", [create("qdora"), QloraMethod(quantization="int8")], ids=["qdora", "int8"])
def test_what_would_lower_the_total_can_run(method: Any) -> None:
    model, capacity = read_model_spec(MODELS / "llama-3-70b.json"), Capacity(80 * GIB, 512 * GIB)
    changes = {
        name: [
            each["change"]
            for each in estimated(model, training(ranks_per_node=8, method=used), capacity)["would_lower"]
        ]
        for name, used in (("lora", LoraMethod()), ("quantized", method))
    }
    assert "zero3" in changes["lora"]
    assert changes["quantized"]
    assert not [each for each in changes["quantized"] if each.startswith("zero3")]


def test_attention_that_transformers_lacks_is_refused(mixtures: dict[str, ModelSpec]) -> None:
    capacity = Capacity(80 * GIB, 512 * GIB)
    actual = estimated(mixtures["gpt_oss"], training(), capacity)
    assert (actual["fits"], actual["why"]) == (False, "a gpt_oss has no sdpa attention; write eager")
    assert estimated(mixtures["gpt_oss"], training(attention="eager"), capacity)["fits"]
    assert mixtures["gpt_oss"].attentions == ("eager",)


def test_attentions_are_those_of_the_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    for path in MODELS.glob("*.json"):
        model = read_model_spec(path)
        config = CONFIG_MAPPING[model.family]
        mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if model.encoder_layers else MODEL_FOR_CAUSAL_LM_MAPPING
        actual: Any = mapping[config]
        own = takes_own_attention(actual) and model.family != "gemma2"  # which caps scores
        supported = {"flash": own, "sdpa": actual._supports_sdpa, "eager": True}
        assert model.attentions == tuple(name for name, has in supported.items() if has), path
    assert {read_model_spec(path).family for path in MODELS.glob("*.json")} == set(FAMILIES) - {"gemma"}


def test_gemma_2_without_a_cap_has_flash() -> None:
    config = SMALL | {"model_type": "gemma2", "head_dim": 8}
    assert from_config(config, WHERE).attentions == ("eager",)
    assert from_config(config | {"attn_logit_softcapping": None}, WHERE).attentions == ("flash", "eager")


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("gptj", ("eager",)),  # its own is built in
        ("stablelm", ("sdpa", "eager")),  # likewise
        ("vaultgemma", ("eager",)),  # caps scores
        ("granite_swa", ("eager",)),  # adds sinks
        ("llama4_text", ("sdpa", "eager")),  # needs a mask
        ("cohere", ("flash", "sdpa", "eager")),
    ],
)
def test_attentions_of_the_meta_device_are_those_of_training(family: str, found: tuple[str, ...]) -> None:
    from transformers import CONFIG_MAPPING

    assert from_config(json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False)), WHERE).attentions == found


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_a_file_with_an_infinite_number_is_read(family: str, tmp_path: Path) -> None:
    """As transformers writes it: {"__float__": "Infinity"}."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    assert '"Infinity"' in (tmp_path / "config.json").read_text()
    built = built_on_meta(config)
    assert read_model_spec(tmp_path).parameters == sum(each.numel() for each in built.parameters())


KINDS = ("axk2", "bert", "bloom", "ctrl", "dots3_note_text", "gpt_neo", "gpt_oss", "mamba2", "modernbert-decoder")
IN_ONE_LINE = {
    ("axk2", "lora"): "the latent attention of a axk2 has no q_b_proj, so that its memory cannot be traced; estimate",
    ("mamba2", "lora"): "a mamba2 has no attention, and only layers with attention can be estimated",
    ("bert", "ia3"): "train.ia3.targets: this model names its keys, values and MLP in another way; write a list",
    ("ctrl", "ia3"): "train.ia3.targets: this model names its keys, values and MLP in another way; write a list",
}


@pytest.mark.parametrize("family", KINDS)
def test_every_kind_is_estimated_or_refused_in_one_line(family: str) -> None:
    """With transformers' default sizes, by every method of training."""
    from transformers import CONFIG_MAPPING

    config = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    for method in TRAINABLE:
        try:
            spec = replace(training(method=create(method)), attention="eager")
            assert predict(from_config(config, WHERE), spec).gpu["total"] > 0
            assert (family, method) not in IN_ONE_LINE
        except UserError as error:
            assert IN_ONE_LINE.get((family, method), "") in str(error)
            assert (family, method) != ("modernbert-decoder", "lora")


def test_all_linear_of_a_model_without_linear_modules_is_refused() -> None:
    model = SPECS["llama-3-70b"]
    without = replace(model, modules=tuple(each for each in model.modules if each.kind != "linear"))
    with pytest.raises(UserError, match="train.lora.targets is all-linear, and a llama has no linear module that can"):
        LoraMethod().parameters(without, 2)


def test_a_model_without_attention_is_refused() -> None:
    config = {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8}
    with pytest.raises(UserError, match="a mamba has no attention, and only layers with attention can be estimated"):
        from_config(config, WHERE)


def test_notes_say_what_is_counted(mixtures: dict[str, ModelSpec]) -> None:
    def notes(model: ModelSpec, **changes: Any) -> str:
        return "\n".join(estimated(model, training(**changes), Capacity(80 * GIB, 512 * GIB))["notes"])

    assert notes(SPECS["llama-3-70b"]) == ""
    mixture = notes(mixtures["qwen3_moe"])
    assert "grouped product, whose memory does not depend on the routing" in mixture
    assert "an adapter makes a copy of all experts' weights" in mixture
    assert "copy of all experts" not in notes(mixtures["qwen3_moe"], method=LoraMethod(targets=("q_proj",)))
    assert "not quantized" in notes(mixtures["mixtral"], method=QloraMethod())
    assert "linear attention: traced as attention over all tokens" in notes(mixtures["qwen3_next"])
    assert "encoder: its rows are assumed as long as the decoder's" in notes(SPECS["t5-3b"])
    stored = from_config(
        SMALL | MIXTURES["gpt_oss"] | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, WHERE
    )
    assert "weights: stored as mxfp4, counted in the run's precision" in notes(stored, attention="eager")
    assert "image encoder" in notes(from_config(VISION, WHERE))
    assert "no image rows" in notes(from_config(VISION, WHERE))


def test_a_count_has_its_noun() -> None:
    assert [counted(count, "run") for count in (0, 1, 1000)] == ["0 runs", "1 run", "1,000 runs"]
