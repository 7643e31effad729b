"""The interface of a strategy: its sharding and offload, collectives, requirements and rendered options."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NamedTuple

from zerolora.conflict import Conflict
from zerolora.errors import UserError
from zerolora.types import Attention, Device, EngineName, Precision

Placement = Literal["gpu", "cpu", "nvme"]
Compiled = Literal["async_io", "quantizer"]
"""Operations of DeepSpeed that are compiled where they are first used (deepspeed/ops/op_builder/)."""


class Reason(NamedTuple):
    """One value of a rendered config."""

    key: str
    """Path of the value, as in zero_optimization.offload_param.device."""
    value: Any
    reason: str
    """Why it has this value."""
    source: str
    """A file of DeepSpeed or torch, a paper, or a thread as in DeepSpeed#1234."""


def nested(reasons: Iterable[Reason]) -> dict[str, Any]:
    """Return the nested config that `reasons` list."""
    config: dict[str, Any] = {}
    for entry in reasons:
        *path, last = entry.key.split(".")
        section = config
        for name in path:
            section = section.setdefault(name, {})
        section[last] = entry.value
    return config


@dataclass(frozen=True)
class Buckets:
    """The size keys of zero_optimization, in elements; 0 where a strategy does not use one."""

    reduce: int = 0
    """reduce_bucket_size: gradients that are reduced together."""
    allgather: int = 0
    """allgather_bucket_size: updated weights that are gathered together (stages 1 and 2)."""
    prefetch: int = 0
    """stage3_prefetch_bucket_size: weights gathered ahead of their use."""
    persistence: int = 0
    """stage3_param_persistence_threshold: weights smaller than this are never sharded."""
    live: int = 0
    """stage3_max_live_parameters: the most gathered weights at a time."""
    overlap: bool = False
    """overlap_comm: reduce and gather during computation, at the price of a second bucket."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that its buckets depend on: its width, and numbers of parameters."""

    hidden: int
    trained: int
    layer: int
    """Of one layer."""
    largest: int
    """Of the largest module."""
    total: int
    """Of the base model."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The hardware and settings that a strategy must support."""

    device: Device
    precision: Precision
    nodes: int
    ranks_per_node: int
    nvme: str | None
    """Directory on a local disk for offloaded states."""
    unpacks: bool = False
    """The method computes with unpacked weights of quantized modules outside of their forward pass."""
    frozen_type: str | None = None
    """The type of a quantized base model: nf4, fp4, int8, or None."""

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node


INT8_WHOLE = "train.quantization.type is int8, of which bitsandbytes keeps a whole copy on every rank"
"""Why int8 weights cannot be sharded (bitsandbytes/nn/modules.py, Linear8bitLt: state.CB)."""


GATHER: Final = "all_gather"
SCATTER: Final = "reduce_scatter"
REDUCE: Final = "all_reduce"
EXCHANGE: Final = "all_to_all"
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Scope = Literal["all", "node", "across"]
Behind = Literal["nothing", "first_forward", "last_backward", "computation"]


@dataclass(frozen=True)
class PassWork:
    """The work of all layers in a pass of one micro-step of one rank."""

    flops: float
    """Floating-point operations of matrix products, beside `scores`."""
    scores: float
    """The same of attention's fused kernel, over all pairs of tokens of a packed row."""
    moved: float
    """Bytes that all other operations read and write."""
    operations: float


@dataclass(frozen=True)
class LayerWork:
    """The work of all layers in a micro-step, counted in passes of the model's class."""

    forward: PassWork
    backward: PassWork


