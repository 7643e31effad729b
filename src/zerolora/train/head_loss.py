"""The losses that a head computes from its logits, a chunk of tokens at a time (loss.py): cross-entropy by default.

An objective with a loss of its own makes one for each micro-batch (`Objective.head_loss`).
"""

from abc import ABC, abstractmethod

import torch


class HeadLoss(ABC):
    """Losses of each supervised token of a micro-batch, from its logits. Its tensors stay as they are: engines cast the
    tensors among a model's arguments."""

    outputs: int = 1
    """The values of a token: the loss that is trained, and further values without gradient."""

    @abstractmethod
    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, part: slice, gradient: bool) -> torch.Tensor:
        """Return the values of a chunk, [outputs, tokens], fp32.

        logits: [tokens, vocabulary], fp32, which it may write over. With `gradient`, they become the gradient of the
        first value. part: the chunk's place among the supervised tokens.
        """


class CrossEntropy(HeadLoss):
    """The cross-entropy of the targets."""

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, part: slice, gradient: bool) -> torch.Tensor:
        """Return the losses of a chunk, [1, tokens]."""
        of_target = targets.unsqueeze(1)
        logits.sub_(logits.amax(1, keepdim=True))
        wanted = logits.gather(1, of_target)
        total = logits.exp_().sum(1, keepdim=True)
        if gradient:
            logits.div_(total)  # the probabilities
            logits.scatter_add_(1, of_target, logits.new_full((1, 1), -1.0).expand_as(of_target))
        return (total.log() - wanted).view(1, -1)


CROSS_ENTROPY = CrossEntropy()
