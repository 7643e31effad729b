"""The estimate: published figures, laws for any model, and recorded traces."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, served
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory import baselines, compare, measure
from zerolora.config.settings import EstimateSettings
from zerolora.memory.estimate import Capacity, estimate, estimated
from zerolora.memory.predict import predict
from zerolora.memory.states import model_states
from zerolora.memory.table import rows, table
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.methods.qlora import QloraMethod
from zerolora.methods.registry import METHODS, create
from zerolora.model.families import FAMILIES
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import ModelSpec, from_json
from zerolora.planner.hardware import GPUS
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES
from zerolora.units import GIB

MODELS = ROOT / "config/recipes/models"

# ZeRO, arXiv 1910.02054, figure 1 and table 1; XTuner's DeepSpeed page. GB = 1e9 bytes of model states per GPU.
PAPER = [
    (7.5e9, 64, "ddp", 120.0),
    (7.5e9, 64, "zero0", 120.0),
    (7.5e9, 64, "zero1", 31.4),
    (7.5e9, 64, "zero2", 16.6),
    (7.5e9, 64, "zero3", 1.9),
    (7e9, 8, "zero1", 38.5),
    (7e9, 8, "zero2", 26.25),
    (7e9, 8, "zero3", 14.0),
    (7.5e9, 64, "fsdp", 1.9),
]


@pytest.mark.parametrize(("parameters", "ranks", "strategy", "gigabytes"), PAPER)
def test_model_states_match_the_papers(parameters: float, ranks: int, strategy: str, gigabytes: float) -> None:
    states = model_states(0.0, int(parameters), STRATEGIES[strategy], ranks, min(8, ranks), "bf16")
    decimals = len(str(gigabytes).partition(".")[2])
    assert round(states.total / 1e9, decimals) == gigabytes


def test_json_has_an_object_per_strategy_whose_terms_add_up() -> None:
    options = ["--model", str(MODELS / "qwen2.5-7b.json"), "--nodes", "2", "--gpus-per-node", "4", "--json"]
    options += ["--activation-checkpointing", "--micro-batch", "2", "--sequence-length", "2048"]
    result = served("zerolora", "memory", *options)
    actual = [json.loads(line) for line in result.stdout.splitlines()]
    assert [entry["strategy"] for entry in actual] == list(STRATEGIES)
    for entry in actual:
        gpu = entry["gpu"]
        terms = ("model_states", "activations", "logits", "buffers", "reserve")
        assert sum(gpu[term] for term in terms) == gpu["total"]
        assert gpu["total"] == max(entry["phases"].values())
        assert entry["phases"][gpu["peak_phase"]] == gpu["total"]
        host = [value for term, value in entry["host"].items() if term not in ("total", "needed", "peak_phase")]
        assert sum(host) == entry["host"]["total"]
        disk = [value for term, value in entry["disk"].items() if term != "total"]
        assert sum(disk) == entry["disk"]["total"]
        assert isinstance(entry["fits"], bool)
        assert entry["why"] == "fits" if entry["fits"] else "needs" in entry["why"] or "sent in bf16" in entry["why"]
        assert entry["dominates"] in gpu
        for remedy in entry["would_lower"]:
            assert remedy["total"] < gpu["total"]


def test_known_families_are_estimated_without_torch() -> None:
    known = [str(path) for path in MODELS.glob("*.json") if json.loads(path.read_text())["model_type"] in FAMILIES]
    code = (
        "import sys; from pathlib import Path; from zerolora.cli import app; "
        "from zerolora.model.read_spec import read_model_spec; "
        f"[read_model_spec(Path(path)) for path in {known!r}]; "
        f"app(['memory', '--model', {str(MODELS / 'llama-3-70b.json')!r}, '--json'], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'imported'"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- states ---

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 99,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL))
    stats: dict[str, Any] = {
        "packing": True,
        "longest_packed_row": 512,
        "most_supervised": 100,
        "train_packed_rows": 64,
        "train_rows": 640,
        "train_common_prefix": 0,
        "validation_packed_rows": 8,
    }
    stats |= {"train_tokens": 30000, "train_supervised_tokens": 6000, "validation_supervised_tokens": 600}
    stats |= {"train_mean_row_of_a_token": 50.0}
    (folder / "stats.json").write_text(json.dumps(stats))
    return folder


def test_constants_of_4_bit_weights_match_the_paper(small: Path) -> None:
    """QLoRA, arXiv 2305.14314, section 3: 0.5 bits a parameter for constants, 0.127 with double quantization."""
    model = read_model_spec(small)
    count = sum(module.parameters * module.count for module in model.linears)
    for double, bits in ((False, 0.5), (True, 0.127)):
        actual = QloraMethod(double_quantization=double).parameters(model, 2).frozen_bytes
        quantized = actual - 2 * (model.parameters - count)
        assert round(8 * quantized / count - 4, 3) == bits


def test_frozen_parameters_have_no_optimizer_state() -> None:
    states = model_states(16e9, 0, STRATEGIES["zero2"], 8, 8, "bf16")
    assert states.total == states.frozen_weights == 16e9


# --- laws ---

SPECS = {
    name: read_model_spec(MODELS / f"{name}.json") for name in ("smollm2-135m", "llama-3-8b", "gpt2", "gemma-2-9b")
}

SPEC = TrainingSpec(
    strategy="zero2", method=LoraMethod(), nodes=1, ranks_per_node=1, micro_batch=1, accumulation=1, length=512,
    activation_checkpointing=False, attention="sdpa", precision="bf16", masked=False,
)  # fmt: skip


@st.composite
def specs(draw: st.DrawFn) -> TrainingSpec:
    return TrainingSpec(
        strategy=draw(st.sampled_from(list(STRATEGIES))),
        method=create(draw(st.sampled_from(sorted(METHODS))), r=draw(st.sampled_from([1, 8, 64]))),
        nodes=draw(st.integers(1, 8)),
        ranks_per_node=draw(st.integers(1, 8)),
        micro_batch=draw(st.integers(1, 16)),
        accumulation=draw(st.sampled_from([1, 4])),
        length=draw(st.integers(8, 8192)),
        activation_checkpointing=draw(st.booleans()),
        attention=draw(st.sampled_from(["eager", "sdpa", "flash"])),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        masked=draw(st.booleans()),
        loss=draw(st.sampled_from(["full", "supervised", "fused"])),
    )


MODEL = st.sampled_from(list(SPECS.values()))
SLACK = 2**16  # bytes: storages are rounded up to blocks of 512


@given(MODEL, specs())
@settings(max_examples=60, deadline=None)
def test_more_nodes_never_need_more_gpu_memory(model: ModelSpec, spec: TrainingSpec) -> None:
    spec = replace(spec, nodes=spec.nodes + 1)  # on one node, hpZ and DDP communicate nothing
    more = replace(spec, nodes=2 * spec.nodes)
    assert predict(model, more).gpu["total"] <= predict(model, spec).gpu["total"] + SLACK


@given(MODEL, specs())
@settings(max_examples=60, deadline=None)
def test_longer_rows_and_larger_batches_never_need_less(model: ModelSpec, spec: TrainingSpec) -> None:
    least = predict(model, spec).gpu["total"] - SLACK
    assert predict(model, replace(spec, length=spec.length + 8)).gpu["total"] >= least
    assert predict(model, replace(spec, micro_batch=spec.micro_batch + 1)).gpu["total"] >= least
    assert predict(model, replace(spec, accumulation=8)).gpu["total"] >= least


@given(
    MODEL,
    specs(),
    st.sampled_from([("zero1", "zero1_offload"), ("zero2", "zero2_offload"), ("zero3", "zero3_offload")]),
)
@settings(max_examples=60, deadline=None)
def test_offload_moves_states_to_the_host(model: ModelSpec, spec: TrainingSpec, names: tuple[str, str]) -> None:
    kept, moved = (
        model_states(*_states_of(model, spec), STRATEGIES[name], spec.ranks, spec.ranks_per_node, spec.precision)
        for name in names
    )
    assert moved.total <= kept.total
    # Gradients are stored on their owners only, in the optimizer's precision.
    assert moved.total + moved.host >= kept.total - kept.gradients - 1
    assert predict(model, replace(spec, strategy=names[1])).offloaded >= int(moved.host)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_saving_needs_the_adapter_and_its_moments_on_one_host(method: str) -> None:
    """The trained weights and both AdamW moments in fp32, unsharded; the disk holds two checkpoints."""
    model = read_model_spec(MODELS / "llama-2-7b.json")
    spec = replace(SPEC, strategy="zero3", method=create(method), ranks_per_node=8)
    trained, predicted = spec.parameters(model).trained, predict(model, spec)
    assert predicted.host["saving"] == (0 if predicted.host["peak_phase"] == "loading" else 12 * trained)
    assert predicted.host["peak_phase"] == ("step" if method == "full" else "loading")
    assert predicted.disk["checkpoints"] == 2 * 12 * trained
    kept = predict(model, replace(spec, keep_checkpoints=10, keeps_best=True))
    assert kept.disk["checkpoints"] == 11 * 16 * trained
    assert predicted.disk["adapter"] == 4 * trained


def test_cpu_ranks_keep_pages_of_weights_they_convert() -> None:
    """Quantized modules, and modules whose initialization subtracts the factors; not weights used as stored."""
    model = SPECS["smollm2-135m"]
    adapted = sum(module.inputs * module.outputs * module.count for module in model.linears)
    actual = {}
    for name, method in {
        "lora": LoraMethod(), "start": LoraMethod(init="pissa"), "some": LoraMethod(init="olora", targets=("q_proj",)),
        "nf4": QloraMethod(), "int8": QloraMethod(quantization="int8"),
    }.items():  # fmt: skip
        spec = replace(SPEC, method=method, ranks_per_node=2, precision="fp32", on_cpu=True)
        actual[name] = predict(model, spec).host["page_cache"]
    assert actual.pop("lora") == 0
    assert actual.pop("some") == 2 * 4 * 30 * 576 * 576
    assert set(actual.values()) == {2 * 4 * adapted}


def _states_of(model: ModelSpec, spec: TrainingSpec) -> tuple[float, int]:
    parameters = spec.parameters(model)
    return parameters.frozen_bytes, parameters.trained


@given(MODEL, specs())
@settings(max_examples=60, deadline=None)
def test_higher_stages_never_need_more_states(model: ModelSpec, spec: TrainingSpec) -> None:
    spec = replace(spec, nodes=spec.nodes + 2)  # a single fp32 rank has a master copy at stage 1 but none at stage 0
    totals = [predict(model, replace(spec, strategy=f"zero{stage}")).gpu["model_states"] for stage in range(4)]
    assert totals == sorted(totals, reverse=True)


@given(MODEL, specs())
@settings(max_examples=60, deadline=None)
def test_activation_checkpointing_never_needs_more(model: ModelSpec, spec: TrainingSpec) -> None:
    spec = replace(spec, length=max(256, spec.length), loss="supervised", method=LoraMethod())
    plain, saving = (predict(model, replace(spec, activation_checkpointing=each)) for each in (False, True))
    assert saving.gpu["total"] <= plain.gpu["total"] + SLACK


@given(MODEL, specs())
@settings(max_examples=60, deadline=None)
def test_activation_offload_moves_layer_inputs_to_the_host(model: ModelSpec, spec: TrainingSpec) -> None:
    spec = replace(spec, activation_checkpointing=True)
    kept, moved = (predict(model, replace(spec, activation_offload=each)) for each in (False, True))
    assert moved.gpu["total"] <= kept.gpu["total"] + SLACK
    assert moved.host["total"] >= kept.host["total"]
    # All layer inputs but at most one; pinned blocks are powers of two.
    size = spec.micro_batch * spec.length * model.hidden * spec.prepared_method.activation_width(spec.width)
    block = spec.ranks_per_node * 2 ** math.ceil(math.log2(size))
    expected = (0,) if moved.host["peak_phase"] == "loading" else (block * model.layers, block * (model.layers - 1))
    assert moved.host["layer_inputs"] in expected
    assert kept.host["layer_inputs"] == 0
    # CPU ranks have them on the host anyway.
    on_cpu = [predict(model, replace(spec, activation_offload=each, on_cpu=True)) for each in (False, True)]
    assert on_cpu[0] == on_cpu[1]


# --- the stage ---

SETTINGS = EstimateSettings.model_validate(
    {
        "device": "cuda",
        "gpu_memory": 80 * GIB,
        "host_memory": 512 * GIB,
        "reserve": GIB,
        "nodes": 1,
        "ranks_per_node": 8,
        "global_batch": 16,
        "micro_batch": 1,
        "precision": "bf16",
        "activation_checkpointing": True,
        "attention": None,
        "method": {"name": "lora", "settings": {"r": 16}},
        "keeps_best": False,
    }
)


def test_stage_estimates_every_strategy_with_sources(small: Path) -> None:
    result = estimate(SETTINGS, small, small)
    assert [entry["strategy"] for entry in result["strategies"]] == list(STRATEGIES)
    terms = {term for entry in result["strategies"] for part in ("gpu", "host") for term in entry[part]}
    assert terms - {"model_states", "total", "needed", "peak_phase"} <= set(result["sources"])
    assert from_json(json.loads(json.dumps(result["shape"]))) == read_model_spec(small)
    assert "zero3_offload" in table(result)


def test_published_experiment_fits() -> None:
    """Qwen2.5-14B on 2 x 32 GB (MB = 2^20): 28,317.6 MB while loading; all four strategies ran."""
    model = read_model_spec(MODELS / "qwen2.5-14b.json")
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    spec = TrainingSpec(
        strategy="zero0",
        method=LoraMethod(r=8, targets=names, dropout=0.01),
        nodes=1,
        ranks_per_node=2,
        micro_batch=16,
        accumulation=1,
        length=60,
        activation_checkpointing=True,
        attention="sdpa",
        precision="bf16",
        loss="supervised",
    )
    capacity = Capacity(GPUS["V100-32GB"].memory, 180 * 10**9)
    for name in ("zero0", "zero1", "zero2_offload", "zero3_offload"):
        entry = estimated(model, replace(spec, strategy=name), capacity)
        assert entry["fits"], (name, entry["why"])
    loading = predict(model, replace(spec, reserve=0)).phases["loading"]
    assert abs(loading / 2**20 - 28317.6) / 28317.6 < 0.01
    assert "zero3_offload" in rows([estimated(model, replace(spec, strategy="zero3_offload"), capacity)], capacity)


LOADING = [("qwen2.5-14b", 27.51, 1.45, 42.48), ("llama-3-8b", 14.96, 0.98, 26.15)]
"""Model, GiB of its bf16 weights, of its largest weight, and of a host with 8 GPUs at stage 0."""


@pytest.mark.parametrize(("name", "weights", "largest", "total"), LOADING)
def test_gpu_ranks_share_the_pages_of_weights(name: str, weights: float, largest: float, total: float) -> None:
    model = read_model_spec(MODELS / f"{name}.json")
    spec = TrainingSpec("zero0", LoraMethod(), 1, 8, 1, 1, 2048, True, "flash", "bf16", loss="fused")
    host = predict(model, spec).host
    assert host["peak_phase"] == "loading"
    assert host["page_cache"] / GIB == pytest.approx(weights, abs=0.01)
    assert host["loading"] / GIB == pytest.approx(8 * largest, abs=0.05)
    assert host["total"] / GIB == pytest.approx(total, abs=0.01)
    documented = " | ".join(f"{host[term] / GIB:.2f} GiB" for term in ("processes", "page_cache", "loading", "total"))
    assert documented in (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    # One more rank costs its process and its weight in transfer.
    more = predict(model, replace(spec, ranks_per_node=9)).host
    assert more["page_cache"] == host["page_cache"]
    assert (more["total"] - host["total"]) / GIB == pytest.approx(largest + host["processes"] / 8 / GIB, abs=0.01)
    # At stage 3 only rank 0 reads.
    sharded = predict(model, replace(spec, strategy="zero3")).host
    assert sharded["loading"] * 8 == host["loading"]
    # Offloaded shards replace the pages.
    offloaded = predict(model, replace(spec, strategy="zero3_offload")).host
    assert offloaded["total"] < host["total"]


# --- traces (benchmarks/memory) ---

OFFLOADED = {compare.key(case) for case in compare.offloaded()}


def test_predictions_stay_within_bounds_of_every_trace() -> None:
    actual = compare.errors(compare.all_compared())
    assert actual["combinations"] >= 250
    assert actual["mean_absolute_error"] <= 0.03
    assert abs(actual["worst_error"]) <= 0.08
    assert actual["lowest_error"] >= -0.02


def test_ddp_traces_match_mixed_precision_training() -> None:
    # Inputs are bf16 copies. With fp32 inputs, as peft casts them for fp32 adapters, the mean error was 7 %.
    traced = [trace for trace in compare.read_traces() if trace["case"]["strategy"] == "ddp"]
    assert {trace["case"]["method"] for trace in traced} == set(METHODS)
    actual = compare.errors([compare.compared(trace["case"], trace["bytes"]) for trace in traced])
    assert actual["mean_absolute_error"] < 0.003
    assert abs(actual["worst_error"]) < 0.05
    assert actual["lowest_error"] > -0.012


@pytest.mark.parametrize("method", sorted(METHODS))
def test_ddp_adds_bf16_copies_of_trained_weights(method: str) -> None:
    model = SPECS["llama-3-8b"]
    spec = replace(SPEC, method=create(method), ranks_per_node=8, length=4096)
    ddp, zero0 = (predict(model, replace(spec, strategy=name, reserve=0)).phases for name in ("ddp", "zero0"))
    copies = (ddp["backward"] - ddp["saving"]) - (zero0["backward"] - zero0["saving"])
    assert 0.7 * spec.parameters(model).trained < copies < 2 * spec.parameters(model).trained


def test_int8_estimate_matches_traces() -> None:
    """int8 matmul saves its input also in modules without adapter: 3 % of the total if only queries are adapted."""
    traced = [trace for trace in compare.read_traces() if trace["case"].get("quantization") == "int8"]
    actual = [compare.compared(trace["case"], trace["bytes"])["error"] for trace in traced]
    assert len(actual) >= 9
    assert max(map(abs, actual)) < 1e-3


def test_activation_offload_matches_traces() -> None:
    """Counted on the GPU, layer inputs would be 1.5 to 15 % of the total."""
    traced = [trace for trace in compare.read_traces() if compare.key(trace["case"]) in OFFLOADED]
    assert len(traced) == len(OFFLOADED) == 4
    for trace in traced:
        on_gpu = compare.compared({**trace["case"], "offload": False}, trace["bytes"])["error"]
        assert abs(compare.compared(trace["case"], trace["bytes"])["error"]) < min(0.014, on_gpu / 5)


def test_objectives_match_traces() -> None:
    """Ignored, an objective's own bytes would be at most 0.03 % of a step, so they are compared on their own too."""
    traced = {compare.key(trace["case"]): trace for trace in compare.read_traces() if "objective" in trace["case"]}
    cases = compare.of_objectives()
    assert sorted(traced) == sorted(map(compare.key, cases))
    for name in ("objective", "strategy", "checkpointing", "logits"):
        values = {case[name] for case in cases}
        assert len(values) == {"objective": len(OBJECTIVES) - 1, "strategy": 3}.get(name, 2)
    actual = compare.errors([compare.compared(trace["case"], trace["bytes"]) for trace in traced.values()])
    assert actual["mean_absolute_error"] < 0.002
    assert abs(actual["worst_error"]) < 0.01
    for trace in traced.values():
        spec = compare.spec_of(trace["case"])
        own = trace["bytes"]["objective"]
        assert own < 0.0003 * trace["bytes"]["peak"]
        if not spec.logits:  # with few tokens the blocks of 512 bytes of its scalars are most of them
            assert spec.added_by_objective(0).activations == pytest.approx(own, rel=0.1)


