"""The log-probabilities of the stage reference are those of transformers' own model, for each sequence alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import Bench
from transformers import AutoModelForCausalLM

from zerolora.config.objective_sections import START
from zerolora.config.settings import EvaluateRunSettings, ReferenceSettings, RenderSettings
from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.errors import UserError
from zerolora.evaluate import frozen_model, reference_log_probabilities
from zerolora.evaluate.evaluated_models import with_adapter
from zerolora.files import read_json
from zerolora.model.manifest import located
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import EVALUATION_TOKENS
from zerolora.planner.slurm_resources import SHARED_DISK, evaluating, referring
from zerolora.train.beginning import check_reference_model
from zerolora.train.objectives.mismatched import mismatched, partners

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # trains an adapter of a tiny model


@pytest.fixture(scope="module", autouse=True)
def _rows(bench: Bench) -> None:
    bench.prefer()


def expected(model: Any, row: dict[str, Any], prefix: str = "") -> float:
    """Return the log-probability of the supervised tokens of a sequence."""
    ids, labels = row[f"{prefix}input_ids"], row[f"{prefix}labels"]
    with torch.no_grad():
        each = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(sum(each[at - 1, ids[at]] for at in range(1, len(ids)) if labels[at] != IGNORED))


def base(bench: Bench) -> Any:
    weights = located(bench.folder / "w/tiny.json")
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()


def columns_of(bench: Bench, kind: str) -> dict[str, np.ndarray]:
    rows = open_split(bench.folder / f"{kind}-reference", "train").with_format("numpy")
    return {name: rows[name][:] for name in rows.column_names}


def test_rows_without_answers_are_refused_before_a_model_is_loaded(bench: Bench, tmp_path: Path) -> None:
    settings = ReferenceSettings(device="cpu", precision="fp32")
    with pytest.raises(UserError, match="the prepared rows have no answers to compare"):
        reference_log_probabilities.compute(settings, bench.folder / "data", tmp_path / "no.json", tmp_path / "out")


def test_requested_time_counts_mismatched_sequences(bench: Bench) -> None:
    statistics = read_json(bench.folder / "labelled/stats.json", "")
    tokens = sum(statistics[f"{split}_tokens"] for split in ("train", "validation"))
    seconds, answering = {}, set()
    for objective in ("dpo", "kto"):
        settings = bench.resolved(objective=objective)["runs"]["default"]
        run = RenderSettings.model_validate(settings["render"])
        reference = ReferenceSettings.model_validate(settings["reference"])
        seconds[objective] = referring(reference, bench.folder / "m/tiny", bench.folder / "labelled", run)["seconds"]
        evaluate = EvaluateRunSettings.model_validate(settings["evaluate"])
        answering.add(evaluating(evaluate, bench.folder / "m/tiny", bench.folder / "labelled", run)["seconds"])
    stored = (located(bench.folder / "w/tiny.json") / "model.safetensors").stat().st_size / SHARED_DISK
    passes = [math.ceil(count * tokens / EVALUATION_TOKENS) for count in (1, 2)]
    assert passes[0] < passes[1] and len(answering) == 1
    assert (seconds["kto"] - stored) / passes[1] == pytest.approx((seconds["dpo"] - stored) / passes[0])


@pytest.mark.parametrize("way", ["own attention", "transformers' attention", "spread"])
def test_each_answer_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """With this project's attention, which computes a prompt once; with transformers' own; and from the logits of the
    whole model, as for one that is spread over GPUs."""
    if way == "spread":
        monkeypatch.setattr(frozen_model, "placement", lambda *_, **__: {"device_map": "auto"})
    if way == "transformers' attention":
        assert "flash" in read_model_spec(bench.folder / "m/tiny").attentions
        monkeypatch.setattr(
            frozen_model, "read_model_spec", lambda path: replace(read_model_spec(path), attentions=("sdpa",))
        )
    model = base(bench)
    for kind in ("pairs", "labelled"):
        bench.refer(kind)
    pairs, labelled = (list(open_split(bench.folder / kind, "train")) for kind in ("pairs", "labelled"))
    columns = columns_of(bench, "pairs")
    assert columns["reference_chosen"] == pytest.approx([expected(model, row) for row in pairs], rel=1e-5)
    assert columns["reference_rejected"] == pytest.approx(
        [expected(model, row, "rejected_") for row in pairs], rel=1e-5
    )
    columns, longest = columns_of(bench, "labelled"), max(row["length"] for row in labelled)
    others = partners(np.array([row["prompt_hash"] for row in labelled]))
    assert columns["reference"] == pytest.approx([expected(model, row) for row in labelled], rel=1e-5)
    crossed = [mismatched(row, labelled[other], longest) for row, other in zip(labelled, others, strict=True)]
    assert columns["reference_mismatched"] == pytest.approx([expected(model, row) for row in crossed], rel=1e-5)


def test_the_adapter_that_training_starts_from(bench: Bench) -> None:
    adapter = Path(bench.run("start-of-pairs", "ddp", ranks_per_node=1)) / "adapter"
    bench.refer("pairs", from_adapter=str(adapter))
    model = with_adapter(base(bench), adapter).eval()
    rows = list(open_split(bench.folder / "pairs", "train"))
    values = columns_of(bench, "pairs")["reference_chosen"]
    assert values == pytest.approx([expected(model, row) for row in rows], rel=1e-5)
    assert values != pytest.approx([expected(base(bench), row) for row in rows], rel=1e-3)
    reference, stamp = bench.folder / "pairs-reference", bench.folder / "w/tiny.json"
    check_reference_model(reference, START, str(adapter), stamp)
    check_reference_model(reference, str(adapter), None, stamp)
    for named, start in ((START, None), ("other", str(adapter))):
        with pytest.raises(UserError, match=f"under {adapter}, and the run compares with (the base model|other); run"):
            check_reference_model(reference, named, start, stamp)
    tensors = adapter / "adapter_model.safetensors"
    before = tensors.read_bytes()
    tensors.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(UserError, match=f"under the adapter {adapter} before it changed"):
        check_reference_model(reference, str(adapter), None, stamp)
    tensors.write_bytes(before)
    bench.refer("pairs")
