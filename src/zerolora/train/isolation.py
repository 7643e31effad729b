"""Tests of the loaded model before the first step: its loss is the intended one, packed rows do not see each other, and
rows with a common prefix, computed once, are as if alone. Modules that mix the rows of a packed row are found, and
computed row by row.

Whether they are depends on the architecture and on the implementation of attention, and nothing fails if they do: the
loss is only slightly wrong. So it is tested on the model itself.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from zerolora.compat.transformers_patches import keeps_rows_apart
from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError
from zerolora.machine.devices import on_gpu
from zerolora.model.foreign import reason
from zerolora.model.spec import FEWEST
from zerolora.model.weight_files import few
from zerolora.train import kernels
from zerolora.train.attention import IMPLEMENTATIONS, NAME, lengths
from zerolora.train.common_prefix import Group
from zerolora.train.feed import Feed, PackedRow, collate, joined, padding
from zerolora.train.loss import logits_of, make_whole, next_logits, token_losses
from zerolora.train.mixing_modules import FIRST, MixingModule, PackedTrial, compute_row_by_row, find
from zerolora.train.non_finite import check_finite
from zerolora.train.objectives.objective import by_sequence
from zerolora.train.sequence_parallel import sequence
from zerolora.types import Precision

LENGTHS = (7, 9)
"""Tokens of the two rows: short, and of different lengths, to reveal a shift of one row against the other."""
MARGIN = 25
"""Allowed rounding over the type's epsilon. The 30 layers of SmolLM2-135M differ by 2e-6 (17 eps) in fp32, 0.004
(4 eps) in fp16 and 0.04 (5 eps) in bf16."""
LEAST_ROUNDING = 1e-3
"""Allowed in any type: fp32's share of MARGIN would be 3e-6, too tight for models deeper than SmolLM2."""


def isolate(engine: Any, base: Any, device: torch.device) -> list[str]:
    """Compute the modules that mix the rows of a packed row by row, if rows see each other; return their paths. Where
    fla, mamba_ssm and causal_conv1d compute them, they get the rows' boundaries instead, if that isolates the rows.

    `base` is the model under the adapter. Raises UserError as check_isolation. Collective.
    """
    fault = isolation_fault(engine, base.config, device)
    if not any(_of_any_rank([fault is not None], device)) or sequence.size > 1:
        if fault:
            raise UserError(fault)
        return []
    modules = _mixing(engine, base, device)
    if base.config._attn_implementation == NAME and keeps_rows_apart(base.get_submodule(each.path) for each in modules):
        lengths.boundaries = True
        kept = isolation_fault(engine, base.config, device) is None
        lengths.boundaries = not any(_of_any_rank([not kept], device))
        if lengths.boundaries:
            return []
    engine.gather_for_rows([each.path for each in modules])
    compute_row_by_row(base, modules)
    paths = [each.path for each in modules]
    try:
        check_isolation(engine, base.config, device)
    except UserError:
        raise
    except Exception as error:  # a module may count on all tokens, and raise errors of any type
        raise UserError(
            f"pack.packing is on, but {few(paths)}, which would mix the rows of a packed row, cannot be computed row "
            f"by row: {reason(error)}; set pack.packing: off"
        ) from None
    return paths


def check_isolation(model: Any, config: Any, device: torch.device) -> None:
    """Raise UserError if a row of a packed row sees another one, or has other logits than alone.

    `model` is the engine, `config` that of the base model. Collective: every rank makes the same two forward passes.
    Restores training mode and random state.
    """
    if fault := isolation_fault(model, config, device):
        raise UserError(fault)


