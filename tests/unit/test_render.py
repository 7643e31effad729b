"""Rendered files: DeepSpeed accepts them, every value has a reason, training wins, contradictions are refused."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from zerolora import strategies
from zerolora.config.settings import RenderSettings, UsefulFlops
from zerolora.errors import UserError
from zerolora.memory.estimate import estimate
from zerolora.model import fused_kernels
from zerolora.planner.candidates import Choice
from zerolora.planner.deepspeed_keys import (
    OFFLOADS,
    SECTIONS,
    TOP_LEVEL,
    ZERO_KEYS,
    ZERO_REFUSED,
    ZERO_RENAMED,
    ZERO_SECTIONS,
)
from zerolora.planner.render import Rendered, lines, rendered, training_choice
from zerolora.planner.render import render as run_render
from zerolora.planner.run_hardware import target_of
from zerolora.planner.user_config import DEFAULTS, corrected, filled, layout_of
from zerolora.planner.user_faults import faults
from zerolora.planner.zero_json import FsdpOptions
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Buckets, ModelSizes, Strategy

HARDWARE = {
    "probe": None,
    "gpu": None,
    "compute_capability": 8.0,
    "node_link": None,
    "network": "100gbe",
    "network_adapters": 1,
    "host_link": "pcie4",
    "disk": "nvme",
}
SETTINGS = {
    "device": "cuda",
    "gpu_memory": 80 * 1024**3,
    "host_memory": 512 * 1024**3,
    "reserve": 0,
    "nodes": 1,
    "ranks_per_node": 1,
    "global_batch": 6,
    "micro_batch": 2,
    "precision": "bf16",
    "activation_checkpointing": False,
    "attention": "sdpa",
    "method": {"name": "lora", "settings": {"r": 4}},
    "keeps_best": False,
    "strategy": "zero2",
    "user_config": None,
    "gradient_clipping": 0.5,
    "nvme": None,
    "epochs": 1,
    "max_steps": None,
    "validation_steps": None,
    "hardware": HARDWARE,
}


def render(settings: RenderSettings, estimate: Path) -> tuple[dict[str, Any], Rendered]:
    """Return the contents of zero.json and render.json."""
    zero, explained = run_render(settings, estimate)
    return zero.as_json(), explained


def settings_of(**changed: Any) -> RenderSettings:
    """Return render's settings for one A100, with changes."""
    return RenderSettings.model_validate(SETTINGS | changed)


MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
STATS = {
    "packing": False,
    "longest_packed_row": 100,
    "most_supervised": 10,
    "train_packed_rows": 12,
    "train_rows": 12,
    "train_common_prefix": 0,
    "validation_packed_rows": 3,
    "train_tokens": 900,
    "train_supervised_tokens": 90,
    "validation_supervised_tokens": 30,
    "train_mean_row_of_a_token": 80.0,
}
FLOPS = UsefulFlops(token=1.0, squared_token=2.0, supervised_token=3.0, peak=None)
ROOT = Path(__file__).resolve().parents[2]
USER_JSON = "config/deepspeed/own.json"
ELEMENTS = {
    "reduce_bucket_size": "reduce",
    "allgather_bucket_size": "allgather",
    "stage3_prefetch_bucket_size": "prefetch",
    "stage3_param_persistence_threshold": "persistence",
    "stage3_max_live_parameters": "live",
}


@pytest.fixture
def predicted(tmp_path: Path) -> Path:
    """Return the estimate of a small Llama."""
    for name, content in {"config.json": MODEL, "stats.json": STATS}.items():
        (tmp_path / name).write_text(json.dumps(content))
    path = tmp_path / "estimate.json"
    path.write_text(json.dumps(estimate(settings_of(), tmp_path, tmp_path)))
    return path


@pytest.mark.parametrize(
    ("changed", "packing", "said"),
    [
        ({"global_batch": 14}, False, r"is 14, but train.epochs: 1 of 12 rows .*12 or less, or more epochs"),
        ({"global_batch": 40, "epochs": 3}, False, r"train.epochs: 3 of 12 rows to train on make 36, .* 36 or less"),
        ({"global_batch": 14}, True, r"12 packed rows .*12 or less, or pack.packing: false, or more epochs"),
        ({"global_batch": 40, "ranks_per_node": 20}, False, r"make 12, not one step; use fewer ranks, or more"),
        ({"global_batch": 20, "ranks_per_node": 5}, False, r"set train.global_batch: 10 or less"),
    ],
)
def test_fewer_rows_than_a_global_batch_are_refused(
    tmp_path: Path, predicted: Path, changed: dict[str, Any], packing: bool, said: str
) -> None:
    (tmp_path / "stats.json").write_text(json.dumps(STATS | {"packing": packing}))
    predicted.write_text(json.dumps(estimate(settings_of(), tmp_path, tmp_path)))
    with pytest.raises(UserError, match=said):
        render(settings_of(**changed), predicted)


