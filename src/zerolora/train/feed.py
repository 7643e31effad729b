"""The packed rows of each rank in each step, and the tensors of a micro-batch."""

import hashlib
from typing import Any

import numpy as np
import torch

from zerolora.config.settings import TrainingPlan
from zerolora.data.packing_plan import PackingPlan
from zerolora.data.prepared_rows import IGNORED, kind_of
from zerolora.data.row_columns import columns_of
from zerolora.errors import UserError
from zerolora.machine.devices import moved
from zerolora.model.padded_lengths import padded
from zerolora.schedules import rows_in
from zerolora.train.common_prefix import Branches, Group, grouped, worthwhile
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.objective import MARK, OF_TOKENS, Objective, Sequence, token_counts
from zerolora.train.order import ABSENT, assign, assign_padded, global_batches, spread
from zerolora.train.sequence_parallel import sequence

PackedRow = list[Sequence]
"""The sequences of all rows of a packed row."""
Units = dict[str, int]
"""The number of each unit of the objective in some rows."""


class Batches:
    """The packed rows of every optimizer step; their order depends only on seed and global batch (order.py)."""

    def __init__(
        self, rows: Any, packing: PackingPlan, plan: TrainingPlan, rank: int, world: int, packed: bool = True
    ) -> None:
        """`rows` is a split of the data, packed by `packing`; `rank` is one of the `world` ranks that do not share
        rows; `packed`: sequences may share a packed row.

        Raises UserError if rows and packing do not match, are fewer than a global batch, hold something else than the
        objective learns from, or lack a column that it reads.
        """
        self.rows, self.packing, self.rank, self.world = rows, packing, rank, world
        self.objective = OBJECTIVES[plan.objective].of(plan)
        self.micro_batch, self.global_batch = plan.micro_batch, plan.global_batch
        # A compiled layer has a graph for each number of rows, and answers of other rows have other lengths.
        self._padded = not packed and not plan.compile and not self.objective.other_row
        self._last: tuple[int, np.ndarray] | None = None
        """The last step that was assigned to ranks, and its assignment."""
        if len(packing.members) != len(rows):
            raise UserError(
                f"the packing plan is of {len(packing.members)} rows, but the data has {len(rows)}; "
                "run `zerolora stage pack` again"
            )
        if (kind := kind_of(rows)) != self.objective.rows:
            raise UserError(
                f"train.objective is {self.objective.name}, which learns from {self.objective.rows}, but the prepared "
                f"rows are {kind}; choose another objective, or prepare the rows for this one"
            )
        if missing := sorted(self.objective.reads - {*rows.column_names}):
            remedy = "choose another objective"
            if self.objective.reference and all(name.startswith("reference") for name in missing):
                remedy = "add --reference with the output of `zerolora stage reference`"
            if {*missing} <= {*self.objective.of_tokens}:
                remedy = "add --teacher with the output of `zerolora stage teacher`"
            raise UserError(
                f"train.objective is {self.objective.name}, which reads {' and '.join(missing)} of each row, but the "
                f"prepared rows have no such column; {remedy}"
            )
        length, supervised, source = (_column(rows, name) for name in ("length", "supervised", "source"))
        sequences = _lengths(rows, self.objective)
        self.tokens, self.work = _sums(length, packing), _sums((sequences**2).sum(0), packing)
        # Alone, each sequence of a row is padded to the longest.
        self._computed = self.tokens if packed else _sums(sequences.max(0) * len(sequences), packing)
        # The first token of a row is never predicted, so prepare has not counted it either.
        self._supervised = _sums(supervised, packing)
        self._units = _units(rows, packing, self.objective)
        # Memory depends on the tokens of a packed row, not on attention.
        largest = int(np.lexsort((self.work, self._computed))[-1])
        order = global_batches(
            self.work, plan.seed, plan.global_batch, plan.epochs, largest, by_length=plan.group_by_length
        )
        if (available := rows_in(len(self.work), plan.epochs)) < plan.global_batch:
            raise UserError(
                f"train.global_batch is {plan.global_batch}, but {plan.epochs} epochs have only {available} rows; "
                "lower it"
            )
        self.order = order[: plan.max_steps]
        self.planned = self.steps = len(self.order)
        self._tokens_until = np.cumsum([self.tokens[batch].sum() for batch in self.order])
        self._length, self._supervised_of_row, self._source = length, supervised, source
        self._items = _items(rows, self.objective)

    def order_digest(self) -> str:
        """Return the sha256 of the order: of the packed rows of every step."""
        digest = hashlib.sha256()
        for batch in self.order:
            digest.update(f"{' '.join(map(str, batch.tolist()))}\n".encode())
        return digest.hexdigest()

    def at(self, step: int, before: bool = False) -> tuple[list[list[PackedRow]], Units]:
        """Return this rank's micro-batches of a step, and the units of the whole global batch. With `before` they are
        those of the pass before the step.

        A step has the same number of micro-batches on each rank, since engines communicate in each of them: where no
        row is left for one, it has the shortest row of the global batch again, which does not count (`counts_at`).
        """
        batch = self.order[step]
        shortest = int(self._computed[batch].argmin())
        micro_batches = [
            [
                packed_row(self.rows, self.packing, number, self.objective, before)
                for number in batch[positions[positions != ABSENT] if counts else [shortest]].tolist()
            ]
            for positions, counts in zip(self._assigned(step)[:, self.rank], self.counts_at(step), strict=True)
        ]
        return micro_batches, {name: int(counts[batch].sum()) for name, counts in self._units.items()}

    def counts_at(self, step: int) -> list[bool]:
        """Return whether each of this rank's micro-batches of a step has rows of its own."""
        has_rows: list[bool] = (self._assigned(step)[:, self.rank] != ABSENT).any(1).tolist()
        return has_rows

    def _assigned(self, step: int) -> np.ndarray:
        if self._last is None or self._last[0] != step:
            batch, share = self.order[step], (self.world, self.micro_batch, self.global_batch)
            by_length = self._padded and step  # the first one is to need the most memory of all
            assigned = (
                assign_padded(self._computed[batch], self._supervised[batch], *share)
                if by_length
                else assign(self.work[batch], *share)
            )
            self._last = step, assigned
        return self._last[1]

    def sizes_at(self, step: int) -> tuple[int, int, int]:
        """Return tokens, summed squared row lengths and supervised tokens of a global batch, without padding."""
        batch = self.order[step]
        return int(self.tokens[batch].sum()), int(self.work[batch].sum()), int(self._supervised[batch].sum())

    def items_at(self, step: int, sources: int) -> list[int]:
        """Return the items of the loss's first term in a global batch, by source."""
        starts = self.packing.starts
        members = np.concatenate([self.packing.members[starts[n] : starts[n + 1]] for n in self.order[step]])
        counts: list[int] = np.bincount(self._source[members], self._items[members], sources).astype(int).tolist()
        return counts

    def end_after(self, steps: int) -> None:
        """Drop the steps after the first `steps`, which were not made; `planned`, for the schedule, stays."""
        self.order, self.steps = self.order[:steps], steps

    def tokens_until(self, steps: int) -> int:
        """Return the tokens of the first `steps` steps over all ranks, without padding."""
        return int(self._tokens_until[steps - 1]) if steps else 0

    @property
    def supervised_tokens(self) -> int:
        """Return the supervised tokens of all steps over all ranks."""
        return sum(int(self._supervised[batch].sum()) for batch in self.order)

    def balance(self) -> dict[str, float]:
        """Return the spread of tokens and of attention work over ranks, in the mean and in the worst global batch, and
        the share of padding among all computed positions."""
        spreads: dict[str, list[float]] = {"tokens": [], "attention": []}
        computed = 0.0  # positions, padding included
        for step, batch in enumerate(self.order):
            assigned = self._assigned(step)
            spreads["tokens"].append(spread(self.tokens[batch], assigned))
            spreads["attention"].append(spread(self.work[batch], assigned))
            present = assigned != ABSENT
            longest = np.where(present, self._computed[batch][assigned], 0).max(2)
            computed += ((longest + -longest % sequence.size) * present.sum(2)).sum()
        result = {"padding_share": 1 - self.tokens_until(self.steps) / computed}
        for name, values in spreads.items():
            result[f"rank_{name}_spread_mean"] = sum(values) / len(values)
            result[f"rank_{name}_spread_worst"] = max(values)
        return {name: round(float(value), 6) for name, value in result.items()}

    def tokens_by_source(self, sources: int) -> list[int]:
        """Return the tokens of all steps over all ranks, by source."""
        return self._by_source(self._length, sources)

    def supervised_by_source(self, sources: int) -> list[int]:
        """Return the supervised tokens of all steps over all ranks, by source."""
        return self._by_source(self._supervised_of_row, sources)

    def _by_source(self, counts: np.ndarray, sources: int) -> list[int]:
        times = np.bincount(np.concatenate(self.order), minlength=len(self.work))
        members = self.packing.members
        used = np.repeat(times, np.diff(self.packing.starts)) * counts[members]
        per_source: list[int] = np.bincount(self._source[members], used, sources).astype(int).tolist()
        return per_source