def isolation_fault(model: Any, config: Any, device: torch.device) -> str | None:
    """Return what check_isolation raises, None if rows are isolated."""
    draw = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    one, other_one, two, other_two = (_row(vocabulary, length, draw) for length in LENGTHS for _ in range(2))
    with _evaluating(model, device):
        # All in one forward pass: the common parts of two packed rows are then computed in the same way, without
        # rounding to allow for, in any precision.
        packed = _logits(model, [[one, two], [other_one, two], [one, other_two], [one, two]], True, device)
        alone = _logits(model, [[two]], False, device)[0]
    first, second = packed.split(LENGTHS, dim=1)
    noise = _largest(packed[0] - packed[3])  # 0, unless a kernel sums in another order each time
    for who, whom, seen in (("second", "first", second[0] - second[1]), ("first", "second", first[0] - first[2])):
        difference = _largest(seen)
        if not difference <= 4 * noise:
            return (
                f"pack.packing is on, but in {_name(config)} the {who} row of a packed row sees the {whom}: other "
                f"tokens there change its logits by {difference:.2g} (the largest is {_largest(alone):.2g}); "
                "set pack.packing: off"
            )
    difference = _distance(second[0], alone)
    if not difference <= _rounding(model):
        return (
            f"pack.packing is on, but in {_name(config)} a row has other logits in a packed row than alone: they "
            f"differ by {difference:.2g} of their standard deviation; set pack.packing: off"
        )
    return None


def _mixing(engine: Any, base: Any, device: torch.device) -> list[MixingModule]:
    """Return the modules of a base model that mix rows."""
    trial = PackedTrial.of(base, padding.step)
    draw = torch.Generator().manual_seed(0)
    vocabulary = base.config.get_text_config().vocab_size
    one, other, two = (_row(vocabulary, length, draw) for length in (FIRST, FIRST, trial.tokens - FIRST))
    packed = [[other if number == 1 else one, two] for number in range(trial.packed_rows)]
    batch = collate(packed, True, device)

    def forward() -> None:
        with _evaluating(engine, device):
            next_logits(engine, batch, torch.zeros(1, dtype=torch.int64, device=device))

    return find(base, trial, forward, lambda flags: _of_any_rank(flags, device))


def _of_any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """Return for each flag whether it is set on any rank."""
    result = torch.tensor(flags, dtype=torch.float32, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in result.tolist()]


def check_length(model: Any, config: Any, device: torch.device, longest: int, packing: bool) -> None:
    """Raise UserError if a short row, or one of `longest` tokens, has other losses beside the other than alone: where
    rotary factors follow the longest position, attention changes its kind with the length, or a window, a chunk or a
    compressed block is counted from the beginning of a packed row.

    Collective, like check_isolation.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    rows = [_row(vocabulary, length, draw) for length in (LENGTHS[0], max(longest, LENGTHS[0]))]
    for row in rows:
        row["labels"] = row["input_ids"]
    with _evaluating(model, device):
        # Losses, since all logits of a long row may not fit.
        batch = collate([rows] if packing else [[row] for row in rows], packing, device)
        together = _losses(model, batch).flatten() if packing else _losses(model, batch)
        starts = (0, LENGTHS[0]) if packing else (0, 0)
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            count = len(row["input_ids"]) - 1
            alone = _losses(model, collate([[row]], packing, device))[0, :count]
            beside = (together if packing else together[number])[start : start + count]
            difference, other = _distance(beside, alone), len(rows[1 - number]["input_ids"])
            if not difference <= _rounding(model):
                raise UserError(
                    f"in {_name(config)} a row of {count + 1:,} tokens has another loss beside one of {other:,} tokens "
                    f"than alone: they differ by {difference:.2g} of their standard deviation; set pack.packing: off "
                    "and train.micro_batch: 1"
                )


def shares_prefixes(model: Any, config: Any, device: torch.device) -> bool:
    """Return whether rows with a common prefix, computed once, have the logits that each has alone, and see nothing of
    each other.

    They do not if a model mixes tokens outside of the attention that `train.attention: flash` replaces, as in a
    convolution or a recurrent layer. Collective, like check_isolation.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    prefix = _row(vocabulary, FEWEST, draw)["input_ids"]
    one, other_one, two, other_two = (_row(vocabulary, length, draw, prefix) for length in LENGTHS for _ in range(2))
    rows = [one, two, other_one, two, one, other_two, one, two]
    groups = [Group(FEWEST, (number, number + 1)) for number in range(0, len(rows), 2)]
    with _evaluating(model, device):
        # All in one forward pass, as in check_isolation.
        logits = logits_of(model, joined(rows, groups, device))[0].float()
        alone = [_logits(model, [[row]], False, device)[0] for row in (one, two)]
    of_groups = [part.split((FEWEST, *LENGTHS)) for part in logits.split(FEWEST + sum(LENGTHS))]
    noise = max(_largest(one - other) for one, other in zip(of_groups[0], of_groups[3], strict=True))
    seen = (
        *(_largest(of_groups[0][0] - others[0]) for others in of_groups[1:3]),  # by the prefix
        _largest(of_groups[0][1] - of_groups[2][1]),  # by the first of the second
        _largest(of_groups[0][2] - of_groups[1][2]),
    )
    if not max(seen) <= 4 * noise:
        return False
    prefix_of_alone = [(each[:FEWEST], each[FEWEST:]) for each in alone]
    pairs = [(of_groups[0][0], before) for before, _ in prefix_of_alone]
    pairs += [(of_groups[0][1 + number], after) for number, (_, after) in enumerate(prefix_of_alone)]
    return all(
        bool((ours - theirs).square().mean().sqrt() <= _rounding(model) * theirs.std()) for ours, theirs in pairs
    )


