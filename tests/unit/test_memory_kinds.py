"""Estimates of more than dense decoders: experts, adapted parameters, peft's fp32 casts, and the reserve.

Parameter counts are compared with peft on the meta device; bytes with traces, in test_memory.py.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.config import schema
from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.memory import reserve
from zerolora.memory.estimate import Capacity, estimated
from zerolora.memory.host import DEQUANTIZING
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.dora import DoraMethod
from zerolora.methods.lora import LoraMethod
from zerolora.methods.qlora import QloraMethod
from zerolora.methods.registry import TRAINABLE, create
from zerolora.model.architecture import built_on_meta, stacked_names
from zerolora.model.attention_trial import tried
from zerolora.model.families import FAMILIES
from zerolora.model.meta_device import build_on_meta
from zerolora.model.read_spec import from_config, read_model_spec
from zerolora.model.spec import ModelSpec, from_json, to_json
from zerolora.planner.candidates import open_buckets
from zerolora.planner.hardware import GPUS, named
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
}


@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized_parameters_match_transformers(family: str) -> None:
    """Routers of phimoe and llama4, of subclasses of Linear, are neither quantized nor adapted. Stacked experts are, in
    4 bits."""
    config = SMALL | QUANTIZED[family] | {"model_type": family}
    spec = from_config(config, WHERE)
    model = build_on_meta(config, WHERE)
    quantized = sum(model.get_submodule(path).weight.numel() for path in quantizable_paths(model))
    experts = sum(model.get_parameter(name).numel() for name in stacked_names(model))
    assert (experts > 0) == bool(spec.experts)
    assert QloraMethod(quantization="int8").replaced(spec) == quantized > 0
    method = QloraMethod(double_quantization=False)
    assert method.replaced(spec) == quantized + experts
    packed = sum(method.packed(module, 2) * module.count for module in spec.modules)
    assert packed == spec.parameters - 0.75 * (quantized + experts)
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    assert all(module.quantizable and module.name != "router" for module in spec.linears)


ADAPTED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"targets": ["q_proj", "gate_proj", "up_proj"], "rank_pattern": {"gate_up_proj": 3}}),
    ("mixtral", {"targets": ["w2", "v_proj"]}),
    ("mixtral", {"targets": ["experts.gate_up_proj", "v_proj"]}),
    ("gpt_oss", {"targets": ["experts.gate_up_proj", "experts.down_proj", "q_proj"]}),
]


@pytest.mark.parametrize(
    ("family", "options"), ADAPTED, ids=[f"{name}-{number}" for number, (name, _) in enumerate(ADAPTED)]
)
def test_adapter_tensors_match_peft(family: str, options: dict[str, Any], mixtures: dict[str, ModelSpec]) -> None:
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = MethodSections.model_validate({"lora": {"r": 4, **options}})
    with torch.device("meta"):
        base = built_on_meta(CONFIG_MAPPING[family].from_dict(SMALL | MIXTURES[family]))
        model = LoraMethod.build(base, settings)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert Counter(LoraMethod.of(settings).adapted(mixtures[family])[0]) == Counter(map(torch.numel, trained.values()))
    assert not any("router" in name or ".gate." in name for name in trained), "the router stays frozen"


REFUSED = [
    (LoraMethod(dropout=0.1), "mlp.experts.gate_up_proj is a parameter, which peft adapts without dropout only"),
    (DoraMethod(), "is a parameter, for which peft has no DoRA"),
    (LoraMethod(targets=("gate_proj",)), "are one parameter, gate_up_proj; name both or neither"),
]


@pytest.mark.parametrize(("method", "message"), REFUSED)
def test_peft_limits_are_one_line(method: Any, message: str, mixtures: dict[str, ModelSpec]) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        method.parameters(mixtures["qwen3_moe"], 2)


def test_dense_and_sparse_layers_are_counted_apart(mixtures: dict[str, ModelSpec]) -> None:
    model = mixtures["deepseek_v3"]
    assert [count for _, count in model.layer_kinds] == [1, 2]
    dense, sparse = ({module.name for module in modules} for modules, _ in model.layer_kinds)
    assert "experts" not in dense and "experts" in sparse
    assert model.latent == (16, 8, 12)
    layers = {
        number: sum(each.parameters for each in model.in_layers if number in each.numbers)
        for number in range(model.layers)
    }
    assert model.largest_layer(lambda module: module.parameters) == layers[2] > layers[0]
    rest = sum(module.parameters * module.count for module in model.modules if not module.stack)
    assert sum(layers.values()) + rest == model.parameters
    for each in mixtures.values():
        assert from_json(json.loads(json.dumps(to_json(each)))) == each


def training(**changes: Any) -> TrainingSpec:
    base = TrainingSpec("zero2", LoraMethod(), 1, 2, 1, 1, 1024, True, "sdpa", "bf16")
    return replace(base, **changes)


def test_sparse_layers_need_more_than_dense_ones() -> None:
    config = SMALL | MIXTURES["deepseek_v3"] | {"model_type": "deepseek_v3", "num_hidden_layers": 8}
    totals = [
        predict(from_config(config | {"first_k_dense_replace": dense}, WHERE), training()).gpu["total"]
        for dense in (6, 3, 1)
    ]
    assert totals == sorted(totals)


def test_mixture_in_4_bits_fits_where_a_dense_model_of_its_size_does() -> None:
    """Qwen3-30B-A3B beside Qwen2.5-32B: with adapters of attention on an L4, where the 32B does not fit, and with those
    of all linear modules and experts on an A100 of 40 GB, as the 32B."""
    mixture, dense = (
        read_model_spec(path)
        for path in (ROOT / "benchmarks/memory/models/qwen3-30b-a3b.json", MODELS / "qwen2.5-32b.json")
    )
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    for targets, gpu, fitting in ((attention, "L4", (True, False)), ("all-linear", "A100-40GB-SXM", (True, True))):
        spec = training(
            strategy="ddp", method=QloraMethod(targets=targets), ranks_per_node=1, length=4096, loss="fused"
        )
        totals = [predict(model, spec).gpu["total"] for model in (mixture, dense)]
        assert tuple(total <= GPUS[gpu].memory for total in totals) == fitting


SPECS = {name: read_model_spec(MODELS / f"{name}.json") for name in ("llama-3-70b", "gpt2", "falcon-7b", "gemma-2-9b")}
FULL = training(strategy="zero1", method=create("full"), length=4096, activation_checkpointing=False)


# --- the reserve ---


def test_reserve_is_the_sum_of_its_shares() -> None:
    small = read_model_spec(MODELS / "smollm2-135m.json")
    alone, two = (predict(small, training(ranks_per_node=ranks)).gpu for ranks in (1, 2))
    between = reserve.CONNECTION * reserve.CHANNELS
    assert alone["reserve_nccl"] == 0 and two["reserve_nccl"] == between
    assert alone["reserve_context"] == two["reserve_context"] == reserve.CONTEXT
    tensors = alone["total"] - alone["reserve"]
    assert alone["reserve_allocator"] == pytest.approx(reserve.UNUSED * tensors, abs=1)
    assert alone["reserve"] < 0.6 * GIB
    # Sharding within a node needs further process groups.
    hybrid = predict(small, training(strategy="zero3_hpz", nodes=2)).gpu
    assert hybrid["reserve_nccl"] == 3 * between
    assert predict(small, training(reserve=0)).gpu["reserve"] == 0
    assert predict(small, training(on_cpu=True)).gpu["reserve"] == 0


def test_hopper_has_the_measured_reserve() -> None:
    small = read_model_spec(MODELS / "smollm2-135m.json")
    ada, hopper = (predict(small, training(ranks_per_node=2, capability=each)).gpu for each in (8.9, 9.0))
    more = {name: hopper[name] - ada[name] for name in ada if name.startswith("reserve_")}
    assert more == {
        "reserve_context": 101 * 2**20,
        "reserve_nccl": 652 * 2**20,
        "reserve_kernels": 540 * 2**20,
        "reserve_workspaces": 64 * 2**20 - 2 * 8320 * 1024,
        "reserve_allocator": 0,
        "reserve_streams": 0,
    }


def test_reserve_may_be_zero() -> None:
    assert schema.Estimate().reserve is None
    assert schema.Estimate(reserve="0GiB").reserve == "0GiB"
    assert parse_bytes("0GiB", zero=True) == 0
    with pytest.raises(ValueError, match="give a size with its unit"):
        parse_bytes("0GiB")
    with pytest.raises(ValueError, match="give a size with its unit, as in 2GiB or 0GiB"):
        schema.Estimate.model_validate({"reserve": 0})


# --- CUDA kernels, and weights that peft casts to fp32 ---


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_eager_softmax_counts_cuda_temporary(precision: Any) -> None:
    model = read_model_spec(MODELS / "llama-3.2-1b.json")
    spec = training(attention="eager", precision=precision, loss="fused", logits=8, length=2048, reserve=0)
    on_gpu, on_cpu = (predict(model, replace(spec, on_cpu=each)).phases["backward"] for each in (False, True))
    scores = model.heads * 2048**2
    # In fp16, CUDA's kernel reads scores and writes their gradient in fp16, the CPU's in fp32.
    assert on_gpu - on_cpu == pytest.approx({"fp16": 4 - 2, "bf16": 4, "fp32": 4}[precision] * scores, rel=0.02)


def test_peft_casts_unquantized_weights_except_under_deepspeed() -> None:
    model = read_model_spec(MODELS / "llama-3-8b.json")
    ours, lifted = QloraMethod(), QloraMethod(prepared_by="peft")
    rest = model.parameters - sum(module.inputs * module.outputs * module.count for module in model.linears)
    assert lifted.parameters(model, 2).frozen_bytes - ours.parameters(model, 2).frozen_bytes == 2 * rest
    for strategy, equal in (("ddp", False), ("zero2", True)):
        totals = {predict(model, training(strategy=strategy, method=each)).gpu["total"] for each in (ours, lifted)}
        assert (len(totals) == 1) == equal


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_vision_tower_matches_bitsandbytes(kind: Any, tmp_path: Path) -> None:
    """bitsandbytes quantizes Gemma-3's vision tower and projector too, not their norms."""
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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_stage_3_buckets_have_4_bit_weights_as_deepspeed_counts_them(precision: Any, tmp_path: Path) -> None:
    """By the elements of the packed tensor, which is of the run's type where weights are sharded (storage: auto)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    config = AutoConfig.for_model(**SMALL, model_type="llama")
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=dtype
    )
    stored = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, quantization_config=quantization, device_map={"": "cpu"}
    )
    assert {each.dtype for each in stored.parameters()} == {dtype}
    layer, everything = (sum(each.numel() for each in part.parameters()) for part in (stored.model.layers[0], stored))
    model = read_model_spec(tmp_path)
    spec = training(strategy="zero3", method=QloraMethod(targets=("q_proj",)), precision=precision)
    trained, largest = spec.parameters(model).trained, stored.lm_head.weight.numel()
    one_rank = named("A100-80GB-SXM", "nvlink3", "infiniband-hdr", "bf16", 1)  # no latency asks for more
    least, *more = open_buckets(model, spec, one_rank)
    assert (least.prefetch, least.live) == (layer, min(everything, 2 * layer + largest))
    assert more[-1].live == everything + trained


# --- refusals and notes ---


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload", "fsdp", "fsdp_offload"])
def test_no_rank_holds_a_4_bit_model_whole_while_loading(strategy: str) -> None:
    """Llama-3-70B in 4 bits on eight GPUs: its shard, the constants, and the largest weight; QDoRA needs all of it."""
    model = read_model_spec(MODELS / "llama-3-70b.json")
    spec = replace(FULL, strategy=strategy, method=QloraMethod(), ranks_per_node=8, length=64, reserve=0)
    quantized, lora = predict(model, spec), predict(model, replace(spec, method=LoraMethod()))
    parameters = spec.parameters(model)
    whole, shard = parameters.frozen_bytes, (parameters.frozen_bytes - parameters.constants) / 8
    assert whole > 35e9
    largest = model.vocabulary * model.hidden * 2
    kept = parameters.constants + (0 if spec.layout.offloads else shard + 0.05e9)
    assert quantized.phases["loading"] == pytest.approx(kept + largest, rel=0.02)
    if not spec.layout.offloads:  # whose host holds shards too
        assert quantized.host["loading"] == 8 * lora.host["loading"]
        on_load = predict(replace(model, stored_bytes=1), spec)
        assert on_load.host["loading"] == quantized.host["loading"] + 8 * DEQUANTIZING
        assert (on_load.disk["model"], on_load.gpu) == (1, quantized.gpu)
    said = "loading: each rank reads the quantized base model whole before it keeps its shard"
    qdora = replace(spec, method=create("qdora"))
    assert said not in estimated(model, spec, Capacity(80 * GIB, 512 * GIB))["notes"]
    assert said in estimated(model, qdora, Capacity(80 * GIB, 512 * GIB))["notes"]
    assert predict(model, qdora).phases["loading"] >= whole


@pytest.mark.parametrize(("double", "expected"), [(True, 5.49), (False, 8.46)])
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_quantization_constants_are_never_sharded(strategy: str, double: bool, expected: float) -> None:
    """The frozen GiB of Llama-3-70B on one of eight GPUs; with all bytes divided they would be 4.60 and 4.97."""
    model = read_model_spec(MODELS / "llama-3-70b.json")
    method = QloraMethod(double_quantization=double)
    gpu = predict(model, replace(FULL, strategy=strategy, method=method, ranks_per_node=8, length=64)).gpu
    assert (gpu["frozen_weights"] + gpu["quantization_constants"]) / GIB == pytest.approx(expected, abs=0.011)
    offloaded = predict(model, replace(FULL, strategy="fsdp_offload", method=method, ranks_per_node=8, length=64)).gpu
    assert offloaded["quantization_constants"] == gpu["quantization_constants"]
    assert offloaded["frozen_weights"] == 0
    assert "quantization_constants" not in predict(model, replace(FULL, strategy=strategy, length=64)).gpu


@pytest.mark.parametrize("method", [create("qdora"), QloraMethod(quantization="int8")], ids=["qdora", "int8"])
def test_remedies_can_run(method: Any) -> None:
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


def test_attentions_match_transformers_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    of_families = [path for path in MODELS.glob("*.json") if json.loads(path.read_text())["model_type"] in FAMILIES]
    for path in of_families:
        model = read_model_spec(path)
        actual: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model.family]]
        config = CONFIG_MAPPING[model.family].from_dict(SMALL | {"model_type": model.family})
        supported = {"flash": tried(config) is None, "sdpa": actual._supports_sdpa, "eager": True}
        assert model.attentions == tuple(name for name, has in supported.items() if has), path
    assert {read_model_spec(path).family for path in of_families} == set(FAMILIES) - {"gemma"}


def test_gemma_2_without_softcap_has_flash() -> None:
    config = SMALL | {"model_type": "gemma2", "head_dim": 8}
    assert from_config(config, WHERE).attentions == ("eager",)
    assert from_config(config | {"attn_logit_softcapping": None}, WHERE).attentions == ("flash", "eager")


@pytest.mark.parametrize(
    ("family", "attentions"),
    [
        ("gptj", ("eager",)),  # its own is built in
        ("stablelm", ("flash", "sdpa", "eager")),  # its flags say otherwise
        ("vaultgemma", ("eager",)),  # caps scores
        ("granite_swa", ("flash", "eager")),  # adds sinks
        ("llama4_text", ("sdpa", "eager")),  # needs a mask
        ("cohere", ("flash", "sdpa", "eager")),
    ],
)
def test_attentions_from_meta_device_match_training(family: str, attentions: tuple[str, ...]) -> None:
    from transformers import CONFIG_MAPPING

    assert (
        from_config(json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False)), WHERE).attentions == attentions
    )


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_config_with_infinity_is_read(family: str, tmp_path: Path) -> None:
    """As transformers writes it: {"__float__": "Infinity"}."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    assert '"Infinity"' in (tmp_path / "config.json").read_text()
    built = built_on_meta(config)
    assert read_model_spec(tmp_path).parameters == sum(each.numel() for each in built.parameters())


