"""The routers of a mixture of experts in a step: the tokens of each expert, and the auxiliary loss.

The auxiliary loss is reported but not added to the loss: it would train the routers, which are frozen. Hooks record the
routers' outputs in the forward passes of training, without recomputations and validations. Padding does not count, and
a token of a common prefix (common_prefix.py) counts for each of its rows.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from zerolora.machine.devices import moved
from zerolora.train.feed import PackedRow
from zerolora.train.sequence_parallel import sequence

LOAD = ("router_imbalance", "router_idle_share")
AUXILIARY = "router_aux_loss"


class Routers:
    """The routers of a model, and their counts in this step on this rank."""

    def __init__(self, model: Any) -> None:
        routers = list(_routers(model))
        has_loss = any(_has_loss(module) for module in model.modules())
        self.columns = (*LOAD, AUXILIARY)[: 3 if has_loss else 2] if routers else ()
        """Columns of telemetry.csv; none for a model without routers."""
        self._size = len(routers)
        # Rows of which each token of a forward pass is a part, 0 for padding; None outside of one.
        self._weights: torch.Tensor | None = None
        self._seen = [0] * self._size
        """Tokens of this forward pass that each router has seen: of a row at a time in a module that mixes rows."""
        self._counts: torch.Tensor | None = None  # [routers, experts], tokens x experts of a token
        self._shares: torch.Tensor | None = None  # [experts], probabilities summed over tokens and routers
        self._tokens = 0
        self._experts = 0
        self._figures: dict[str, float] = {}
        for number, (module, index, chosen) in enumerate(routers):
            module.register_forward_hook(functools.partial(self._record, number, index, chosen))

    @contextlib.contextmanager
    def watched(self, packed_rows: list[PackedRow], batch: dict[str, Any], counts: bool) -> Iterator[None]:
        """Count the routed tokens of a forward pass on a batch of packed rows, which may have none that counts."""
        if not self._size:
            yield
            return
        tokens = batch["input_ids"]
        lengths = torch.tensor([sum(len(row["input_ids"]) for row in packed) * counts for packed in packed_rows])
        self._seen = [0] * self._size
        if "weights" in batch:
            self._weights = batch["weights"] * counts
            self._tokens += int(lengths.sum())  # of the weights, without a read of the device
        else:
            weights = (torch.arange(tokens.shape[1] * sequence.size) < lengths.unsqueeze(1)).long()
            weights = sequence.own_part(weights).flatten()
            self._weights = moved(weights, tokens.device)
            self._tokens += int(weights.sum())
        try:
            yield
        finally:
            self._weights = None

    def sums(self) -> torch.Tensor:
        """Return this rank's counts of a step, to be summed over all ranks, and reset them; empty without routers.

        The result is where the routers are, and has the same length on every rank.
        """
        if self._counts is None or self._shares is None:
            return torch.empty(0, dtype=torch.float64)
        tokens = moved(torch.tensor([self._tokens], dtype=torch.float64), self._counts.device)
        parts = (self._counts.flatten(), self._shares, tokens)
        self._experts = len(self._shares)
        self._counts = self._shares = None
        self._tokens = 0
        return torch.cat([part.double() for part in parts])

    def take(self, sums: torch.Tensor) -> None:
        """Compute a step's figures from the sums over all ranks."""
        self._figures = {}
        if not len(sums):
            return
        experts, tokens = self._experts, sums[-1]
        counts, shares = sums[: -experts - 1].view(-1, experts), sums[-experts - 1 : -1]
        imbalance = (counts.amax(1) / counts.mean(1)).mean()
        # transformers' load_balancing_loss_func (arXiv 2101.03961, 2.2), over all tokens of the step.
        loss = experts * (counts.sum(0) * shares).sum() / (len(counts) * tokens) ** 2
        figures = (imbalance.item(), (counts == 0).double().mean().item(), loss.item())
        self._figures = dict(zip(self.columns, figures, strict=False))

    def figures(self) -> dict[str, float | None]:
        """Return the step's figures by column of telemetry.csv, None where routers do not show whom they chose; empty
        without routers."""
        return {name: self._figures.get(name) for name in self.columns}

    @torch.no_grad()
    def _record(self, number: int, index: int, top: int | None, module: Any, _: Any, output: Any) -> None:
        if self._weights is None:
            return
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        logits = outputs[index].detach().flatten(0, -2)
        whole = (each for each in outputs if isinstance(each, torch.Tensor) and not each.is_floating_point())
        chosen = next(whole, None)
        if chosen is None:
            if top is None:
                return
            chosen = logits.topk(top, -1).indices
        chosen = chosen.flatten(0, -2)
        start = self._seen[number]
        self._seen[number] += len(chosen)
        assert self._seen[number] <= len(self._weights), "a router sees every token once"
        if self._counts is None:
            self._counts = torch.zeros(self._size, logits.shape[-1], dtype=torch.int64, device=logits.device)
            self._shares = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        weights = self._weights[start : self._seen[number]].unsqueeze(1)
        self._counts[number].scatter_add_(0, chosen.flatten(), weights.expand_as(chosen).flatten())
        if AUXILIARY in self.columns:
            assert self._shares is not None
            self._shares += (logits.float().softmax(-1) * weights).sum(0, dtype=torch.float64)


def _routers(model: Any) -> Iterator[tuple[Any, int, int | None]]:
    """Yield each router of a model with the index of the logits in its output, as transformers records them
    (utils/output_capturing.py, OutputRecorder), and the number of experts of a token, which DBRX's block chooses."""
    recorders = {}
    for module in model.modules():
        outputs = getattr(type(module), "_can_record_outputs", None)
        recorder = outputs.get("router_logits") if isinstance(outputs, dict) else None
        if recorder is not None and getattr(recorder, "target_class", None):
            recorders[recorder.target_class] = recorder.index
    for path, module in model.named_modules():
        # FSDP subclasses the classes of modules that it shards.
        index = next((index for kind, index in recorders.items() if isinstance(module, kind)), None)
        if index is not None:
            block = model.get_submodule(path.rpartition(".")[0])
            yield module, index, getattr(module, "top_k", getattr(block, "top_k", None))


def _has_loss(module: Any) -> bool:
    """Return whether transformers has a load-balancing loss for a module's model."""
    return hasattr(sys.modules.get(type(module).__module__), "load_balancing_loss_func")
