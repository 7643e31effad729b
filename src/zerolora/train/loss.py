"""The losses of each supervised token, the input of objectives, computed in chunks: cross-entropy, or what an
objective computes from the logits itself (head_loss.py).

Logits are the largest tensor of a step: [tokens, vocabulary], in the model's precision and again in fp32. Here they are
computed only for positions before supervised tokens, a chunk at a time. With a frozen output head a chunk's gradient,
[tokens, hidden], follows at once, and the logits are freed (arXiv 2410.10989, 3.2). With a trained head they are
computed again in the backward pass, as the head's gradient depends on the factors of the losses.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from zerolora.compat.peft_patches import without_rows
from zerolora.compat.transformers_patches import replace_forward
from zerolora.machine.devices import moved
from zerolora.model.spec import chunk_size
from zerolora.train.attention import lengths
from zerolora.train.head_loss import CROSS_ENTROPY, HeadLoss
from zerolora.train.kernels import LOSSES, FusedLosses
from zerolora.train.sequence_parallel import sequence


def token_losses(model: Any, batch: dict[str, Any], head_loss: HeadLoss | None = None) -> torch.Tensor:
    """Return the cross-entropy of each supervised token, [supervised tokens], or the values of a `head_loss`, [outputs,
    supervised tokens], of which only the first have a gradient. fp32."""
    own = {} if head_loss is None else {"head_loss": head_loss}
    each = model(**_inputs(batch), use_cache=False, supervised=batch["supervised"], targets=batch["targets"], **own)
    assert isinstance(each, torch.Tensor)
    return each.view(-1) if head_loss is None else each


def next_logits(model: Any, batch: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Return the logits at some positions of the flattened batch: [positions, vocabulary]."""
    logits = model(**_inputs(batch), use_cache=False, supervised=positions)
    assert isinstance(logits, torch.Tensor)
    return logits


def logits_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a batch, [packed rows, longest, vocabulary]. Collective among ranks that share rows."""
    logits = model(**_inputs(batch), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return sequence.whole(logits.view(*batch["input_ids"].shape, -1))


def _inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a model's inputs, for calls without cache: with one, models ignore restarting positions of packed rows."""
    lengths.set(batch["lengths"], batch.get("branches", ()), packed="position_ids" in batch)
    names = ("input_ids", "attention_mask", "position_ids")
    inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
    return inputs | _boundaries(inputs) if lengths.boundaries and "position_ids" in inputs else inputs


