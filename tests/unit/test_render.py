"""Rendered files: DeepSpeed takes them, every value says why, the impossible is refused, training's values win."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.config.settings import RenderSettings, UsefulFlops
from zerolora.errors import UserError
from zerolora.memory.estimate import estimate
from zerolora.planner.candidates import Choice
from zerolora.planner.render import lines, render, rendered, training_choice
from zerolora.planner.run_hardware import target_of
from zerolora.planner.user_config import (
    DEFAULTS,
    FLAGS,
    OFFLOADS,
    RENAMED,
    SECTIONS,
    SIZES,
    faults,
    filled,
    known_keys,
    layout_of,
)
from zerolora.strategies import STRATEGIES
from zerolora.strategies.base import Strategy
from zerolora.strategies.buckets import Buckets, ModelSizes, deepspeed_buckets

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


def settings_of(**changed: Any) -> RenderSettings:
    """Return render's settings for one A100, some of them changed."""
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
    "validation_packed_rows": 3,
    "train_tokens": 900,
    "train_supervised_tokens": 90,
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
        ({"global_batch": 40, "ranks_per_node": 20}, False, r"make 12, not one step; write fewer ranks, or more"),
        ({"global_batch": 20, "ranks_per_node": 5}, False, r"write train.global_batch: 10 or less"),
    ],
)
def test_fewer_rows_than_a_global_batch_are_refused_before_a_job(
    tmp_path: Path, predicted: Path, changed: dict[str, Any], packing: bool, said: str
) -> None:
    (tmp_path / "stats.json").write_text(json.dumps(STATS | {"packing": packing}))
    predicted.write_text(json.dumps(estimate(settings_of(), tmp_path, tmp_path)))
    with pytest.raises(UserError, match=said):
        render(settings_of(**changed), predicted)


def test_epochs_together_fill_a_global_batch(predicted: Path) -> None:
    """Rows left over from an epoch join the next one, as order.global_batches makes them."""
    _, explained = render(settings_of(global_batch=14, epochs=2), predicted)
    assert explained["choice"]["steps"] == 1


def impossible(name: str, device: str, precision: str, nvme: str | None) -> bool:
    """Whether a strategy must be refused, written once more by name."""
    return (
        (name == "zero3_quantized" and device == "cpu")
        or (name == "zero3_nvme" and nvme is None)
        or (name.startswith(("ddp", "fsdp")) and precision == "fp16")
    )


def leaves(config: dict[str, Any], prefix: str) -> set[str]:
    found = set()
    for key, value in config.items():
        name = f"{prefix}.{key}"
        found |= leaves(value, name) if isinstance(value, dict) else {name}
    return found


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    device=st.sampled_from(["cpu", "cuda"]),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]),
    nodes=st.integers(1, 64),
    local=st.integers(1, 8),
    nvme=st.sampled_from([None, "/nvme"]),
    counts=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    hidden=st.integers(1, 20000),
    trained=st.integers(1, 10**10),
    layer=st.integers(1, 10**10),
    largest=st.integers(1, 10**10),
)
def test_every_rendered_file_is_accepted_and_says_why(
    name: str,
    device: str,
    precision: str,
    nodes: int,
    local: int,
    nvme: str | None,
    counts: tuple[int, int],
    hidden: int,
    trained: int,
    layer: int,
    largest: int,
) -> None:
    strategy = STRATEGIES[name]
    model = ModelSizes(hidden, trained, layer, largest, layer + largest + trained)
    sizes = strategy.buckets(model, device == "cuda")
    choice = Choice(name, *counts, True, "sdpa", sizes)
    settings = settings_of(device=device, precision=precision, nodes=nodes, ranks_per_node=local, nvme=nvme)
    if impossible(name, device, precision, nvme):
        with pytest.raises(UserError, match=rf"render.strategy is {name}, and .*; write "):
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
    """Return what of a strategy a DeepSpeed JSON says."""
    return (strategy.stage, strategy.optimizer, strategy.parameters, strategy.within_node, strategy.quantized)


