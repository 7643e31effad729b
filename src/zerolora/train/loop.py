"""The training loop: step after step, resumable after each. The main path is `run`."""

import functools
import hashlib
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerolora.config.settings import TrainingPlan
from zerolora.data.packing_plan import PackingPlan
from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.machine.devices import moved
from zerolora.progress import Progress
from zerolora.train import schedule
from zerolora.train.adapter import base_of, method_of
from zerolora.train.checkpoint.format import State, read_chosen
from zerolora.train.checkpoint.store import Checkpoints
from zerolora.train.engines.engine import WEIGHT, Engine, plain, trained
from zerolora.train.feed import Batches, Feed, Units, collate, items_by_source, packed_row, units_of
from zerolora.train.first_gradients import FirstGradients
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.rendezvous import broadcast_json
from zerolora.train.launch.stop_signals import Stop, Stopped
from zerolora.train.loss import next_logits, token_losses
from zerolora.train.non_finite import check_finite, first_loss
from zerolora.train.objectives.objective import Objective, Values, by_sequence
from zerolora.train.telemetry.writer import TelemetryWriter
from zerolora.train.validation import Validations
from zerolora.train.validation_tasks import Choices, Questions


class Loop:
    """Training of one run on one rank. Every method is collective: all ranks call it, in the same order."""

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        plan: TrainingPlan,
        *,
        packed: bool,
        prefixes: bool,
        sources: Sequence[str],
        device: torch.device,
        checkpoints: Checkpoints,
        telemetry: TelemetryWriter,
        stop: Stop,
        heartbeat: Heartbeat,
        tasks: Sequence[Choices | Questions] = (),
    ) -> None:
        """`packed`: several rows may share a packed row; `prefixes`: a prefix that rows of a micro-batch share is
        computed once; `sources`: the names of the data sources; `tasks`: those at validation."""
        self.engine, self.batches, self.plan = engine, batches, plan
        self.objective = batches.objective
        self.feed = Feed(batches, packed, device, prefixes)
        self.sources, self.device, self.checkpoints = len(sources), device, checkpoints
        self.telemetry, self.stop, self.heartbeat = telemetry, stop, heartbeat
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # Ranks that share rows count as one here.
        self.data_rank, self.data_ranks = self.rank // plan.sequence_parallel, self.world // plan.sequence_parallel
        self.step = 0
        """Number of completed optimizer steps."""
        self.losses: list[float] = []
        """Mean loss of each step."""
        self.metrics: dict[str, list[float]] = {name: [] for name in self.objective.metrics}
        """The objective's further metrics of each step."""
        self.loss_by_source = torch.zeros(len(sources), dtype=torch.float64)
        """Summed loss of all steps so far: [sources]."""
        self.losses_of_sources: list[list[float]] = []
        """Mean loss of each source in each step, NaN for one without an item in it; empty for a single source."""
        self.gradients: FirstGradients | None = FirstGradients(engine.module, method_of(plan).trains_base)
        """Checked in the first step after each start."""
        self.tasks = tasks
        self.validations = Validations(plan, batches.planned, sources)
        self.resumes = 0
        self.seconds = 0.0
        """Seconds of training, without loading and pauses."""

    def resume(self) -> None:
        """Resume from a checkpoint, if there is one. Raises UserError if train.resume names one of another config, or
        if other parameters were trained."""
        chosen: Path | None = None
        if self.rank == 0:
            chosen, lines = self.checkpoints.choose(self.plan.resume)
            for line in lines:
                LOGGER.info(line)
        name = broadcast_json(chosen and str(chosen), self.device)
        if name is None:
            return
        state = read_chosen(Path(name), self.rank)
        self._check_trained(name, state)
        self.engine.restore(state.parts, state.updates, state.loss_scale)
        self.step, self.resumes, self.seconds = state.step, state.resumes + 1, state.seconds
        self.losses, self.loss_by_source = state.loop["loss"].tolist(), state.loop["loss_by_source"]
        if self.sources > 1:
            self.losses_of_sources = state.loop["losses_of_sources"].tolist()
        self.metrics = {name: state.loop[f"metric.{name}"].tolist() for name in self.metrics}
        self.validations.restore(state.loop["validation"], state.best)
        if self.rank == 0:
            LOGGER.info(f"resuming at step {self.step} of {self.batches.steps} from {name}")

    def _check_trained(self, path: str, state: State) -> None:
        """Raise UserError if the parameters of a checkpoint are not those that this run trains: all-linear may have
        meant fewer modules in an earlier version."""
        ours, theirs = {plain(name) for name in trained(self.engine.module)}, set(state.parts[WEIGHT])
        if ours == theirs:
            return
        said = [
            f"{len(names)} that {who}, as {min(names)}"
            for names, who in ((ours - theirs, "only this run trains"), (theirs - ours, "only it has"))
            if names
        ]
        raise UserError(
            f"{path}: has other trained parameters than this run: {' and '.join(said)}; give the targets that it was "
            "trained with as a list, or set train.resume: never to start over"
        )

    def run(self, rows: Any, packing: PackingPlan) -> None:
        """Make all remaining steps, with the configured validations on `rows`, packed by `packing`.

        Raises Stopped on a stop signal, UserError if a loss is not finite.
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
                totals, norm, asked, due = self._optimizer_step(due)
                if self.plan.compile:
                    self._count_graphs()
                loss, metrics = totals.loss, totals.metrics
                if not math.isfinite(loss):
                    raise self._not_finite(loss)
                self.losses.append(loss)
                if self.sources > 1:
                    self.losses_of_sources.append(totals.of_sources(self.batches.items_at(self.step, self.sources)))
                for name, value in metrics.items():
                    self.metrics[name].append(value)
                if not self.step and self.rank == 0 and (remark := self.objective.remark(metrics)):
                    LOGGER.warning(remark)
                self.step += 1
                self.seconds = before + time.monotonic() - started
                row = self.telemetry.write(self.step, loss, self._learning_rate(self.step - 1), norm, metrics)
                tokens = self.batches.tokens_until(self.step) - tokens_before
                bar.update(text=_figures(loss, tokens / (time.monotonic() - started), row.get("gradient_norm")))
                if asked or due or self.step == steps:
                    self._save()
                if asked:
                    self._stop()
        if self.step < steps and self.rank == 0:
            why = ", which is above its bar (train.stop_above)" if self.validations.above_bar else ""
            LOGGER.info(f"stops early: {self.validations}{why}")

    def _optimizer_step(self, due: bool) -> "tuple[Totals, float | None, bool, bool]":
        """Make a step on a global batch; `due`: a checkpoint is due on this rank.

        Returns the totals of the global batch, the norm of its gradient, and whether any rank got a stop signal or has
        a checkpoint due. The host reads the device once, at the end, and once more in the first step.
        """
        self.telemetry.start()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["ratio"] * self._learning_rate(self.step)
        # A resumed step draws the same dropout as an uninterrupted one, and every rank draws its own.
        torch.manual_seed(_seed(self.plan.seed, self.step, self.rank))
        micro_batches, units = self.feed.at(self.step)
        totals = Totals(self.objective, units, self.sources, self.device)
        means: dict[str, float] = {}
        if self.objective.before:
            means = self._means(self._step_batches(), units)
            self.engine.train()
            self.telemetry.times.lap("forward")
        counting = self.batches.counts_at(self.step)
        for number, (micro_batch, counts) in enumerate(zip(micro_batches, counting, strict=True)):
            batch = self.feed.batch(self.step, number)
            self.telemetry.times.lap("data")
            self.heartbeat.step(self.step + 1, "forward")
            with self.telemetry.routers.watched(micro_batch, batch, counts):
                losses = token_losses(self.engine, batch, self.objective.head_loss(batch))
                values = self.objective.values(losses, batch, means)
            del losses
            terms = totals.add(values, counts)
            self.telemetry.times.lap("forward")
            self.heartbeat.step(self.step + 1, "backward")
            # Undoes the engine's division, so that an item of a unit counts the same in every batch.
            self.engine.backward(totals.weighted(terms, self.engine.divisor * counts))
            if self.gradients and number == len(micro_batches) - 1:
                with self.telemetry.sent.uncounted():
                    self.gradients.check()
                self.gradients = None
            self.telemetry.times.lap("backward")
            self.engine.step()
            self.telemetry.times.lap("optimizer")
            self.feed.build(self.step, number + 1)
        self.telemetry.times.lap("data")
        self.heartbeat.step(self.step + 1, "sum of the losses")
        asked = moved(torch.tensor([self.stop.asked, due], dtype=torch.float64), self.device)
        routed = self.telemetry.routers.sums().to(self.device)  # without routers empty, and on the host
        sums = torch.cat([totals.sums[:1], asked, totals.sums[1:], routed])
        torch.distributed.all_reduce(sums)
        norm = self.engine.gradient_norm()
        beside = [norm.double().view(1)] if isinstance(norm, torch.Tensor) and norm.device == sums.device else []
        read = torch.cat([sums, *beside]).cpu()
        if norm is not None:
            norm = self.engine.unscaled(float(read[-1] if beside else norm))
        first, asked, others, routed = read[: len(sums)].split([1, 2, len(totals.sums) - 1, len(routed)])
        totals.sums = torch.cat([first, others])
        self.telemetry.routers.take(routed)
        self.telemetry.times.lap("communication")
        self.loss_by_source += totals.by_source
        return totals, norm, bool(asked[0]), bool(asked[1])

    def _count_graphs(self) -> None:
        from zerolora.train.compiled_layers import compiled_layers  # imports torch's compiler

        compiled_layers.after_step()

    def _step_batches(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the batches of a step for `_means`, and whether each counts."""
        micro_batches, _ = self.batches.at(self.step, before=True)
        for micro_batch, counts in zip(micro_batches, self.batches.counts_at(self.step), strict=True):
            self.heartbeat.step(self.step + 1, "forward")
            yield self.feed.collated(micro_batch), counts

    def validate(self, rows: Any, packing: PackingPlan) -> bool:
        """Compute the mean loss and the metrics of a split, and the accuracies of the tasks; return whether this is the
        best state so far.

        With train.keep: best, keeps the best adapter. Raises Stopped on a stop signal.
        """
        self.engine.eval()
        units = units_of(rows, packing, self.objective)
        totals = Totals(self.objective, units, self.sources, self.device)
        with torch.no_grad():
            means = {}
            if self.objective.before:
                means = self._means(self._validation_batches(rows, packing, before=True), units)
            for batch, own in self._validation_batches(rows, packing):
                losses = token_losses(self.engine, batch, self.objective.head_loss(batch))
                values = self.objective.values(losses, batch, means)
                if own:
                    totals.add(values)
            accuracies = {
                task.name: self._accuracy(task) if isinstance(task, Choices) else self._answered(task)
                for task in self.tasks
            }
        totals.sums = self._summed(totals.sums)
        of_sources = totals.of_sources(items_by_source(rows, self.objective, self.sources))
        figures = {"loss": totals.loss, **totals.metrics, **accuracies, **self.validations.of_sources(of_sources)}
        best = self.validations.add(self.step, figures)
        if self.rank == 0:
            LOGGER.info(f"step {self.step}: {self.validations}")
        if best and self.validations.keeps_best:
            self.validations.best = self.engine.part(WEIGHT)
        return best

    def _accuracy(self, task: Choices) -> float:
        """Return the accuracy of a task. Collective, as `_validation_batches` is. A choice has the same batch for any
        number of ranks. Raises Stopped on a stop signal."""
        count, size = len(task.sequences), self.plan.micro_batch
        sums = torch.zeros(count, dtype=torch.float64, device=self.device)
        for start in range(0, count, size * self.data_ranks):
            self.heartbeat.at(f"validation task {task.name} from choice {start}", "step")
            first = start + self.data_rank * size
            chosen = slice(first, first + size) if first < count else slice(count - 1, count)
            batch = self.feed.collated([[each] for each in task.sequences[chosen]])
            losses = token_losses(self.engine, batch)
            if first < count:
                sums[chosen] -= by_sequence(losses, batch)
            self._stop_if_asked_between()
        return task.accuracy(self._summed(sums))

    def _answered(self, task: Questions) -> float:
        """Return the share of right answers to a task's prompts. Collective; a prompt has the same batch for any number
        of ranks. Raises Stopped on a stop signal."""
        count, size = len(task.prompts), self.plan.micro_batch
        right = torch.zeros(count, dtype=torch.float64, device=self.device)
        for start in range(0, count, size * self.data_ranks):
            self.heartbeat.at(f"validation task {task.name} from prompt {start}", "step")
            first = start + self.data_rank * size
            numbers = range(first, min(first + size, count)) if first < count else [count - 1]
            answers = self._greedy([task.prompts[number] for number in numbers], task)
            for number, answer in zip(numbers, answers, strict=True) if first < count else ():
                right[number] = task.is_right(number, answer)
            self._stop_if_asked_between()
        return float(self._summed(right).mean())

    def _greedy(self, prompts: Sequence[list[int]], task: Questions) -> list[list[int]]:
        """Return the most likely tokens after each prompt, up to a stop token. Collective: as many forward passes as
        the longest answer of any rank takes, without a cache of keys and values."""
        answers: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        for _ in range(task.most):
            texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            rows = [[{"input_ids": text, "labels": [IGNORED] * len(text), "source": 0}] for text in texts]
            batch = collate(rows, self.feed.packing, self.device)
            width = batch["input_ids"].shape[1]
            ends = [number * width + len(text) - 1 for number, text in enumerate(texts)]
            logits = next_logits(self.engine, batch, moved(torch.tensor(ends), self.device))
            for number, token in enumerate(logits.argmax(-1).tolist()):
                ended[number] = ended[number] or token in task.stops
                if not ended[number]:
                    answers[number].append(token)
            left = torch.tensor([float(not all(ended))], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(left)
            if not left:
                break
        return answers

    def _validation_batches(
        self, rows: Any, packing: PackingPlan, before: bool = False
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield this rank's batches of a split, and whether each counts; with `before`, those of the pass before the
        loss. Collective, as stage 3 gathers in each forward pass: a rank out of rows repeats one that does not count.
        Raises Stopped on a stop signal."""
        count, size = len(packing.starts) - 1, self.plan.micro_batch
        for start in range(0, count, size * self.data_ranks):
            self.heartbeat.at(f"validation from row {start}", "step")
            first = start + self.data_rank * size
            numbers = range(first, min(first + size, count)) if first < count else [0]
            packed_rows = [packed_row(rows, packing, number, self.objective, before) for number in numbers]
            yield self.feed.collated(packed_rows), first < count
            self._stop_if_asked_between()

    def _stop_if_asked_between(self) -> None:
        """Save and raise Stopped if any rank got a stop signal, during a validation. Collective."""
        if self._stop_asked():
            self._save()
            self._stop()

    def _means(self, batches: Iterator[tuple[dict[str, Any], bool]], units: Units) -> dict[str, float]:
        """Return the objective's means `before` over the batches of all ranks, which have `units`, by forward passes.
        Collective; leaves the model in evaluation mode."""
        self.engine.eval()
        sums = torch.zeros(len(self.objective.before), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for batch, own in batches:
                values = self.objective.values_before(token_losses(self.engine, batch), batch)
                if own:
                    sums += torch.stack([values[name].double().sum() for name in self.objective.before])
        names = self.objective.before.items()
        return {
            name: total / max(1, units[unit])
            for (name, unit), total in zip(names, self._summed(sums).tolist(), strict=True)
        }

    def history(self) -> list[dict[str, Any]]:
        """Return loss, learning rate and metrics of each step, without a metric that had no item in it."""
        return [
            {
                "step": step + 1,
                "loss": loss,
                "learning_rate": self._learning_rate(step),
                **{name: values[step] for name, values in self.metrics.items() if not math.isnan(values[step])},
            }
            for step, loss in enumerate(self.losses)
        ]

    def _not_finite(self, loss: float) -> UserError:
        """Return the error for a loss that is not finite. Collective."""
        # That step made the trained weights NaN, too. A weight of the base may be used only now, such as the embedding
        # of a token.
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
            mixed = bool(self.losses_of_sources)
            loop = {
                "loss": torch.tensor(self.losses, dtype=torch.float64),
                "loss_by_source": self.loss_by_source.clone(),
                "validation": self.validations.state(),
                **({"losses_of_sources": torch.tensor(self.losses_of_sources, dtype=torch.float64)} if mixed else {}),
                **{
                    f"metric.{name}": torch.tensor(values, dtype=torch.float64) for name, values in self.metrics.items()
                },
            }
            state = State(
                self.step,
                parts,
                self.engine.updates(),
                loop,
                self.seconds,
                self.resumes,
                best_step=self.validations.best_of_all[0] if self.validations.best else None,
                best=self.validations.best,
                loss_scale=self.engine.loss_scale(),
            )
            self.checkpoints.write(state)

    def stop_if_asked(self) -> None:
        """Raise Stopped if any rank got a stop signal, before anything is published. Collective."""
        if self._stop_asked():
            self._stop()

    def _stop_asked(self) -> bool:
        return bool(self._summed(moved(torch.tensor(float(self.stop.asked)), self.device)))

    def _stop(self) -> None:
        """Raise Stopped, with the state on disk. Collective."""
        self.heartbeat.at("the end")
        self.checkpoints.wait()
        torch.distributed.barrier()
        step = f"step {self.step} of {self.batches.steps}"
        raise Stopped(f"training stopped on request; {step} is saved in {self.checkpoints.folder}")

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks, on the host, of tensors on the device."""
        torch.distributed.all_reduce(values)
        return values.cpu()


def _figures(loss: float, rate: float, norm: float | None) -> str:
    """Return the text beside the progress bar."""
    return "  ".join([f"loss {loss:.4f}", *([] if norm is None else [f"norm {norm:.3g}"]), f"{rate:.0f} tokens/s"])


def _seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8])


