"""The batches of the stage reference: every sequence once, and no more tokens than planned, padding included."""

import preference_rows
import pytest

from zerolora.evaluate import frozen_model
from zerolora.evaluate.reference_log_probabilities import _batches, _sequences

ROWS, TOKENS, MOST = 40, 30, 60


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_batches_hold_every_sequence_once_and_few_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_model, "EVALUATION_TOKENS", MOST)
    of = preference_rows.texts(ROWS, TOKENS, longest=20)
    rows = preference_rows.pairs(of) if kind == "pairs" else preference_rows.labelled(of)
    sequences = _sequences(rows)
    batches = list(_batches(sequences))
    assert sorted(number for batch in batches for number in batch) == list(range(2 * ROWS))
    sizes = [[len(sequences[number]["input_ids"]) for number in batch] for batch in batches]
    assert all(len(batch) * max(batch) <= MOST or len(batch) == 2 for batch in sizes)
    assert max(map(len, sizes)) > 2


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_an_empty_split_has_no_batch(kind: str) -> None:
    rows = getattr(preference_rows, kind)(preference_rows.texts(4, TOKENS)).select([])
    assert list(_batches(_sequences(rows))) == []
