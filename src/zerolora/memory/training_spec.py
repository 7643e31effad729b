"""The spec of a training, and the statistics of its rows: the input of a prediction beside the model."""

import functools
import math
from dataclasses import dataclass
from typing import Any

from zerolora.memory.states import BYTES
from zerolora.methods.method import Method, TrainedParameters
from zerolora.model.fused_kernels import Part
from zerolora.model.spec import ModelSpec, chunk_size
from zerolora.optimizers import OPTIMIZERS
from zerolora.optimizers.optimizer import Optimizer
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Buckets, Strategy
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.objective import AddedMemory, Objective
from zerolora.types import Attention, Loss, Precision


@dataclass(frozen=True)
class TrainingSpec:
    """Strategy, method, ranks, batch and precision of a run."""

    strategy: str
    """A strategy's name, or the path of the user's DeepSpeed JSON."""
    method: Method
    nodes: int
    ranks_per_node: int
    micro_batch: int
    """Packed rows of one forward pass of one rank."""
    accumulation: int
    """Forward passes of one optimizer step of one rank."""
    length: int
    """Tokens of the longest packed row."""
    activation_checkpointing: bool
    attention: Attention
    precision: Precision
    masked: bool = True
    """Attention gets a mask, for packed or padded rows."""
    loss: Loss = "full"
    logits: int = 0
    """Positions of a row with logits; 0 = all."""
    on_cpu: bool = False
    """Ranks compute on the CPU, with the GPU's terms in host memory."""
    keeps_best: bool = False
    """Also keep the adapter and the checkpoint with the lowest validation loss."""
    keep_checkpoints: int = 2
    reserve: int | None = None
    """Bytes per GPU beside torch's tensors; None to compute them (reserve.py)."""
    buckets: Buckets | None = None
    """Sizes of the user's DeepSpeed JSON; None for render's."""
    own: Strategy | None = None
    """The layout of the user's DeepSpeed JSON; None for a named strategy."""
    sequence_parallel: int = 1
    """Ranks that share each row."""
    kernels: tuple[Part, ...] = ()
    """What liger-kernel computes."""
    compiles: bool = False
    """Decoder layers are compiled."""
    activation_offload: bool = False
    """Keep the inputs of checkpointed layers on the host, where CPU ranks have them anyway."""
    capability: float | None = None
    """Compute capability of the GPUs; None for those that have flash attention."""
    objective: Objective = OBJECTIVES["sft"]
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    packed: float = 1.0
    """Rows of the longest packed row, by their mean length."""
    all_supervised: int = 0
    """Supervised tokens of all rows, validation included."""

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def own_length(self) -> int:
        """Tokens of the longest packed row on one rank."""
        return -(-self.length // self.sequence_parallel)

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of checkpointed layers leave the GPU."""
        return self.activation_checkpointing and self.activation_offload and not self.on_cpu

    @property
    def layout(self) -> Strategy:
        """The strategy's layout."""
        return self.own or STRATEGIES[self.strategy]

    @property
    def width(self) -> int:
        """Bytes of a weight in the run's precision."""
        return BYTES[self.precision]

    @property
    def prepared_method(self) -> Method:
        """The method under the strategy's engine."""
        return self.method.under(self.layout.engine)

    def added_by_objective(self, trained: int) -> AddedMemory:
        """Return the bytes of a rank that the objective adds with `trained` parameters."""
        return self.objective.memory(self.micro_batch * (self.logits or self.own_length), trained)

    def chunk_of_objective(self, model: ModelSpec) -> float:
        """Return the bytes that the objective's own head loss takes beside the logits of a chunk (train/loss.py)."""
        tokens = self.micro_batch * (self.logits or self.own_length)
        if self.loss == "fused":
            tokens = min(tokens, chunk_size(tokens, model.hidden, model.vocabulary))
        return self.objective.chunk_memory(tokens, model.vocabulary, self.width)

    def saved_by_packing(self, model: ModelSpec) -> float:
        """Return by how many weights of the run's precision quantization makes the base model smaller, without
        constants."""
        method, width = self.prepared_method, self.width
        return sum((module.parameters - method.packed(module, width)) * module.count for module in model.modules)

    def parameters(self, model: ModelSpec) -> TrainedParameters:
        """Return the trained parameters. Raises UserError if a module to train is not in the model."""
        return _parameters(self.prepared_method, model, self.width)


@functools.lru_cache(maxsize=64)
def _parameters(method: Method, model: ModelSpec, width: int) -> TrainedParameters:
    return method.parameters(model, width)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """Statistics of a packing plan that memory and time depend on; lengths in tokens."""

    packing: bool
    """Packed rows combine several rows."""
    longest_packed_row: int
    most_supervised: int
    """Maximum number of supervised tokens in a packed row."""
    packed_rows: int
    """For training."""
    tokens: int
    """Of all rows for training."""
    supervised_tokens: int
    mean_row_of_a_token: float
    """Mean over tokens of the length of a token's row."""
    validation_rows: int
    """Packed rows for validation."""
    validation_supervised_tokens: int = 0
    rows: int = 0
    """For training, before packing."""
    common_prefix: int = 0
    """Tokens that all rows for training begin with."""
    shared_prompts: int = 0
    """Tokens of pairs for training that both sequences of one begin with, counted once."""
    shared_prompt_of_a_token: float = 0.0
    """Mean over these tokens of the length of a token's shared prompt."""

    def packed(self, texts: int) -> float:
        """Return how many rows the longest packed row has, by their mean length; 1 without packing. `texts`: sequences
        of a row."""
        return max(1.0, texts * self.rows * self.longest_packed_row / self.tokens) if self.packing else 1.0

    def padded(self, together: int, parts: int) -> float:
        """Return how many times as long rows are, on average, with the padding of `together` of them in a micro-batch.
        1 with packing, which fills rows. `parts`: the micro-batches of a global batch, each of rows of similar length
        (train/order.py).

        As if lengths were uniform in a range of their mean and spread: a part has 1 / parts of the range, and of n rows
        in it the longest is expected at n / (n + 1).
        """
        if self.packing or together < 2:
            return 1.0
        mean = self.tokens / self.packed_rows
        spread = math.sqrt(max(0.0, self.mean_row_of_a_token / mean - 1))  # deviation over mean
        longer = math.sqrt(3) * spread * (together - 1) / ((together + 1) * parts)
        return min(1 + longer, self.longest_packed_row / mean)


def row_statistics(stats: dict[str, Any]) -> RowStatistics:
    """Return the statistics in a packing plan's stats.json."""
    return RowStatistics(
        packing=stats["packing"],
        longest_packed_row=stats["longest_packed_row"],
        most_supervised=stats["most_supervised"],
        packed_rows=stats["train_packed_rows"],
        tokens=stats["train_tokens"],
        supervised_tokens=stats["train_supervised_tokens"],
        mean_row_of_a_token=stats["train_mean_row_of_a_token"],
        validation_rows=stats["validation_packed_rows"],
        validation_supervised_tokens=stats["validation_supervised_tokens"],
        rows=stats["train_rows"],
        common_prefix=stats["train_common_prefix"],
        shared_prompts=stats.get("train_shared_prompts", 0),
        shared_prompt_of_a_token=stats.get("train_shared_prompt_of_a_token", 0.0),
    )
