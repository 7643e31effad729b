"""Layers of models that no table has: traced from their class, extrapolated, kept in a file, used in every estimate."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, served
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING

from benchmarks.memory import compare
from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.memory import layer_trace, layer_tracing
from zerolora.memory.estimate import Capacity, estimated
from zerolora.memory.predict import _planned as planned
from zerolora.memory.predict import layer_work, predict
from zerolora.memory.traced_parts import LENGTHS, MEASURES, TracedPart, least
from zerolora.memory.training_spec import RowStatistics, TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.methods.registry import create
from zerolora.model.architecture import built_on_meta
from zerolora.model.fake_pass import even_splits
from zerolora.model.layer_kinds import keep_one_of_each_kind, kinds_of, stack_of
from zerolora.model.meta_device import DESCRIBED, build_on_meta
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec, from_json, to_json
from zerolora.planner.candidates import step_work
from zerolora.planner.cost import step_seconds
from zerolora.planner.hardware import named
from zerolora.strategies import STRATEGIES
from zerolora.units import GIB

WHERE = Path("config.json")
TEXT: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32},
    **{"num_key_value_heads": 4, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MAMBA = {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 99, "state_size": 16}
MAMBA |= {"num_heads": 8, "head_dim": 16, "n_groups": 1}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SPEC = TrainingSpec(
    strategy="ddp", method=LoraMethod(), nodes=1, ranks_per_node=1, micro_batch=2, accumulation=1, length=640,
    activation_checkpointing=False, attention="sdpa", precision="bf16", loss="fused",
)  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> ModelSpec:
    return from_config(TEXT | {"model_type": "llama"}, WHERE)


@pytest.fixture(scope="module")
def as_stranger(llama: ModelSpec) -> ModelSpec:
    """The same model as if no table had its layers."""
    return replace(llama, config=json.dumps(TEXT | {"model_type": "llama"}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True, "length": 1536, "micro_batch": 1},
        {"method": create("full"), "strategy": "zero2", "ranks_per_node": 4},
        {"method": create("full"), "activation_checkpointing": True},
        {"method": LoraMethod(targets=("q_proj",)), "strategy": "zero3", "ranks_per_node": 2},
        {"method": create("qlora")},
        {"method": create("dora", dropout=0.1), "length": 2048},
        {"attention": "eager", "loss": "full"},
        {"attention": "flash", "length": 3000},
    ],
    ids=str,
)
def test_traced_layers_take_what_the_table_says(
    llama: ModelSpec, as_stranger: ModelSpec, changes: dict[str, Any]
) -> None:
    """The table of Llama's layers is held by recorded traces, and the trace of the class by the table, for every method
    and size of rows."""
    spec = replace(SPEC, **changes)
    table, traced = (predict(model, spec).phases for model in (llama, as_stranger))
    for phase in ("forward", "loss", "backward", "backward_end"):
        assert traced[phase] == pytest.approx(table[phase], rel=0.03), phase
    assert layer_trace.fault_of_tracing(as_stranger) is None


def test_counted_work_is_that_of_the_cost_model(llama: ModelSpec, as_stranger: ModelSpec) -> None:
    rows = RowStatistics(
        packing=True, longest_packed_row=640, most_supervised=300, packed_rows=9, tokens=9 * 640,
        supervised_tokens=9 * 300, mean_row_of_a_token=640, validation_rows=1,
    )  # fmt: skip
    one, other = (step_work(model, SPEC, rows) for model in (llama, as_stranger))
    assert one.counted is None
    work = other.counted
    assert work is not None
    head = one.vocabulary * one.hidden
    products = 2 * one.tokens * (one.matmul - head + one.trainable)
    assert work.forward.flops == pytest.approx(products, rel=0.01)
    assert work.forward.scores == pytest.approx(4 * one.tokens * 640 * one.heads * one.head_dim * one.layers, rel=0.01)
    # Of frozen weights one product, of factors two, and none for the first factors' own input alone.
    assert work.backward.flops == pytest.approx(products + 2 * one.tokens * one.trainable, rel=0.05)
    hardware = named("A100-80GB-SXM", "nvlink4", "infiniband-hdr", "bf16", 1)
    seconds = [step_seconds(each, STRATEGIES["ddp"], hardware).forward for each in (one, other)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.25)


def test_tables_outside_of_families_are_held_by_recorded_traces() -> None:
    """Whatever is not in a table that traces hold is traced."""
    traced = {trace["case"]["model"] for trace in compare.read_traces()}
    assert {compare.spec_of_model(name, None).family for name in traced} >= set(DESCRIBED)
    assert not any(compare.spec_of_model(name, None).config for name in traced)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | LINEAR
    assert from_config(TEXT | sizes | {"model_type": "qwen3_next"}, WHERE).config


def test_command_says_once_that_it_traces(tmp_path: Path) -> None:
    path, traces = tmp_path / "mamba2.json", tmp_path / "zerolora/traces"
    path.write_text(json.dumps(MAMBA))
    command = ("zerolora", "memory", "--model", str(path), "--strategy", "ddp", "--sequence-length", "64")

    def run() -> tuple[bool, str]:
        """Return whether the command said that it traces, and what it printed."""
        done = served(*command, before=f"import os; os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}")
        assert done.returncode == 0, done.stderr
        said = f"a mamba2 has no table of its own: its layers are traced, some seconds once; kept in {traces}\n"
        return said in done.stderr, done.stdout

    first, second = run(), run()
    assert (first[0], second[0]) == (True, False)
    assert first[1] == second[1]
    assert "traced from the model's class" in " ".join(first[1].split())
    (kept,) = traces.iterdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert layer_trace._read(kept.stem)
        kept.write_text("{")
        assert layer_trace._read(kept.stem) is None, "a damaged file is traced again"


def test_key_follows_config_settings_and_code(as_stranger: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(model: ModelSpec, **changes: Any) -> str:
        return layer_trace._key(model, replace(traced, **changes))

    from zerolora.memory.traced_parts import TracedPass

    traced = TracedPass(LoraMethod(), (("q", 8),), "sdpa", 2, 2, 2, False)
    keys = {key(as_stranger), key(as_stranger, attention="eager"), key(as_stranger, method=LoraMethod(r=4))}
    keys |= {key(replace(as_stranger, config="{}")), key(as_stranger, on_cpu=True), key(as_stranger, width=4)}
    monkeypatch.setattr(layer_trace, "code", lambda: "another")
    keys.add(key(as_stranger))
    assert len(keys) == 7


def test_class_that_cannot_be_traced_is_a_decoder_of_its_sizes_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: ModelSpec, as_stranger: ModelSpec
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("it reads\nvalues")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layer_tracing, "trace_layers", fails)
    monkeypatch.setattr(layer_trace, "_faults", {})
    layer_trace.layer_trace.cache_clear()
    other = replace(as_stranger, config=as_stranger.config + " ")
    notes = estimated(other, SPEC, Capacity(80 * GIB, 512 * GIB))["notes"]
    assert "activations: as those of a decoder of these sizes, for its class cannot be traced: it reads values" in notes
    assert predict(other, SPEC).gpu["total"] == predict(llama, SPEC).gpu["total"]
    with pytest.raises(
        UserError, match=r"a mamba2 is unknown: its class cannot be traced \(it reads values\), and a m"
    ):
        predict(from_config(MAMBA, WHERE), replace(SPEC, attention="eager"))


def test_one_layer_of_each_kind_is_kept() -> None:
    """With its own entry of each list, beside a copy of the first layer."""
    config = CONFIG_MAPPING["qwen3_5_text"](**TEXT | LINEAR | {"num_hidden_layers": 8})
    model = built_on_meta(config)
    kept = [model.model.layers[number] for number in (0, 3)]
    assert keep_one_of_each_kind(model, "model.layers", first_twice=True) == [0, 0, 0, 1, 0, 0, 0, 1]
    assert [*model.model.layers][1:] == kept
    assert model.config.layer_types == ["linear_attention", "linear_attention", "full_attention"]
    assert model.config.num_hidden_layers == 3
    assert [layer.linear_attn.layer_idx for layer in [*model.model.layers][:2]] == [0, 1]
    assert model.model.layers[2].self_attn.layer_idx == 2


def test_kinds_follow_lists_that_a_config_computes_and_attributes_of_modules() -> None:
    """Jamba's config has the kinds of its layers by rules on their numbers; a number makes a kind unless each layer has
    another, as in a schedule."""
    rules = {"num_hidden_layers": 6, "attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False}
    model = built_on_meta(CONFIG_MAPPING["jamba"](**TEXT | rules))
    before = model.config.layer_types
    order = keep_one_of_each_kind(model, stack_of(model))
    assert model.config.layer_types == [before[order.index(kind)] for kind in range(max(order) + 1)]
    model = built_on_meta(CONFIG_MAPPING["llama"](**TEXT))
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.scale = 1 / (number + 1)
    assert kinds_of(model, "model.layers") == [0, 0, 0, 0]
    for layer, window in zip(model.model.layers, (8, 16, 8, 16), strict=True):
        layer.self_attn.window = window
    assert kinds_of(model, "model.layers") == [0, 1, 0, 1]


def test_class_that_needs_all_its_layers_has_them() -> None:
    """Gemma 3n's layers share embeddings whose width is that of all layers together."""
    sizes = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512}
    settings = CONFIG_MAPPING["gemma3n_text"](**TEXT | sizes | {"num_hidden_layers": 6})
    model = from_config(json.loads(settings.to_json_string(use_diff=False)), WHERE)
    assert predict(model, replace(SPEC, length=256)).gpu["activations"] > 0
    assert layer_trace.fault_of_tracing(model) is None


