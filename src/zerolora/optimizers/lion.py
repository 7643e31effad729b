"""Lion (arXiv 2302.06675): the sign of a moving average of gradients."""

from zerolora.optimizers.bnb import Bitsandbytes

OPTIMIZER = Bitsandbytes(
    name="lion",
    order=60,
    built="bitsandbytes.optim.Lion",
    states=("exp_avg",),
    betas=(0.9, 0.99),
    epsilon=None,
    cpu_traffic=88.0,
    cost="4",
    where="everywhere but on NVMe",
)