def test_every_method_has_traces() -> None:
    traced = {compare.key(trace["case"]) for trace in compare.read_traces()}
    wanted = compare.every_method()
    assert {case["method"] for case in wanted} == set(METHODS)
    assert {"peft"} == {case["prepared_by"] for case in wanted if "prepared_by" in case}
    assert [case for case in wanted if compare.key(case) not in traced] == []


# --- other tools' answers (benchmarks/memory) ---


# DeepSpeed's documentation, t5-3b on one node of eight GPUs: strategy, host and GPU in GiB.
T5 = [
    ("zero3_offload", 71.71, 0.12),
    ("zero3_offload_optimizer", 63.74, 0.79),
    ("zero3", 1.43, 6.10),  # documented as 1.47, for a largest layer of 32,899,072
]


@pytest.mark.parametrize(("strategy", "host", "gpu"), T5)
def test_deepspeed_answers_as_documented(strategy: str, host: float, gpu: float) -> None:
    answer = baselines.deepspeed_answer(strategy, 2_851_000_000, 32_000_000, ranks_per_node=8)
    assert answer.host is not None and answer.gpu is not None
    assert answer.host / GIB == pytest.approx(host, rel=0.01)
    assert answer.gpu / GIB == pytest.approx(gpu, abs=0.01)


