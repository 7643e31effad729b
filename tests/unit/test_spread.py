"""A model that is spread: over memory and disk, through the same library and calls as over several GPUs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_vllm_engine import answers_of, models, settings

from zerolora.evaluate import evaluated_models as models_module
from zerolora.evaluate.evaluated_models import EvaluatedModel, load, placement
from zerolora.files import read_json

__all__ = ["models"]
WHOLE = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"), "cpu")


def test_a_spread_model_answers_the_same(
    models: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft puts no adapter beside weights on a disk, so that this is the base model."""
    model, offload = EvaluatedModel(models.base), tmp_path / "offload"
    whole = answers_of(settings(engine="transformers"), models, model, tmp_path / "whole")
    placed = {"device_map": WHOLE | {"model.layers.1": "disk"}, "offload_folder": str(offload)}
    monkeypatch.setattr(models_module, "placement", lambda *_: placed)
    assert answers_of(settings(engine="transformers", batch=5), models, model, tmp_path / "spread") == whole
    assert len(set(whole)) > 5
    loaded, _ = load(models.base, torch.device("cpu"), [])
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta and not loaded.lm_head.weight.is_meta
    first, second = (read_json(tmp_path / name / "evaluate.json", "") for name in ("whole", "spread"))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_a_model_is_spread_if_it_and_its_cache_do_not_fit(
    models: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs are said to be there; placing weights on them is accelerate's."""
    size = sum(path.stat().st_size for path in models.base.glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size, 2 * size))
    gpu = torch.device("cuda", 0)
    assert placement(models.base, gpu) == {}
    assert placement(models.base, gpu, beside=size) == {"device_map": "auto"}
    assert placement(models.base, torch.device("cpu"), beside=size) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert placement(models.base, gpu) == {}
    assert placement(models.base, gpu, beside=size) == {"device_map": "auto"}  # and the rest in host memory
