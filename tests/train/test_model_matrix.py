"""Types of models that people train, each through the stages as a tiny model: three CPU-seconds each."""

import json
from pathlib import Path

import model_matrix
import model_table
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", model_matrix.FAMILIES)
def test_a_type_goes_through_the_stages(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """As the page says."""
    outcome = model_matrix.run(kind, tiny_model, tmp_path)
    assert outcome.result == "works", outcome
    published = json.loads(model_matrix.RESULTS.read_text())["types"][kind]
    assert (published["result"], published.get("by_row", ""), published["attention"]) == (
        "works",
        outcome.by_row,
        outcome.attention,
    )


def test_the_page_has_every_type() -> None:
    assert list(model_table.FAMILIES) == list(model_matrix.FAMILIES)
    assert list(model_table.results()["types"]) == model_matrix.types()
    page = model_table.every_type()
    assert all(f"`{kind}`" in page for kind in model_matrix.types())
