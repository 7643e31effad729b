"""The collectives of an optimizer step, and the sizes that they depend on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from zerolora.types import Attention

GATHER: Final = "all_gather"
SCATTER: Final = "reduce_scatter"
REDUCE: Final = "all_reduce"
EXCHANGE: Final = "all_to_all"
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Scope = Literal["all", "node", "across"]


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
    """Frozen parameters Ψ; 0 = full fine-tuning."""
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
    """Mean number of scores of a token: the whole packed row if a mask hides other rows, half of the token's own row if
    the kernel skips the rest."""
    supervised: float
    """Share of positions for which logits are computed."""
    checkpointing: bool
    attention: Attention
    width: Literal[2, 4]
    """Bytes of a number in training."""
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
    """Bytes that the optimizer reads and writes for each trained parameter; by default AdamW's."""
    update_states: float = 8.0
    """Bytes of the optimizer's states for each trained parameter; by default AdamW's."""
    forwards_before: int = 0
    """Forward passes of the global batch before the step, without gradient."""
    offloads_inputs: bool = False
    """Inputs of checkpointed layers are moved to the host and back."""

    @property
    def tokens(self) -> int:
        """Tokens that the rank computes in a micro-step."""
        return self.micro_batch * -(-self.length // self.sequence_parallel)

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
    yield Collective("all_to_all heads and tokens", EXCHANGE, scope, size, 2 * passes, ranks)
