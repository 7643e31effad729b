"""The gradients of the first step: proof, on the model itself and under any engine, that all trained parameters learn.

Whether a gradient reaches a parameter depends on the architecture, and nothing fails if none does: the adapter would be
published with its initial values.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from zerolora.errors import UserError, shown
from zerolora.log import LOGGER
from zerolora.methods.peft_format import adapted_module
from zerolora.methods.without_gradient import of_any_expert
from zerolora.model.weight_files import few
from zerolora.train.engines.engine import trained
from zerolora.units import counted


class FirstGradients:
    """What the first step shows of the gradient of each trained parameter of an engine's module."""

    def __init__(self, model: Any, whole_weights: bool) -> None:
        """`whole_weights`: with full fine-tuning."""
        self.parameters, self.whole_weights = trained(model), whole_weights
        self._seen: list[torch.Tensor | None] = [None] * len(self.parameters)
        """Of each parameter whether its gradient was other than 0; None without one."""
        # Not read at the end: DeepSpeed takes gradients away as they come.
        self._handles = [each.register_hook(self._taking(at)) for at, each in enumerate(self.parameters.values())]

    def _taking(self, at: int) -> Callable[[torch.Tensor], None]:
        def take(gradient: torch.Tensor) -> None:
            seen = self._seen[at]
            other = gradient.detach().any()
            self._seen[at] = other if seen is None else seen | other

        return take

    def check(self) -> None:
        """Raise UserError if a parameter got no gradient in the micro-batches of a step, before its update; warn of
        gradients that are 0. Collective."""
        for handle in self._handles:
            handle.remove()
        self._read_replaced()
        names, device = list(self.parameters), next(iter(self.parameters.values())).device
        zero = torch.zeros((), dtype=torch.bool, device=device)
        flags = torch.stack(
            [
                torch.tensor([each is not None for each in self._seen], device=device),
                torch.stack([zero if each is None else each.to(device) for each in self._seen]),
            ]
        ).float()
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        reached, learning = ({name for name, flag in zip(names, row, strict=True) if flag} for row in flags.tolist())
        chosen = {of_any_expert(name) for name in reached}
        without = [name for name in names if name not in reached and of_any_expert(name) not in chosen]
        if without:
            remedy = "use another method" if self.whole_weights else "leave these modules out of the method's targets"
            raise UserError(
                f"no gradient reaches {counted(len(without), 'trained parameter')}, such as {shown(without[0])}: "
                f"nothing would be trained there; {remedy}"
            )
        if torch.distributed.get_rank():
            return
        still = sorted({adapted_module(name) for name in reached} - {adapted_module(name) for name in learning})
        if still:
            LOGGER.warning(f"the gradient of {few(still)} is 0 in the first step, which teaches them nothing")

    def _read_replaced(self) -> None:
        """Read the gradients of parameters that FSDP replaces while it computes."""
        for at, parameter in enumerate(self.parameters.values()):
            if self._seen[at] is None and parameter.grad is not None:
                gradient = parameter.grad
                self._seen[at] = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).any()
