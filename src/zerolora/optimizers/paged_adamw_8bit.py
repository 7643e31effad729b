"""AdamW with 8-bit moments in CUDA's unified memory (arXiv 2305.14314, section 3)."""

from zerolora.optimizers.bnb import Bitsandbytes

OPTIMIZER = Bitsandbytes(
    name="paged_adamw_8bit",
    order=40,
    built="bitsandbytes.optim.AdamW",
    states=("exp_avg", "exp_avg_sq"),
    betas=(0.9, 0.999),
    epsilon=1e-8,
    bits=8,
    paged=True,
    cpu_traffic=134.0,
    cost="2.03, which may move to the host",
    where="GPUs, without optimizer offload",
)
