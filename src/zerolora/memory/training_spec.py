"""The spec of a training: everything that a prediction depends on beside the model itself."""

import functools
from dataclasses import dataclass

from zerolora.memory.states import BYTES
from zerolora.methods.method import Method, TrainedParameters
from zerolora.model.spec import ModelSpec
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
    """A strategy's name, or the path of the user's own DeepSpeed JSON."""
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
    """Attention gets a mask, since rows are packed or padded."""
    loss: Loss = "full"
    logits: int = 0
    """Positions of a row that get logits; 0 = all."""
    on_cpu: bool = False
    """Ranks compute on the CPU; what would be in GPU memory is in host memory."""
    keeps_best: bool = False
    """The adapter with the lowest validation loss is kept in addition to the one in training."""
    keep_checkpoints: int = 2
    """The last checkpoints that are kept; that of the lowest validation loss is kept in addition."""
    reserve: int | None = None
    """Bytes per GPU beside torch's tensors; None for those that reserve.py computes."""
    buckets: Buckets | None = None
    """Sizes of the user's own DeepSpeed JSON; None for those that render writes."""
    own: Strategy | None = None
    """The layout of the user's own DeepSpeed JSON; None for a named strategy."""
    sequence_parallel: int = 1
    """Ranks that share each row."""
    activation_offload: bool = False
    """The inputs of checkpointed layers are kept on the host; those of CPU ranks are there anyway."""
    objective: Objective = OBJECTIVES["sft"]
    optimizer: Optimizer = OPTIMIZERS["adamw"]

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def own_length(self) -> int:
        """Tokens of the longest packed row that one rank holds."""
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
        """The method as it is under the strategy's engine."""
        return self.method.under(self.layout.engine)

    def added_by_objective(self, trained: int) -> AddedMemory:
        """Return the bytes of a rank that the objective adds, with so many trained parameters."""
        return self.objective.memory(self.micro_batch * (self.logits or self.own_length), trained)

    def parameters(self, model: ModelSpec) -> TrainedParameters:
        """Return the trained parameters. Raises UserError if a module to train is not in the model."""
        return _parameters(self.prepared_method, model, self.width)


@functools.lru_cache(maxsize=64)
def _parameters(method: Method, model: ModelSpec, width: int) -> TrainedParameters:
    return method.parameters(model, width)
