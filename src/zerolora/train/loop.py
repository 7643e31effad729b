"""The loop: step after step, resumable after each. The main path is `run`."""

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerolora.data.plan import PackingPlan
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.progress import Progress
from zerolora.train import schedule
from zerolora.train.batch import Batches, collate, loss_sum, packed_row
from zerolora.train.checkpoint.store import Checkpoints, State, read
from zerolora.train.engines.base import MOMENTS, WEIGHT, Engine
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.rendezvous import broadcast_json
from zerolora.train.launch.stop_signals import Stop, Stopped
from zerolora.train.telemetry.writer import TelemetryWriter
from zerolora.train.validation import Validations


class Loop:
    """Training of one run on one rank. Every method is collective: all ranks call it, in the same order."""

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        settings: dict[str, Any],
        packed: bool,
        sources: int,
        device: torch.device,
        saver: Checkpoints,
        record: TelemetryWriter,
        stop: Stop,
        watch: Heartbeat,
    ) -> None:
        self.engine, self.batches, self.settings, self.packed = engine, batches, settings, packed
        self.sources, self.device, self.saver = sources, device, saver
        self.record, self.stop, self.watch = record, stop, watch
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.step = 0
        """Optimizer steps made."""
        self.losses: list[float] = []
        """Mean loss per supervised token of each step."""
        self.loss_by_source = torch.zeros(sources, dtype=torch.float64)
        """Summed loss of all steps so far."""
        self.validations = Validations(settings)
        self.resumes = 0
        self.seconds = 0.0
        """Seconds of training, loading and pauses not counted."""

    def resume(self) -> None:
        """Go on from a checkpoint, if there is one. Raises UserError if the config names one of another config."""
        chosen: Path | None = None
        if self.rank == 0:
            if self.engine.resumable:
                chosen, said = self.saver.choose(self.settings["resume"])
            else:
                said = ["no checkpoints are written: moments on NVMe are not gathered from there"]
            for line in said:
                LOGGER.info(line)
        name = broadcast_json(chosen and str(chosen), self.device)
        if name is None:
            return
        state, _ = read(Path(name))
        self.engine.restore(state.parts, state.updates, state.loss_scale)
        self.step, self.resumes, self.seconds = state.step, state.resumes + 1, state.seconds
        self.losses, self.loss_by_source = state.loop["loss"].tolist(), state.loop["loss_by_source"]
        self.validations.restore(state.loop["validation"], state.best)
        if self.rank == 0:
            LOGGER.info(f"goes on after step {self.step} of {self.batches.steps}, from {name}")

    def run(self, rows: Any, plan: PackingPlan) -> None:
        """Make all steps that are left, and validate on `rows` in between, if the config says so.

        Raises Stopped when asked to stop, UserError if a loss is not finite.
        """
        self.engine.train()
        steps, before = self.batches.steps, self.seconds
        tokens_before, started = self.batches.tokens_until(self.step), time.monotonic()
        with Progress("step", steps, self.step, silent=self.rank != 0) as bar:
            while True:
                if self.validations.due(self.step):
                    paused = time.monotonic()
                    if self.validate(rows, plan):
                        self._save()
                    started += time.monotonic() - paused
                    self.engine.train()
                if self.step == steps or self.validations.exhausted:
                    break
                due = self.rank == 0 and self.saver.due(self.step + 1)
                loss, asked, due = self._optimizer_step(due)
                if not math.isfinite(loss):
                    raise UserError(f"loss is {loss} at step {self.step + 1}; lower train.learning_rate")
                self.losses.append(loss)
                self.step += 1
                self.seconds = before + time.monotonic() - started
                row = self.record.write(self.step, loss, self._learning_rate(self.step - 1))
                tokens = self.batches.tokens_until(self.step) - tokens_before
                bar.update(text=_figures(loss, tokens / (time.monotonic() - started), row.get("gradient_norm")))
                if asked or due or self.step == steps:
                    self._save()
                if asked:
                    self._leave()
        if self.step < steps and self.rank == 0:
            LOGGER.info(f"stops early: {self.validations}")

    def _optimizer_step(self, due: bool) -> tuple[float, bool, bool]:
        """Return the loss, and whether any rank was asked to stop, or finds a checkpoint due."""
        self.record.start()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["ratio"] * self._learning_rate(self.step)
        # A resumed step draws the same dropout as it would have, and every rank draws its own.
        torch.manual_seed(_seed(self.settings["seed"], self.step, self.rank))
        micro_batches, tokens = self.batches.at(self.step)
        sums = torch.zeros(3 + self.sources, dtype=torch.float64)
        for micro_batch in micro_batches:
            batch = collate(micro_batch, self.packed, self.device)
            self.record.lap("data")
            self.watch.step(self.step + 1, "forward")
            loss, parts = loss_sum(self.engine, batch, self.sources)
            self.record.lap("forward")
            self.watch.step(self.step + 1, "backward")
            # Whatever the engine divides by, a token must count the same in every batch.
            self.engine.backward(loss * (self.engine.divisor / tokens))
            self.record.lap("backward")
            self.engine.step()
            self.record.lap("optimizer")
            sums[0] += loss.detach().cpu()
            sums[3:] += parts.cpu()
        self.watch.step(self.step + 1, "sum of the losses")
        sums[1], sums[2] = self.stop.asked, due
        sums = self._summed(sums)
        self.record.lap("communication")
        self.loss_by_source += sums[3:]
        return sums[0].item() / tokens, bool(sums[1]), bool(sums[2])

    def validate(self, rows: Any, plan: PackingPlan) -> bool:
        """Take the mean loss per supervised token of a split, and keep the adapter if it is the best so far and wanted.

        Returns whether it is the best. Raises Stopped when asked to stop.
        """
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64)  # loss, supervised tokens
        count, size = len(plan.starts) - 1, self.settings["micro_batch"]
        with torch.no_grad():
            # Every rank makes as many forward passes (stage 3 gathers in each); a rank out of rows repeats one.
            for start in range(0, count, size * self.world):
                self.watch.at(f"validation from row {start}", "step")
                first = start + self.rank * size
                numbers = range(first, min(first + size, count)) if first < count else [0]
                batch = collate([packed_row(rows, plan, number) for number in numbers], self.packed, self.device)
                loss, _ = loss_sum(self.engine, batch, self.sources)
                if first < count:
                    sums += torch.tensor([loss.item(), len(batch["targets"])], dtype=torch.float64)
                if self._summed(torch.tensor(float(self.stop.asked))):
                    self._save()
                    self._leave()
        total, tokens = self._summed(sums).tolist()
        better = self.validations.note(self.step, total / tokens)
        if self.rank == 0:
            LOGGER.info(f"step {self.step}: {self.validations}")
        if better and self.validations.keeps_best:
            self.validations.best = self.engine.part(WEIGHT)
        return better

    def history(self) -> list[dict[str, Any]]:
        """Return loss and learning rate of every step."""
        return [
            {
                "step": step + 1,
                "loss": loss,
                "learning_rate": self._learning_rate(step),
            }
            for step, loss in enumerate(self.losses)
        ]

    def _learning_rate(self, step: int) -> float:
        return schedule.learning_rate(self.settings, step, self.batches.steps)

    def _save(self) -> None:
        if not self.engine.resumable:
            return
        self.watch.at(f"the checkpoint of step {self.step}")
        parts = {part: self.engine.part(part) for part in (WEIGHT, *MOMENTS)}
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
            self.saver.write(state)

    def _leave(self) -> None:
        """End training here, with its state on disk. Raises Stopped."""
        self.watch.at("the end")
        self.saver.wait()
        torch.distributed.barrier()
        where = f"is saved in {self.saver.folder}" if self.engine.resumable else "is lost"
        raise Stopped(f"training was asked to stop; step {self.step} of {self.batches.steps} {where}")

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
