"""The values of a teacher as further columns of a data set, and the check that they belong to its tokens."""

import math
from collections.abc import Mapping
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
"""Standard errors by which the labels beside the tokens must be the likelier ones."""


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
    if len(rows):  # datasets joins no columns of an empty split
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
    """Raise UserError if the values of tokens predict the label before or after each of them, and better than its own:
    then they belong to another position. A poor teacher may repeat its input, but predicts no label."""
    chosen = np.arange(len(rows))[: int(np.searchsorted(np.cumsum(supervised), COMPARED)) + 1]
    own: dict[str, list[np.ndarray]] = {"before": [], "after": []}
    beside: dict[str, list[np.ndarray]] = {"before": [], "after": []}
    everything = [np.zeros(0, np.int32)]
    for row in RowColumns(rows).rows(chosen.tolist(), ("labels", IDS, LOG_PROBABILITIES, REST)):
        labels = labels_of(row)
        everything.append(labels)
        ids, known = (row[name].reshape(len(labels), -1) for name in (IDS, LOG_PROBABILITIES))
        others = np.maximum(row[REST].astype(np.float64) - np.log(max(1, vocabulary - k)), -100.0)
        values = ids, known.astype(np.float64), others
        for where, at, neighbours in (("after", slice(0, -1), labels[1:]), ("before", slice(1, None), labels[:-1])):
            of_some = tuple(each[at] for each in values)
            own[where].append(_likelihood(labels[at], *of_some))
            beside[where].append(_likelihood(neighbours, *of_some))
    bound = unigram_loss(np.concatenate(everything), vocabulary)
    for where in own:
        ours, theirs = (np.concatenate([np.zeros(0), *each[where]]) for each in (own, beside))
        if len(ours) < FEWEST:
            continue
        gains = theirs - ours
        if gains.mean() > ERRORS * gains.std() / np.sqrt(len(gains)) and -theirs.mean() < bound:
            raise UserError(
                f"{teacher}: its values belong to other tokens: the loss of the labels is {-ours.mean():.3g} under "
                f"them, and that of the labels {where} these {-theirs.mean():.3g}; run `{COMMAND}` again"
            )


def _likelihood(of: np.ndarray, ids: np.ndarray, known: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of tokens, [tokens], under stored values; `others` has that of any token outside of
    the top k."""
    matches = ids == of[:, None]
    likelihoods: np.ndarray = np.where(matches.any(1), (known * matches).sum(1), others)
    return likelihoods


def labels_of(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the labels of a row's supervised tokens."""
    labels = row["labels"][1:]
    supervised: np.ndarray = labels[labels != IGNORED]
    return supervised


def unigram_loss(labels: np.ndarray, vocabulary: int) -> float:
    """Return the mean cross-entropy of labels under their own frequencies: each under those of all others, plus one for
    each token of the vocabulary."""
    if not len(labels):
        return math.log(vocabulary)
    counts = np.bincount(labels, minlength=vocabulary)
    return float(np.log((len(labels) - 1 + vocabulary) / counts[labels]).mean())
