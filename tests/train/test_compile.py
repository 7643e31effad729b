"""train.compile: the same training with compiled layers, each compiled once for each length."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, metrics

from zerolora.config.settings import PackSettings
from zerolora.data.pack import pack_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # g++ compiles for 40 s of CPU

SETTINGS: dict[str, Any] = {
    "ranks_per_node": 1, "micro_batch": 1, "global_batch": 2, "max_steps": 3, "validation_steps": 2,
    "activation_checkpointing": True, "lora": {"dropout": 0.0},
}  # fmt: skip


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in csv.DictReader((run / "metrics/telemetry.csv").open())]


def test_compiled_layers_train_alike_and_are_compiled_once_for_each_length(tmp_path: Path, tiny_model: Path) -> None:
    """With checkpointing, FSDP's hooks around each layer, padding to several lengths, and validation, which is not
    compiled; without dropout, which draws for padding too."""
    bench, runs = Bench(tmp_path, tiny_model), []
    bench.mix()
    pack_rows(PackSettings(packing=False, capacity=None), tmp_path / "mixed", tmp_path / "mixed-rows")
    for name in ("plain", "compiled"):
        strategy = "fsdp" if name == "compiled" else "ddp"
        command = bench.command(name, strategy, "mixed-rows", "mixed", compile=name == "compiled", **SETTINGS)
        result = bench.server.run(command, tmp_path, bench.environment)
        assert result.returncode == 0, result.stderr[-3000:]
        runs.append(tmp_path / name)
    plain, compiled = runs
    assert metrics(compiled)["losses"] == pytest.approx(metrics(plain)["losses"], rel=1e-5)
    assert metrics(compiled)["loss_validation"] == pytest.approx(metrics(plain)["loss_validation"], rel=1e-5)
    assert metrics(compiled)["tokens"] == metrics(plain)["tokens"]
    assert column(compiled, "gradient_norm") == pytest.approx(column(plain, "gradient_norm"), rel=1e-4)
    figures = json.loads((compiled / "metrics/train_resources.json").read_text())
    assert figures["compiled_graphs"] >= 3 * figures["compiled_lengths"] and figures["recompiled_graphs"] == 0
    assert 1 < figures["compiled_lengths"] <= 4
    assert "compiled_graphs" not in json.loads((plain / "metrics/train_resources.json").read_text())
