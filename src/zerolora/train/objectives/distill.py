"""Distillation (arXiv 1503.02531): learns from the probabilities of a teacher, which the stage `teacher` computes once,
and from the labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolora.train.objectives.objective import OF_TOKENS, AddedMemory, Objective, Sequence, Values

if TYPE_CHECKING:
    import torch

    from zerolora.train.head_loss import HeadLoss

IDS, LOG_PROBABILITIES, REST, LABEL = "teacher_ids", "teacher_log_probabilities", "teacher_rest", "teacher_label"
"""Columns of each row: of every supervised token the k most likely tokens, their log-probabilities, and the logarithms
of the rest's and of the label's probability."""
STORED = 4 + 2
"""Bytes of one of the k tokens: its number, and its log-probability in fp16."""
STORED_BESIDE = 4 + 4
"""Bytes of the rest and of the label, of each supervised token."""
WINDOW = 1 << 18
"""Supervised tokens whose values the stage `teacher` writes at a time: 100 MB at k = 64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation(Objective):
    """alpha times the cross-entropy of the labels plus (1 - alpha) T² times the divergence from the teacher."""

    teacher: str | None = None
    adapter: str | None = None
    top_k: int = 64
    temperature: float = 1.0
    alpha: float = 0.5

    def sequences(self, row: Sequence) -> list[Sequence]:
        """Return the row's own sequence, with the teacher's values of its supervised tokens."""
        own = {name: row[name] for name in (*self.columns, "source")}
        return [own | {OF_TOKENS: {name: row[name] for name in self.of_tokens}}]

    def head_loss(self, batch: Mapping[str, Any]) -> "HeadLoss":
        """Return the loss of a micro-batch's tokens."""
        from zerolora.train.top_k import Divergence

        of_tokens = batch[OF_TOKENS]
        rest = of_tokens[REST]
        ids, known = (of_tokens[name].view(len(rest), -1) for name in (IDS, LOG_PROBABILITIES))
        return Divergence(ids, known, rest, self.temperature, self.alpha)

    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        """Return loss and metrics of each token."""
        loss, cross_entropy, kl = losses
        of_teacher = -batch[OF_TOKENS][LABEL]
        each = {"loss": loss, "cross_entropy": cross_entropy.detach(), "kl": kl.detach()}
        return {
            name: Values(value, batch["source"])
            for name, value in (each | {"teacher_cross_entropy": of_teacher}).items()
        }

    def remark(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning if the teacher predicts the labels worse than the model does before its first step."""
        ours, theirs = metrics["cross_entropy"], metrics["teacher_cross_entropy"]
        if theirs < ours:
            return None
        return (
            f"the teacher predicts the labels of the first step no better than this model does before training: its "
            f"cross-entropy is {theirs:.3g}, the model's {ours:.3g}; distillation teaches its mistakes too"
        )

    def memory(self, supervised: int, trained: int) -> AddedMemory:
        """Return the bytes of the teacher's values and of the head's three, and of their gradients and the teacher's
        losses (benchmarks/memory/trace.py)."""
        of_teacher = STORED * self.top_k + STORED_BESIDE
        return AddedMemory(activations=18 * supervised, batch=(of_teacher + 12) * supervised)

    def chunk_memory(self, tokens: float, vocabulary: int, width: int) -> float:
        """Return the bytes beside a chunk's logits: of each of the k tokens its number in 64 bits and eight fp32
        values, and at T ≠ 1 a second distribution; they are gone before the copy of the gradient in `width` bytes."""
        own = (8 + 8 * 4) * self.top_k + 4 * vocabulary * (self.temperature != 1)
        return tokens * max(0, own - vocabulary * width * (width < 4))

    def logit_bytes(self) -> float:
        """Return the bytes of the second distribution at T ≠ 1: written, read and written twice, read to add it."""
        return 0.0 if self.temperature == 1 else 9 * 4.0

    def row_bytes(self, supervised: int) -> int:
        """Return the bytes on disk of the teacher's values of `supervised` tokens."""
        return (STORED * self.top_k + STORED_BESIDE) * supervised


OBJECTIVE = Distillation(
    name="distill",
    order=70,
    taught=True,
    own_head_loss=True,
    units={"supervised token": "supervised"},
    terms={"loss": "supervised token"},
    metrics=dict.fromkeys(("cross_entropy", "kl", "teacher_cross_entropy"), "supervised token"),
    of_tokens=(IDS, LOG_PROBABILITIES, REST, LABEL),
    by_token=True,
    costly=("top_k", "temperature"),
)