def check_sequence_parallel(model: Any, config: Any, device: torch.device) -> None:
    """Raise UserError if ranks that share a row compute other logits than a rank alone.

    They do if a model mixes tokens outside of the attention that `train.attention: flash` replaces, as in a convolution
    or a recurrent layer. Collective, like check_isolation.
    """
    row = _row(config.get_text_config().vocab_size, sum(LENGTHS), torch.Generator().manual_seed(0))
    with _evaluating(model, device):
        shared = _logits(model, [[row]], False, device)[0]
        with sequence.off():
            alone = _logits(model, [[row]], False, device)[0]
    difference = _distance(shared, alone)
    if not difference <= _rounding(model):
        raise UserError(
            f"train.sequence_parallel is {sequence.size}, but in {_name(config)} a row that ranks share has other "
            f"logits than in one rank: they differ by {difference:.2g} of their standard deviation; set "
            "sequence_parallel: 1"
        )


def check_reference(model: Any, feed: Feed, device: torch.device) -> None:
    """Raise UserError if the log-probabilities of the first global batch under the model, before its first step, are
    not those of the stage `reference`: of its own sequences, and of those of the pass before a step.

    Collective, like check_isolation: every rank computes its own part.
    """
    batches = feed.batches
    micro_batches = [*feed.at(0)[0], *(batches.at(0, before=True)[0] if batches.objective.before else ())]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with _evaluating(model, device):
        for packed_rows in micro_batches:
            batch = feed.collated(packed_rows)
            computed = -by_sequence(token_losses(model, batch), batch)
            sums[0] += (computed - batch["numbers"]["reference"]).abs().sum()
            sums[1] += len(batch["targets"])
    torch.distributed.all_reduce(sums)
    difference = float(sums[0] / sums[1])
    if not difference <= (allowed := _rounding(model)):
        raise UserError(
            f"the model that training starts from gives the answers of the first global batch other log-probabilities "
            f"than the stage reference: they differ by {difference:.2g} a token, and rounding by less than "
            f"{allowed:.2g}; run the stage reference again with these weights and this adapter"
        )


