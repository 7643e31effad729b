"""Every key of a DeepSpeed JSON, its type, and its treatment here.

Source: DeepSpeed 0.19, deepspeed/runtime/config.py and the models of its sections, which a test compares with the
installed package. DeepSpeed ignores unknown top-level keys, and refuses those inside a section with a traceback after
the model is loaded.
"""

from typing import NamedTuple


class JsonKey(NamedTuple):
    """A key that DeepSpeed gets unchanged."""

    kind: str
    """Kind of its values: flag, size, number, share, text or texts (user_faults.py, WANTED)."""
    optional: bool = False
    """Whether it may be null."""


def _keys(optional: str = "", **kinds: str) -> dict[str, JsonKey]:
    """Return the keys of each kind; those in `optional` may be null."""
    return {key: JsonKey(kind, key in optional.split()) for kind, keys in kinds.items() for key in keys.split()}


ZERO = "zero_optimization"
STAGE_3 = _keys(
    size="stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold",
    flag="stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
)
"""Keys that DeepSpeed also accepts without their prefix."""
ZERO_KEYS = {
    **_keys(
        size="stage reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size",
        flag="contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm "
        "compute_grad_norm load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights "
        "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
        optional="overlap_comm",
    ),
    **STAGE_3,
    **{key.removeprefix("stage3_"): kind for key, kind in STAGE_3.items()},
}
ZERO_SECTIONS = {
    "offload_param": _keys(
        text="device nvme_path",
        size="buffer_count buffer_size max_in_cpu",
        flag="pin_memory",
        optional="nvme_path",
    ),
    "offload_optimizer": _keys(
        text="device nvme_path",
        size="buffer_count",
        flag="pin_memory pipeline_read pipeline_write fast_init super_offload",
        share="ratio cpuadam_cores_perc",
        optional="nvme_path",
    ),
    "leaf_module": _keys(texts="classes names name_suffixes"),
}
OFFLOADS = ("offload_param", "offload_optimizer")
ZERO_RENAMED = {
    "cpu_offload": "offload_optimizer: {device: cpu}",
    "cpu_offload_param": "offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer or offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
ZERO_REFUSED = {"zenflow": "updates some weights later than others, so it trains something else; remove it"}

SECTIONS = {
    "aio": _keys(
        size="block_size queue_depth intra_op_parallelism",
        flag="single_submit overlap_events use_gds",
    ),
    "bf16": _keys(
        flag="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    ),
    "fp16": _keys(
        flag="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        number="loss_scale",
        size="initial_scale_power loss_scale_window hysteresis min_loss_scale",
    ),
    "comms_logger": _keys(flag="enabled prof_all verbose debug", texts="prof_ops"),
    "flops_profiler": _keys(
        flag="enabled detailed",
        number="recompute_fwd_factor module_depth",
        size="profile_step top_modules",
        text="output_file",
        optional="output_file",
    ),
}
"""Sections that DeepSpeed gets, beside zero_optimization."""
HONOURED = _keys(
    text="communication_data_type seq_parallel_communication_data_type log_level",
    flag="prescale_gradients disable_allgather disable_python_gc wall_clock_breakdown memory_breakdown dump_state "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    number="gradient_predivide_factor",
    size="steps_per_print",
    optional="communication_data_type seq_parallel_communication_data_type steps_per_print",
)
"""Values that DeepSpeed gets; zero_allow_untested_optimizer and zero_force_ds_cpu_optimizer are set for optimizers that
need them."""
OF_TRAINING = _keys(
    number="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping",
)
"""Values that follow from the config's own."""
ALGORITHMS = {"optimizer": "train.optimizer", "scheduler": "train.schedule"}
"""Sections that the config replaces."""
DATA_TYPES = ("fp16", "bf16", "fp32")
"""Types of communication_data_type and seq_parallel_communication_data_type."""

LEFT_OUT = {
    "compile": "the model runs as transformers has it",
    "tensor_parallel": "ranks share rows and weights, not layers",
    "activation_checkpointing": "train.activation_checkpointing and train.activation_offload",
    "checkpoint": "train.checkpoint_steps and train.checkpoint_minutes",
    "datastates_ckpt": "train.checkpoint_steps and train.checkpoint_minutes",
    "dataloader_drop_last": "rows are read from results/data/",
    "data_types": "gradients of several micro-batches are added in fp32",
    "timers": "telemetry.csv has the parts of each step",
    "autotuning": "render chooses the sizes",
    "hybrid_engine": "for generation in training, which there is none of",
    "tensorboard": "train.tracker",
    "wandb": "train.tracker",
    "csv_monitor": "telemetry.csv",
    "comet": "train.tracker",
    "monitor_config": "telemetry.csv; DeepSpeed has no such key",
    "comms_config": "telemetry.csv; DeepSpeed has no such key",
    "vocabulary_size": "the model's config.json",
}
"""Keys that are omitted with a line in the log, and their replacement; none of them changes training's result."""
REFUSED = {
    "pipeline": "ranks share rows and weights, not stages",
    "expert_parallel": "ranks share rows and weights, not experts",
    "use_data_before_expert_parallelism": "ranks share rows and weights, not experts",
    "torch_autocast": "set by train.precision",
    "managed_gradient_accumulation": "set by train.global_batch",
    "data_efficiency": "it trains on other rows",
    "weight_quantization": "it trains other weights; set train.method: qlora",
    "compression_training": "DeepSpeed no longer has it",
    "quantize_training": "DeepSpeed no longer has it",
    "curriculum_learning": "DeepSpeed no longer has it",
    "progressive_layer_drop": "DeepSpeed no longer has it",
    "eigenvalue": "DeepSpeed no longer has it",
    "sparse_attention": "DeepSpeed no longer has it",
    "sparse_gradients": "DeepSpeed no longer has it",
    "amp": "DeepSpeed no longer has it; set train.precision",
    "nebula": "DeepSpeed no longer has it",
    "elasticity": "DeepSpeed no longer has it",
    "graph_harvesting": "DeepSpeed no longer has it",
}
"""Keys that would change training's result, or at which DeepSpeed stops: refused unless they are off."""
OLD_NAMES = {"bfloat16": "bf16"}
REDUCTIONS = {"gradient_allreduce_op": "mean"}
"""Keys with one valid value."""
TOP_LEVEL = frozenset(
    {ZERO, *SECTIONS, *HONOURED, *OF_TRAINING, *ALGORITHMS, *LEFT_OUT, *REFUSED, *OLD_NAMES, *REDUCTIONS}
)
"""Every key of the top level."""
SET_UNLESS_OFF = {
    ("bf16", "bf16_master_weights_and_grads"): "the trained weights are fp32",
    ("bf16", "bf16_optimizer_states"): "the optimizer's states are fp32",
    ("fp16", "fp16_master_weights_and_grads"): "the trained weights are fp32",
    ("fp16", "auto_cast"): "weights compute in the type of train.precision",
}
"""Flags that are omitted, with a line in the log if they are on."""
