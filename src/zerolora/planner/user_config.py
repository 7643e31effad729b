"""The user's own DeepSpeed JSON: checked before anything runs, completed, and described as a strategy.

DeepSpeed reads its config after the model is loaded, and ignores many mistakes. Here each mistake is reported in one
line that names the key, before a job is submitted.
"""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from zerolora.errors import UserError, shown
from zerolora.strategies.base import Placement, Strategy, Target
from zerolora.strategies.buckets import Buckets
from zerolora.strategies.engines.deepspeed import ZERO, DeepSpeed

# All keys of zero_optimization and their types, as in deepspeed/runtime/zero/config.py (0.19); a test keeps the two
# equal. DeepSpeed refuses other keys (extra="forbid") with a traceback.
FLAGS = (
    "contiguous_gradients",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "overlap_comm",
    "compute_grad_norm",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "ignore_unused_parameters",
    "legacy_stage1",
    "round_robin_gradients",
    "parameter_alignment",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory",
)
SIZES = (
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "zero_hpz_partition_size",
)
SECTIONS = (
    "offload_param",
    "offload_optimizer",
    "zenflow",
    "leaf_module",
)
RENAMED = {
    "cpu_offload": "offload_optimizer: {device: cpu}",
    "cpu_offload_param": "offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer or offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
OFFLOADS = {
    "offload_param": {"device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"},
    "offload_optimizer": {
        "device",
        "nvme_path",
        "buffer_count",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "ratio",
        "super_offload",
        "cpuadam_cores_perc",
    },
}
OFFLOAD_FLAGS = ("pin_memory", "pipeline_read", "pipeline_write", "fast_init", "super_offload")
OFFLOAD_SIZES = ("buffer_count", "buffer_size", "max_in_cpu")
OFFLOAD_SHARES = ("ratio", "cpuadam_cores_perc")
# DeepSpeed ignores misspelt top-level keys. Ignoring one of these would change a run.
TOP = (ZERO, "aio", "bf16", "fp16", "gradient_clipping", "activation_checkpointing", "communication_data_type")
TOP_SECTIONS = ("aio", "bf16", "fp16", "activation_checkpointing")
TOP_NUMBERS = (
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
LARGEST = 2**63 - 1  # of a size, which is a 64-bit integer in torch
# DeepSpeed's defaults, in elements.
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
}
HPZ_OFF = {"zero_hpz_partition_size": 1}
ALIKE = 0.75  # difflib ratio from which a name counts as a misspelling


class UserLayout(NamedTuple):
    """A DeepSpeed JSON, described like a named strategy."""

    strategy: Strategy
    buckets: Buckets


def check_user_config(path: str, user: Any, target: Target, key: str = "render.strategy") -> None:
    """Raise UserError, with one line for each mistake, if a JSON is invalid by itself or on a run's `target`.

    `key` is the setting or option that names the file.
    """
    mistakes = list(faults(user))
    if not mistakes:
        mistakes += _batch_faults(user, target.ranks)
        zero = user.get(ZERO, {})
        nvme = next((zero[key]["nvme_path"] for key in OFFLOADS if (zero.get(key) or {}).get("nvme_path")), None)
        strategy = layout_of(user).strategy
        if conflict := strategy.conflict(replace(target, nvme=nvme)):
            mistakes.append(f"{strategy.name}: {conflict.problem}; {conflict.remedy}")
        mistakes += _partition_faults(zero, strategy, target.ranks)
    if mistakes:
        raise UserError("\n".join(f"{key}: {path}: {mistake}" for mistake in mistakes))


def faults(user: Any) -> Iterator[str]:
    """Yield the mistakes of a JSON that do not depend on the run."""
    if not isinstance(user, dict) or not isinstance(user.get(ZERO, {}), dict):
        yield f"is not a DeepSpeed config; write an object with a {ZERO} object"
        return
    zero = user.get(ZERO, {})
    yield from _misspelt(user)
    yield from _wrong_top(user)
    yield from _unknown(zero)
    wrong = list(_wrong_types(zero))
    yield from wrong
    if all(
        isinstance(user.get(key, {}), dict) and user.get(key, {}).get("enabled") is True for key in ("bf16", "fp16")
    ):
        yield "bf16.enabled and fp16.enabled are both true; write one, or none: training's precision wins"
    if not wrong:
        yield from _contradictions(zero)


def filled(user: dict[str, Any], hidden: int, key_of_file: str = "render.strategy") -> dict[str, Any]:
    """Return a JSON with "auto" in its stage-3 sizes replaced for a model of width `hidden`, and with stage 0 if it
    names none. Raises UserError for an "auto" without a meaning, which DeepSpeed would silently drop."""
    zero = {"stage": 0, **user.get(ZERO, {})}
    known = auto_values(hidden)
    for key, value in zero.items():
        if value == "auto":
            if key not in known:
                raise UserError(f"{key_of_file}: {ZERO}.{key} is 'auto' in your JSON; write its value")
            zero[key] = known[key]
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in user.items()}
    return {**copied, ZERO: zero}