class Feed:
    """The micro-batches of a rank's steps on its device, each built while the device computes the one before."""

    def __init__(self, batches: Batches, packing: bool, device: torch.device, prefixes: bool = False) -> None:
        """`packing` and `prefixes`: as in `collate`."""
        self.batches, self.packing, self.device, self.prefixes = batches, packing, device, prefixes
        self._step: tuple[int, list[list[PackedRow]], Units] | None = None
        self._batch: tuple[int, int, dict[str, Any]] | None = None

    def at(self, step: int) -> tuple[list[list[PackedRow]], Units]:
        """Return this rank's micro-batches of a step, and the units of the whole global batch."""
        if self._step is None or self._step[0] != step:
            micro_batches, units = self.batches.at(step)
            if not self.packing:
                micro_batches = [single(packed_rows) for packed_rows in micro_batches]
            self._step = step, micro_batches, units
        return self._step[1:]

    def collated(self, packed_rows: list[PackedRow]) -> dict[str, Any]:
        """Return a batch of packed rows."""
        return collate(packed_rows, self.packing, self.device, self.prefixes)

    def batch(self, step: int, number: int) -> dict[str, Any]:
        """Return a micro-batch, from `build` or built now."""
        self.build(step, number)
        assert self._batch is not None
        return self._batch[2]

    def build(self, step: int, number: int) -> None:
        """Build a micro-batch ahead. Past the last of a step it is the first of the next; after all steps, none."""
        if number == len(self.at(step)[0]):
            step, number = step + 1, 0
        if step < self.batches.steps and (self._batch is None or self._batch[:2] != (step, number)):
            self._batch = step, number, self.collated(self.at(step)[0][number])


