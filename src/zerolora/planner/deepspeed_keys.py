"""Every key of a DeepSpeed JSON, its type, and what becomes of it here.

As in DeepSpeed 0.19: deepspeed/runtime/config.py and the models of its sections, which a test compares with the
installed package. DeepSpeed ignores a top-level key that it does not know, and refuses one inside a section with a
traceback after the model is loaded.
"""

from typing import Literal, NamedTuple

from zerolora.errors import wordings

Kind = Literal["flag", "size", "number", "share", "text", "texts"]


class JsonKey(NamedTuple):
    """A key that DeepSpeed gets as the JSON says it."""

    kind: Kind
    optional: bool = False
    """Whether null is a value of it."""


FLAG, SIZE, NUMBER, SHARE = JsonKey("flag"), JsonKey("size"), JsonKey("number"), JsonKey("share")
TEXT, TEXTS = JsonKey("text"), JsonKey("texts")
OPTIONAL_FLAG, OPTIONAL_TEXT = JsonKey("flag", optional=True), JsonKey("text", optional=True)

ZERO = "zero_optimization"
STAGE_3 = {
    "stage3_prefetch_bucket_size": SIZE,
    "stage3_param_persistence_threshold": SIZE,
    "stage3_model_persistence_threshold": SIZE,
    "stage3_max_live_parameters": SIZE,
    "stage3_max_reuse_distance": SIZE,
    "stage3_gather_16bit_weights_on_model_save": FLAG,
    "stage3_module_granularity_threshold": SIZE,
    "stage3_use_all_reduce_for_fetch_params": FLAG,
    "stage3_allgather_sequential": FLAG,
}
"""Keys that DeepSpeed also knows without their prefix."""
ZERO_KEYS = {
    "stage": SIZE,
    "contiguous_gradients": FLAG,
    "reduce_scatter": FLAG,
    "reduce_bucket_size": SIZE,
    "use_multi_rank_bucket_allreduce": FLAG,
    "allgather_partitions": FLAG,
    "allgather_bucket_size": SIZE,
    "overlap_comm": OPTIONAL_FLAG,
    "compute_grad_norm": FLAG,
    "load_from_fp32_weights": FLAG,
    "elastic_checkpoint": FLAG,
    "sub_group_size": SIZE,
    "ignore_unused_parameters": FLAG,
    "legacy_stage1": FLAG,
    "round_robin_gradients": FLAG,
    "parameter_alignment": FLAG,
    "zero_hpz_partition_size": SIZE,
    "zero_quantized_weights": FLAG,
    "zero_quantized_nontrainable_weights": FLAG,
    "zero_quantized_gradients": FLAG,
    "memory_efficient_linear": FLAG,
    "pipeline_loading_checkpoint": FLAG,
    "override_module_apply": FLAG,
    "log_trace_cache_warnings": FLAG,
    "enable_sanity_checks": FLAG,
    "save_muon_momentum_buffer_in_memory": FLAG,
    **STAGE_3,
    **{key.removeprefix("stage3_"): kind for key, kind in STAGE_3.items()},
}
ZERO_SECTIONS = {
    "offload_param": {
        "device": TEXT,
        "nvme_path": OPTIONAL_TEXT,
        "buffer_count": SIZE,
        "buffer_size": SIZE,
        "max_in_cpu": SIZE,
        "pin_memory": FLAG,
    },
    "offload_optimizer": {
        "device": TEXT,
        "nvme_path": OPTIONAL_TEXT,
        "buffer_count": SIZE,
        "pin_memory": FLAG,
        "pipeline_read": FLAG,
        "pipeline_write": FLAG,
        "fast_init": FLAG,
        "ratio": SHARE,
        "super_offload": FLAG,
        "cpuadam_cores_perc": SHARE,
    },
    "leaf_module": {"classes": TEXTS, "names": TEXTS, "name_suffixes": TEXTS},
}
OFFLOADS = ("offload_param", "offload_optimizer")
ZERO_RENAMED = wordings(
    cpu_offload="offload_optimizer: {device: cpu}",
    cpu_offload_param="offload_param: {device: cpu}",
    cpu_offload_use_pin_memory="pin_memory in offload_optimizer or offload_param",
    stage3_gather_fp16_weights_on_model_save="stage3_gather_16bit_weights_on_model_save",
)
ZERO_REFUSED = wordings(zenflow="updates some weights later than others, so it trains something else; remove it")