@pytest.mark.parametrize(("global_batch", "epochs", "steps"), [(14, 2, 2), (12, 2, 2), (5, 1, 3)])
def test_the_last_step_takes_the_rows_that_are_left(
    predicted: Path, global_batch: int, epochs: int, steps: int
) -> None:
    """Remaining rows of an epoch join the next one, as in order.global_batches."""
    _, explained = render(settings_of(global_batch=global_batch, epochs=epochs), predicted)
    assert explained["choice"]["steps"] == steps


@pytest.mark.parametrize(
    ("installed", "changed", "logged"),
    [(False, {}, True), (True, {}, False), (False, {"kernels": "off"}, False), (False, {"device": "cpu"}, False)],
)
def test_auto_kernels_without_their_package_are_a_line_of_the_log(
    predicted: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    installed: bool,
    changed: dict[str, Any],
    logged: bool,
) -> None:
    monkeypatch.setattr(fused_kernels, "is_installed", lambda: installed)
    with caplog.at_level("INFO", "zerolora"):
        render(settings_of(**({"kernels": "auto"} | changed)), predicted)
    assert ("train.kernels is auto, but liger-kernel is not installed" in caplog.text) == logged


def impossible(name: str, device: str, precision: str, nvme: str | None, nodes: int) -> bool:
    """Return whether a strategy must be refused, independently of its code."""
    return (
        (name in ("zero3_quantized", "zero3_qgz") and device == "cpu")
        or (name == "zero3_qgz" and (nodes == 1 or precision != "fp16"))
        or (name == "zero3_nvme" and nvme is None)
        or (name.startswith(("ddp", "fsdp")) and precision == "fp16")
    )


def leaves(config: dict[str, Any], prefix: str) -> set[str]:
    result = set()
    for key, value in config.items():
        name = f"{prefix}.{key}"
        result |= leaves(value, name) if isinstance(value, dict) else {name}
    return result


SIZES = st.tuples(st.integers(1, 20000), *[st.integers(1, 10**10)] * 3)


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    device=st.sampled_from(["cpu", "cuda"]),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]),
    ranks=st.tuples(st.integers(1, 64), st.integers(1, 8)),
    nvme=st.sampled_from([None, "/nvme"]),
    counts=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    sizes_of_model=SIZES,
)
def test_rendered_file_is_accepted_with_reasons(
    name: str,
    device: str,
    precision: str,
    ranks: tuple[int, int],
    nvme: str | None,
    counts: tuple[int, int],
    sizes_of_model: tuple[int, int, int, int],
) -> None:
    strategy, (nodes, local) = STRATEGIES[name], ranks
    sizes = strategy.buckets(ModelSizes(*sizes_of_model, sum(sizes_of_model[1:])), device == "cuda")
    choice = Choice(name, *counts, True, "sdpa", sizes)
    settings = settings_of(device=device, precision=precision, nodes=nodes, ranks_per_node=local, nvme=nvme)
    if impossible(name, device, precision, nvme, nodes):
        with pytest.raises(UserError, match=rf"render.strategy is {name}, and .*; (use|set) "):
            rendered(choice, target_of(settings), 0.5)
        return
    config, reasons = rendered(choice, target_of(settings), 0.5)
    assert json.loads(json.dumps(config)) == config
    assert training_choice(choice, settings.precision, FLOPS).engine == strategy.engine
    section = {"deepspeed": "zero_optimization", "ddp": "ddp", "fsdp": "fsdp"}[strategy.engine]
    assert {"zero_optimization", "ddp", "fsdp"} & config.keys() == {section}
    explained = {entry.key: entry for entry in reasons}
    assert leaves(config[section], section) == {key for key in explained if key.startswith(f"{section}.")}
    assert all(entry.reason and entry.source for entry in reasons)
    if strategy.engine == "deepspeed":
        assert_deepspeed_accepts(config, strategy, sizes, nodes * local, local)


def layout(strategy: Strategy) -> tuple[object, ...]:
    """Return the parts of a strategy that a DeepSpeed JSON defines."""
    return (strategy.stage, strategy.optimizer, strategy.parameters, strategy.within_node, strategy.quantized,
            strategy.quantized_gradients)  # fmt: skip


