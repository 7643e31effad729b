"""The named strategies as DeepSpeed JSON."""

from typing import Any

from zerolora.memory.states import MAX_LIVE_PARAMETERS, STRATEGIES

LARGEST_BUCKET = 200_000_000


def strategy_json(name: str, hidden: int, trainable: int, device: str) -> dict[str, Any]:
    """Return the `zero_optimization` part of a named strategy for a model of width `hidden`.

    `trainable` parameters set the buckets: a bucket larger than all gradients is memory that nothing uses.
    """
    sharding = STRATEGIES[name]
    zero: dict[str, Any] = {"stage": sharding.stage}
    if sharding.stage in (1, 2):
        bucket = min(trainable, LARGEST_BUCKET)
        # overlap_comm stays off: the adapter's gradients are too small to hide, and it doubles the bucket.
        zero |= {
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
    if sharding.stage == 3:
        zero |= {
            "contiguous_gradients": True,
            "overlap_comm": device == "cuda",
            **auto_values(hidden),
            "stage3_max_live_parameters": MAX_LIVE_PARAMETERS,
            # Above 0 DeepSpeed scans the whole trace at each module, which costs a small model most of its time.
            "stage3_max_reuse_distance": 0,
        }
    host = {"device": "cpu", "pin_memory": device == "cuda"}
    if sharding.offload_optimizer:
        zero["offload_optimizer"] = host
    if sharding.offload_parameters:
        zero["offload_param"] = dict(host)
    return zero


def auto_values(hidden: int) -> dict[str, int]:
    """Return what "auto" means for stage 3's sizes (transformers/integrations/deepspeed.py, config_finalize)."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
