"""ZeRO-Infinity: weights and optimizer on disk, with real files, through DeepSpeed's async_io.

The op is compiled once, in about three CPU-minutes, into torch's cache of extensions; it needs libaio-dev.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from conftest import ROOT, project_environment
from safetensors.torch import load_file

from zerolora.train.checkpoint.store import FINISHED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # a minute and, the first time, the compilation


class NvmeBench(Bench):  # type: ignore[misc]  # mypy does not find the module of a package named like a test's
    """A bench with a disk, and with the user's own cache of extensions."""

    @property
    def hardware(self) -> dict[str, Any]:
        """The disk."""
        return {"nvme": str(self.folder / "disk")}

    @property
    def environment(self) -> dict[str, str]:
        return project_environment(ROOT)


@pytest.fixture(scope="module")
def nvme(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> NvmeBench:
    """Return a bench with a model whose shards are large enough to be moved to disk: 1 MiB or more."""
    probe = ["c++", "-x", "c++", "-", "-laio", "-o", str(tmp_path_factory.mktemp("probe") / "probe")]
    source = "#include <libaio.h>\nint main() { return 0; }\n"
    compiler = shutil.which("c++")
    if not compiler or subprocess.run(probe, input=source, capture_output=True, text=True, check=False).returncode:
        pytest.skip("no C++ compiler with libaio here: apt-get install g++ libaio-dev")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").unlink()
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": 128}
    torch.manual_seed(0)
    config = LlamaConfig(**json.loads((model / "config.json").read_text()) | wide)
    LlamaForCausalLM(config).save_pretrained(model)
    return NvmeBench(tmp_path_factory.mktemp("nvme"), model)


# Factors of 1,024 x 512 numbers: a rank's half of each is 1 MiB, so trained weights are on disk too.
SETTINGS: dict[str, Any] = {"lora": {"r": 1024}, "learning_rate": 1e-3, "global_batch": 2}


@pytest.fixture(scope="module")
def whole(nvme: NvmeBench) -> dict[str, Path]:
    """Return runs of three steps with everything on disk, and with everything in memory."""
    return {strategy: nvme.run(strategy, strategy, **SETTINGS) for strategy in ("zero2", "zero3_nvme")}


def assert_same(run: Path, reference: Path) -> None:
    """Hold a run against another: the same losses, the same adapter."""
    assert metrics(run)["losses"] == pytest.approx(metrics(reference)["losses"], rel=1e-5)
    assert metrics(run)["loss_validation"] == pytest.approx(metrics(reference)["loss_validation"], rel=1e-5)
    file = "adapter/adapter_model.safetensors"
    adapter, other = load_file(run / file), load_file(reference / file)
    for name, tensor in other.items():
        assert torch.allclose(adapter[name], tensor, rtol=1e-3, atol=1e-4), name


def test_a_run_on_disk_learns_the_same(nvme: NvmeBench, whole: dict[str, Path]) -> None:
    assert_same(whole["zero3_nvme"], whole["zero2"])
    files = [path for path in (nvme.folder / "disk/zero3_nvme").rglob("*.swp") if path.stat().st_size >= 2**20]
    for part, kind in (("optimizer", "exp_avg_sq"), ("float32params", "param")):
        for rank in (0, 1):
            assert [path for path in files if f"{part}/rank{rank}" in str(path) and kind in path.name], (part, rank)


@pytest.mark.parametrize(("first", "then"), [("zero2", "zero3_nvme"), ("zero3_nvme", "zero2")])
def test_a_run_moves_to_disk_and_back(nvme: NvmeBench, whole: dict[str, Path], first: str, then: str) -> None:
    """As if the first had been killed after its second step."""
    name, checkpoints = f"{first}-then-{then}", nvme.folder / "checkpoints"
    shutil.copytree(checkpoints / first, checkpoints / name)
    for file in ("step-00000003.safetensors", FINISHED):
        next((checkpoints / name).glob(f"*/{file}")).unlink()
    result = nvme.start(name, then, **SETTINGS)
    assert result.returncode == 0 and "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    assert_same(nvme.folder / name, whole["zero2"])


METHODS: dict[str, dict[str, Any]] = {
    "dora": {"method": "dora"},
    "pissa": {"lora": {"r": 256, "init": "pissa"}},
    "ia3": {"method": "ia3"},
    "nf4": {"method": "qlora"},
    "full": {"method": "full", "learning_rate": 1e-4},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_the_same_on_disk(name: str, nvme: NvmeBench) -> None:
    settings = SETTINGS | METHODS[name]
    run, reference = (nvme.run(f"{name}-{strategy}", strategy, **settings) for strategy in ("zero3_nvme", "zero2"))
    assert metrics(run)["losses"] == pytest.approx(metrics(reference)["losses"], rel=1e-5)
    assert metrics(run)["loss_validation"] == pytest.approx(metrics(reference)["loss_validation"], rel=1e-5)