def test_recorded_types_are_within_bounds() -> None:
    """The estimate of each type against a trace of its whole class (benchmarks/memory/model_types.py)."""
    recorded = json.loads((ROOT / "benchmarks/results/memory_types.json").read_text(encoding="utf-8"))
    errors = [abs(row["error"]) for row in recorded["rows"]]
    held = {row["type"] for row in recorded["rows"]}
    assert len(held) >= 80
    assert not held & recorded["refused"].keys()
    assert sum(errors) / len(errors) <= 0.03
    assert max(errors) <= 0.08
    assert all(why and "\n" not in why for why in recorded["refused"].values())


def test_tokens_of_experts_may_be_read_to_split_a_tensor() -> None:
    """As JetMoe's experts do. What else is computed from such a number ends the pass."""
    with FakeTensorMode(), even_splits():
        counts, tokens = torch.zeros(3, dtype=torch.int64), torch.zeros(8, 2)
        assert [len(part) for part in tokens.split(counts.tolist(), dim=0)] == [3, 3, 2]
        with pytest.raises(TypeError):
            sum(counts.tolist())
        with pytest.raises(TypeError, match="are read"):
            tokens.tolist()


def test_weights_that_layers_return_are_counted_where_they_are_recomputed() -> None:
    """Each is held beside a gradient of zeros, in the estimate by table and by trace."""
    sizes = {"model_type": "bloom", "vocab_size": 512, "hidden_size": 64, "n_layer": 3, "n_head": 4}
    table = from_config(sizes, WHERE)
    stranger = replace(table, config=json.dumps(sizes))
    spec = replace(SPEC, attention="eager", activation_checkpointing=True, length=1536, micro_batch=1)
    one, other = (predict(model, spec).phases["backward"] for model in (table, stranger))
    assert other == pytest.approx(one, rel=0.03)
    held = predict(replace(table, returns_weights=False), spec).phases["backward"]
    assert one - held == pytest.approx(2 * 2 * 4 * 1536**2, rel=0.03)