def assert_deepspeed_accepts(
    config: dict[str, Any], strategy: Strategy, sizes: Buckets, ranks: int, local: int
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    # This process is one rank, which DeepSpeed holds the batch against.
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
    if strategy.stage:
        assert zero.overlap_comm == sizes.overlap
    assert zero.zero_hpz_partition_size == (local if strategy.within_node else 1)
    assert zero.zero_quantized_weights == strategy.quantized
    if strategy.parameters == "nvme":
        assert zero.offload_param.buffer_size * local >= sizes.live
        assert accepted.aio_config["queue_depth"] >= 1
    # A user's own JSON of the same content has the same layout and sizes.
    described, same = layout_of(config)
    assert layout(described) == layout(replace(strategy, within_node=strategy.within_node and local > 1))
    assert same == sizes
    assert list(faults({key: value for key, value in config.items() if key != "zerolora"})) == []


def test_frozen_weights_are_kept_quantized_where_deepspeed_can() -> None:
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
        ({"strategy": "zero2", "attention": "flash"}, ("zero2", "sdpa"), "torch.nn.attention.varlen"),
        (
            {"strategy": USER_JSON, "user_config": {"zero_optimization": {"stage": 2, "overlap_comm": True}}},
            ("zero2", "sdpa"),
            "overlap_comm has raced",
        ),
    ],
)
def test_a_long_risky_run_is_compared_with_the_nearest_safe_setting(
    predicted: Path, changed: dict[str, Any], safe: tuple[str, str], why: str
) -> None:
    config, explained = render(settings_of(**LONG, **changed), predicted)
    canary = config["zerolora"]["canary"]
    assert canary["steps"] == 5
    assert any(why in reason for reason in canary["reasons"]) and why in explained["canary"]
    chosen = canary["zero"]["zerolora"]
    assert (chosen["strategy"], chosen["attention"], chosen["canary"]) == (*safe, None)
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
def test_a_safe_or_a_short_run_has_no_canary(predicted: Path, changed: dict[str, Any], steps: int) -> None:
    canary = render(settings_of(**changed), predicted)[0]["zerolora"]["canary"]
    assert (canary["steps"] if canary else 0) == steps


def test_a_hybrid_mesh_is_nodes_by_ranks_of_a_node() -> None:
    settings = settings_of(nodes=2, ranks_per_node=8)
    meshes = {
        name: rendered(Choice(name, 1, 1, False, "sdpa", Buckets()), target_of(settings), 0.5)[0]["fsdp"]["mesh"]
        for name in ("fsdp", "fsdp_hybrid")
    }
    assert meshes == {"fsdp": [16], "fsdp_hybrid": [2, 8]}


@pytest.mark.parametrize("name", ["fsdp", "fsdp_hybrid", "fsdp_offload", "fsdp_hybrid_offload"])
def test_every_option_of_fully_shard_is_read_by_its_engine(name: str) -> None:
    target = target_of(settings_of(nodes=2, ranks_per_node=8))
    options = {reason.key.removeprefix("fsdp.") for reason in STRATEGIES[name].options(Buckets(), target)}
    source = (ROOT / "src/zerolora/train/engines/fsdp.py").read_text(encoding="utf-8")
    assert options == set(re.findall(r'options\["(\w+)"\]', source))


def test_sizes_are_the_models_own(predicted: Path) -> None:
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
        "canary": None,
    }
    assert f"reduce_bucket_size = {trained}: elements of gradients reduced together" in lines(reasons)


def test_useful_flops_are_those_that_torch_counts(predicted: Path) -> None:
    """A forward and a backward pass of one row, as every layer but the first does it: with a gradient of its input."""
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


def test_the_peak_is_that_of_a_gpu_with_a_name(predicted: Path) -> None:
    peaks = {}
    for name in (None, "A100-80GB-SXM"):
        settings = settings_of(hardware=HARDWARE | {"gpu": name})
        peaks[name] = render(settings, predicted)[0]["zerolora"]["flops"]["peak"]
    assert peaks == {None: None, "A100-80GB-SXM": 312e12}