def assert_deepspeed_accepts(
    config: dict[str, Any], strategy: Strategy, sizes: Buckets, ranks: int, local: int
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    # DeepSpeed checks the batch against this process, one rank.
    accepted = DeepSpeedConfig({key: value for key, value in config.items() if key != "train_batch_size"})
    assert accepted.train_batch_size * ranks == config["train_batch_size"]
    zero = accepted.zero_config
    assert (
        ranks * accepted.train_micro_batch_size_per_gpu * accepted.gradient_accumulation_steps
        == (config["train_batch_size"])
    )
    assert accepted.gradient_clipping == 0.5
    assert zero.stage == strategy.stage
    offloads = (zero.offload_optimizer, zero.offload_param)
    assert [offload.device if offload else "gpu" for offload in offloads] == [strategy.optimizer, strategy.parameters]
    for key, field in ELEMENTS.items():
        if key in config["zero_optimization"]:
            size = config["zero_optimization"][key]
            assert type(size) is int and size >= (field != "prefetch" or strategy.parameters != "nvme")
            assert size == getattr(sizes, field)
    assert zero.zero_quantized_gradients == strategy.quantized_gradients
    if strategy.stage:
        assert zero.overlap_comm == sizes.overlap
    assert zero.zero_hpz_partition_size == (local if strategy.within_node else 1)
    assert zero.zero_quantized_weights == strategy.quantized
    if strategy.parameters == "nvme":
        assert zero.offload_param.buffer_size * local >= sizes.live
        assert accepted.aio_config["queue_depth"] >= 1
    # A user JSON with this content has the same layout and sizes.
    described, same = layout_of(config)
    assert layout(described) == layout(replace(strategy, within_node=strategy.within_node and local > 1))
    assert same == sizes
    assert list(faults({key: value for key, value in config.items() if key != "zerolora"})) == []


def test_frozen_weights_stay_quantized_in_fp16() -> None:
    sizes = Buckets(reduce=1, prefetch=1, persistence=1, live=1)
    for precision, kept in (("fp16", True), ("bf16", False)):
        choice = Choice("zero3_quantized", 2, 3, False, "sdpa", sizes)
        zero = rendered(choice, target_of(settings_of(precision=precision)), 0.5)[0]["zero_optimization"]
        assert zero["zero_quantized_nontrainable_weights"] is kept


LONG = {"epochs": 1000}  # of 12 packed rows


@pytest.mark.parametrize(
    ("changed", "safe", "why"),
    [
        ({"strategy": "zero3"}, ("zero3", "sdpa"), "overlap_comm has raced"),
        ({"strategy": "zero3_quantized"}, ("zero3", "sdpa"), "weights are gathered as int8"),
        (
            {"strategy": "zero3_qgz", "nodes": 2, "precision": "fp16"},
            ("zero3", "sdpa"),
            "gradients are reduced as int4",
        ),
        ({"strategy": "zero2", "attention": "flash"}, ("zero2", "sdpa"), "torch.nn.attention.varlen"),
        (
            {"strategy": USER_JSON, "user_config": {"zero_optimization": {"stage": 2, "overlap_comm": True}}},
            ("zero2", "sdpa"),
            "overlap_comm has raced",
        ),
    ],
)
def test_long_risky_run_has_a_canary(predicted: Path, changed: dict[str, Any], safe: tuple[str, str], why: str) -> None:
    config, explained = render(settings_of(**LONG, **changed), predicted)
    canary = config["zerolora"]["canary"]
    assert canary["steps"] == 5
    assert any(why in reason for reason in canary["reasons"]) and why in explained["canary"]
    chosen = canary["zero"]["zerolora"]
    assert (chosen["strategy"], chosen["attention"], chosen.get("canary")) == (*safe, None)
    assert canary["zero"]["zero_optimization"].get("overlap_comm") in (False, None)
    shorter = render(settings_of(**LONG, **changed, canary="off"), predicted)[1]
    assert explained["slurm_resources"]["seconds"] > shorter["slurm_resources"]["seconds"]


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({**LONG, "strategy": "zero2"}, 0),
        ({**LONG, "strategy": "zero3", "canary": "off"}, 0),
        ({**LONG, "strategy": "zero3", "device": "cpu", "gpu_memory": None}, 0),
        ({"epochs": 10, "strategy": "zero3"}, 0),
        ({"epochs": 10, "strategy": "zero3", "canary": 3}, 3),
    ],
)
def test_safe_or_short_run_has_no_canary(predicted: Path, changed: dict[str, Any], steps: int) -> None:
    canary = render(settings_of(**changed), predicted)[0]["zerolora"].get("canary")
    assert (canary["steps"] if canary else 0) == steps


def test_hybrid_mesh_is_nodes_by_ranks_of_a_node() -> None:
    settings = settings_of(nodes=2, ranks_per_node=8)
    meshes = {
        name: rendered(Choice(name, 1, 1, False, "sdpa", Buckets()), target_of(settings), 0.5)[0]["fsdp"]["mesh"]
        for name in ("fsdp", "fsdp_hybrid")
    }
    assert meshes == {"fsdp": [16], "fsdp_hybrid": [2, 8]}


def test_strategies_are_ordered_by_stage_and_described() -> None:
    listed = list(STRATEGIES.values())
    assert [each.name for each in listed] == list(STRATEGIES)
    assert [each.stage for each in listed] == sorted(each.stage for each in listed)
    for strategy in listed:
        assert strategy.about and strategy.sharded and strategy.costs
        assert f"| `{strategy.name}` | {strategy.sharded} | {strategy.costs} |" in strategies.table()


@pytest.mark.parametrize("name", ["fsdp", "fsdp_hybrid", "fsdp_offload", "fsdp_hybrid_offload"])
def test_fsdp_engine_reads_every_option(name: str) -> None:
    target = target_of(settings_of(nodes=2, ranks_per_node=8))
    options = {reason.key.removeprefix("fsdp.") for reason in STRATEGIES[name].options(Buckets(), target)}
    source = (ROOT / "src/zerolora/train/engines/fsdp.py").read_text(encoding="utf-8")
    assert options == FsdpOptions.model_fields.keys() == set(re.findall(r"options(?:\(config\))?\.(\w+)", source))