def test_buffers_are_on_every_gpu() -> None:
    sizes = {"model_type": "gpt_bigcode", "n_positions": 2048, "n_embd": 64, "n_layer": 2, "n_head": 4}
    sizes |= {"vocab_size": 512}
    model = from_config(sizes, WHERE)
    assert model.buffers == (0, 2048**2)
    spec = replace(SPEC, strategy="zero3", ranks_per_node=8)
    states = [planned(each, spec).states.total for each in (model, replace(model, buffers=(0, 0)))]
    assert states[0] - states[1] == pytest.approx(2048**2)


def test_rows_of_a_packed_row_are_padded_and_computed_one_by_one() -> None:
    """By modules that mix tokens in chunks, as Mamba 2's do without its kernels."""
    model = from_config(MAMBA | {"chunk_size": 64}, WHERE)
    spec = replace(SPEC, length=640, micro_batch=1, attention="eager")
    whole, of_10, of_64 = (replace(spec, packed=float(rows)) for rows in (1, 64, 10))
    bytes_ = [predict(model, each).gpu["activations"] for each in (whole, of_64, of_10)]
    assert bytes_[0] < bytes_[1] < bytes_[2]
    calls = [layer_work(model, each) for each in (whole, of_64, of_10)]
    assert calls[0] and calls[1] and calls[2]
    operations = [each.forward.operations for each in calls if each]
    assert operations[0] < operations[1] / 2 < operations[2] / 4


