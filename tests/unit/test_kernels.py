"""train.kernels: which kernels a run gets, what they save in memory and time, and that a model's output stays.

liger-kernel's kernels run in Triton's interpreter, on a CPU in fp32 (tests/kernels).
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from tables import TABLES

from zerolora.config.settings import Canary, TrainingChoice, TrainSettings, UsefulFlops
from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.memory.decoder import phases
from zerolora.methods.lora import LoraMethod
from zerolora.model import fused_kernels
from zerolora.model.fused_kernels import FAMILIES
from zerolora.model.projections import ForwardSpec, Trained
from zerolora.model.read_spec import from_config
from zerolora.planner.cost import FUSED, FUSED_OPERATIONS, OPERATIONS, TRAFFIC
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.launch.canary import compare_first_steps
from zerolora.types import Attention

TINY: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1024, "vocab_size": 128,
}  # fmt: skip
"""The models of tests/kernels/compared.py."""
LENGTH, SUPERVISED = 8, 4
NAMES = {"norm": "norms", "mlp": "MLPs", "rotary": "rotary embedding", "loss": "losses"}


def spec_of(family: str) -> Any:
    return from_config(TINY | {"model_type": family, "num_local_experts": 4}, Path("config.json"))


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    """Return what tests/kernels/compared.py prints; in a process of its own, as Triton reads its variable once."""
    folder = subprocess.run(
        [ROOT / "tests/kernels/install", sys.executable], capture_output=True, text=True, check=False
    )
    if folder.returncode:
        pytest.skip(f"liger-kernel and Triton cannot be installed: {folder.stderr.splitlines()[-1]}")
    path = [f"{ROOT}/tests", f"{ROOT}/tests/kernels", f"{ROOT}/benchmarks", f"{ROOT}/benchmarks/train"]
    result = subprocess.run(
        [sys.executable, ROOT / "tests/kernels/compared.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*path, folder.stdout.strip()]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    seen: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return seen


# 25 s of CPU: the interpreter takes milliseconds for each token of each norm.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_keep_losses_and_gradients_of_each_family(compared: dict[str, Any], family: str) -> None:
    seen = compared["families"][family]
    assert family in compared["library"]
    assert 0 < seen["loss"] < 1e-6 and 0 < seen["gradient"] < 1e-5  # they did compute, in another order
    assert seen["gradients"] >= 8
    for part, name in NAMES.items():
        assert (name in seen["described"]) == (part in FAMILIES[family]), seen["described"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_of_each_family_are_those_of_the_estimate(compared: dict[str, Any], family: str) -> None:
    model, seen = spec_of(family), compared["families"][family]
    predicted = {
        name: phases(model, step, trained(model))["kept"]["total"]
        for name, step in (("off", step_of(family)), ("on", replace(step_of(family), kernels=FAMILIES[family])))
    }
    saved = seen["off"] - seen["on"]
    # Blocks of each norm's small tensors: a number for each token, and Gemma's 1 + w, which the estimate leaves out.
    small = 2048 * int(seen["described"].split(" norms")[0].split()[-1])
    assert predicted["off"] - predicted["on"] == pytest.approx(saved, abs=small)
    assert saved > 2 * small or family == "mixtral"


def step_of(family: str) -> ForwardSpec:
    attention: Attention = "eager" if family == "gemma2" else "sdpa"
    return ForwardSpec(1, LENGTH, 4, attention, False, False, "fused", SUPERVISED, on_cpu=True)


def trained(model: Any) -> Trained:
    method = LoraMethod(r=8)
    return Trained(method, method.parameters(model, 4).ranks, 4, 1.0)


@pytest.mark.slow
def test_kernels_keep_losses_and_gradients_of_each_method_and_checkpointing(compared: dict[str, Any]) -> None:
    for seen in (*compared["methods"].values(), *compared["checkpointing"].values()):
        assert 0 < seen["loss"] < 1e-6 and 0 < seen["gradient"] < 2e-5, seen


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_kernels_keep_losses_under_engines_that_shard_weights(compared: dict[str, Any], strategy: str) -> None:
    """In bf16, one rank."""
    seen = compared["engines"][strategy]
    assert 0 < seen["losses"] < 1e-2 and 0 < seen["gradient norm"] < 1e-2, seen


@pytest.mark.slow
def test_benchmark_compares_saved_bytes_of_each_part_with_the_estimate(compared: dict[str, Any]) -> None:
    """And kernels are as far from fp32 in bf16 as the operations that they replace."""
    assert {*compared["benchmark"]} == {"fp32", "bf16"}
    for seen in compared["benchmark"].values():
        less = seen["saved_bytes_a_token"]["less"]
        assert {*less} == {"norm", "rotary", "mlp", "loss", "all"}
        for part in ("norm", "mlp", "all"):
            assert less[part]["measured"] == pytest.approx(less[part]["predicted"], rel=0.2, abs=256), part
        assert less["all"]["measured"] == sum(less[part]["measured"] for part in ("norm", "rotary", "mlp", "loss"))
    rounded = compared["benchmark"]["bf16"]
    assert 0 < rounded["fused_from_fp32"]["gradients"] < 2 * rounded["own_from_fp32"]["gradients"]
    assert "| tiny, bf16 |" in TABLES["train_kernels.json"]({"models": {"tiny": compared["benchmark"]}})


@pytest.mark.slow
def test_losses_of_one_kernel_are_fp32_and_their_gradient_replaces_the_logits(compared: dict[str, Any]) -> None:
    assert compared["kernel for losses"]
    for seen in compared["losses"].values():
        assert max(seen.values()) < 1e-5


@pytest.mark.slow
def test_a_kernel_that_changes_the_output_is_noticed_and_removed(compared: dict[str, Any]) -> None:
    assert compared["check"]["right"] < 0.1
    assert compared["check"]["wrong"] > 1
    assert compared["check"]["removed"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "is_installed", lambda: True)


@pytest.mark.usefixtures("installed")
def test_auto_uses_kernels_where_a_gpu_and_the_family_have_them() -> None:
    assert fused_kernels.used("auto", "cuda", "llama", "silu") == FAMILIES["llama"]
    assert fused_kernels.used("auto", "cpu", "llama", "silu") == ()
    assert fused_kernels.used("auto", "cuda", "gpt2", "gelu_new") == ()
    assert fused_kernels.used("off", "cuda", "llama", "silu") == ()
    assert "mlp" not in fused_kernels.used("auto", "cuda", "llama", "gelu")  # its kernel computes silu
    assert "mlp" not in fused_kernels.used("auto", "cuda", "gemma", "gelu")  # its kernel computes tanh's approximation
    with pytest.raises(UserError, match="no kernels for a gpt2 here .* use auto or off"):
        fused_kernels.used("liger", "cuda", "gpt2", "gelu_new")


def test_a_missing_package_is_refused_by_name_or_ignored_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "is_installed", lambda: False)
    assert fused_kernels.used("auto", "cuda", "llama", "silu") == ()
    with pytest.raises(UserError, match=r"liger-kernel is not installed; install it with pip install '.\[kern"):
        fused_kernels.used("liger", "cuda", "llama", "silu")


def test_kernels_move_less_than_the_operations_that_they_replace() -> None:
    for (kind, width), (forward, backward) in TRAFFIC.items():
        saved = [FUSED[part, width] for part in ("norm", "rotary", "mlp")]
        assert 0 < sum(each[0] for each in saved) < forward, kind
        assert 0 < sum(each[1] for each in saved) < backward, kind
    for forward, backward in OPERATIONS.values():
        assert sum(each[0] for each in FUSED_OPERATIONS.values()) < forward
        assert sum(each[1] for each in FUSED_OPERATIONS.values()) < backward


def wrong_with_kernels(paths: dict[str, Path], wrong: str, started: list[str]) -> Any:
    """Return a `Start` whose trainings have other losses where kernels are `wrong`, and name them in `started`."""

    def start(number: int, arguments: list[str], logs: Path) -> None:
        options = dict(zip(arguments[::2], arguments[1::2], strict=False))
        kernels = ZeroJson.read(Path(options["--zero"])).choice.kernels
        compiled = " compiled" if json.loads(options["--settings"])["compile"] else ""
        started.append(f"{kernels}{compiled}")
        loss = 2.5 if kernels == wrong else 2.0
        (Path(options["--output"]) / "telemetry.csv").write_text(f"loss,gradient_norm\n{loss},1.0\n")

    return start


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return the arguments of a training whose canary is due."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("data", "packing"):
        write_json(tmp_path / name / "manifest.json", {"files": {}})
    write_json(tmp_path / "packing/stats.json", {"packing": False, "capacity": None, "longest_packed_row": 8})
    write_json(tmp_path / "weights.json", {"files": {}})
    names = {"zero": "zero.json", "weights": "weights.json", "checkpoints": "checkpoints/run"}
    return {name: tmp_path / names.get(name, name) for name in ("data", "packing", "zero", "weights", "checkpoints")}


def write_zero(paths: dict[str, Path], kernels: Any) -> None:
    options = {"gradient_clipping": 1.0}
    choice = TrainingChoice(
        engine="ddp", strategy="ddp", micro_batch=1, accumulation=1, activation_checkpointing=False, attention="flash",
        precision="fp32", flops=UsefulFlops(token=1, squared_token=1, supervised_token=1, peak=None),
    )  # fmt: skip
    safe = ZeroJson(options=options, choice=choice).as_json()
    risky = choice.model_copy(
        update={"kernels": kernels, "canary": Canary(steps=1, reasons=["a test says so"], zero=safe)}
    )
    ZeroJson(options=options, choice=risky).write(paths["zero"])


def test_auto_trains_without_kernels_whose_first_steps_differ(paths: dict[str, Path], tmp_path: Path) -> None:
    write_zero(paths, "auto")
    started: list[str] = []
    start = wrong_with_kernels(paths, "auto", started)
    settings = TrainSettings(device="cpu")
    for _ in range(2):  # the second time from the record
        assert compare_first_steps(settings, paths, tmp_path, start) == ["--no-kernels"]
    assert started == ["auto", "off", "off"]


def test_kernels_that_agree_stay(paths: dict[str, Path], tmp_path: Path) -> None:
    write_zero(paths, "auto")
    started: list[str] = []
    start = wrong_with_kernels(paths, "none", started)
    assert compare_first_steps(TrainSettings(device="cpu", compile=True), paths, tmp_path, start) == []
    assert started == ["auto compiled", "off"]  # the safe training compiles nothing either


def test_kernels_required_by_name_stop_the_run_if_its_first_steps_differ(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    write_zero(paths, "liger")
    start = wrong_with_kernels(paths, "liger", [])
    with pytest.raises(UserError, match="loss 2.5 instead of 2; .* and train.kernels: off, or train.canary: off"):
        compare_first_steps(TrainSettings(device="cpu"), paths, tmp_path, start)