def test_bucket_sizes_follow_the_model(predicted: Path) -> None:
    config, reasons = render(settings_of(), predicted)
    trained = json.loads(predicted.read_text())["model"]["trainable_parameters"]
    assert config["zero_optimization"]["reduce_bucket_size"] == trained
    assert config["zerolora"] == {
        "engine": "deepspeed",
        "strategy": "zero2",
        "micro_batch": 2,
        "accumulation": 3,
        "activation_checkpointing": False,
        "attention": "sdpa",
        "precision": "bf16",
        "flops": config["zerolora"]["flops"],
    }
    assert f"reduce_bucket_size = {trained}: elements of gradients reduced together" in lines(reasons)


def test_useful_flops_match_torch(predicted: Path) -> None:
    """One row forward and backward, with gradients of the inputs, as in every layer but the first."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM._from_config(LlamaConfig.from_dict(MODEL), attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    model.enable_input_require_grads()
    length, supervised = 48, 5
    rows = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=rows, use_cache=False, logits_to_keep=supervised).logits.sum().backward()
    flops = render(settings_of(), predicted)[0]["zerolora"]["flops"]
    expected = flops["token"] * length + flops["squared_token"] * length**2 + flops["supervised_token"] * supervised
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_peak_flops_need_a_named_gpu(predicted: Path) -> None:
    peaks = {}
    for name in (None, "A100-80GB-SXM"):
        settings = settings_of(hardware=HARDWARE | {"gpu": name})
        peaks[name] = render(settings, predicted)[0]["zerolora"]["flops"]["peak"]
    assert peaks == {None: None, "A100-80GB-SXM": 312e12}


def test_training_overrides_the_user_json_and_reports_it(predicted: Path) -> None:
    user = {
        "train_micro_batch_size_per_gpu": 7,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": 5},
        "wall_clock_breakdown": True,
        "zero_force_ds_cpu_optimizer": True,
    }
    before = json.dumps(user)
    config, reasons = render(settings_of(strategy=USER_JSON, user_config=user), predicted)
    assert json.dumps(user) == before
    overrides = {entry["key"]: (entry["json"], entry["training"]) for entry in reasons["overrides"]}
    assert overrides == {
        "train_micro_batch_size_per_gpu": (7, 2),
        "gradient_clipping": (1.0, 0.5),
        "bf16.enabled": (False, True),
        "optimizer": ({"type": "Adam"}, "train.optimizer and train.schedule"),
        "zero_force_ds_cpu_optimizer": (True, False),
    }
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 3
    assert config["wall_clock_breakdown"] is True
    assert config["zerolora"]["strategy"] == USER_JSON
    assert config["zero_optimization"] == {
        "stage": 3,
        "stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
        "reduce_bucket_size": 5,
    }
    assert "gradient_clipping: your JSON sets 1.0, training says 0.5" in lines(reasons)


ZERO_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"stage": 4}, "stage is 4; use 0, 1, 2 or 3"),
    (
        {"stage": 2, "overlapp_comm": True},
        "zero_optimization.overlapp_comm is not a key of DeepSpeed; use overlap_comm",
    ),
    ({"stage": 3, "aio": {}}, "aio belongs to the top level"),
    ({"stage": 2, "cpu_offload": True}, "cpu_offload is deprecated; use offload_optimizer: {device: cpu}"),
    ({"stage": 2, "reduce_bucket_size": "5e8"}, "reduce_bucket_size is '5e8'; use a whole number"),
    ({"stage": 2, "reduce_bucket_size": 0}, "reduce_bucket_size is 0; use 1 or more"),
    ({"stage": True}, "stage is True; use a whole number"),
    ({"stage": 2, "overlap_comm": 1}, "overlap_comm is 1; use true or false"),
    ({"stage": 3, "offload_param": "cpu"}, "offload_param is 'cpu'; use an object"),
    ({"stage": 3, "offload_param": {"device": "disk"}}, "device is 'disk'; use none, cpu or nvme"),
    ({"stage": 3, "offload_param": {"device": "cpu", "pinned": True}}, "offload_param.pinned is not a key"),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param with stage 2"),
    ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer with stage 0"),
    ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "nvme with stage 2"),
    ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme without nvme_path"),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio with stage 2"),
    ({"stage": 2, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size with stage 2"),
    ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights with stage 2"),
    ({"stage": 1, "zero_quantized_gradients": True}, "zero_quantized_gradients with stage 1, which DeepSpeed ignores"),
    (
        {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False},
        "reduce_scatter is false with zero_quantized_gradients, which needs it; set it to true",
    ),
    (
        {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        "super_offload is true, and DeepSpeed's CPU Adam would replace train.optimizer; remove it",
    ),
    ({"stage": 2, "cpu_offload_use_pin_memory": True}, "cpu_offload_use_pin_memory is deprecated"),
    ({"stage": 2, "allgather_bucket_size": None}, "allgather_bucket_size is null; use a whole number"),
    ({"stage": 2, "contiguous_gradients": None}, "contiguous_gradients is null; use true or false, or remove it"),
    ({"stage": 3, "leaf_module": {"classes": "Block"}}, "leaf_module.classes is 'Block'; use a list of texts"),
    ({"stage": 3, "leaf_module": None}, "leaf_module is None; use an object"),
    ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "zenflow updates some weights later than others"),
    ({"stage": 2, "reduce_scatter": "auto"}, "reduce_scatter is 'auto'; set its value"),
    ({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": "auto"}}, "pin_memory is 'auto'; set its value"),
    ({"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}, "appears twice, once without"),
    ({"stage": 3, "zeropp_loco_param": {}}, "is of LoCo, which DeepSpeed 0.19.8 no longer has"),
    ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio is 1.5; use a number from 0 to 1"),
    ({"stage": 1, "legacy_stage1": True}, "legacy_stage1 is true"),
    ({"stage": 2, "reduce_bucket_size": math.inf}, "reduce_bucket_size is inf; use a whole number"),
    ({"stage": math.nan}, "stage is nan; use a whole number"),
    ({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": 3}}, "pin_memory is 3; use true or false"),
    ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": 5}}, "nvme_path is 5; use the folder"),
    (
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}, "prefetch_bucket_size": 5},
        "stage3_prefetch_bucket_size is 5",
    ),
]


@pytest.mark.parametrize(("zero", "message"), ZERO_MISTAKES)
def test_contradiction_in_zero_optimization_is_named(zero: dict[str, Any], message: str) -> None:
    actual = list(faults({"zero_optimization": zero}))
    assert len(actual) == 1
    assert message in actual[0].text and actual[0].at[0] == "zero_optimization"


@pytest.mark.parametrize(
    ("user", "run", "message"),
    [
        ({"zero_optimization": 3}, {}, "is not a DeepSpeed config"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, {}, "sub_group_size is 'auto'"),
        ({"gradient_clipping": "x"}, {}, "gradient_clipping is 'x'; use a number"),
        ({"train_batch_size": []}, {}, "train_batch_size is []; use a number"),
        ({"bf16": [1]}, {}, "bf16 is [1]; use an object"),
        ({"aio": 3}, {}, "aio is 3; use an object"),
        (
            {"zero_optimisation": {"stage": 3}, "gradient_clipping": 1.0},
            {},
            "'zero_optimisation' is not a key of DeepSpeed, which ignores it; use zero_optimization",
        ),
        ({}, {}, "is not a DeepSpeed config: it has no key; use an object with zero_optimization"),
        ({"stage": 3}, {}, "is not a DeepSpeed config: it has 'stage'; put it in zero_optimization"),
        ({"zero_optimization": {}, "stage": 3}, {}, "'stage' is not a key of DeepSpeed's top level; put it in"),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}, {}, "it has 'fsdp', 'fsdp_config'"),
        ({"zero_optimization": {}, "fsdp": "full_shard"}, {}, "'fsdp' is not a key of DeepSpeed, which ignores it"),
        (
            {"zero_optimization": {}, "compression_training": {"a": {}}},
            {},
            "compression_training is not run",
        ),
        (
            {"zero_optimization": {}, "torch_autocast": {"enabled": True}},
            {},
            "torch_autocast is not run",
        ),
        ({"zero_optimization": {}, "expert_parallel": {"size": 2}}, {}, "expert_parallel is not run: ranks share rows"),
        (
            {"zero_optimization": {}, "aio": {"blocksize": 1}},
            {},
            "aio.blocksize is not a key of DeepSpeed",
        ),
        ({"bf16": {"enabled": "yes"}}, {}, "bf16.enabled is 'yes'; use true or false"),
        ({"fp16": {"enabled": True, "loss_scale": "dynamic"}}, {}, "fp16.loss_scale is 'dynamic'; use a number"),
        ({"bf16": {"grad_accum": 1}}, {}, "bf16.grad_accum is not a key of DeepSpeed"),
        ({"bfloat16": {"enabled": True}}, {}, "bfloat16 is an old name; use bf16"),
        ({"seq_parallel_communication_data_type": "int8"}, {}, "is 'int8'; use one of fp16, bf16, fp32"),
        ({"communication_data_type": 16}, {}, "communication_data_type is 16; use text"),
        ({"gradient_allreduce_op": "sum"}, {}, "gradients are averaged: use mean"),
        ({"steps_per_print": "often"}, {}, "steps_per_print is 'often'; use a whole number"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "bf16.enabled and fp16.enabled are both true"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            {"ranks_per_node": 2},
            "train_batch_size is 9, but 2 a GPU x 2 steps x 2 ranks are 8",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, {"nodes": 6}, "6 ranks are not a multiple"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            {"device": "cpu"},
            "no kernels for quantized",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            {"device": "cpu"},
            "zero_quantized_gradients: hardware.device is cpu, which has no kernels for it; remove it",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            {"precision": "fp16"},
            "zero_quantized_gradients: train.nodes is 1, and DeepSpeed quantizes gradients between nodes only; remove",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            {"nodes": 2, "precision": "bf16"},
            "zero_quantized_gradients: gradients are sent in bf16, and DeepSpeed's kernel reads them as fp16",
        ),
        (
            {
                "communication_data_type": "fp32",
                "zero_optimization": {"stage": 3, "zero_quantized_gradients": True},
            },
            {"nodes": 2, "precision": "fp16"},
            "zero_quantized_gradients: gradients are sent in fp32, and DeepSpeed's kernel reads them as fp16",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            {},
            "zero_optimization.mics_shard_size is of MiCS, which DeepSpeed 0.19.8 no longer has (DeepSpeed#8489); "
            "use zero_hpz_partition_size (hpZ), or render.strategy: fsdp_hybrid",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}},
            {},
            "stage3_prefetch_bucket_size is not 0, with which DeepSpeed reads frozen weights twice and fails; use 0",
        ),
    ],
)
def test_unusable_user_json_is_one_line(predicted: Path, user: Any, run: dict[str, Any], message: str) -> None:
    settings = settings_of(**run, strategy=USER_JSON, user_config=user)
    with pytest.raises(UserError) as error:
        render(settings, predicted)
    assert str(error.value).startswith(f"render.strategy: {USER_JSON}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class Watched(dict[str, Any]):
    """A config that records which keys are looked up."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.sought: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.sought.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        assert key in self
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.sought.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def test_known_keys_match_deepspeed() -> None:
    """All keys that DeepSpeed's parser looks up at the top level, and all fields of its section models."""
    import deepspeed.runtime.config as parser
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config, values = object.__new__(parser.DeepSpeedConfig), Watched({"train_batch_size": 1})
    config.world_size, config.mesh_device = 1, None
    parser._reject_removed_config_keys(values)
    config._initialize_params(values)
    ignored = {"monitor_config", "comms_config"}  # in stock files
    assert values.sought | {"vocabulary_size"} == TOP_LEVEL - ignored
    assert set(SECTIONS["bf16"]) == fields_of(DeepSpeedBF16Config)
    assert set(SECTIONS["fp16"]) == fields_of(DeepSpeedFP16Config)
    assert set(SECTIONS["comms_logger"]) == fields_of(CommsLoggerConfig)
    assert set(SECTIONS["aio"]) == set(AIO_DEFAULT_DICT)
    profiler = Watched({})
    parser.DeepSpeedFlopsProfilerConfig({"flops_profiler": profiler})
    assert set(SECTIONS["flops_profiler"]) == profiler.sought

    fields = DeepSpeedZeroConfig.model_fields
    sections = {name: model for name, field in fields.items() if (model := model_of(field.annotation))}
    assert sections.keys() == ZERO_SECTIONS.keys() | ZERO_REFUSED.keys()
    assert {name: fields_of(model) for name, model in sections.items() if name in ZERO_SECTIONS} == {
        name: set(keys) for name, keys in ZERO_SECTIONS.items()
    }
    by_name = {name: field for key, field in fields.items() for name in {key, field.alias or key}}
    deprecated = {name for name, field in by_name.items() if (field.json_schema_extra or {}).get("deprecated")}
    assert deprecated == set(ZERO_RENAMED)
    kinds = {name: str(field.annotation) for name, field in by_name.items() if name not in {*deprecated, *sections}}
    assert kinds.keys() == ZERO_KEYS.keys()
    assert {name for name, kind in kinds.items() if "bool" in kind} == {
        name for name, key in ZERO_KEYS.items() if key.kind == "flag"
    }
    assert {name for name, kind in kinds.items() if "Optional" in kind} == {
        name for name, key in ZERO_KEYS.items() if key.optional
    }
    assert {name: by_name[name].default for name in DEFAULTS} == DEFAULTS


