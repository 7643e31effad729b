"""The training loop: step after step, resumable after each. The main path is `run`."""

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerolora.data.packing_plan import PackingPlan
from zerolora.errors import UserError, wording
from zerolora.log import LOGGER
from zerolora.progress import Progress
from zerolora.train import schedule
from zerolora.train.adapter import base_of
from zerolora.train.checkpoint.format import State, read_chosen
from zerolora.train.checkpoint.store import Checkpoints
from zerolora.train.engines.engine import WEIGHT, Engine
from zerolora.train.feed import Batches, collate, packed_row
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.rendezvous import broadcast_json
from zerolora.train.launch.stop_signals import Stop, Stopped
from zerolora.train.loss import loss_sum
from zerolora.train.non_finite import check_finite, first_loss
from zerolora.train.telemetry.writer import TelemetryWriter
from zerolora.train.training_plan import TrainingPlan
from zerolora.train.validation import Validations


class Loop:
    """Training of one run on one rank. Every method is collective: all ranks call it, in the same order."""

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        plan: TrainingPlan,
        *,
        packed: bool,
        sources: int,
        device: torch.device,
        checkpoints: Checkpoints,
        telemetry: TelemetryWriter,
        stop: Stop,
        heartbeat: Heartbeat,
    ) -> None:
        """`packed` tells whether rows are joined to packed rows; `sources` is how many the data comes from."""
        self.engine, self.batches, self.plan, self.packed = engine, batches, plan, packed
        self.sources, self.device, self.checkpoints = sources, device, checkpoints
        self.telemetry, self.stop, self.heartbeat = telemetry, stop, heartbeat
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # Ranks that share rows count as one.
        self.data_rank, self.data_ranks = self.rank // plan.sequence_parallel, self.world // plan.sequence_parallel
        self.step = 0
        """Optimizer steps made."""
        self.losses: list[float] = []
        """Mean loss per supervised token of each step."""
        self.loss_by_source = torch.zeros(sources, dtype=torch.float64)
        """Summed loss of all steps so far."""
        self.validations = Validations(plan)
        self.resumes = 0
        self.seconds = 0.0
        """Seconds of training, loading and pauses not counted."""

    def resume(self) -> None:
        """Go on from a checkpoint, if there is one. Raises UserError if the config names one of another config."""
        chosen: Path | None = None
        if self.rank == 0:
            chosen, lines = self.checkpoints.choose(self.plan.resume)
            for line in lines:
                LOGGER.info(line)
        name = broadcast_json(chosen and str(chosen), self.device)
        if name is None:
            return
        state = read_chosen(Path(name), self.rank)
        self.engine.restore(state.parts, state.updates, state.loss_scale)
        self.step, self.resumes, self.seconds = state.step, state.resumes + 1, state.seconds
        self.losses, self.loss_by_source = state.loop["loss"].tolist(), state.loop["loss_by_source"]
        self.validations.restore(state.loop["validation"], state.best)
        if self.rank == 0:
            LOGGER.info(f"resuming at step {self.step} of {self.batches.steps} from {name}")

    def run(self, rows: Any, packing: PackingPlan) -> None:
        """Make all steps that are left, and validate on `rows`, packed by `packing`, in between if the config says so.

        Raises Stopped when asked to stop, UserError if a loss is not finite.
        """
        self.engine.train()
        steps, before = self.batches.steps, self.seconds
        tokens_before, started = self.batches.tokens_until(self.step), time.monotonic()
        with Progress("step", steps, self.step, silent=self.rank != 0) as bar:
            while True:
                if self.validations.due(self.step):
                    paused = time.monotonic()
                    if self.validate(rows, packing):
                        self._save()
                    started += time.monotonic() - paused
                    self.engine.train()
                if self.step == steps or self.validations.exhausted or self.validations.above_bar:
                    break
                due = self.rank == 0 and self.checkpoints.due(self.step + 1)
                loss, asked, due = self._optimizer_step(due)
                if not math.isfinite(loss):
                    raise self._not_finite(loss)
                self.losses.append(loss)
                self.step += 1
                self.seconds = before + time.monotonic() - started
                row = self.telemetry.write(self.step, loss, self._learning_rate(self.step - 1))
                tokens = self.batches.tokens_until(self.step) - tokens_before
                bar.update(text=_figures(loss, tokens / (time.monotonic() - started), row.get("gradient_norm")))
                if asked or due or self.step == steps:
                    self._save()
                if asked:
                    self._stop()
        if self.step < steps and self.rank == 0:
            why = wording(", which is above its bar (train.stop_above)" if self.validations.above_bar else "")
            LOGGER.info(f"stops early: {self.validations}{why}")

    def _optimizer_step(self, due: bool) -> tuple[float, bool, bool]:
        """Make a step on a global batch; `due` tells whether this rank finds a checkpoint due.

        Returns the mean loss per supervised token, and of all ranks whether any was asked to stop, or found a
        checkpoint due.
        """
        self.telemetry.start()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["ratio"] * self._learning_rate(self.step)
        # A resumed step draws the same dropout as it would have, and every rank draws its own.
        torch.manual_seed(_seed(self.plan.seed, self.step, self.rank))
        micro_batches, tokens = self.batches.at(self.step)
        sums = torch.zeros(3 + self.sources, dtype=torch.float64)
        for micro_batch in micro_batches:
            batch = collate(micro_batch, self.packed, self.device)
            self.telemetry.lap("data")
            self.heartbeat.step(self.step + 1, "forward")
            with self.telemetry.routers.watched(micro_batch, batch):
                loss, parts = loss_sum(self.engine, batch, self.sources)
            self.telemetry.lap("forward")
            self.heartbeat.step(self.step + 1, "backward")
            # Whatever the engine divides by, a token must count the same in every batch.
            self.engine.backward(loss * (self.engine.divisor / tokens))
            self.telemetry.lap("backward")
            self.engine.step()
            self.telemetry.lap("optimizer")
            sums[0] += loss.detach().cpu()
            sums[3:] += parts.cpu()
        self.heartbeat.step(self.step + 1, "sum of the losses")
        sums[1], sums[2] = self.stop.asked, due
        sums, routed = self._summed(torch.cat([sums, self.telemetry.routers.sums()])).tensor_split([len(sums)])
        self.telemetry.routers.take(routed)
        self.telemetry.lap("communication")
        self.loss_by_source += sums[3:]
        return sums[0].item() / tokens, bool(sums[1]), bool(sums[2])

    def validate(self, rows: Any, packing: PackingPlan) -> bool:
        """Compute the mean loss per supervised token of a split, and keep the adapter if it is the best and wanted.

        Returns whether it is the best. Raises Stopped when asked to stop.
        """
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64)  # loss, supervised tokens
        count, size = len(packing.starts) - 1, self.plan.micro_batch
        with torch.no_grad():
            # Every rank makes as many forward passes (stage 3 gathers in each); a rank out of rows repeats one.
            for start in range(0, count, size * self.data_ranks):
                self.heartbeat.at(f"validation from row {start}", "step")
                first = start + self.data_rank * size
                numbers = range(first, min(first + size, count)) if first < count else [0]
                batch = collate([packed_row(rows, packing, number) for number in numbers], self.packed, self.device)
                loss, _ = loss_sum(self.engine, batch, self.sources)
                if first < count:
                    sums += torch.tensor([loss.item(), len(batch["targets"])], dtype=torch.float64)
                if self._summed(torch.tensor(float(self.stop.asked))):
                    self._save()
                    self._stop()
        total, tokens = self._summed(sums).tolist()
        best = self.validations.add(self.step, total / tokens)
        if self.rank == 0:
            LOGGER.info(f"step {self.step}: {self.validations}")
        if best and self.validations.keeps_best:
            self.validations.best = self.engine.part(WEIGHT)
        return best

    def history(self) -> list[dict[str, Any]]:
        """Return loss and learning rate of every step."""
        return [
            {"step": step + 1, "loss": loss, "learning_rate": self._learning_rate(step)}
            for step, loss in enumerate(self.losses)
        ]

    def _not_finite(self, loss: float) -> UserError:
        """Return the error for a loss that is not finite. Collective."""
        # The step that gave it has made what is trained NaN, too. A weight of the base may be met only now, such as the
        # embedding of a token.
        check_finite(base_of(self.engine.module), self.plan.precision, trained=False)
        if self.step:
            return UserError(f"loss is {loss} at step {self.step + 1}; lower train.learning_rate")
        return first_loss(loss, self.plan.precision)

    def _learning_rate(self, step: int) -> float:
        return schedule.learning_rate(self.plan, step, self.batches.planned)

    def _save(self) -> None:
        self.heartbeat.at(f"the checkpoint of step {self.step}")
        self.checkpoints.wait()  # two at once may be more than the host holds
        parts = {part: self.engine.part(part) for part in (WEIGHT, *self.engine.recipe.states)}
        if self.rank == 0:
            loop = {
                "loss": torch.tensor(self.losses, dtype=torch.float64),
                "loss_by_source": self.loss_by_source.clone(),
                "validation": self.validations.state(),
            }
            state = State(
                self.step,
                parts,
                self.engine.updates(),
                loop,
                self.seconds,
                self.resumes,
                best_step=self.validations.lowest[0] if self.validations.best else None,
                best=self.validations.best,
                loss_scale=self.engine.loss_scale(),
            )
            self.checkpoints.write(state)

    def stop_if_asked(self) -> None:
        """End training before anything is published if any rank was asked to stop. Raises Stopped."""
        if self._summed(torch.tensor(float(self.stop.asked))):
            self._stop()

    def _stop(self) -> None:
        """End training here, with its state on disk. Raises Stopped."""
        self.heartbeat.at("the end")
        self.checkpoints.wait()
        torch.distributed.barrier()
        step = f"step {self.step} of {self.batches.steps}"
        raise Stopped(f"training was asked to stop; {step} is saved in {self.checkpoints.folder}")

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks, on the host."""
        values = values.to(self.device)
        torch.distributed.all_reduce(values)
        return values.cpu()


def _figures(loss: float, rate: float, norm: float | None) -> str:
    """Return what is shown beside the bar: loss, norm of the gradient, tokens/s."""
    return "  ".join([f"loss {loss:.4f}", *([] if norm is None else [f"norm {norm:.3g}"]), f"{rate:.0f} tokens/s"])


def _seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8])
