"""AdamW with fp32 moments in CUDA's unified memory (arXiv 2305.14314, section 3)."""

from zerolora.optimizers.bnb import Bitsandbytes

OPTIMIZER = Bitsandbytes(
    name="paged_adamw",
    order=30,
    built="bitsandbytes.optim.AdamW",
    states=("exp_avg", "exp_avg_sq"),
    betas=(0.9, 0.999),
    epsilon=1e-8,
    paged=True,
    cost="8, which may move to the host",
    where="GPUs, without optimizer offload",
)
