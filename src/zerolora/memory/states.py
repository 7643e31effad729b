"""Model states: weights, gradients, fp32 master weights and the optimizer's states, of frozen and trained parameters.

Source of the sharding: ZeRO (arXiv 1910.02054, section 3 and figure 1). An adapter trains only φ of Ψ parameters; the
frozen ones have weights only.
"""

from dataclasses import dataclass

from zerolora.strategies.strategy import Strategy

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# A frozen weight in int8, with one fp32 scale for about 4,000 weights (partition_parameters.py, CUDAQuantizer).
SCALE = 4 / 4000
MASTER, MOMENTS = 4, 8  # bytes of an fp32 copy, and of AdamW's two fp32 moments


@dataclass(frozen=True)
class States:
    """Bytes of one rank's model states on its GPU, and offloaded to the host or to disk."""

    frozen_weights: float
    trained_weights: float
    gradients: float
    master: float
    moments: float
    constants: float = 0.0
    """Of quantized weights, and buffers."""
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        weights = self.frozen_weights + self.constants + self.trained_weights
        return weights + self.gradients + self.master + self.moments


def model_states(
    frozen_bytes: float,
    trained: int,
    strategy: Strategy,
    ranks: int,
    ranks_per_node: int,
    precision: str,
    moments: float = MOMENTS,
    constants: float = 0.0,
    accumulates: bool = False,
) -> States:
    """Return the bytes per rank of frozen weights and `trained` parameters under a strategy.

    `moments`: bytes of the optimizer's states for each trained parameter. `constants`: of `frozen_bytes`, those of
    buffers and of the constants of quantized weights (bitsandbytes/nn/modules.py, Linear4bit.quant_state), which
    are no parameters: engines neither shard nor offload them. `accumulates`: gradients of several micro-batches are
    added, in fp32 (train/gradient_sums.py). Full fine-tuning, without frozen bytes, in 16 bits and without
    accumulation has ZeRO's 16x, 4x + 12x/N, 2x + 14x/N and 16x/N.
    """
    size = BYTES[precision]
    stage = strategy.stage
    shards = ranks_per_node if strategy.engine == "fsdp" and strategy.within_node else ranks
    weights_share = shards if stage == 3 else 1
    gradient_share = shards if stage >= 2 else 1
    optimizer_share = shards if stage >= 1 else 1
    adapter, gradient, master = _widths(strategy, size)
    if accumulates:
        gradient = MASTER
    frozen = (frozen_bytes - constants) / weights_share
    if strategy.quantized and precision == "fp16":  # the only precision in which DeepSpeed does (docs/choice.md)
        frozen *= (1 + SCALE) / size
    trained_weights = trained * adapter / weights_share
    gradients = trained * gradient / gradient_share
    masters, moments = trained * master / optimizer_share, trained * moments / optimizer_share
    away = 0.0
    if strategy.optimizer != "gpu":
        # Gradients move to the device of the optimizer, in its precision (stage_1_and_2.py, cpu_offload).
        away += masters + moments + trained * MASTER / optimizer_share
        masters = moments = 0.0
        # Until the last micro-step they are on the GPU at stage 1, and at stage 2 if they are added in another type
        # (stage_1_and_2.py, grad_accum and _build_compact_grad_partition_buffer).
        waits = strategy.engine == "deepspeed" and (stage == 1 or (stage == 2 and size < MASTER))
        if not (accumulates and waits):
            gradients = 0.0
    if strategy.parameters != "gpu":
        away += frozen + trained_weights
        frozen = trained_weights = 0.0
    on_disk = "nvme" in (strategy.optimizer, strategy.parameters)
    return States(
        frozen,
        trained_weights,
        gradients,
        masters,
        moments,
        constants,
        host=0.0 if on_disk else away,
        disk=away if on_disk else 0.0,
    )


def _widths(strategy: Strategy, size: int) -> tuple[int, int, int]:
    """Return the bytes of a trained weight, of its gradient and of its master copy.

    Without DeepSpeed, and at its stage 0 in fp32, fp32 weights are updated in place: the same sum. Otherwise DeepSpeed
    keeps a flat fp32 copy in any precision (stage_1_and_2.py, stage3.py).
    """
    if strategy.engine != "deepspeed" or (strategy.stage == 0 and size == 4):
        return 4, 4, 0
    return size, size, MASTER
