"""lion_8bit: Lion with a moment of 8 bits."""

from zerolora.optimizers.bnb import Bitsandbytes

OPTIMIZER = Bitsandbytes(
    name="lion_8bit",
    about="Lion (arXiv 2302.06675) with its moment in 8 bits",
    built="bitsandbytes.optim.Lion",
    states=("exp_avg",),
    betas=(0.9, 0.99),
    epsilon=None,
    bits=8,
    on_cpu=5,
    cost="1.02",
    where="everywhere but on NVMe",
)
