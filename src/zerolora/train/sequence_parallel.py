"""Sequence parallelism (Ulysses, arXiv 2309.14509, 3.1): the ranks of a group share each row.

A rank computes its part of the tokens of every row. The group exchanges parts before and after attention: before it
each rank gets all tokens of its share of the heads, after it all heads of its part of the tokens. Each rank's loss is
the sum over its own tokens, so gradients are summed over all ranks as without sequence parallelism.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed


class SequenceGroup:
    """The `size` consecutive ranks that share rows with this one. Set here, as models have no argument for them."""

    def __init__(self) -> None:
        self.size = 1
        self.rank = 0
        """Rank in the group, the number of this rank's part of a row."""
        self.group: torch.distributed.ProcessGroup | None = None

    def set(self, size: int) -> None:
        """Let groups of `size` ranks share rows. Collective."""
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        assert world % size == 0, f"{world} ranks are not a multiple of {size}"
        self.size, self.rank, self.group = size, rank % size, None
        for first in range(0, world, size) if size > 1 else ():
            members = range(first, first + size)
            group = torch.distributed.new_group(list(members))
            if rank in members:
                self.group = group

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Let every rank compute whole rows by itself."""
        size, rank, self.size, self.rank = self.size, self.rank, 1, 0
        try:
            yield
        finally:
            self.size, self.rank = size, rank

    def own_part(self, values: Any) -> Any:
        """Return this rank's part of a tensor or array, [rows, tokens, ...]; tokens are a multiple of `size`."""
        part = values.shape[1] // self.size
        return values[:, self.rank * part : (self.rank + 1) * part]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks, [rows, tokens of a part, ...]. Collective; no gradient."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def by_heads(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Exchange parts of tokens for a share of the heads: [rows, heads, tokens of a part, head size] -> [rows,
        heads / size, tokens, head size]. One exchange for all `states`. Collective."""
        shapes = [(rows, heads // self.size, part, size) for rows, heads, part, size in (each.shape for each in states)]
        sent = [each.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(1) for each in states]
        received = _exchanged(torch.cat(sent, 1)).split([each.shape[1] for each in sent], 1)
        return [
            each.view(self.size, *shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for each, shape in zip(received, shapes, strict=True)
        ]

    def by_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """Undo `by_heads`: [rows, tokens, heads / size, head size] -> [rows, tokens of a part, heads, head size]."""
        received = _exchanged(attended.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous())
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


sequence = SequenceGroup()


def _exchanged(parts: torch.Tensor) -> torch.Tensor:
    exchanged = _Exchange.apply(parts)  # type: ignore[no-untyped-call]
    assert isinstance(exchanged, torch.Tensor)
    return exchanged


class _Exchange(torch.autograd.Function):
    """Send part i of [ranks of the group, ...] to rank i; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts, group=sequence.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _Exchange.forward(ctx, gradients[0].contiguous())