def units_of(rows: Any, packing: PackingPlan, objective: Objective) -> Units:
    """Return the units of all packed rows."""
    return {name: int(counts.sum()) for name, counts in _units(rows, packing, objective).items()}


def items_by_source(rows: Any, objective: Objective, sources: int) -> list[int]:
    """Return the items of the loss's first term in some rows, by source."""
    counts: list[int] = np.bincount(_column(rows, "source"), _items(rows, objective), sources).astype(int).tolist()
    return counts


def _items(rows: Any, objective: Objective) -> np.ndarray:
    column = objective.units[next(iter(objective.terms.values()))]
    return _column(rows, column) if column else np.ones(len(rows), np.int64)


def prepared(rows: Any, objective: Objective) -> Any:
    """Return a prepared split with the columns that the objective derives from its own."""
    for name, values in objective.derived(rows).items():
        rows = rows.add_column(name, values)
    return rows


def packed_row(rows: Any, packing: PackingPlan, number: int, objective: Objective, before: bool = False) -> PackedRow:
    """Return the sequences of packed row `number`; with `before`, those of the pass before a step."""
    members = packing.members[packing.starts[number] : packing.starts[number + 1]].tolist()
    names, columns = [*objective.columns, "source", *objective.numbers, *objective.of_tokens], columns_of(rows)
    if not before:
        return [each for row in columns.rows(members, names) for each in objective.sequences(row)]
    names += objective.before_columns
    if objective.other_row:
        of_members = list(columns.rows(members, [*names, objective.other_row]))
        others = columns.rows([row[objective.other_row] for row in of_members], names)
        of_members = [row | {objective.other_row: other} for row, other in zip(of_members, others, strict=True)]
    else:
        of_members = list(columns.rows(members, names))
    return [each for row in of_members for each in objective.sequences_before(row)]


def single(packed_rows: list[PackedRow]) -> list[PackedRow]:
    """Return each sequence as a packed row of its own."""
    return [[each] for packed in packed_rows for each in packed]


class Padding:
    """The lengths to which batches are padded. Set here, as `sequence` is."""

    def __init__(self) -> None:
        self.step = 1
        """All lengths are multiples of it."""


padding = Padding()


