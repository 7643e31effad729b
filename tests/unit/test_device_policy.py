"""hardware.device is obeyed: on the CPU nothing uses a GPU that is there; for a GPU nothing falls back to the CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_vllm_engine import answers_of, models, settings
from typer.testing import CliRunner

from zerolora import devices
from zerolora.cli import app
from zerolora.evaluate import asked_task, merged_logits, ranks
from zerolora.evaluate.models import EvaluatedModel
from zerolora.evaluate.vllm_engine import engine_arguments
from zerolora.peak_memory import PeakMemory

__all__ = ["models"]
GPU = torch.device("cuda", 0)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that torch says is there; each use of it is noted here, and fails."""
    noted: list[str] = []

    def use(*_: Any, **__: Any) -> None:
        noted.append("CUDA was initialised")
        raise RuntimeError(noted[-1])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", use)
    return noted


def test_peaks_are_read_before_cuda_is_initialised() -> None:
    """torch refuses to reset the peaks of a GPU that it has not initialised (pytorch#49952)."""
    memory = PeakMemory(GPU)
    memory.restart()
    assert memory.gpu() == 0 and memory.host() > 0


def test_an_evaluation_on_the_cpu_uses_no_gpu_that_is_there(
    models: SimpleNamespace, tmp_path: Path, touched: list[str]
) -> None:
    """The merged model, its comparison with base and adapter, and both unmerged."""
    model = EvaluatedModel(models.base, models.adapter, models.merged)
    found = answers_of(settings(engine="transformers", unmerged=True), models, model, tmp_path)
    assert len(found) == 12 and not touched


def test_a_models_device_is_where_each_stage_loads_it(models: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is said to be there, and nothing goes to the CPU instead."""
    seen: list[str] = []

    def load(weights: Path, device: torch.device, *_: Any, **__: Any) -> None:
        seen.append(str(device))
        raise LookupError

    for module in (asked_task, merged_logits, ranks):
        monkeypatch.setattr(module, "load", load)
    model = EvaluatedModel(models.base, models.adapter, models.merged, "cuda")
    for started in (
        lambda: asked_task.loaded(model, models.data),
        lambda: merged_logits.of_merged(torch.zeros(1), model, models.data, []),
        lambda: ranks.load_for(settings(), models.data, model, []),
    ):
        with pytest.raises(LookupError):
            started()
    assert seen == ["cuda:0"] * 3


def test_vllm_is_given_the_device_of_the_config(models: SimpleNamespace, touched: list[str]) -> None:
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, dtype=torch.float32)
    arguments = engine_arguments(settings(), EvaluatedModel(models.base), models.base, config, 64)
    assert arguments["enforce_eager"] and not touched  # as on a CPU


COMMANDS = {
    "weights": ("--model", "m", "--weights", "w", "--device", "cuda"),
    "evaluate": (
        *("--settings", '{"check": "exact", "device": "cuda"}', "--data", "d", "--weights", "w"),
        *("--output", "o", "--answers", "a"),
    ),
    "task": (
        *("--settings", '{"kind": "harness", "tasks": ["t"], "files": {}}', "--weights", "w", "--output", "o"),
        *("--answers", "a", "--device", "cuda"),
    ),
    "judge": (
        *("--settings", "{}", "--data", "d", "--base", "b", "--tuned", "t", "--work", "w", "--output", "o"),
        *("--device", "cuda"),
    ),
    "export": (
        *("--target", "vllm_adapter", "--settings", "{}", "--model", "m", "--weights", "w", "--adapter", "a"),
        *("--merged", "g", "--data", "d", "--output", "o", "--vllm-python", "python", "--device", "cuda"),
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stage_that_cannot_use_a_gpu_refuses_before_it_reads_anything(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the files that the commands name is there."""
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(devices, "driver_library", lambda: None)
    result = CliRunner().invoke(app, [command, *COMMANDS[command]])
    assert "hardware.device is cuda, but this machine has no NVIDIA driver" in str(result.exception)


def test_every_stage_of_the_workflow_is_given_a_device() -> None:
    """Each rule that computes with a model checks its device first, counts its GPUs and is assigned them."""
    for name in ("evaluate", "task", "judge", "export", "train"):
        text = (ROOT / f"workflow/rules/{name}.smk").read_text(encoding="utf-8")
        jobs = text.count("zerolora weights ")
        assert jobs == text.count("--weights {params.weights} --device {params.device} &&") > 0
        assert jobs == text.count(" gpu=") == text.count(" node_gpus=") == text.count(" gres=")
        assert jobs == text.count("workflow/scripts/on_gpus {resources.node_gpus}")