def fields_of(model: Any) -> set[str]:
    return set(model.model_fields)


def model_of(annotation: Any) -> Any:
    """Return the pydantic model of an annotation, optional or not, or None."""
    kinds = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, BaseModel)), None)


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({"max_live_parameters": 0}, {("zero_optimization", "max_live_parameters"): 0}),
        ({"stage3_max_live_parameters": 0.0}, {("zero_optimization", "stage3_max_live_parameters"): 0}),
        (
            {"stage3_gather_16bit_weights_on_model_save": "auto"},
            {("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): "auto"},
        ),
        ({"stage": 2, "round_robin_gradients": True}, {("zero_optimization", "round_robin_gradients"): True}),
    ],
)
def test_bad_advice_is_removed_and_reported(user: dict[str, Any], expected: dict[Any, Any]) -> None:
    written = {"zero_optimization": {"stage": 3, **user}}
    before = json.dumps(written)
    assert list(faults(written)) == []
    result, corrections = corrected(written)
    assert {each.at: each.value for each in corrections} == expected and all(each.instead for each in corrections)
    assert not {key for _, key in expected} & result["zero_optimization"].keys()
    assert json.dumps(written) == before


def test_keys_without_effect_are_removed(predicted: Path) -> None:
    user = {
        "_comment": "of nobody",
        "zero_optimization": {
            "stage": 2,
            "cpu_offload": False,
            "cpu_offload_param": None,
            "cpu_offload_use_pin_memory": False,
            "stage3_gather_fp16_weights_on_model_save": False,
            "offload_optimizer": {"device": "none"},
        },
        "compile": {"disable": False, "backend": "inductor"},
        "tensor_parallel": {"autotp_size": 2},
        "wandb": {"enabled": True},
        "tensorboard": {"enabled": False, "output_path": "x"},
        "curriculum_learning": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": "auto", "bf16_optimizer_states": True},
        "seq_parallel_communication_data_type": "bf16",
        "prescale_gradients": False,
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "bfloat16": {"enabled": False},
    }
    config, reasons = render(settings_of(strategy=USER_JSON, user_config=user), predicted)
    left_out = {"compile", "tensor_parallel", "wandb", "data_types", "bf16.bf16_optimizer_states"}
    assert {entry["key"] for entry in reasons["overrides"]} == left_out
    assert config["seq_parallel_communication_data_type"] == "bf16" and config["prescale_gradients"] is False
    assert not {"compile", "tensor_parallel", "wandb", "tensorboard", "curriculum_learning", "_comment"} & config.keys()
    assert not {"amp", "bfloat16"} & config.keys() and not set(ZERO_RENAMED) & config["zero_optimization"].keys()
    assert "tensor_parallel: your JSON sets {'autotp_size': 2}" in lines(reasons)


FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
TRAINER = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "fp16": {"enabled": "auto", **FP16},
    "bf16": {"enabled": "auto"},
}
SIZES_3 = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
COPIED_3 = {**SIZES_3, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
CPU = {"device": "cpu", "pin_memory": True}
NONE = {"device": "none", "pin_memory": True}
STOCK: dict[str, tuple[dict[str, Any], str | None, set[str]]] = {
    # a tool's stock file, the strategy it describes (None: unnamed), and its removed keys
    "axolotl zero1_torch_compile": (
        {"zero_optimization": {"stage": 1}, "compile": {"disable": False, "backend": "inductor"}},
        "zero1",
        {"compile"},
    ),
    "axolotl zero2": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True}},
        "zero2_offload",
        set(),
    ),
    "axolotl zero3, zero3_bf16": (
        {"zero_optimization": {"stage": 3, **COPIED_3, "gather_16bit_weights_on_model_save": True}},
        "zero3",
        {"zero_optimization.max_live_parameters"},
    ),
    "axolotl zero3_bf16_cpuoffload_all": (
        {
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **COPIED_3},
        },
        "zero3_offload",
        {"zero_optimization.max_live_parameters"},
    ),
    "axolotl zero3_bf16_cpuoffload_params": (
        {"zero_optimization": {"stage": 3, "offload_param": CPU, **COPIED_3}},
        None,
        {"zero_optimization.max_live_parameters"},
    ),
    "llamafactory ds_z0": (
        {"zero_optimization": {"stage": 0, "allgather_bucket_size": 5e8, "round_robin_gradients": True}},
        "zero0",
        set(),
    ),
    "llamafactory ds_z2_autotp": (
        {
            "_comment": "x",
            "zero_optimization": {"stage": 2, "round_robin_gradients": True},
            "tensor_parallel": {"autotp_size": 2},
        },
        "zero2",
        {"zero_optimization.round_robin_gradients", "tensor_parallel"},
    ),
    "llamafactory ds_z2_offload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": CPU, "round_robin_gradients": True}},
        "zero2_offload",
        {"zero_optimization.round_robin_gradients"},
    ),
    "llamafactory ds_z3_fp8": (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
            "steps_per_print": 10000000,
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        },
        "zero3_offload_optimizer",
        {"monitor_config"},
    ),
    "ms-swift zero1": ({"zero_optimization": {"stage": 1, "offload_optimizer": NONE}}, "zero1", set()),
    "ms-swift zero3": (
        {
            "zero_optimization": {
                "stage": 3, "offload_optimizer": NONE, "offload_param": NONE, "zero_quantized_weights": False,
                "zero_quantized_gradients": False, "stage3_max_live_parameters": 1e9, **SIZES_3,
            }
        },
        "zero3",
        set(),
    ),
    "xtuner zero3_offload": (
        {
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "offload_optimizer": CPU, "offload_param": CPU,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        "zero3_offload",
        set(),
    ),
    "accelerate zero_stage3": (
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto", **SIZES_3}},
        "zero3",
        {"zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_json_of_another_tool_loads(name: str, predicted: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    values, strategy, left_out = STOCK[name]
    user = TRAINER | values
    assert list(faults(user)) == []
    assert {".".join(each.at) for each in corrected(user)[1]} == left_out
    described = layout_of(filled(user, 64)).strategy
    named = [each for each in STRATEGIES.values() if each.engine == "deepspeed" and layout(each) == layout(described)]
    assert [each.name for each in named] == ([strategy] if strategy else [])
    config, reasons = render(settings_of(strategy=USER_JSON, user_config=user), predicted)
    assert left_out <= {entry["key"] for entry in reasons["overrides"]}
    accepted = DeepSpeedConfig({key: value for key, value in config.items() if key != "train_batch_size"})
    assert accepted.zero_config.stage == user["zero_optimization"]["stage"]


def test_mistake_has_the_line_of_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predicted: Path) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("ds.json")
    file.write_text(
        '{\n  "fp16": {"enabled": "auto"},\n  "zero_optimization": {\n    "stage": 2,\n\n    "overlap": true,\n'
        '    "offload_optimizer": {\n      "device": "disk"}},\n  "fsdp": "a\\nb: [", "x": [1, {"fsdp": 2}]\n}\n'
    )
    settings = settings_of(strategy=str(file), user_config=json.loads(file.read_text()))
    with pytest.raises(UserError) as error:
        render(settings, predicted)
    actual = [line.split(": ")[1:3] for line in str(error.value).splitlines()]
    assert [(at, text.split(" ")[0]) for at, text in actual] == [
        ("ds.json:9", "'fsdp'"),
        ("ds.json:9", "'x'"),
        ("ds.json:6", "zero_optimization.overlap"),
        ("ds.json:8", "zero_optimization.offload_optimizer.device"),
    ]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["auto", "cpu", 0]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_mutated_json_is_refused_or_loads(data: st.DataObject) -> None:
    """Any value of a known key is refused in one line, or accepted by DeepSpeed's models."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    values, _, _ = STOCK[data.draw(st.sampled_from(sorted(STOCK)))]
    user = copy.deepcopy(TRAINER | values)
    zero = user["zero_optimization"]
    for _ in range(data.draw(st.integers(1, 3))):
        section, keys = data.draw(
            st.sampled_from(
                [(user, sorted(TOP_LEVEL)), (zero, sorted(ZERO_KEYS)), (zero, sorted(ZERO_SECTIONS))]
                + [(zero[name], sorted(ZERO_SECTIONS[name])) for name in OFFLOADS if isinstance(zero.get(name), dict)]
                + [
                    (user[name], sorted(SECTIONS[name]))
                    for name in ("bf16", "fp16")
                    if isinstance(user.get(name), dict)
                ]
            )
        )
        section[data.draw(st.sampled_from(keys) | st.text(max_size=5))] = data.draw(JSON_VALUES)
    actual = list(faults(user))
    assert all("\n" not in each.text for each in actual)
    if actual:
        return
    result = filled(user, 64)
    layout_of(result)
    DeepSpeedZeroConfig(**result["zero_optimization"])
    for name, model in (("bf16", DeepSpeedBF16Config), ("fp16", DeepSpeedFP16Config)):
        model(**{key: value for key, value in result.get(name, {}).items() if value != "auto"})


@pytest.mark.parametrize("path", sorted((ROOT / "config/deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_jsons_are_valid(path: Path) -> None:
    user = json.loads(path.read_text(encoding="utf-8"))
    assert list(faults(user)) == []
    strategy, sizes = layout_of(filled(user, 64))
    expected = {"reference-stage2": "zero2_offload", "reference-stage3": "zero3_offload"}
    assert layout(strategy) == layout(STRATEGIES[expected[path.stem]])
    assert sizes.overlap
    assert sizes.reduce == (200_000_000 if strategy.stage == 2 else 64 * 64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_json_with_only_a_stage_has_deepspeeds_defaults(stage: int) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    strategy, sizes = layout_of({"zero_optimization": {"stage": stage}})
    defaults = DeepSpeedZeroConfig(stage=stage)
    assert layout(strategy) == (stage, "gpu", "gpu", False, False, False)
    if stage:
        assert sizes.reduce == defaults.reduce_bucket_size
        assert sizes.overlap == defaults.overlap_comm
    assert sizes.live == (defaults.max_live_parameters if stage == 3 else 0)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"shape": 3, "data": {}}', '{"shape": {"modules": [1]}, "data": {}}']
)
def test_estimate_of_another_version_is_one_line(tmp_path: Path, text: str) -> None:
    old = tmp_path / "estimate.json"
    old.write_text(text)
    with pytest.raises(
        UserError, match=r"estimate\.json: was written by another version; run `zerolora stage estimate` again"
    ):
        render(settings_of(), old)


def test_requested_time_covers_every_validation(predicted: Path) -> None:
    """2 steps of 6 rows; 3 validation rows at the end, or after each step too."""
    once, thrice = (
        render(settings_of(validation_steps=every), predicted)[1]["slurm_resources"]["seconds"] for every in (None, 1)
    )
    step = render(settings_of(), predicted)[1]["choice"]["ranked"][0]["step_seconds"]
    assert thrice - once == pytest.approx(2 * step * 3 / 6)


@pytest.mark.parametrize("trained", [1, 2, 4_999_999, 300_000_001])
def test_allgather_size_is_even(trained: int) -> None:
    """DeepSpeed fails at start otherwise (stage_1_and_2.py, nccl_start_alignment_factor)."""
    model = ModelSizes(hidden=64, trained=trained, layer=1, largest=1, total=trained)
    sizes = STRATEGIES["zero2"].buckets(model, True)
    assert sizes.allgather % 2 == 0
    assert min(trained, 200_000_000) <= sizes.allgather <= trained + 1
