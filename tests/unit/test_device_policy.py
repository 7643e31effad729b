"""hardware.device is obeyed: cpu never uses a GPU, cuda never falls back to the CPU."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from pretended_driver import PretendedDriver
from test_vllm_engine import answers_of, models, settings
from typer.testing import CliRunner

from zerolora.cli import app
from zerolora.config.stages import ALL_STAGES
from zerolora.evaluate import asked_task, merged_logits, ranks
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.evaluate.vllm_engine import engine_arguments
from zerolora.machine import devices
from zerolora.machine.peak_memory import PeakMemory

__all__ = ["models"]
GPU = torch.device("cuda", 0)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend a GPU in torch; return a list of its uses, which fail."""
    uses: list[str] = []

    def use(*_: Any, **__: Any) -> None:
        uses.append("CUDA was initialised")
        raise RuntimeError(uses[-1])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", use)
    return uses


def test_peaks_are_read_before_cuda_is_initialised() -> None:
    """torch cannot reset the peaks of an uninitialised GPU (pytorch#49952)."""
    memory = PeakMemory(GPU)
    memory.restart()
    assert memory.gpu() == 0 and memory.host() > 0


def test_cpu_evaluation_never_uses_a_gpu(models: SimpleNamespace, tmp_path: Path, touched: list[str]) -> None:
    """For the merged model, base with adapter, and the comparison of their logits."""
    model = EvaluatedModel(models.base, models.adapter, models.merged)
    actual = answers_of(settings(engine="transformers", unmerged=True), models, model, tmp_path)
    assert len(actual) == 12 and not touched


def test_each_stage_loads_the_model_on_its_device(models: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def load(weights: Path, device: torch.device, *_: Any, **__: Any) -> None:
        seen.append(str(device))
        raise LookupError

    for module in (asked_task, merged_logits, ranks):
        monkeypatch.setattr(module, "load", load)
    model = EvaluatedModel(models.base, models.adapter, models.merged, "cuda")
    for started in (
        lambda: asked_task.loaded(model, models.data),
        lambda: merged_logits.of_base(model, models.data, []),
        lambda: ranks.load_for(settings(), models.data, model, 1),
    ):
        with pytest.raises(LookupError):
            started()
    assert seen == ["cuda:0"] * 3


def test_vllm_gets_the_configured_device(models: SimpleNamespace, touched: list[str]) -> None:
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, dtype=torch.float32)
    arguments = engine_arguments(settings(), EvaluatedModel(models.base), models.base, config, 64)
    assert arguments["enforce_eager"] and not touched  # as on a CPU


Driver = Callable[[PretendedDriver | None], None]
TRAINED = json.dumps({"device": "cuda", "ranks_per_node": 1, "nodes": 1})
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
    "train": (
        *("--settings", TRAINED, "--data", "d", "--packing", "p", "--zero", "z", "--weights", "w"),
        *("--checkpoints", "c", "--output", "o", "--logs", "l"),
    ),
    "probe": ("--output", "o", "--device", "cuda"),
    "export": (
        *("--target", "vllm_adapter", "--settings", "{}", "--model", "m", "--weights", "w", "--adapter", "a"),
        *("--merged", "g", "--data", "d", "--output", "o", "--vllm-python", "python", "--device", "cuda"),
    ),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a function that sets the machine's driver, under a torch built for CUDA."""
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setenv(devices.VISIBLE, "0")
    return lambda pretended: monkeypatch.setattr(devices, "driver_library", lambda: pretended)


def outcome(command: str, device: str) -> str:
    arguments = [each.replace("cuda", device) for each in COMMANDS[command]]
    of_stage = ["stage"] if command in ALL_STAGES else []
    return str(CliRunner().invoke(app, [*of_stage, command, *arguments]).exception)


UNUSABLE = {
    "no driver": (None, "this machine has no NVIDIA driver"),
    "no visible GPU": (PretendedDriver(), "a GPU is needed and none visible"),
    "an old driver": (PretendedDriver(9.0, cuda=(12, 4)), "goes up to CUDA 12.4"),
    "a driver that cannot start": (PretendedDriver(9.0, start=999), "cuInit returned 999"),
    "an old GPU": (PretendedDriver(7.0), "has compute capability 7.0"),
}
"""What a machine may have instead of a GPU that torch can use, and what is said of it."""


@pytest.mark.parametrize("machine", UNUSABLE)
@pytest.mark.parametrize("command", COMMANDS)
def test_stage_without_a_usable_gpu_reads_no_file(command: str, machine: str, driver: Driver) -> None:
    pretended, said = UNUSABLE[machine]
    driver(pretended)
    text = outcome(command, "cuda")
    assert "device is cuda, but " in text and said in text and "\n" not in text


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"probe"}))
def test_stage_sees_gpus_only_on_cuda(command: str, driver: Driver) -> None:
    driver(gpu := PretendedDriver(9.0))
    assert "device is cuda" not in outcome(command, "cuda") and os.environ[devices.VISIBLE] == "0"
    gpu.asked.clear()
    assert "device is" not in outcome(command, "cpu") and os.environ[devices.VISIBLE] == "" and not gpu.asked


@pytest.mark.parametrize(
    "command",
    [
        ("stage", "merge", "--settings", "{}", "--weights", "w", "--adapter", "a", "--output", "o"),
        ("merge", "--base", "b", "--adapter", "a", "--output", "o"),
        ("merged-weights", "--weights", "w", "--adapter", "a", "--manifest", "m"),
    ],
)
def test_merge_hides_gpus(command: tuple[str, ...], driver: Driver, tmp_path: Path) -> None:
    driver(PretendedDriver(9.0))
    (tmp_path / "m").write_text('{"merged": true}')
    CliRunner().invoke(app, [each.replace("m", str(tmp_path / "m")) if each == "m" else each for each in command])
    assert os.environ[devices.VISIBLE] == ""


def test_every_workflow_stage_gets_a_device() -> None:
    """Each rule that computes with a model checks its device first, counts its GPUs and is assigned them."""
    for name in ("evaluate", "task", "judge", "export", "train"):
        text = (ROOT / f"workflow/rules/{name}.smk").read_text(encoding="utf-8")
        jobs = text.count("zerolora weights ")
        assert jobs == text.count("--weights {params.weights} --device {params.device} &&") > 0
        assert jobs == text.count("**resources_of(")
        assert jobs == text.count('"$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus}')
