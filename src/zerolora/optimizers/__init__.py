"""The optimizers that `train.optimizer` may name, one entry of a table each.

To add an optimizer, add an entry (docs/extending.md); one of another library also needs a class in its own module.
Nothing here imports torch before it builds an optimizer.
"""

from zerolora.optimizers.adafactor import MATRIX, VECTOR, Adafactor
from zerolora.optimizers.adamw import AdamW
from zerolora.optimizers.bnb import Bitsandbytes
from zerolora.optimizers.optimizer import Optimizer
from zerolora.optimizers.torchao_adamw import TorchaoAdamW
from zerolora.registries import Registry, registered

OPTIMIZERS: Registry[Optimizer] = registered(
    "optimizers",
    Optimizer,
    [
        AdamW(
            name="adamw",
            about="AdamW (arXiv 1711.05101), torch's own: the default",
            built="torch.optim.AdamW",
            cost="8",
            where="everywhere",
        ),
        Bitsandbytes(
            name="adamw_8bit",
            about="AdamW with both moments in 8 bits, quantized block by block (arXiv 2110.02861)",
            built="bitsandbytes.optim.AdamW",
            bits=8,
            on_cpu=5,
            host_time=52.0,
            cost="2.03; 8 for tensors of fewer than 4,096 elements",
            where="everywhere but on NVMe",
        ),
        Bitsandbytes(
            name="paged_adamw",
            about="AdamW with fp32 moments in CUDA's unified memory (arXiv 2305.14314, section 3)",
            built="bitsandbytes.optim.AdamW",
            paged=True,
            cost="8, which may move to the host",
            where="GPUs, without optimizer offload",
        ),
        Bitsandbytes(
            name="paged_adamw_8bit",
            about="AdamW with 8-bit moments in CUDA's unified memory (arXiv 2305.14314, section 3)",
            built="bitsandbytes.optim.AdamW",
            bits=8,
            paged=True,
            cost="2.03, which may move to the host",
            where="GPUs, without optimizer offload",
        ),
        Adafactor(
            name="adafactor",
            about="Adafactor (arXiv 1804.04235), transformers' own, with the learning rate of train.schedule",
            built="transformers.Adafactor",
            states=(*MATRIX, VECTOR),
            betas=None,
            epsilon=None,
            host_time=15.0,
            cost="4 (rows + columns) of a matrix: 4 / r or less with LoRA; 4 for a vector",
            where="`zero0`, `ddp`",
        ),
        Bitsandbytes(
            name="lion",
            about="Lion (arXiv 2302.06675): the sign of a moving average of gradients",
            built="bitsandbytes.optim.Lion",
            states=("exp_avg",),
            betas=(0.9, 0.99),
            epsilon=None,
            host_time=16.0,
            cost="4",
            where="everywhere but on NVMe",
        ),
        TorchaoAdamW(
            name="adamw_torch_8bit",
            about="AdamW with both moments in 8 bits, from torchao, whose step needs no kernels but torch's",
            built="torchao.optim.AdamW8bit",
            bits=8,
            moved=1486.0,
            temporary=53.0,
            host_time=274.0,
            cost="2.03; 8 for tensors of fewer than 4,096 elements",
            where="everywhere but on NVMe",
        ),
        TorchaoAdamW(
            name="adamw_torch_4bit",
            about="AdamW with both moments in 4 bits (arXiv 2309.01507), from torchao",
            built="torchao.optim.AdamW4bit",
            bits=4,
            moved=936.0,
            temporary=53.0,
            host_time=157.0,
            cost="1.03; 8 for tensors of fewer than 4,096 elements",
            where="everywhere but on NVMe",
        ),
    ],
)
"""All optimizers by name, the default first."""