KINDS = ("bert", "bloom", "ctrl", "gpt_neo", "gpt_oss", "modernbert-decoder")
IN_ONE_LINE = {
    ("bert", "ia3"): "train.ia3.targets: this model names its keys, values and MLP in another way; use a list",
    ("ctrl", "ia3"): "train.ia3.targets: this model names its keys, values and MLP in another way; use a list",
}


@pytest.mark.parametrize(("number", "family"), list(enumerate(KINDS)), ids=KINDS)
def test_other_architectures_are_estimated_or_refused(number: int, family: str) -> None:
    """With transformers' default sizes, by every training method: each on one of them, since a trace takes seconds, and
    IA3 on all; benchmarks/memory/model_types.py has all types."""
    from transformers import CONFIG_MAPPING

    model = from_config(json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False)), WHERE)
    for method in {
        *list(TRAINABLE)[number :: len(KINDS)],
        "ia3",
        *(["lora"] if family == "modernbert-decoder" else []),
    }:
        try:
            spec = replace(training(method=create(method)), attention="eager")
            assert predict(model, spec).gpu["total"] > 0
            assert (family, method) not in IN_ONE_LINE
        except UserError as error:
            assert IN_ONE_LINE.get((family, method), "") in str(error)
            assert (family, method) != ("modernbert-decoder", "lora")


