"""AdamW with both moments in 8 bits, quantized block by block (arXiv 2110.02861)."""

from zerolora.optimizers.bnb import Bitsandbytes

OPTIMIZER = Bitsandbytes(
    name="adamw_8bit",
    order=20,
    built="bitsandbytes.optim.AdamW",
    states=("exp_avg", "exp_avg_sq"),
    betas=(0.9, 0.999),
    epsilon=1e-8,
    bits=8,
    on_cpu=5,
    cpu_traffic=134.0,
    cost="2.03; 8 for tensors of fewer than 4,096 elements",
    where="everywhere but on NVMe",
)