def test_training_wins_over_the_users_json_and_says_so(predicted: Path) -> None:
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
    told = {entry["key"]: (entry["json"], entry["training"]) for entry in reasons["overrides"]}
    assert told == {
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
    assert "gradient_clipping: your JSON says 1.0, training says 0.5" in lines(reasons)


def test_an_auto_that_nobody_knows_is_refused(predicted: Path) -> None:
    user = {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}
    with pytest.raises(UserError, match="sub_group_size is 'auto'"):
        render(settings_of(strategy="x.json", user_config=user), predicted)


ZERO_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"stage": 4}, "stage is 4; write 0, 1, 2 or 3"),
    ({"stage": 2, "overlapp_comm": True}, "zero_optimization.overlapp_comm is no key of DeepSpeed; write overlap_comm"),
    ({"stage": 3, "aio": {}}, "aio belongs to the top level"),
    ({"stage": 2, "cpu_offload": True}, "cpu_offload is deprecated; write offload_optimizer: {device: cpu}"),
    ({"stage": 2, "reduce_bucket_size": "5e8"}, "reduce_bucket_size is '5e8'; write a whole number"),
    ({"stage": 2, "reduce_bucket_size": 0.5}, "reduce_bucket_size is 0.5; write a whole number"),
    ({"stage": 2, "reduce_bucket_size": 0}, "reduce_bucket_size is 0; write 1 or more"),
    ({"stage": True}, "stage is True; write a whole number"),
    ({"stage": 2, "overlap_comm": 1}, "overlap_comm is 1; write true or false"),
    ({"stage": 3, "offload_param": "cpu"}, "offload_param is 'cpu'; write an object"),
    ({"stage": 3, "offload_param": {"device": "disk"}}, "device is 'disk'; write none, cpu or nvme"),
    ({"stage": 3, "offload_param": {"device": "cpu", "pinned": True}}, "offload_param.pinned is no key"),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param with stage 2"),
    ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer with stage 0"),
    ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "nvme with stage 2"),
    ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme without nvme_path"),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio with stage 2"),
    ({"stage": 2, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size with stage 2"),
    ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights with stage 2"),
    ({"stage": 3, "stage3_max_live_parameters": 0}, "stage3_max_live_parameters is 0"),
    ({"stage": 3, "max_live_parameters": 0}, "stage3_max_live_parameters is 0"),
    ({"stage": 1, "legacy_stage1": True}, "legacy_stage1 is true"),
    ({"stage": 2, "reduce_bucket_size": math.inf}, "reduce_bucket_size is inf; write a whole number"),
    ({"stage": 2, "reduce_bucket_size": 1e300}, "reduce_bucket_size is 1e+300; write a whole number"),
    ({"stage": math.nan}, "stage is nan; write a whole number"),
    ({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": 3}}, "pin_memory is 3; write true or false"),
    ({"stage": 3, "offload_param": {"device": "cpu", "buffer_size": "x"}}, "buffer_size is 'x'; write a whole number"),
    ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": "x"}}, "ratio is 'x'; write a number from 0 to 1"),
    ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": 5}}, "nvme_path is 5; write the folder"),
    (
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}, "prefetch_bucket_size": 5},
        "stage3_prefetch_bucket_size is 5",
    ),
    ({"stage": 2, "round_robin_gradients": True}, "round_robin_gradients is true"),
]


@pytest.mark.parametrize(("zero", "told"), ZERO_MISTAKES)
def test_a_contradiction_in_zero_optimization_is_named(zero: dict[str, Any], told: str) -> None:
    found = list(faults({"zero_optimization": zero}))
    assert len(found) == 1
    assert told in found[0]


@pytest.mark.parametrize(
    ("user", "run", "told"),
    [
        ({"zero_optimization": 3}, {}, "is not a DeepSpeed config"),
        ({"gradient_clipping": "x"}, {}, "gradient_clipping is 'x'; write a number"),
        ({"train_batch_size": []}, {}, "train_batch_size is []; write a number"),
        ({"bf16": [1]}, {}, "bf16 is [1]; write an object"),
        ({"aio": 3}, {}, "aio is 3; write an object"),
        ({"zero_optimisation": {"stage": 3}}, {}, "'zero_optimisation' is no key of DeepSpeed, which ignores it"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "bf16.enabled and fp16.enabled are both true"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            {"ranks_per_node": 2},
            "train_batch_size is 9, but 2 a GPU x 2 steps x 2 ranks are 8",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, {"nodes": 6}, "6 ranks are no multiple"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            {"device": "cpu"},
            "no kernels for quantized",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            {},
            "zero_optimization.mics_shard_size is of MiCS, which DeepSpeed 0.19.8 no longer has (DeepSpeed#8489); "
            "write zero_hpz_partition_size (hpZ), or render.strategy: fsdp_hybrid",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}},
            {},
            "stage3_prefetch_bucket_size is not 0, with which DeepSpeed reads frozen weights twice and fails; write 0",
        ),
    ],
)
def test_a_json_that_the_run_cannot_use_is_one_line(predicted: Path, user: Any, run: dict[str, Any], told: str) -> None:
    settings = settings_of(**run, strategy=USER_JSON, user_config=user)
    with pytest.raises(UserError) as error:
        render(settings, predicted)
    assert str(error.value).startswith(f"render.strategy: {USER_JSON}: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_the_known_keys_are_deepspeeds_own() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    fields = DeepSpeedZeroConfig.model_fields
    assert known_keys() == {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert {"offload_param": set(DeepSpeedZeroOffloadParamConfig.model_fields)} | {
        "offload_optimizer": set(DeepSpeedZeroOffloadOptimizerConfig.model_fields)
    } == OFFLOADS
    by_name = {field.alias or name: field for name, field in fields.items()}
    deprecated = {name for name, field in by_name.items() if (field.json_schema_extra or {}).get("deprecated")}
    assert deprecated == set(RENAMED)
    kinds = {name: str(field.annotation) for name, field in by_name.items() if name not in RENAMED}
    assert {name for name, kind in kinds.items() if "bool" in kind} == set(FLAGS)
    assert {name for name, kind in kinds.items() if "int" in kind or "StageEnum" in kind} == set(SIZES)
    assert set(kinds) - set(FLAGS) - set(SIZES) == set(SECTIONS)
    assert {name: by_name[name].default for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("path", sorted((ROOT / "config/deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_the_shipped_jsons_have_no_fault_and_are_layout_of(path: Path) -> None:
    user = json.loads(path.read_text(encoding="utf-8"))
    assert list(faults(user)) == []
    strategy, sizes = layout_of(filled(user, 64))
    expected = {"reference-stage2": "zero2_offload", "reference-stage3": "zero3_offload"}
    assert layout(strategy) == layout(STRATEGIES[expected[path.stem]])
    assert sizes.overlap
    assert sizes.reduce == (200_000_000 if strategy.stage == 2 else 64 * 64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_json_that_names_a_stage_only_is_described_by_deepspeeds_defaults(stage: int) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    strategy, sizes = layout_of({"zero_optimization": {"stage": stage}})
    defaults = DeepSpeedZeroConfig(stage=stage)
    assert layout(strategy) == (stage, "gpu", "gpu", False, False)
    if stage:
        assert sizes.reduce == defaults.reduce_bucket_size
        assert sizes.overlap == defaults.overlap_comm
    assert sizes.live == (defaults.max_live_parameters if stage == 3 else 0)


def test_render_writes_reasons_as_plain_json(predicted: Path) -> None:
    _, why = render(settings_of(), predicted)
    entry = json.loads(json.dumps(why))["reasons"][0]
    assert entry.keys() == {"key", "value", "reason", "source"}


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"shape": 3, "data": {}}', '{"shape": {"modules": [1]}, "data": {}}']
)
def test_an_estimate_of_another_version_is_one_line(tmp_path: Path, text: str) -> None:
    old = tmp_path / "estimate.json"
    old.write_text(text)
    with pytest.raises(UserError, match=r"estimate\.json: is of another version; run `zerolora estimate` again"):
        render(settings_of(), old)


def test_training_asks_for_the_time_of_every_validation(predicted: Path) -> None:
    """2 steps of 6 rows; 3 rows are validated at the end, and after each step if that is asked for."""
    once, thrice = (
        render(settings_of(validation_steps=every), predicted)[1]["slurm_resources"]["seconds"] for every in (None, 1)
    )
    step = render(settings_of(), predicted)[1]["choice"]["ranked"][0]["step_seconds"]
    assert thrice - once == pytest.approx(2 * step * 3 / 6)


@pytest.mark.parametrize("trained", [1, 2, 4_999_999, 300_000_001])
def test_an_odd_number_of_trained_parameters_gathers_an_even_one(trained: int) -> None:
    """DeepSpeed ends at its start otherwise (stage_1_and_2.py, nccl_start_alignment_factor)."""
    sizes = deepspeed_buckets(2, ModelSizes(hidden=64, trained=trained, layer=1, largest=1, total=trained), True)
    assert sizes.allgather % 2 == 0
    assert min(trained, 200_000_000) <= sizes.allgather <= trained + 1
