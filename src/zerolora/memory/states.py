"""Model states: weights, gradients, fp32 master and Adam moments, told apart by who owns and who trains them.

Source of the sharding: ZeRO (arXiv 1910.02054, section 3 and figure 1). What differs here is that with LoRA only
φ of Ψ parameters are trained: the frozen rest costs its weights and nothing else.
"""

from dataclasses import dataclass

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
MASTER, MOMENTS = 4, 8  # an fp32 copy; Adam's two fp32 moments

# DeepSpeed gathers no more than this many parameters at a time under stage 3; zero/strategies.py renders it.
MAX_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Sharding:
    """What a strategy shares out among the ranks, and what it moves to the host."""

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False


STRATEGIES = {
    "zero0": Sharding(0),
    "zero1": Sharding(1),
    "zero2": Sharding(2),
    "zero2_offload": Sharding(2, offload_optimizer=True),
    "zero3": Sharding(3),
    "zero3_offload": Sharding(3, offload_optimizer=True, offload_parameters=True),
}


@dataclass(frozen=True)
class States:
    """Bytes of one rank's model states. The host part is what offload moved there."""

    frozen_weights: float
    trainable_weights: float
    gradients: float
    master: float
    moments: float
    host: float

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        return self.frozen_weights + self.trainable_weights + self.gradients + self.master + self.moments


def model_states(frozen: int, trainable: int, sharding: Sharding, ranks: int, precision: str) -> States:
    """Return the bytes per rank of `frozen` + `trainable` parameters under a sharding.

    Full fine-tuning is frozen = 0; then bf16 gives ZeRO's 16x, 4x + 12x/N, 2x + 14x/N and 16x/N.
    """
    size = BYTES[precision]
    stage = sharding.stage
    weights_share = ranks if stage == 3 else 1
    gradient_share = ranks if stage >= 2 else 1
    optimizer_share = ranks if stage >= 1 else 1
    # DeepSpeed keeps a flat fp32 copy of each partition whatever the precision (runtime/zero/stage_1_and_2.py,
    # stage3.py); stage 0 in fp32 steps on the weights themselves.
    master = 0 if stage == 0 and precision == "fp32" else MASTER
    weights = size / weights_share
    optimizer = trainable * (master + MOMENTS) / optimizer_share
    # Offloaded gradients go to the host with the optimizer that needs them (stage_1_and_2.py, cpu_offload).
    gradients = trainable * size / gradient_share
    host = 0.0
    if sharding.offload_optimizer:
        host += optimizer + trainable * MASTER / optimizer_share
    if sharding.offload_parameters:
        host += (frozen + trainable) * weights
    on_gpu = not sharding.offload_optimizer
    return States(
        frozen_weights=0.0 if sharding.offload_parameters else frozen * weights,
        trainable_weights=0.0 if sharding.offload_parameters else trainable * weights,
        gradients=gradients if on_gpu else 0.0,
        master=trainable * master / optimizer_share if on_gpu else 0.0,
        moments=trainable * MOMENTS / optimizer_share if on_gpu else 0.0,
        host=host,
    )
