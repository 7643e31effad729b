"""What a merge lost, as an evaluation measures it: logits of the merged model against base and adapter."""

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
    """Return the prepared data of a base model to which no tokens are added."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text(json.dumps({"added_tokens": [], "files": {}}))
    return tmp_path / "data"


def figures(base: Path, adapter: Path, merged: Path, data: Path) -> dict[str, float]:
    given = next_tokens(load(merged, CPU, [])[0], ROWS)
    assert given.shape[0] == 3 + 4 + 2  # the supervised tokens that have one before them
    return of_merged(given, EvaluatedModel(base, adapter, merged), data, ROWS)


def test_a_merge_loses_nothing_of_what_was_trained(
    tiny_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    actual = figures(tiny_model, adapter, tmp_path / "merged", data)
    assert tuple(actual) == OF_MERGED
    assert actual["merged_kl"] < 1e-6 and actual["merged_kl_share"] < 1e-3
    assert actual["merged_argmax"] == 1 and 0 < actual["merged_logits"] < 1e-4
    assert "is not what was trained" not in caplog.text


def test_a_merge_that_lost_the_adapter_is_told(
    tiny_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The merged model is the base model, as an update that is smaller than the rounding of the weights leaves it."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    shutil.copytree(tiny_model, tmp_path / "merged")
    with caplog.at_level(logging.WARNING):
        actual = figures(tiny_model, adapter, tmp_path / "merged", data)
    assert actual["merged_kl_share"] == pytest.approx(1) and actual["merged_kl_share"] > BOUND
    assert actual["merged_kl"] > 1e-5
    assert "100 % of what fine-tuning changed is lost" in caplog.text


def test_the_divergence_is_that_of_torch(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    other = next_tokens(load(tiny_model, CPU, [])[0], ROWS)
    tuned = next_tokens(load(tiny_model, CPU, [], adapter)[0], ROWS)
    actual = of_merged(other, EvaluatedModel(tiny_model, adapter, tiny_model), data, ROWS)
    theirs = torch.nn.functional.kl_div(other, tuned, log_target=True, reduction="batchmean")
    assert actual["merged_kl"] == pytest.approx(theirs.item(), rel=1e-4)
    assert actual["merged_logits"] == pytest.approx((other - tuned).abs().max().item())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_is_what_an_adapter_of_qlora_was_trained_on(
    kind: str, tiny_model: Path, tmp_path: Path, data: Path
) -> None:
    """Merged into the dequantized base it is what was trained; into the original base it is not."""
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
    # int8 is so near to the original that both divergences may be nothing but rounding: some 1e-7 of a sum of fp32.
    assert actual[True]["trained_kl"] <= actual[False]["trained_kl"] + 1e-6