def test_deepspeed_answers_only_stages_2_and_3() -> None:
    for name, layout in STRATEGIES.items():
        answer = baselines.deepspeed_answer(name, 10**9, 10**6, 8)
        assert (answer.gpu is None) == (layout.stage < 2 or layout.engine != "deepspeed"), name
    # DeepSpeed#5304: frozen parameters are counted with optimizer states.
    assert baselines.deepspeed_answer("zero2", 8_030_261_248, 0, 8).gpu == 2 * 8_030_261_248 + 18 * 8_030_261_248 // 8


def test_accelerate_answers_four_copies_in_fp32() -> None:
    config = MODELS / "smollm2-135m.json"
    assert baselines.model_parameters(config) == (134_515_008, 49152 * 576)  # the tied embedding counts once
    fp32, bf16 = (baselines.accelerate_answer(config, precision).gpu for precision in ("fp32", "bf16"))
    assert fp32 == pytest.approx(4 * 4 * 134_515_008, rel=1e-6)  # 64 numbers of rotary embedding count too
    assert bf16 == pytest.approx(2 * 4 * 134_515_008, rel=1e-6)
    assert baselines.accelerate_answer(config, "bf16").host is None


def test_groups_can_be_predicted_and_rendered() -> None:
    for group in [*measure.cpu_groups(), *gpu_groups()]:
        model = read_model_spec(MODELS / f"{group['model']}.json")
        assert {"bf16", "fp16"} <= measure.zero_json(group).keys(), group
        for batch in group["batches"]:
            spec = measure.spec_of(group, batch)
            assert spec.reserve == 0
            assert spec.on_cpu == (group["device"] == "cpu")
            assert predict(model, spec).host["total"] > 0


def gpu_groups() -> list[measure.Group]:
    """Return the groups of a machine with one GPU."""
    return [{**group, "ranks": 1} for group in measure.gpu_groups()]


def test_recorded_predictions_are_current() -> None:
    result = json.loads((ROOT / "benchmarks/results/memory_cpu.json").read_text())
    for each in result["rows"]:
        assert measure.predicted_again(each)["predicted_host"] == each["predicted_host"], each