def test_experts_are_computed_for_all_rows_of_a_packed_row() -> None:
    """Their sums over tokens are counts, of the tokens of each expert."""
    sizes = {"model_type": "mixtral", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"num_local_experts": 4}
    stranger = replace(from_config(sizes, WHERE), config=json.dumps(sizes))
    spec = replace(SPEC, length=640, micro_batch=1)
    works = [layer_work(stranger, replace(spec, packed=packed)) for packed in (1.0, 64.0)]
    assert works[0] and works[0] == works[1]


@given(*(st.integers(0, 10**6) for _ in range(4)), st.integers(1, 64), st.integers(1, 65536))
def test_bytes_are_extrapolated_exactly(a: int, b: int, c: int, d: int, rows: int, length: int) -> None:
    """A storage is constant, or grows with rows, tokens, or pairs of tokens of a row."""

    def size(rows: int, length: int) -> int:
        return a + rows * (b + c * length + d * length**2)

    measured = {each: dict.fromkeys(MEASURES, size(*each)) for each in least(LENGTHS)}
    part = TracedPart.of(LENGTHS, 1, measured)
    assert part.at("kept", rows, length) == pytest.approx(size(rows, length), rel=1e-9)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 64), st.integers(LENGTHS[1], 65536))
def test_operations_that_long_rows_add_are_added_at_most_by_row(few: int, more: int, rows: int, length: int) -> None:
    """A parabola through the numbers of Mamba 2's operations was below zero for sixteen rows of 2,048 tokens."""
    measured = {each: dict.fromkeys(MEASURES, few + more * (each[1] > LENGTHS[0])) for each in least(LENGTHS)}
    counted = TracedPart.of(LENGTHS, 1, measured).at("operations", rows, length)
    assert few - 1e-6 <= counted <= few + rows * more + 1e-6


def test_spec_with_its_config_is_kept_in_estimate_json(as_stranger: ModelSpec) -> None:
    assert from_json(json.loads(json.dumps(to_json(as_stranger)))) == as_stranger


def test_a_trace_leaves_torch_as_it_was(as_stranger: ModelSpec) -> None:
    before = (torch.nn.functional.dropout, torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention)
    assert layer_work(as_stranger, replace(SPEC, method=LoraMethod(r=3))) is not None
    functional = torch.nn.functional
    assert (functional.dropout, functional.linear, functional.scaled_dot_product_attention) == before
    model = build_on_meta(TEXT | {"model_type": "llama"}, WHERE)
    assert LoraMethod.build(model, MethodSections()) is not None