def collate(
    packed_rows: list[PackedRow], packing: bool, device: torch.device, prefixes: bool = False
) -> dict[str, Any]:
    """Return a batch of packed rows, padded on the right to the longest; with `prefixes`, rows that begin with the same
    tokens are joined to one row instead (`joined`).

    input_ids: [packed rows, longest]. [supervised tokens] each: `supervised`, the positions in the flattened batch that
    predict supervised tokens; `targets`, those tokens; `sequence`, their sequence's number; `source`, their data
    source; and `mark`, if sequences have it. [sequences] each: `sources`, and the objective's `numbers`. `lengths`: for
    attention row by row (attention.py). `of_tokens`: by column, k values of each supervised token.

    Without packing every sequence has a row of its own, and attention_mask marks the padding. With packing there is
    none, since models would let tokens attend across rows; position_ids that restart at every row, and at the padding,
    separate them, and the first token of a row is never a target.

    Their length is a multiple of padding.step. Where ranks share rows, the batch is this rank's part of the tokens: the
    longest is a multiple of their number, and position_ids are always present, since a part of a row does not show its
    positions.
    """
    if prefixes:
        rows = [row for packed in packed_rows for row in packed]
        tokens = [row["input_ids"] for row in rows]
        if worthwhile(tokens, groups := grouped(tokens)):
            return joined(rows, groups, device)
    packing = packing or sequence.size > 1
    packed_rows = packed_rows if packing else single(packed_rows)
    longest = max(sum(len(row["input_ids"]) for row in packed) for packed in packed_rows)
    longest = padded(longest, padding.step)
    longest += -longest % sequence.size
    shape = (len(packed_rows), longest)
    marks = (MARK,) if MARK in packed_rows[0][0] else ()
    names = ("input_ids", "labels", "sequence", *marks, "position_ids" if packing else "attention_mask")
    batch: dict[str, Any] = {name: np.zeros(shape, dtype=np.int64) for name in names}
    batch["labels"].fill(IGNORED)
    of_rows, sources, count = [], [row["source"] for packed in packed_rows for row in packed], 0
    for index, packed in enumerate(packed_rows):
        start = 0
        for row in packed:
            end = start + len(row["input_ids"])
            batch["input_ids"][index, start:end] = row["input_ids"]
            batch["labels"][index, start + 1 : end] = row["labels"][1:]
            batch["sequence"][index, start:end] = count
            for name in marks:
                batch[name][index, start:end] = row[name]
            if packing:
                batch["position_ids"][index, start:end] = np.arange(end - start)
            else:
                batch["attention_mask"][index, start:end] = 1
            start, count = end, count + 1
        if packing:
            batch["position_ids"][index, start:] = np.arange(longest - start)
        of_rows.append([len(row["input_ids"]) for row in packed] + [longest - start] * (start < longest))
    # By the position that predicts them; first tokens are never targets, so nothing leaves its packed row.
    targets = {name: np.roll(batch.pop(name), -1) for name in ("labels", "sequence", *marks)}
    own: np.ndarray | None = None
    if sequence.size > 1:
        counted = (targets["labels"] != IGNORED).cumsum().reshape(shape) - 1
        own = sequence.own_part(counted)[sequence.own_part(targets["labels"]) != IGNORED]
        batch = {name: np.ascontiguousarray(sequence.own_part(values)) for name, values in batch.items()}
        targets = {name: sequence.own_part(values) for name, values in targets.items()}
    supervised = np.flatnonzero(targets["labels"].ravel() != IGNORED)
    targets = {name: values.ravel()[supervised] for name, values in targets.items()}
    batch |= {"supervised": supervised, "targets": targets.pop("labels"), **targets}
    batch["sources"] = np.array(sources, dtype=np.int64)
    batch["source"] = batch["sources"][batch["sequence"]]
    tensors = {name: moved(torch.from_numpy(values), device) for name, values in batch.items()}
    further = {"numbers": _numbers(packed_rows, device), OF_TOKENS: _of_tokens(packed_rows, device, own)}
    return {**tensors, "lengths": of_rows, **further}


