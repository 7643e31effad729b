"""A teacher's distribution of each supervised token: its k most likely tokens, and all others as one bin.

Without that bin, the k probabilities would be normalised, and the student taught that nothing else can follow. With
k = vocabulary the divergence is the full one.
"""

import torch

from zerolora.train.head_loss import HeadLoss

LEAST_LOG = -100.0
"""The least log-probability of a teacher's bin, so that a bin of probability 0 adds 0."""
NO_MASS = -1e30
"""The logarithm of the mass of a student's rest without a token, which a teacher's bin of probability 0 multiplies."""


class Divergence(HeadLoss):
    """alpha * cross-entropy + (1 - alpha) * T² * KL(teacher || student), both at the temperature T in the divergence.

    T² keeps the gradient's size as T grows (arXiv 1503.02531, section 2). Values: this loss, the cross-entropy, KL.
    """

    outputs = 3

    def __init__(
        self, ids: torch.Tensor, log_probabilities: torch.Tensor, rest: torch.Tensor, temperature: float, alpha: float
    ) -> None:
        """ids and log_probabilities: of the teacher's most likely tokens, [supervised tokens, k]; rest: the logarithm
        of the probability of all others, [supervised tokens]."""
        self.ids, self.log_probabilities, self.rest = ids, log_probabilities, rest
        self.temperature, self.alpha = temperature, alpha

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, part: slice, gradient: bool) -> torch.Tensor:
        """Return the values of a chunk, [3, tokens]. The gradient of a token's logit is alpha (q - 1[label]) +
        (1 - alpha) T (q - p), with q - p of a token of the rest the student's share in it of the bins' difference."""
        ids, of_target = self.ids[part].long(), targets.unsqueeze(1)
        stored = torch.cat([self.log_probabilities[part].float(), self.rest[part].float().unsqueeze(1)], 1)
        # They are rounded: normalised again, the divergence is never negative.
        teacher_log = stored.clamp_min_(LEAST_LOG).log_softmax(1)
        teacher = teacher_log.exp()
        label, top = logits.gather(1, of_target).squeeze(1), logits.gather(1, ids)
        # The rest has its own largest logit, so that it has a gradient however far it is below the top.
        logits.scatter_(1, ids, -torch.inf)
        largest = logits.amax(1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)  # of no token, without a rest
        logits.sub_(largest)
        # At T = 1 both losses have the same distribution.
        warm = logits.exp_() if self.temperature == 1 else logits.div(self.temperature).exp_()
        mass, student_log, highest, total = _bins(warm, top / self.temperature, largest / self.temperature)
        student = student_log.exp()
        kl = (teacher * (teacher_log - student_log)).sum(1)
        weight, label_weight = (1 - self.alpha) * self.temperature, self.alpha
        change = (student - teacher).mul_(weight)
        if warm is logits:
            change.add_(student, alpha=label_weight)
        if gradient:
            warm.mul_(change[:, -1:] / mass)
        if warm is not logits:
            mass, student_log, highest, total = _bins(logits.exp_(), top, largest)
            of_label = student_log.exp_().mul_(label_weight)
            if gradient:
                logits.mul_(of_label[:, -1:] / mass).add_(warm)
                change.add_(of_label)
        if gradient:
            logits.scatter_(1, ids, change[:, :-1])
            logits.scatter_add_(1, of_target, logits.new_full((1, 1), -label_weight).expand_as(of_target))
        cross_entropy = total - (label - highest)
        loss = label_weight * cross_entropy + weight * self.temperature * kl
        return torch.stack([loss, cross_entropy, kl])


def _bins(rest: torch.Tensor, top: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the sum of the rest's exponentials, relative to its `largest` logit; the log-probabilities of the tokens
    on top and of the rest, [tokens, k + 1]; the highest logit, and the logarithm of all exponentials relative to it."""
    mass = rest.sum(1, keepdim=True).clamp_min_(1.0)  # which it is, unless there is no token
    highest = torch.maximum(top.amax(1, keepdim=True), largest)
    bins = torch.cat([top - highest, mass.log().add_(largest - highest)], 1)
    total = bins.logsumexp(1, keepdim=True)
    return mass, bins.sub_(total).clamp_min_(NO_MASS), highest.squeeze(1), total.squeeze(1)


class TopK(HeadLoss):
    """The distribution of a teacher: the k most likely of the first `vocabulary` tokens and the rest, at a temperature.

    Values: the tokens' numbers (fp32 has all up to 2^24), their log-probabilities, the logarithm of the rest, and the
    label's log-probability at T = 1.
    """

    def __init__(self, k: int, temperature: float, vocabulary: int) -> None:
        self.k, self.temperature, self.vocabulary = k, temperature, vocabulary
        self.outputs = 2 * k + 2

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, part: slice, gradient: bool) -> torch.Tensor:
        """Return the values of a chunk, [2 k + 2, tokens]."""
        assert not gradient, "a teacher is not trained"
        label = (logits.gather(1, targets.unsqueeze(1)) - logits.logsumexp(1, keepdim=True)).T
        logits.div_(self.temperature)
        values, ids = logits[:, : self.vocabulary].topk(self.k)
        total = logits.logsumexp(1, keepdim=True)
        logits.sub_(total).exp_().scatter_(1, ids, 0.0)
        return torch.cat([ids.T.float(), (values - total).T, logits.sum(1).log().unsqueeze(0), label])