def _boundaries(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tokens of all packed rows as one, and where each row ends, as transformers' mixing modules want them
    (modeling_flash_attention_utils.py, FlashAttentionKwargs)."""
    rows = [length for row in lengths.of_rows or [] for length in row]
    lengths.set([rows])
    joined = {name: each.view(1, -1) for name, each in inputs.items()}
    ends = lengths.ends(1, sum(rows), joined["input_ids"].device)
    number = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(rows))
    return joined | {
        "seq_idx": moved(number, ends.device).view(1, -1),
        **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(rows), "max_length_k": max(rows)},
    }


def make_chunked(model: Any) -> None:
    """Let a base model take `supervised` and `targets`, both [supervised tokens], and return their losses, fp32: [1,
    supervised tokens], or those of a `head_loss`.

    `supervised` are the positions in the flattened batch that predict the `targets`; without targets, their logits are
    returned. Without both nothing changes.
    """
    replace_forward(model, _model_forward, _head_forward)
    model.logits_are_plain = _decoder(model) is not model


def _decoder(model: Any) -> Any:
    """Return the module whose hidden states the head reads. Some classes have themselves as their decoder, or the head,
    as Llama 4 and ModernBERT's decoder."""
    decoder = model.get_decoder()
    return model.base_model if decoder is model or decoder is model.get_output_embeddings() else decoder


def make_whole(model: Any) -> None:
    """Compute the losses from the model's own logits, unchunked: for a model that post-processes them."""
    model.logits_are_plain = False


def _model_forward(
    model: Any,
    *arguments: Any,
    supervised: Any = None,
    targets: Any = None,
    head_loss: HeadLoss = CROSS_ENTROPY,
    **inputs: Any,
) -> Any:
    if supervised is None:
        return type(model).forward(model, *arguments, **inputs)
    head = model.get_output_embeddings()
    linear = without_rows(head)
    if not model.logits_are_plain or not isinstance(linear, torch.nn.Linear):
        logits = type(model).forward(model, *arguments, **inputs).logits
        chosen = logits.flatten(0, 1).index_select(0, supervised).float()
        if targets is None:
            return chosen
        return of_logits(chosen, targets, head_loss)
    inputs = {name: value for name, value in inputs.items() if value is not None and name != "return_dict"}
    hidden = _decoder(model)(*arguments, **inputs).last_hidden_state
    # Read before the head is called: stage 3 then counts its weight as used by the model as well, and fetches fewer
    # layers ahead while it is gathered (deepspeed/runtime/zero/parameter_offload.py, ZeROOrderedDict).
    weight = linear.weight
    dtype, trained = weight.dtype, weight.requires_grad
    del weight
    # Some classes, as Mamba's, add up their layers in fp32 and cast before the head.
    chosen = hidden.flatten(0, 1).index_select(0, supervised).to(dtype)
    del hidden
    if targets is None:
        return head(chosen)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # as Gemma's
    return head(chosen, targets, softcap, trained, head_loss)


def _head_forward(
    head: Any,
    hidden: torch.Tensor,
    targets: Any = None,
    softcap: float | None = None,
    trained: bool = False,
    head_loss: HeadLoss = CROSS_ENTROPY,
    numbers: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    # Inside the head's own call, so that stage 3 has gathered its weight. `rows` are the trained rows of added tokens,
    # which replace the weight's own rows `numbers` (module_forwards.py).
    if targets is None:
        logits: torch.Tensor = type(head).forward(head, hidden)
        if numbers is None or rows is None:
            return logits
        return logits.index_copy(-1, numbers, torch.nn.functional.linear(hidden, rows.to(hidden.dtype)))
    if rows is not None:
        rows = rows.to(hidden.dtype)
    fused = getattr(head, LOSSES, None) if head_loss is CROSS_ENTROPY else None
    if trained:
        losses = TrainedHeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, softcap, head_loss, fused
        )
    else:
        losses = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, softcap, head_loss, numbers, rows, fused
        )
    assert isinstance(losses, torch.Tensor)
    return losses


def of_logits(logits: torch.Tensor, targets: torch.Tensor, head_loss: HeadLoss) -> torch.Tensor:
    """Return the values of a head loss, [outputs, tokens], of logits that a model has computed itself, [tokens,
    vocabulary], fp32."""
    losses = WholeLoss.apply(logits, targets, head_loss)  # type: ignore[no-untyped-call]
    assert isinstance(losses, torch.Tensor)
    return losses