def auto_values(hidden: int) -> dict[str, int]:
    """Return what "auto" means for stage 3's sizes (transformers/integrations/deepspeed.py, config_finalize)."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def layout_of(user: dict[str, Any]) -> UserLayout:
    """Return the strategy and sizes that a JSON describes, so that it is estimated like the named strategies.

    `user` is the result of `filled`; a remaining "auto" counts as DeepSpeed's default, which DeepSpeed uses for it.
    """
    zero = user.get(ZERO, {})
    stage = zero.get("stage", 0)
    strategy = DeepSpeed(
        name="your JSON",
        order=0,
        sharded="",
        costs="",
        stage=stage,
        optimizer=_placement(zero, "offload_optimizer") if stage else "gpu",
        parameters=_placement(zero, "offload_param"),
        within_node=stage == 3 and _hpz_ranks(zero) > 1,
        quantized=stage == 3 and zero.get("zero_quantized_weights") is True,
    )
    if stage == 0:
        return UserLayout(strategy, Buckets())
    overlap = zero.get("overlap_comm")
    overlap = stage == 3 if overlap in (None, "auto") else overlap
    if stage < 3:
        sizes = Buckets(
            reduce=_size(zero, "reduce_bucket_size"), allgather=_size(zero, "allgather_bucket_size"), overlap=overlap
        )
        return UserLayout(strategy, sizes)
    sizes = Buckets(
        reduce=_size(zero, "reduce_bucket_size"),
        prefetch=_size(zero, "stage3_prefetch_bucket_size"),
        persistence=_size(zero, "stage3_param_persistence_threshold"),
        live=_size(zero, "stage3_max_live_parameters"),
        overlap=overlap,
    )
    return UserLayout(strategy, sizes)


def aliases(key: str) -> set[str]:
    """Return the names that DeepSpeed accepts for a key: stage-3 keys also without their prefix."""
    plain = key.removeprefix("stage3_")
    return {key, plain} if key.startswith("stage3_") else {key}


def known_keys() -> set[str]:
    """Return every key that zero_optimization may have, in all its names."""
    return set(RENAMED) | {name for key in (*FLAGS, *SIZES, *SECTIONS) for name in aliases(key)}


def _misspelt(user: dict[str, Any]) -> Iterator[str]:
    for key in user:
        near = difflib.get_close_matches(key, TOP, 1, ALIKE)
        if near and key not in TOP:
            yield f"{shown(key)} is no key of DeepSpeed, which ignores it; write {near[0]}"


def _wrong_top(user: dict[str, Any]) -> Iterator[str]:
    for key in TOP_SECTIONS:
        if not isinstance(user.get(key, {}), dict):
            yield f"{key} is {shown(user[key])}; write an object"
    for key in TOP_NUMBERS:
        value = user.get(key)
        if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{key} is {shown(value)}; write a number"


def _unknown(zero: dict[str, Any]) -> Iterator[str]:
    for key in zero:
        if key in RENAMED:
            yield f"{ZERO}.{key} is deprecated; write {RENAMED[key]}"
        elif key == "aio":
            yield f"{ZERO}.aio belongs to the top level (DeepSpeed#2721); move it there"
        elif key.startswith("mics_"):
            yield (
                f"{ZERO}.{key} is of MiCS, which DeepSpeed 0.19.8 no longer has (DeepSpeed#8489); write "
                "zero_hpz_partition_size (hpZ), or render.strategy: fsdp_hybrid"
            )
        elif key not in known_keys():
            yield f"{ZERO}.{key} is no key of DeepSpeed; {_nearest(key, known_keys())}"
    for section, known in OFFLOADS.items():
        for key in zero.get(section) or () if isinstance(zero.get(section), dict) else ():
            if key not in known:
                yield f"{ZERO}.{section}.{key} is no key of DeepSpeed; {_nearest(key, known)}"


def _nearest(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), 1)
    return f"write {near[0]}" if near else "remove it"


def _wrong_types(zero: dict[str, Any]) -> Iterator[str]:
    for key, value in zero.items():
        if value in ("auto", None):
            continue
        where = f"{ZERO}.{key} is {shown(value)}"
        if any(key in aliases(flag) for flag in FLAGS) and not isinstance(value, bool):
            yield f"{where}; write true or false"
        elif any(key in aliases(size) for size in SIZES) and not _whole(value):
            yield f"{where}; write a whole number from 0 to 2**63 - 1"
        elif key in SECTIONS and not isinstance(value, dict):
            yield f"{where}; write an object"
    for key in OFFLOADS:
        device = (zero.get(key) or {}).get("device", "none") if isinstance(zero.get(key) or {}, dict) else "none"
        if device not in ("none", "cpu", "nvme"):
            yield f"{ZERO}.{key}.device is {shown(device)}; write none, cpu or nvme"
        yield from _wrong_offload(key, zero.get(key))


def _wrong_offload(section: str, values: Any) -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        if value in (None, "auto"):
            continue
        if key in OFFLOAD_FLAGS and not isinstance(value, bool):
            yield f"{ZERO}.{section}.{key} is {shown(value)}; write true or false"
        elif key in OFFLOAD_SIZES and not _whole(value):
            yield f"{ZERO}.{section}.{key} is {shown(value)}; write a whole number from 0 to 2**63 - 1"
        elif key in OFFLOAD_SHARES and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{ZERO}.{section}.{key} is {shown(value)}; write a number from 0 to 1"
        elif key == "nvme_path" and not isinstance(value, str):
            yield f"{ZERO}.{section}.{key} is {shown(value)}; write the folder of a local disk"


def _whole(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= LARGEST and value == int(value)


def _contradictions(zero: dict[str, Any]) -> Iterator[str]:
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        yield f"{ZERO}.stage is {stage!r}; write 0, 1, 2 or 3"
        return
    yield from _impossible_offload(zero, stage)
    for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if stage != 3 and zero.get(key, "auto") not in (None, False, 0, "auto") and zero[key] != HPZ_OFF.get(key):
            yield f"{ZERO}.{key} with stage {stage}, which DeepSpeed ignores; write stage 3 or remove it"
    if stage == 3 and 0 in [zero.get(name) for name in aliases("stage3_max_live_parameters")]:
        yield (
            f"{ZERO}.stage3_max_live_parameters is 0, with which nothing is fetched ahead; "
            "write the parameters of two layers and of the largest module, or remove it"
        )
    if zero.get("reduce_bucket_size") == 0:
        yield f"{ZERO}.reduce_bucket_size is 0; write 1 or more"
    if stage in (1, 2) and zero.get("round_robin_gradients") is True:
        # stage_1_and_2.py, link_hp_params: slices of the optimizer states are looked up in another order than they are
        # stored in.
        yield (
            f"{ZERO}.round_robin_gradients is true, with which DeepSpeed mixes up the states that a checkpoint holds; "
            "remove it"
        )
    if zero.get("legacy_stage1"):
        yield f"{ZERO}.legacy_stage1 is true, which DeepSpeed no longer has; remove it"


def _impossible_offload(zero: dict[str, Any], stage: int) -> Iterator[str]:
    devices = {key: _placement(zero, key) for key in OFFLOADS}
    for key, device in devices.items():
        if device == "nvme" and stage != 3:
            # stage_1_and_2.py: any device but none is cpu_offload.
            yield (
                f"{key}.device is nvme with stage {stage}, which DeepSpeed takes for cpu; write stage 3 or device cpu"
            )
        if device == "nvme" and not zero[key].get("nvme_path"):
            yield f"{key}.device is nvme without nvme_path (DeepSpeed#5124); write the folder of a local disk"
    prefetch = next((zero[key] for key in aliases("stage3_prefetch_bucket_size") if key in zero), "not 0")
    if devices["offload_param"] == "nvme" and stage == 3 and prefetch != 0:
        # partitioned_param_swapper.py: "already assigned swap buffer id"
        yield (
            f"offload_param.device is nvme and stage3_prefetch_bucket_size is {prefetch}, with which DeepSpeed reads "
            "frozen weights twice and fails; write 0"
        )
    if devices["offload_param"] != "gpu" and stage != 3:
        yield f"offload_param with stage {stage}, where parameters are not sharded; write stage 3 or remove it"
    if devices["offload_optimizer"] != "gpu" and stage == 0:
        yield "offload_optimizer with stage 0, which DeepSpeed ignores; write stage 1 or more, or remove it"
    if (zero.get("offload_optimizer") or {}).get("ratio", 1.0) != 1.0 and stage != 3:
        yield f"offload_optimizer.ratio with stage {stage}; write stage 3 or remove it"


def _batch_faults(user: dict[str, Any], ranks: int) -> Iterator[str]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (user.get(key) for key in keys)
    if all(isinstance(value, int) for value in (batch, micro, accumulation)):
        assert isinstance(micro, int) and isinstance(accumulation, int)
        if batch != micro * accumulation * ranks:
            yield (
                f"train_batch_size is {batch}, but {micro} a GPU x {accumulation} steps x {ranks} ranks are "
                f"{micro * accumulation * ranks}; write that, or leave the three out: training's values win"
            )


def _partition_faults(zero: dict[str, Any], strategy: Strategy, ranks: int) -> Iterator[str]:
    # deepspeed/utils/groups.py, _ensure_divisibility
    size = _hpz_ranks(zero)
    if strategy.within_node and ranks % size:
        yield (
            f"{ZERO}.zero_hpz_partition_size is {size}, and {ranks} ranks are no multiple of it; write a number that "
            f"divides {ranks}, or remove it"
        )


def _hpz_ranks(zero: dict[str, Any]) -> int:
    size = zero.get("zero_hpz_partition_size")
    return 1 if size in (None, "auto") else int(size)


def _placement(zero: dict[str, Any], key: str) -> Placement:
    device = (zero.get(key) or {}).get("device", "none")
    return "gpu" if device == "none" else device


def _size(zero: dict[str, Any], key: str) -> int:
    given = [zero[name] for name in aliases(key) if zero.get(name, "auto") != "auto"]
    return int(given[0]) if given else DEFAULTS[key]