def joined(rows: list[Sequence], groups: list[Group], device: torch.device) -> dict[str, Any]:
    """Return a batch of groups of rows, each with its common prefix once: like `collate`'s, but for one packed row
    without padding, whose `branches` are the lengths of the groups.

    A supervised token of a prefix counts once for each row, so the position that predicts it is in `supervised` as
    often. `weights`: the rows of which each token is a part, [tokens].
    """
    ids, positions, weights, branches = [], [], [], []
    names = ("labels", MARK) if MARK in rows[0] else ("labels",)
    of_rows: list[tuple[np.ndarray, ...]] = [()] * len(rows)
    start = 0
    for prefix, members in groups:
        rests = [len(rows[number]["input_ids"]) - prefix for number in members]
        branches.append(Branches(prefix, tuple(rests)))
        ids.append(rows[members[0]]["input_ids"][:prefix])
        positions.append(np.arange(prefix))
        weights.append(np.full(prefix, len(members)))
        first = start + prefix
        for number, rest in zip(members, rests, strict=True):
            row = rows[number]
            ids.append(row["input_ids"][prefix:])
            positions.append(np.arange(prefix, prefix + rest))
            weights.append(np.ones(rest, dtype=np.int64))
            targets = [np.asarray(row[name][1:], dtype=np.int64) for name in names]
            wanted = np.flatnonzero(targets[0] != IGNORED)
            before = np.concatenate([np.arange(start, start + prefix), np.arange(first, first + rest)])
            of_rows[number] = (before[wanted], *(values[wanted] for values in targets))
            first += rest
        start = first
    batch = {
        name: np.concatenate(parts).astype(np.int64)
        for name, parts in (("input_ids", ids), ("position_ids", positions), ("weights", weights))
    }
    batch["input_ids"], batch["position_ids"] = batch["input_ids"][None], batch["position_ids"][None]
    parts = zip(("supervised", "targets", *names[1:]), zip(*of_rows, strict=True), strict=True)
    batch |= {name: np.concatenate(each) for name, each in parts}
    batch["sequence"] = np.repeat(np.arange(len(rows)), [len(each[0]) for each in of_rows])
    batch["sources"] = np.array([row["source"] for row in rows], dtype=np.int64)
    batch["source"] = batch["sources"][batch["sequence"]]
    tensors = {name: moved(torch.from_numpy(values), device) for name, values in batch.items()}
    segments = [size for each in branches for size in each.segments]
    further = {"numbers": _numbers([rows], device), OF_TOKENS: _of_tokens([rows], device)}
    return {**tensors, "lengths": [segments], "branches": branches, **further}


def _of_tokens(
    packed_rows: list[PackedRow], device: torch.device, own: np.ndarray | None = None
) -> dict[str, torch.Tensor]:
    """Return the values of the supervised tokens, by column: of all, or of the tokens `own`, by number."""
    sequences = [each.get(OF_TOKENS, {}) for packed in packed_rows for each in packed]
    result = {}
    for name in sequences[0]:
        values = np.concatenate([each[name] for each in sequences])
        if own is not None:
            total = sum(int((np.asarray(each["labels"][1:]) != IGNORED).sum()) for row in packed_rows for each in row)
            values = values.reshape(total, -1)[own].ravel()
        result[name] = moved(torch.from_numpy(values), device)
    return result


def _numbers(packed_rows: list[PackedRow], device: torch.device) -> dict[str, torch.Tensor]:
    names = packed_rows[0][0].keys() - {"input_ids", "labels", "source", MARK, OF_TOKENS}
    return {
        name: moved(torch.tensor([row[name] for packed in packed_rows for row in packed], dtype=torch.float64), device)
        for name in names
    }


def _units(rows: Any, packing: PackingPlan, objective: Objective) -> dict[str, np.ndarray]:
    """Return the number of each unit in every packed row: [packed rows]."""
    columns = {
        name: _column(rows, column) if column else np.ones(len(rows), np.int64)
        for name, column in objective.units.items()
    }
    return {name: _sums(values, packing) for name, values in columns.items()}


def _lengths(rows: Any, objective: Objective) -> np.ndarray:
    """Return the tokens of each sequence of each row: [sequences of a row, rows]."""
    if len(objective.texts) == 1:
        return _column(rows, "length")[None]
    return np.stack([token_counts(rows, name) for name in objective.texts])


def _column(rows: Any, name: str) -> np.ndarray:
    return np.asarray(rows.with_format("numpy")[name][:], dtype=np.int64)


def _sums(values: np.ndarray, packing: PackingPlan) -> np.ndarray:
    """Return the sum of `values` [rows] over each packed row."""
    return np.add.reduceat(values[packing.members], packing.starts[:-1])
