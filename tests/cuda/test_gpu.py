"""What a real GPU computes for every family, beside the CPU (real_gpu.py); skipped where torch sees no GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, project_environment
from matrix import DECODERS, drawn, refusal, trainings, write_models

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
# Of the gradients' norm. 8-bit products round activations on a GPU alone.
TOLERANCES = {"fp32": 1e-4, "fp16": 5e-2, "bf16": 1e-1}
QUANTIZED = 1e-1


@pytest.fixture(scope="module")
def agreed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Return the arguments, the figures and the failure of each case."""
    folder = tmp_path_factory.mktemp("families")
    cases = [(f"{name} evaluated", "evaluate", {"weights": name}) for name, _ in write_models(folder, tiny_model)]
    (folder / "cases.json").write_text(json.dumps(cases + trainings(folder)))
    command = [sys.executable, str(ROOT / "tests/cuda/real_gpu.py"), str(folder / "cases.json")]
    result = subprocess.run(command, env=project_environment(ROOT), capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('["')]
    assert result.returncode == 0, result.stderr[-3000:]
    return {name: (arguments, figures, failed) for name, arguments, figures, failed in lines}


@pytest.mark.parametrize("family", DECODERS)
def test_gpu_agrees_with_the_cpu(family: str, agreed: dict[str, tuple[Any, dict[str, Any], Any]]) -> None:
    for name, (arguments, figures, failed) in agreed.items():
        if name.split()[0] != family:
            continue
        choice = drawn().get(name.removesuffix(" bf16"))
        said = refusal(name.removesuffix(" bf16"), choice) if choice else None
        assert said in failed if said and failed else failed is said, (name, failed)
        if name.endswith("evaluated"):
            assert figures["same_answers"], name
        elif not failed:
            settings = arguments["settings"]
            most = QUANTIZED if settings["method"].startswith("q") else TOLERANCES[settings["precision"]]
            assert figures["gradient_error"] < most and not figures["unchanged"] + figures["not_finite"], (
                name,
                figures,
            )
            assert figures["repeats"] == {"losses": True, "gradients": 0.0}, name
