"""What a merge lost: logits of the merged model against base and adapter."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_merge import make_adapter

from zerolora.data.prepared_rows import IGNORED
from zerolora.evaluate.evaluated_models import EvaluatedModel, load
from zerolora.evaluate.merged_logits import BOUND, next_tokens, of_merged
from zerolora.fail_if import OF_MERGED, OF_TRAINED
from zerolora.merge.user_merge import merge_by_hand

CPU = torch.device("cpu")


def row(tokens: list[int], prompt: int) -> dict[str, Any]:
    labels = [IGNORED] * prompt + tokens[prompt:]
    return {"input_ids": tokens, "labels": labels, "prompt": prompt, "length": len(tokens)}


ROWS = [row([5, 9, 40, 77, 2], 2), row([8, 100, 30, 31, 32, 33, 2], 3), row([60, 61, 62], 0)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return prepared data without added tokens."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text(json.dumps({"added_tokens": [], "files": {}}))
    return tmp_path / "data"


def figures(base: Path, adapter: Path, merged: Path, data: Path) -> dict[str, float]:
    logits = next_tokens(load(merged, CPU, [])[0], ROWS)
    assert logits.shape[0] == 3 + 4 + 2  # supervised tokens with a token before them
    return of_merged(logits, EvaluatedModel(base, adapter, merged), data, ROWS)


def test_merge_loses_nothing(tiny_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    actual = figures(tiny_model, adapter, tmp_path / "merged", data)
    assert tuple(actual) == OF_MERGED
    assert actual["merged_kl"] < 1e-6 and actual["merged_kl_share"] < 1e-3
    assert actual["merged_argmax"] == 1 and 0 < actual["merged_logits"] < 1e-4
    assert "is not what was trained" not in caplog.text


def test_lost_adapter_is_reported(
    tiny_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when rounding swallows the update: the merged model is the base model."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    shutil.copytree(tiny_model, tmp_path / "merged")
    with caplog.at_level(logging.WARNING):
        actual = figures(tiny_model, adapter, tmp_path / "merged", data)
    assert actual["merged_kl_share"] == pytest.approx(1) and actual["merged_kl_share"] > BOUND
    assert actual["merged_kl"] > 1e-5
    assert "100 % of what fine-tuning changed is lost" in caplog.text


def test_divergence_matches_torch(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    other = next_tokens(load(tiny_model, CPU, [])[0], ROWS)
    tuned = next_tokens(load(tiny_model, CPU, [], adapter)[0], ROWS)
    actual = of_merged(other, EvaluatedModel(tiny_model, adapter, tiny_model), data, ROWS)
    theirs = torch.nn.functional.kl_div(other, tuned, log_target=True, reduction="batchmean")
    assert actual["merged_kl"] == pytest.approx(theirs.item(), rel=1e-4)
    assert actual["merged_logits"] == pytest.approx((other - tuned).abs().max().item())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_qlora_adapter_belongs_to_the_dequantized_base(kind: str, tiny_model: Path, tmp_path: Path, data: Path) -> None:
    """Only the merge into the dequantized base is the trained model."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    quantization = {"type": kind, "double": True, "precision": "fp32"}
    (adapter / "manifest.json").write_text(json.dumps({"files": {}, "quantization": quantization}))
    actual = {}
    for dequantized in (True, False):
        output = tmp_path / f"merged-{dequantized}"
        merge_by_hand(tiny_model, [adapter], [], output, dequantized=dequantized)
        actual[dequantized] = figures(tiny_model, adapter, output, data)
        assert tuple(actual[dequantized]) == OF_MERGED + OF_TRAINED
    assert actual[True]["trained_logits"] < 1e-4 < actual[True]["merged_logits"]
    assert actual[False]["merged_logits"] < 1e-4 < actual[False]["trained_logits"]
    # int8 is so close to the original that both divergences may be fp32 rounding, about 1e-7.
    assert actual[True]["trained_kl"] <= actual[False]["trained_kl"] + 1e-6