SECTIONS: dict[str, dict[str, JsonKey]] = {
    "aio": {
        "block_size": SIZE,
        "queue_depth": SIZE,
        "intra_op_parallelism": SIZE,
        "single_submit": FLAG,
        "overlap_events": FLAG,
        "use_gds": FLAG,
    },
    "bf16": {
        "enabled": FLAG,
        "immediate_grad_update": FLAG,
        "check_grad_overflow": FLAG,
        "bf16_master_weights_and_grads": FLAG,
        "bf16_optimizer_states": FLAG,
    },
    "fp16": {
        "enabled": FLAG,
        "auto_cast": FLAG,
        "loss_scale": NUMBER,
        "initial_scale_power": SIZE,
        "loss_scale_window": SIZE,
        "hysteresis": SIZE,
        "consecutive_hysteresis": FLAG,
        "min_loss_scale": SIZE,
        "fp16_master_weights_and_grads": FLAG,
    },
    "comms_logger": {"enabled": FLAG, "prof_all": FLAG, "prof_ops": TEXTS, "verbose": FLAG, "debug": FLAG},
    "flops_profiler": {
        "enabled": FLAG,
        "recompute_fwd_factor": NUMBER,
        "profile_step": SIZE,
        "module_depth": NUMBER,
        "top_modules": SIZE,
        "detailed": FLAG,
        "output_file": OPTIONAL_TEXT,
    },
}
"""Sections that DeepSpeed gets, beside zero_optimization."""
HONOURED = {
    "communication_data_type": OPTIONAL_TEXT,
    "seq_parallel_communication_data_type": OPTIONAL_TEXT,
    "prescale_gradients": FLAG,
    "gradient_predivide_factor": NUMBER,
    "disable_allgather": FLAG,
    "disable_python_gc": FLAG,
    "steps_per_print": JsonKey("size", optional=True),
    "wall_clock_breakdown": FLAG,
    "memory_breakdown": FLAG,
    "dump_state": FLAG,
    "log_level": TEXT,
    "zero_allow_untested_optimizer": FLAG,
    "zero_force_ds_cpu_optimizer": FLAG,
}
"""Values that DeepSpeed gets; those of the last two are set where an optimizer needs it."""
OF_TRAINING = {
    "train_batch_size": NUMBER,
    "train_micro_batch_size_per_gpu": NUMBER,
    "gradient_accumulation_steps": NUMBER,
    "gradient_clipping": NUMBER,
}
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
    "data_types": "gradients are accumulated in DeepSpeed's own type",
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
"""Keys that are left out with a line, and what is used instead: none of them changes what is trained."""
REFUSED = wordings(
    pipeline="ranks share rows and weights, not stages",
    expert_parallel="ranks share rows and weights, not experts",
    use_data_before_expert_parallelism="ranks share rows and weights, not experts",
    torch_autocast="train.precision says the type",
    managed_gradient_accumulation="train.global_batch says what a step is",
    data_efficiency="it trains on other rows",
    weight_quantization="it trains other weights; write train.method: qlora",
    compression_training="DeepSpeed no longer has it",
    quantize_training="DeepSpeed no longer has it",
    curriculum_learning="DeepSpeed no longer has it",
    progressive_layer_drop="DeepSpeed no longer has it",
    eigenvalue="DeepSpeed no longer has it",
    sparse_attention="DeepSpeed no longer has it",
    sparse_gradients="DeepSpeed no longer has it",
    amp="DeepSpeed no longer has it; write train.precision",
    nebula="DeepSpeed no longer has it",
    elasticity="DeepSpeed no longer has it",
    graph_harvesting="DeepSpeed no longer has it",
)
"""Keys that would train something else, or that DeepSpeed stops at: refused unless they are off."""
OLD_NAMES = {"bfloat16": "bf16"}
REDUCTIONS = {"gradient_allreduce_op": "mean"}
"""Keys of which one value is what training needs."""
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
"""Flags that are left out with a line, where they are on."""
