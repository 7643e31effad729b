"""The loss of a causal language model: of supervised tokens only, a chunk of them at a time.

Logits are the widest tensor of a step: [tokens, vocabulary], in the model's precision and again in fp32. Here they are
computed for the positions before supervised tokens only, and never all at once: with a frozen output head a chunk's
gradient is known as soon as its logits are, so the gradient, [tokens, hidden], is kept and the logits are freed
(arXiv 2410.10989, 3.2).
"""

from typing import Any

import torch

from zerolora.compat.transformers import replace_forward
from zerolora.logit_chunks import chunk_size
from zerolora.train.attention import lengths


def loss_sum(model: Any, batch: dict[str, Any], sources: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of the batch's supervised tokens, fp32, and its parts by source, detached."""
    each = losses(model, batch)
    parts = torch.zeros(sources, dtype=torch.float32, device=each.device)
    parts.index_add_(0, batch["source"], each.detach())
    return each.sum(), parts


def losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the cross-entropy of each supervised token, fp32: [supervised tokens]."""
    each = model(**_inputs(batch), use_cache=False, supervised=batch["supervised"], targets=batch["targets"])
    assert isinstance(each, torch.Tensor)
    return each


def logits_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a batch, [packed rows, longest, vocabulary]."""
    logits = model(**_inputs(batch), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def _inputs(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a model is called with. Never with a cache: with one, models ignore that positions restart, and rows
    of a packed row see each other."""
    lengths.set(batch["lengths"])
    return {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}


def make_chunked(model: Any) -> None:
    """Let a base model be called with `supervised` and `targets`, and return the losses of these tokens, fp32.

    `supervised` are the positions in the flattened batch before those of the `targets`; both are [supervised tokens].
    Called without them the model is unchanged.
    """
    replace_forward(model, _model_forward, _head_forward)
    model.logits_are_plain = True


def make_whole(model: Any) -> None:
    """Take the losses from the model's own logits, all computed at once: for a model that does more to them than
    multiply by its head."""
    model.logits_are_plain = False


def _model_forward(model: Any, *arguments: Any, supervised: Any = None, targets: Any = None, **inputs: Any) -> Any:
    if supervised is None:
        return type(model).forward(model, *arguments, **inputs)
    head = model.get_output_embeddings()
    if not model.logits_are_plain or not isinstance(head, torch.nn.Linear) or head.weight.requires_grad:
        logits = type(model).forward(model, *arguments, **inputs).logits
        chosen = logits.flatten(0, 1).index_select(0, supervised).float()
        return torch.nn.functional.cross_entropy(chosen, targets, reduction="none")
    inputs = {name: value for name, value in inputs.items() if value is not None and name != "return_dict"}
    hidden = model.get_decoder()(*arguments, **inputs).last_hidden_state
    chosen = hidden.flatten(0, 1).index_select(0, supervised)
    del hidden
    return head(chosen, targets, _softcap(model.config))


def _head_forward(head: Any, hidden: torch.Tensor, targets: Any = None, softcap: float | None = None) -> torch.Tensor:
    # Inside the head's own call, so that stage 3 has gathered its weight.
    if targets is None:
        logits: torch.Tensor = type(head).forward(head, hidden)
        return logits
    losses = ChunkedLoss.apply(hidden, head.weight, head.bias, targets, softcap)  # type: ignore[no-untyped-call]
    assert isinstance(losses, torch.Tensor)
    return losses


def _softcap(config: Any) -> float | None:
    """Return the bound of a model's logits, as Gemma's have one."""
    return getattr(config.get_text_config(), "final_logit_softcapping", None)


class ChunkedLoss(torch.autograd.Function):
    """Cross-entropy behind a frozen linear head, with its gradient made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return the losses [tokens] of hidden states [tokens, hidden] and targets [tokens]."""
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        size = chunk_size(len(targets), hidden.shape[1], len(weight))
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            into = None if gradient is None else gradient[part]
            losses[part] = _chunk(hidden[part], weight, bias, targets[part], softcap, into)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the hidden states."""
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].unsqueeze(1).to(gradient.dtype), None, None, None, None


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    softcap: float | None,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Return the losses of a chunk, and write the gradient of its hidden states."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    slope = None
    if softcap:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1) if gradient is not None else None
        logits.mul_(softcap)
    of_target = targets.unsqueeze(1)
    logits.sub_(logits.amax(1, keepdim=True))
    wanted = logits.gather(1, of_target)
    total = logits.exp_().sum(1, keepdim=True)
    if gradient is not None:
        logits.div_(total)  # the probabilities
        logits.scatter_add_(1, of_target, logits.new_full((1, 1), -1.0).expand_as(of_target))
        if slope is not None:
            logits.mul_(slope)
        torch.mm(logits.to(weight.dtype), weight, out=gradient)
    return (total.log() - wanted).squeeze(1)