class Totals:
    """Sums of an objective's terms and metrics over micro-batches and ranks, for batches with known units."""

    def __init__(self, objective: Objective, units: Units, sources: int, device: torch.device) -> None:
        """`units` are those of all batches of all ranks; batches are on `device`."""
        self.objective, self.units, self.sources = objective, units, sources
        self.first, *more = objective.terms
        self.names = (*more, *objective.metrics)
        self.unit_of = {**objective.terms, **objective.metrics}
        self.sums = torch.zeros(1 + sources + len(self.names), dtype=torch.float64, device=device)
        """The first term, the loss of each source (`by_source`), the other terms, the metrics. Read once, at the end of
        a step: until then the host would wait for the device."""

    def add(self, values: Mapping[str, Values], counts: bool = True) -> dict[str, torch.Tensor]:
        """Add the terms and metrics of a batch if it counts, and return the sum of each term, with its gradient."""
        terms = {name: values[name].each.sum() for name in self.objective.terms}
        if not counts:
            return terms
        self.sums[0] += terms[self.first].detach()
        for name in self.objective.terms:
            each, source = values[name]
            parts = torch.zeros(self.sources, dtype=each.dtype, device=each.device)
            parts.index_add_(0, source, each.detach())
            self.sums[1 : 1 + self.sources] += parts * (self.count(self.first) / self.count(name))
        for index, name in enumerate(self.names, 1 + self.sources):
            self.sums[index] += values[name].each.detach().sum()
        return terms

    def weighted(self, terms: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        """Return the loss of a batch for the backward pass: each term over its own unit, times `factor`."""
        return functools.reduce(operator.add, (value * (factor / self.count(name)) for name, value in terms.items()))

    def count(self, name: str) -> int:
        """Return the number of items that a term or metric is averaged over; 1 where there is none, as its sum is 0."""
        return max(1, self.units[self.unit_of[name]])

    @property
    def by_source(self) -> torch.Tensor:
        """The loss of each source, all terms in it, as a sum over the first term's unit. [sources], fp64."""
        return self.sums[1 : 1 + self.sources]

    def of_sources(self, items: Sequence[int]) -> list[float]:
        """Return the mean loss of each source, which has this many items of the first term; NaN for none."""
        sums = self.by_source.tolist()
        return [value / count if count else math.nan for value, count in zip(sums, items, strict=True)]

    @property
    def loss(self) -> float:
        """The mean loss."""
        means = self.means
        return sum((means[name] for name in [*self.objective.terms][1:]), means[self.first])

    @property
    def means(self) -> dict[str, float]:
        """The mean of each term and metric."""
        sums = {self.first: self.sums[0], **dict(zip(self.names, self.sums[1 + self.sources :], strict=True))}
        return {name: value.item() / self.count(name) for name, value in sums.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric, NaN for one of a unit that has no item."""
        means, metrics = self.means, self.objective.metrics
        return {name: means[name] if self.units[unit] else math.nan for name, unit in metrics.items()}