def test_all_linear_without_linear_modules_is_refused() -> None:
    model = SPECS["llama-3-70b"]
    without = replace(model, modules=tuple(each for each in model.modules if each.kind != "linear"))
    with pytest.raises(UserError, match="train.lora.targets is all-linear, and a llama has no linear module that can"):
        LoraMethod().parameters(without, 2)


def test_notes_name_assumptions(mixtures: dict[str, ModelSpec]) -> None:
    def notes(model: ModelSpec, **changes: Any) -> str:
        return "\n".join(estimated(model, training(**changes), Capacity(80 * GIB, 512 * GIB))["notes"])

    assert notes(SPECS["llama-3-70b"]) == ""
    mixture = notes(mixtures["qwen3_moe"])
    assert "grouped product, whose memory does not depend on the routing" in mixture
    assert "an adapter makes a copy of all experts' weights" in mixture
    assert "copy of all experts" not in notes(mixtures["qwen3_moe"], method=LoraMethod(targets=("q_proj",)))
    assert "not quantized" in notes(mixtures["mixtral"], method=QloraMethod())
    assert "traced from the model's class, with the operations of torch" in notes(mixtures["qwen3_next"])
    stored = from_config(
        SMALL | MIXTURES["gpt_oss"] | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, WHERE
    )
    assert "weights: stored as mxfp4, counted in the run's precision" in notes(stored, attention="eager")
    assert "image encoder" in notes(from_config(VISION, WHERE))
    assert "no image rows" in notes(from_config(VISION, WHERE))


def test_a_count_has_its_noun() -> None:
    assert [counted(count, "run") for count in (0, 1, 1000)] == ["0 runs", "1 run", "1,000 runs"]
