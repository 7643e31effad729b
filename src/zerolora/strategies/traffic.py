"""The collectives of an optimizer step, and the sizes that they depend on."""

from dataclasses import dataclass
from typing import Final, Literal

from zerolora.types import Attention

GATHER: Final = "all_gather"
SCATTER: Final = "reduce_scatter"
REDUCE: Final = "all_reduce"
Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
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
    """Linear modules, the output head included: stage 3 gathers one after another."""
    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    attended: float
    """Mean number of tokens that a token's scores are computed with: the whole packed row if a mask hides other rows,
    half of the token's own row if the kernel skips the rest."""
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

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step."""
        return self.micro_batch * self.length

    @property
    def kind(self) -> Literal["lora", "full"]:
        """Which parameters are trained."""
        return "lora" if self.frozen else "full"


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a step: their number, and the total bytes of their full buffers."""

    name: str
    kind: Kind
    scope: Scope
    """all: every rank. node: the ranks of a node. across: the ranks with the same local rank, one of each node."""
    size: float
    """Bytes."""
    calls: float