def check_loss(model: Any, base: Any, device: torch.device, precision: Precision) -> bool:
    """Return whether the chunked loss (loss.py) equals that of the model's own logits. If not, as with a model that
    scales its logits, use the model's own logits from now on.

    `base` is the model under the adapter. Collective, like check_isolation. Raises UserError for non-finite weights.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = _row(base.config.get_text_config().vocab_size, sum(LENGTHS), draw)["input_ids"]
    batch = collate([[{"input_ids": tokens, "labels": tokens, "source": 0}]], False, device)
    with _evaluating(model, device):
        ours = _losses(model, batch)[0, : len(tokens) - 1]
        logits = logits_of(model, batch)[0, : len(tokens) - 1].float()
    theirs = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:], device=device), reduction="none")
    finite = theirs.isfinite()
    if not finite.all():
        check_finite(base, precision)
    ours, theirs = ours[finite], theirs[finite]
    # Fewer than two cannot be compared; the first step reports its loss.
    same = len(theirs) < 2 or bool((ours - theirs).square().mean().sqrt() <= _rounding(model) * theirs.std())
    if not same:
        make_whole(base)
    return same


def check_kernels(model: Any, base: Any, device: torch.device) -> float:
    """Return how much the logits and losses of a row change with liger-kernel's kernels, over the change that rounding
    may cause: up to 1 they keep the model's output.

    `base` is the model under the adapter. Collective, like check_isolation; the same on all ranks.
    """
    tokens = _row(base.config.get_text_config().vocab_size, sum(LENGTHS), torch.Generator().manual_seed(0))["input_ids"]
    batch = collate([[{"input_ids": tokens, "labels": tokens, "source": 0}]], False, device)
    count = len(tokens) - 1
    with _evaluating(model, device):
        fused = logits_of(model, batch)[:, :count].float(), _losses(model, batch)[0, :count]
        with kernels.off(base):
            own = logits_of(model, batch)[:, :count].float(), _losses(model, batch)[0, :count]
    pairs = zip(fused, own, strict=True)
    changes = [_distance(one, other) for one, other in pairs]
    worst = max(change if math.isfinite(change) else math.inf for change in changes) / _rounding(model)
    result = torch.tensor(worst, device=device)
    torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
    return float(result)


def _losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the losses of the supervised tokens of a batch, which ranks may share, 0 elsewhere: [rows, tokens]."""
    losses = torch.zeros_like(batch["input_ids"], dtype=torch.float32)
    losses.view(-1)[batch["supervised"]] = token_losses(model, batch)
    return sequence.whole(losses)


def _row(vocabulary: int, length: int, draw: torch.Generator, prefix: list[int] | None = None) -> dict[str, Any]:
    tokens = [*(prefix or []), *torch.randint(vocabulary, (length,), generator=draw).tolist()]
    return {"input_ids": tokens, "labels": [IGNORED] * len(tokens), "source": 0}


def _logits(model: Any, packed_rows: list[PackedRow], packing: bool, device: torch.device) -> torch.Tensor:
    longest = max(sum(len(row["input_ids"]) for row in packed) for packed in packed_rows)
    return logits_of(model, collate(packed_rows, packing, device))[:, :longest].float()


def _distance(values: torch.Tensor, others: torch.Tensor) -> float:
    """Return the root mean square difference, in the standard deviation of the others."""
    return ((values - others).square().mean().sqrt() / others.std()).item()


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item()


def _rounding(model: Any) -> float:
    """Return the allowed difference of logits computed in another shape, in their standard deviations: MARGIN times the
    resolution of the coarsest type, at least LEAST_ROUNDING."""
    coarsest = max(torch.finfo(value.dtype).eps for value in model.parameters() if value.is_floating_point())
    return max(LEAST_ROUNDING, MARGIN * coarsest)


@contextlib.contextmanager
def _evaluating(model: Any, device: torch.device) -> Iterator[None]:
    """Put a model in evaluation mode; restore the mode of each module and the random state afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if on_gpu(device) else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _name(config: Any) -> str:
    name = config._attn_implementation
    name = next((ours for ours, theirs in IMPLEMENTATIONS.items() if theirs == name), name)
    return f"the {config.model_type} model with {name} attention"