class WholeLoss(torch.autograd.Function):
    """A head loss of whole logits, whose gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, head_loss: HeadLoss) -> torch.Tensor:
        """Return the values [outputs, tokens] of logits [tokens, vocabulary]."""
        own, needed = logits.clone(), ctx.needs_input_grad[0]
        losses = head_loss(own, targets, slice(None), needed)
        if needed:
            ctx.save_for_backward(own)
        return losses

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0][0].unsqueeze(1), None, None


class Added(NamedTuple):
    """Rows that replace some of a head's, and the output for their logits' gradient."""

    numbers: torch.Tensor
    rows: torch.Tensor
    changes: torch.Tensor
    """[tokens, added tokens]"""


class ChunkedLoss(torch.autograd.Function):
    """A head loss after a frozen linear head, whose gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        softcap: float | None,
        head_loss: HeadLoss = CROSS_ENTROPY,
        numbers: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        fused: FusedLosses | None = None,
    ) -> torch.Tensor:
        """Return the values [outputs, tokens] of hidden states [tokens, hidden] and targets [tokens].

        The trained `rows`, [added tokens, hidden], replace the rows `numbers` of the weight: the gradient of their
        logits, [tokens, added tokens], and the hidden states are saved.
        """
        losses = torch.empty(head_loss.outputs, len(targets), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        changes = None if rows is None else hidden.new_empty(len(hidden), len(rows))
        for part in _chunks(hidden, weight):
            into = None if gradient is None else gradient[part]
            added = None
            if numbers is not None and rows is not None and changes is not None:
                added = Added(numbers, rows, changes[part])
            losses[:, part] = _chunk(hidden, weight, bias, targets, part, softcap, head_loss, into, added, fused)
        if gradient is not None:
            ctx.save_for_backward(gradient, *(() if changes is None else (changes, hidden)))
        return losses

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the hidden states and of the rows of added tokens."""
        gradient, *added = ctx.saved_tensors
        each = outputs[0][0].unsqueeze(1).to(gradient.dtype)
        of_rows = (added[0] * each).T @ added[1] if added else None
        return gradient * each, None, None, None, None, None, None, of_rows, None


class TrainedHeadLoss(torch.autograd.Function):
    """A head loss after a trained linear head, whose logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        softcap: float | None,
        head_loss: HeadLoss = CROSS_ENTROPY,
        fused: FusedLosses | None = None,
    ) -> torch.Tensor:
        """Return the values [outputs, tokens] of hidden states [tokens, hidden] and targets [tokens]."""
        losses = torch.empty(head_loss.outputs, len(targets), dtype=torch.float32, device=hidden.device)
        for part in _chunks(hidden, weight):
            losses[:, part] = _chunk(hidden, weight, bias, targets, part, softcap, head_loss, None, None, fused)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.softcap, ctx.head_loss = softcap, head_loss
        return losses

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the hidden states, the weight and the bias."""
        hidden, weight, bias, targets = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        for part in _chunks(hidden, weight):
            logits, slope = _logits(hidden[part], weight, bias, ctx.softcap, True)
            ctx.head_loss(logits, targets[part], part, True)
            if slope is not None:
                logits.mul_(slope)
            change = logits.mul_(outputs[0][0, part].unsqueeze(1)).to(weight.dtype)
            torch.mm(change, weight, out=of_hidden[part])
            of_weight.addmm_(change.T, hidden[part])
            if of_bias is not None:
                of_bias.add_(change.sum(0))
        return of_hidden, of_weight, of_bias, None, None, None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    """Yield the chunks of tokens."""
    size = chunk_size(len(hidden), hidden.shape[1], len(weight))
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    slopes: bool,
    added: Added | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits of a chunk in fp32, and with `slopes` the derivative of their softcap, if they have one."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if added is not None:
        logits[:, added.numbers] = torch.nn.functional.linear(hidden, added.rows).float()
    slope = None
    if softcap:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1) if slopes else None
        logits.mul_(softcap)
    return logits, slope


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    part: slice,
    softcap: float | None,
    head_loss: HeadLoss,
    gradient: torch.Tensor | None,
    added: Added | None = None,
    fused: FusedLosses | None = None,
) -> torch.Tensor:
    """Return the values of a chunk, and write its hidden states' gradient to `gradient`."""
    hidden, targets = hidden[part], targets[part]
    if fused is not None and added is None:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        losses = fused(logits, targets, softcap, gradient is not None)
        if gradient is not None:
            torch.mm(logits, weight, out=gradient)
        return losses
    logits, slope = _logits(hidden, weight, bias, softcap, gradient is not None, added)
    losses = head_loss(logits, targets, part, gradient is not None)
    if gradient is not None:
        if slope is not None:
            logits.mul_(slope)
        change = logits.to(weight.dtype)
        if added is not None:
            torch.index_select(change, 1, added.numbers, out=added.changes)
            change.index_fill_(1, added.numbers, 0)
        torch.mm(change, weight, out=gradient)
        del change
        if added is not None:
            gradient.addmm_(added.changes, added.rows)
    return losses
