"""The values of a teacher as further columns of a data set, and the check that they belong to its tokens."""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from zerolora.config.settings import TeacherSettings
from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.data.row_columns import RowColumns
from zerolora.errors import UserError
from zerolora.files import MANIFEST, sha256
from zerolora.model import foreign
from zerolora.train.objectives.distill import IDS, LABEL, LOG_PROBABILITIES, REST
from zerolora.train.objectives.objective import Objective, token_counts

COMMAND = "zerolora stage teacher"
COMPARED = 1 << 16
"""Supervised tokens whose values are compared with the labels beside them."""
FEWEST = 30
"""The least such tokens: of fewer, a mean says little."""
ERRORS = 4
"""Standard errors by which the label beside a token must be the likelier one."""


def with_teacher(rows: Any, data: Path, teacher: Path, split: str, objective: Objective) -> Any:
    """Return a split of `data` with the columns of directory `teacher`. Raises UserError if these are of other rows, of
    other settings than the objective's, or of other tokens."""
    from datasets import concatenate_datasets

    columns = open_split(teacher, split)
    manifest = foreign.manifest(teacher / MANIFEST, COMMAND, "data_manifest_sha256", "settings", "k", "vocabulary")
    if manifest["data_manifest_sha256"] != sha256(data / MANIFEST) or len(columns) != len(rows):
        raise UserError(f"{teacher}: has a teacher's values of other rows than {data}; run `{COMMAND}` again")
    _check_settings(manifest["settings"], teacher, objective)
    supervised = np.asarray(rows.with_format("numpy")["supervised"][:], np.int64)
    for name in (IDS, LOG_PROBABILITIES, REST, LABEL):
        width = manifest["k"] if name in (IDS, LOG_PROBABILITIES) else 1
        if name not in columns.column_names or not np.array_equal(token_counts(columns, name), width * supervised):
            raise UserError(f"{teacher}: has not {width} values of {name} a supervised token; run `{COMMAND}` again")
    joined = concatenate_datasets([rows, columns], axis=1)
    _check_place(joined, supervised, manifest["k"], manifest["vocabulary"], teacher)
    return joined


def _check_settings(stored: Any, teacher: Path, objective: Objective) -> None:
    """Raise UserError unless a teacher's values were made with the objective's settings."""
    try:
        settings = TeacherSettings.model_validate(stored)
    except ValidationError:
        raise UserError(f"{teacher / MANIFEST}: was written by another version; run `{COMMAND}` again") from None
    for key in ("top_k", "temperature"):
        ours, theirs = getattr(objective, key, None), getattr(settings, key)
        if ours is not None and ours != theirs:
            raise UserError(
                f"{teacher}: has a teacher's values of {key} {theirs}, and train.{objective.name}.{key} is {ours}; run "
                f"`{COMMAND}` again"
            )


def _check_place(rows: Any, supervised: np.ndarray, k: int, vocabulary: int, teacher: Path) -> None:
    """Raise UserError if the label before or after a token is likelier under the token's values than its own, on
    average and beyond chance: then they belong to another position."""
    chosen = np.arange(len(rows))[: int(np.searchsorted(np.cumsum(supervised), COMPARED)) + 1]
    before: list[np.ndarray] = [np.zeros(0)]
    after: list[np.ndarray] = [np.zeros(0)]
    for row in RowColumns(rows).rows(chosen.tolist(), ("labels", IDS, LOG_PROBABILITIES, REST)):
        labels = row["labels"][1:]
        labels = labels[labels != IGNORED]
        ids, known = (row[name].reshape(len(labels), -1) for name in (IDS, LOG_PROBABILITIES))
        others = np.maximum(row[REST].astype(np.float64) - np.log(max(1, vocabulary - k)), -100.0)

        def likelihood(of: np.ndarray, at: slice, values: tuple[np.ndarray, ...] = (ids, known, others)) -> np.ndarray:
            tokens, stored, rest = (each[at] for each in values)
            matches = tokens == of[:, None]
            return np.where(matches.any(1), (stored.astype(np.float64) * matches).sum(1), rest)

        for into, at, beside in ((after, slice(0, -1), labels[1:]), (before, slice(1, None), labels[:-1])):
            into.append(likelihood(labels[at], at) - likelihood(beside, at))
    for where, gains in (("after", np.concatenate(after)), ("before", np.concatenate(before))):
        if len(gains) < FEWEST:
            continue
        mean, error = float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))
        if mean < -ERRORS * error:
            raise UserError(
                f"{teacher}: its values belong to other tokens: under those of a supervised token, the label {where} "
                f"it has a log-probability that is {-mean:.2g} higher than its own; run `{COMMAND}` again"
            )
