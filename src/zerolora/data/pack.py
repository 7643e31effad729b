"""Stage pack: joins prepared rows to packed rows.

    zerolora stage pack PACKED

Writes a plan of each split, train.arrow and validation.arrow (packing_plan.py), and stats.json with the packing
efficiency. Tokens stay in the output of prepare, so a new capacity does not tokenize again.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.config.compared import compared
from zerolora.config.settings import PackSettings
from zerolora.data.packing import pack
from zerolora.data.packing_bound import lower_bound
from zerolora.data.packing_plan import PackingPlan, open_plan, write_plan
from zerolora.data.prepared_rows import open_table
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, sha256, staged_directory, write_json
from zerolora.log import result
from zerolora.model.spec import FEWEST
from zerolora.units import counted

COUNTS = (
    *("rows", "common_prefix", "tokens", "packed_rows", "longest_packed_row", "most_supervised", "supervised_tokens"),
    "mean_row_of_a_token",
)
CHUNK = 4096  # rows compared at a time


def pack_rows(settings: PackSettings, data: Path, output: Path) -> None:
    """Write the plans of a prepared data set: packed rows of up to `capacity` tokens, or single rows with packing off.

    Raises UserError if a row is longer than the capacity.
    """
    capacity = settings.capacity if settings.packing else None
    stats = compared(settings)
    with staged_directory(output) as staged:
        for split in ("train", "validation"):
            rows = open_table(data, split)
            lengths = rows["length"].to_numpy()
            if capacity:
                if len(lengths) and lengths.max() > capacity:
                    raise UserError(
                        f"pack.capacity is {capacity}, but a row of {split} has {lengths.max()} tokens; raise it, or "
                        "cut rows with prepare's max_length and too_long"
                    )
                write_plan(staged / f"{split}.arrow", pack(lengths, capacity))
            else:
                each = np.arange(len(lengths) + 1)
                write_plan(staged / f"{split}.arrow", PackingPlan(each, each[:-1].astype(np.int32)))
            plan = open_plan(staged / f"{split}.arrow")
            stats |= {f"{split}_{name}": value for name, value in _count(plan, rows, lengths, capacity).items()}
        stats["longest_packed_row"] = max(stats["train_longest_packed_row"], stats["validation_longest_packed_row"])
        # Training computes logits for supervised tokens only (train/loss.py).
        stats["most_supervised"] = max(stats.pop("train_most_supervised"), stats.pop("validation_most_supervised"))
        write_json(staged / "stats.json", stats)
        write_json(staged / MANIFEST, {"data_manifest_sha256": sha256(data / MANIFEST), "files": describe(staged)})
    if capacity:
        result(
            f"{counted(stats['train_rows'], 'row')} in {counted(stats['train_packed_rows'], 'packed row')} of "
            f"{capacity:,} tokens, "
            f"{stats['train_efficiency']:.2%} full"
        )
    else:
        result(f"{counted(stats['train_rows'], 'row')} to train on, none packed")


def _count(plan: PackingPlan, rows: Any, lengths: np.ndarray, capacity: int | None) -> dict[str, Any]:
    if not len(lengths):
        return dict.fromkeys((*COUNTS, *(("fewest_possible", "efficiency") if capacity else ())), 0)
    supervised = rows["supervised"].to_numpy().astype(np.int64)
    tokens = np.add.reduceat(lengths[plan.members].astype(np.int64), plan.starts[:-1])
    sequences = _sequence_lengths(rows)
    # Without packing, each sequence of a pair is padded to the longer one.
    computed = tokens if capacity else sequences.max(0) * len(sequences)
    counts: dict[str, Any] = {
        "rows": len(lengths),
        "common_prefix": common_prefix(rows),
        "tokens": int(tokens.sum()),
        "packed_rows": len(tokens),
        "longest_packed_row": int(computed.max()),
        "most_supervised": int(np.add.reduceat(supervised[plan.members], plan.starts[:-1]).max()),
        "supervised_tokens": int(supervised.sum()),
        # The mean number of tokens in the row of a token, to which its attention is limited.
        "mean_row_of_a_token": round(float((sequences.astype(np.float64) ** 2).sum() / lengths.sum()), 1),
    }
    if len(sequences) > 1:
        shared = shared_prompts(rows)
        counts |= {
            "shared_prompts": int(shared.sum()),
            # The mean number of tokens in the shared prompt of one of these tokens.
            "shared_prompt_of_a_token": round(float((shared.astype(np.float64) ** 2).sum() / max(1, shared.sum())), 1),
        }
    if capacity:
        counts |= {
            "fewest_possible": lower_bound(lengths, capacity),
            "efficiency": round(int(tokens.sum()) / (len(tokens) * capacity), 6),
        }
    return counts


def _sequence_lengths(rows: Any) -> np.ndarray:
    """Return the tokens of each sequence of each row: [sequences of a row, rows]."""
    import pyarrow.compute

    columns = [name for name in ("input_ids", "rejected_input_ids") if name in rows.column_names]
    return np.stack([pyarrow.compute.list_value_length(rows[name]).to_numpy() for name in columns]).astype(np.int64)


def shared_prompts(rows: Any) -> np.ndarray:
    """Return the tokens that the two sequences of each pair of a pyarrow.Table begin with, if training may compute them
    once (train/common_prefix.py), otherwise 0: [rows]."""
    result = []
    for batch in rows.select(["input_ids", "rejected_input_ids"]).to_batches(CHUNK):
        sides = zip(*(_token_arrays(batch[name]) for name in batch.schema.names), strict=True)
        for chosen, rejected in sides:
            most = min(len(chosen), len(rejected)) - 1
            differ = chosen[:most] != rejected[:most]
            result.append(int(differ.argmax()) if differ.any() else most)
    shared = np.array(result, dtype=np.int64)
    return np.where(shared >= FEWEST, shared, 0)


def _token_arrays(column: Any) -> list[np.ndarray]:
    """Return the tokens of each row of a column."""
    offsets, tokens = column.offsets.to_numpy(), column.values.to_numpy()
    return [tokens[start:end] for start, end in itertools.pairwise(offsets)]


def common_prefix(rows: Any) -> int:
    """Return the number of tokens that all rows of a pyarrow.Table begin with."""
    first: np.ndarray | None = None
    for batch in rows.select(["input_ids"]).to_batches(CHUNK):
        column = batch["input_ids"]
        starts, ends = (column.offsets.to_numpy()[part].astype(np.int64) for part in (slice(-1), slice(1, None)))
        tokens = column.values.to_numpy()
        first = tokens[starts[0] : ends[0]] if first is None else first
        first = first[: (ends - starts).min()]
        differ = (tokens[starts[:, None] + np.arange(len(first))] != first).any(0)
        first = first[: int(differ.argmax())] if differ.any() else first
        if not len(first):
            break
    return 0 if first is None else len(first)