@dataclass(frozen=True)
class StepWork:
    """One optimizer step of one rank: `accumulation` micro-steps of `micro_batch` rows of `length` tokens."""

    length: int
    """Tokens of a packed row, padding included."""
    micro_batch: int
    """Packed rows of one forward pass."""
    accumulation: int
    """Forward passes of a step."""
    frozen: int
    """Frozen parameters Ψ, quantized ones as fewer of the run's precision; 0 = full fine-tuning."""
    trainable: int
    """Trained parameters φ."""
    matmul: int
    """Parameters of the base model's linear modules, the output head included (also where it is tied)."""
    modules: int
    """Linear modules, the output head included: stage 3 gathers them one by one."""
    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    attended: float
    """Mean number of scores of a token: the packed row's tokens with a mask, half of its own row's without one."""
    supervised: float
    """Share of positions for which logits are computed."""
    checkpointing: bool
    attention: Attention
    width: Literal[2, 4]
    """Bytes of a number in training."""
    kernels: tuple[str, ...] = ()
    """What liger-kernel computes (model/fused_kernels.py)."""
    live: int = 1_000_000_000
    """stage3_max_live_parameters; DeepSpeed's default."""
    outside: int = 0
    """Parameters outside the layers: embedding, head, last norm."""
    key_heads: int = 0
    """Key-value heads."""
    sequence_parallel: int = 1
    """Ranks that share each row."""
    idle: int = 0
    """Of `matmul`: weights of experts that a token is not routed to."""
    merged: int = 0
    """Of `trainable`: factors that are multiplied into the experts' weights, not with every token."""
    merging: int = 0
    """Multiplications of that in a pass, whatever the tokens."""
    update_traffic: float = 80.0
    """Bytes that the optimizer reads and writes for each trained parameter on a GPU; by default AdamW's."""
    update_on_host: float = 1.0
    """Time of the optimizer's step on the host, relative to AdamW's."""
    update_states: float = 8.0
    """Bytes of the optimizer's states for each trained parameter; by default AdamW's."""
    decoded: int = 0
    """Of `matmul`: quantized weights, which each pass decodes."""
    decoded_modules: int = 0
    """Their modules."""
    forwards_before: int = 0
    """Forward passes of the global batch before the step, without gradient."""
    head_bytes: float = 0.0
    """Bytes that the objective's own head loss moves for each logit, beside those of cross-entropy."""
    offloads_inputs: bool = False
    """Inputs of checkpointed layers are moved to the host and back."""
    prefix: int = 0
    """Tokens that all rows begin with, computed once a micro-step (train/common_prefix.py)."""
    rows: float = 1.0
    """Sequences of a packed row."""
    shared_prompts: float = 0.0
    """Tokens of a packed row that both sequences of a pair begin with, computed once a pair."""
    shared_prompt: float = 0.0
    """Tokens of such a beginning, in the mean over its tokens."""
    counted: LayerWork | None = None
    """The layers' work, where it is counted in the model's class; None where the cost model has it."""

    @property
    def tokens(self) -> int:
        """Tokens of the rank's rows in a micro-step."""
        return self.micro_batch * -(-self.length // self.sequence_parallel)

    @property
    def saved(self) -> float:
        """Those of them that are not computed again, as rows share a prefix."""
        return max(self._saved_by_prefix, self.micro_batch * self.shared_prompts)

    @property
    def saved_scores(self) -> float:
        """Scores of a head that are not computed again."""
        pairs = self.micro_batch * self.shared_prompts
        if pairs > self._saved_by_prefix:
            return pairs * self.shared_prompt / 2
        return self._saved_by_prefix * self.prefix / 2

    @property
    def _saved_by_prefix(self) -> float:
        return self.prefix * max(0.0, self.micro_batch * self.rows - 1)

    @property
    def computed(self) -> float:
        """Tokens that the rank computes in a micro-step."""
        return max(1.0, self.tokens - self.saved)

    @property
    def kind(self) -> Literal["lora", "full"]:
        """Which parameters are trained."""
        return "lora" if self.frozen else "full"


@dataclass(frozen=True)
class Collective:
    """All collectives of one name in a step."""

    name: str
    kind: Kind
    scope: Scope
    """all: every rank. node: the ranks of a node. across: the ranks with the same local rank, one of each node."""
    size: float
    """Total bytes of the full buffers."""
    calls: float
    behind: Behind = "nothing"
    """The computation that it can overlap with on a GPU: none, which waits for it; the forward pass of the step's first
    micro-batch; the backward pass of its last one, which makes gradients one by one; or all of it."""
    after: float = 0.0
    """The share that begins when there is nothing more to compute: the last bucket of gradients."""
    ranks: int | None = None
    """Ranks that take part, if fewer than those of the scope."""


def exchanges(work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
    """Yield the exchanges of sequence parallelism in one step: query, key and value before attention, its result after
    it, and their gradients (train/sequence_parallel.py). Counted."""
    ranks = work.sequence_parallel
    if ranks == 1:
        return
    heads = 2 * (work.heads + work.key_heads)
    passes = work.accumulation * work.layers * (work.forwards_before + (3 if work.checkpointing else 2))
    scope: Scope = "node" if ranks_per_node % ranks == 0 else "all"
    size = passes * work.tokens * heads * work.head_dim * work.width
    yield Collective("all_to_all heads and tokens", EXCHANGE, scope, size, 2 * passes, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How model states are distributed over ranks, GPUs, hosts and disks.

    Two strategies of one engine are equal if their layout is equal; names and descriptions are not compared.
    """

    engine: ClassVar[EngineName]
    name: str = field(compare=False)
    """The name in render.strategy."""
    about: str = field(compare=False)
    """Description for the reference."""
    sharded: str = field(compare=False)
    """Sharded and offloaded states, for the table in docs/choice.md."""
    costs: str = field(compare=False)
    """Its cost, for the same table."""

    risk: str | None = field(default=None, compare=False)
    """Why the canary compares its first losses with a safe strategy's (planner/choice.py), if it does."""

    stage: int
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP counts as 3)."""
    optimizer: Placement = "gpu"
    """Where fp32 master weights and Adam moments are kept."""
    parameters: Placement = "gpu"
    """Where a rank's shard of the weights is kept between uses (stage 3 only)."""
    within_node: bool = False
    """Weights are gathered inside a node only: hpZ keeps a second shard of them for the backward pass (arXiv
    2306.10209, 4.2), FSDP's hybrid sharding replicates them on every node."""
    quantized: bool = False
    """Weights are gathered as int8 with scales (qwZ, arXiv 2306.10209, 4.1); in fp16, frozen ones are stored so too."""

    quantized_gradients: bool = False
    """Gradients are reduced between nodes as int4 with scales (qgZ, arXiv 2306.10209, 4.3)."""

    def owners(self, ranks: int, ranks_per_node: int) -> int:
        """Return the number of ranks among which the optimizer states are sharded."""
        return ranks if self.stage else 1

    def conflict(self, target: Target) -> Conflict | None:
        """Return why the strategy cannot run on a target; None if it can."""
        return None

    def check(self, target: Target) -> None:
        """Raise UserError if the strategy cannot run on a target."""
        if conflict := self.conflict(target):
            raise UserError(f"render.strategy is {self.name}, and {conflict.problem}; {conflict.remedy}")

    def buckets(self, model: ModelSizes, on_gpu: bool) -> Buckets:
        """Return the bucket sizes for a model."""
        return Buckets()

    @abstractmethod
    def options(self, buckets: Buckets, target: Target) -> Iterable[Reason]:
        """Yield the engine's options, each with its reason."""

    @abstractmethod
    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        """Yield the collectives of one optimizer step."""

    def host_operations(self, work: StepWork) -> float:
        """Return the host work that the engine adds to a micro-step, in operations of the model."""
        return 0.0

    def gathered(self, work: StepWork) -> float:
        """Return the number of parameters gathered in one step over all micro-steps, counting every gather."""
        return 0.0

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """The operations that a rank compiles when training starts."""
        return ()

    @property
    def offloads(self) -> bool:
        """Whether any state leaves the GPU."""
        return (self.optimizer, self.parameters) != ("gpu", "gpu")

    @property
    def on_disk(self) -> bool:
        """Whether any state is kept on disk."""
        return "nvme" in (self.optimizer, self.parameters)
