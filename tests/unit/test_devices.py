"""The device that a config names: a GPU that cannot be used is refused in one line, and cpu hides all."""

import os
from typing import Any

import pytest
import yaml
from conftest import ROOT
from pretended_driver import PretendedDriver

from zerolora.config.settings import HardwareSettings
from zerolora.errors import UserError
from zerolora.machine import devices
from zerolora.planner.hardware import GPUS, offered
from zerolora.probe.meta_trial import check_gpu


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built for CUDA 13.0, as the lock's wheels are; tests of others say so."""
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.delenv(devices.VISIBLE, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, driver: PretendedDriver | None) -> None:
    monkeypatch.setattr(devices, "driver_library", lambda: driver)


def refusal(device: str = "cuda", gpus: int = 1) -> str:
    with pytest.raises(UserError) as refused:
        devices.obey(device, gpus)  # type: ignore[arg-type]
    text = str(refused.value)
    assert text.startswith("hardware.device is cuda, but ") and "\n" not in text
    return text


def test_a_gpu_that_works_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, PretendedDriver(9.0, 9.0))
    monkeypatch.setenv(devices.VISIBLE, "2,3")
    devices.obey("cuda", 2)
    assert os.environ[devices.VISIBLE] == "2,3"


def test_cpu_hides_gpus_and_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PretendedDriver(9.0)
    pretend(monkeypatch, driver)
    monkeypatch.setenv(devices.VISIBLE, "0")
    devices.obey("cpu")
    assert os.environ[devices.VISIBLE] == "" and not driver.asked


def test_what_keeps_torch_from_a_gpu_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert "no NVIDIA driver (libcuda.so.1); run where the GPUs are" in refusal()
    pretend(monkeypatch, PretendedDriver(9.0))
    assert "2 GPUs are needed and 1 visible; ask for more" in refusal(gpus=2)
    monkeypatch.setenv(devices.VISIBLE, "-1")
    pretend(monkeypatch, PretendedDriver(start=100))
    assert "a GPU is needed and none visible (CUDA_VISIBLE_DEVICES=-1)" in refusal()
    pretend(monkeypatch, PretendedDriver(9.0, start=803))
    assert "cannot start (cuInit returned 803)" in refusal()
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cpu", None))
    assert "torch 2.13.0+cpu is built for CPUs alone" in refusal()
    monkeypatch.setattr(devices, "_torch_version", lambda: {"hip": "6.4"})
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+rocm6.4", None))
    assert "torch 2.13.0+rocm6.4 is built for AMD's GPUs (ROCm), which zerolora does not use; install" in refusal()


def test_a_torch_for_cpus_is_not_said_to_carry_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cpu", None))
    said = devices.unsupported((7, 0), "V100")
    assert said and "and the torch of envs/requirements.lock carries kernels for 7.5 and later GPUs" in said


@pytest.mark.parametrize(
    ("built_for", "driver", "names"),
    [
        ("13.0", (12, 4), ("goes up to CUDA 12.4", "built for CUDA 13.0", "needs driver 580.65", "for CUDA 12")),
        ("12.8", (11, 8), ("goes up to CUDA 11.8", "built for CUDA 12.8", "needs driver 525.60", "for CUDA 11")),
    ],
)
def test_a_driver_too_old_for_torch_names_both(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: tuple[int, int], names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0", built_for))
    pretend(monkeypatch, PretendedDriver(9.0, cuda=driver))
    text = refusal()
    assert all(name in text for name in names), text


@pytest.mark.parametrize(("built_for", "driver"), [("13.2", (13, 0)), ("12.6", (13, 0)), ("12.9", (12, 2))])
def test_a_driver_of_the_same_major_version_or_a_later_one_is_enough(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: tuple[int, int]
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0", built_for))
    pretend(monkeypatch, PretendedDriver(9.0, cuda=driver))
    devices.obey("cuda")


@pytest.mark.parametrize("capability", [5.0, 6.1, 7.0])
def test_a_gpu_without_kernels_in_the_wheel_is_named(monkeypatch: pytest.MonkeyPatch, capability: float) -> None:
    pretend(monkeypatch, PretendedDriver(9.0, capability))
    assert (
        f"pretended GPU 1 has compute capability {capability}, and torch 2.13.0+cu130 carries kernels for 7.5 and later"
        in refusal()
    )


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        *((each, False) for each in (5.0, 6.1, 7.0, 7.2)),
        *((each, True) for each in (7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1, 13.0)),
    ],
)
def test_which_gpus_the_locks_wheel_runs_on(capability: float, runs: bool) -> None:
    assert devices.runs_on(divmod(round(10 * capability), 10), devices.ARCHITECTURES) == runs


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({"gpu": "V100-32GB", "compute_capability": 7.0}, "V100-32GB has compute capability 7.0"),
        ({"gpu": "V100-16GB", "compute_capability": 8.0}, "V100-16GB has compute capability 7.0"),
        ({"compute_capability": 7.0}, "a GPU as V100-32GB has compute capability 7.0"),
        ({"compute_capability": 5.0}, "a GPU as V100-32GB has compute capability 5.0"),
    ],
)
def test_render_refuses_a_gpu_that_torch_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch, hardware: dict[str, Any], said: str
) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(UserError, match=f"^hardware: {said}, and torch 2.13.0.cu130 carries kernels for 7.5 and later"):
        check_gpu(HardwareSettings(probe=None, disk="nvme", **hardware))


@pytest.mark.parametrize("name", [name for name in GPUS if not name.startswith("V100")])
def test_render_takes_every_other_gpu_of_the_table(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, None)
    check_gpu(HardwareSettings(probe=None, disk="nvme", gpu=name, compute_capability=GPUS[name].capability))


def test_render_refuses_a_driver_too_old_where_training_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = HardwareSettings(probe=None, disk="nvme", compute_capability=8.0)
    pretend(monkeypatch, PretendedDriver(8.0, cuda=(12, 4)))
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(
        UserError, match="the NVIDIA driver .* goes up to CUDA 12.4, and torch 2.13.0.cu130 is built for"
    ):
        check_gpu(hardware)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    check_gpu(hardware)


def test_architectures_are_matched_as_cuda_does() -> None:
    assert devices.runs_on((8, 9), ["sm_86"]) and not devices.runs_on((8, 0), ["sm_86"])
    assert devices.runs_on((9, 0), ["sm_90a"]) and not devices.runs_on((10, 0), ["sm_90"])
    assert devices.runs_on((10, 0), ["sm_80", "compute_90"]) and not devices.runs_on((8, 6), ["compute_90"])


def test_the_table_is_that_of_the_installed_wheel() -> None:
    """Where a CUDA build is installed; PyPI's for x86_64 may have fewer than the table, which is for aarch64 too."""
    import torch

    if torch.version.cuda is None:
        pytest.skip("torch is built for CPUs alone here")
    assert set(str(torch._C._cuda_getArchFlags()).split()) <= set(devices.ARCHITECTURES)


@pytest.mark.parametrize("file", ["README.md", "docs/gpu.md", "envs/conda.yaml", "envs/apptainer.def"])
def test_documents_name_the_driver_that_the_locks_torch_needs(file: str) -> None:
    """PyPI's wheels of this torch are built for CUDA 13; another version in the lock wants a look at both tables."""
    lock = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")
    assert "\ntorch==2.13.0" in lock
    assert f"NVIDIA driver {devices.DRIVERS[13]} or" in " ".join((ROOT / file).read_text(encoding="utf-8").split())


def test_no_recipe_names_a_gpu_without_kernels() -> None:
    configs = sorted((ROOT / "config").rglob("config.yaml"))
    hardware = [(yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("hardware", {}) for path in configs]
    capabilities = {each["compute_capability"] for each in hardware if each.get("device") == "cuda"}
    assert len(capabilities) > 2
    assert all(devices.runs_on(divmod(round(10 * each), 10), devices.ARCHITECTURES) for each in capabilities)
    assert not {each.get("gpu") for each in hardware} & {name for name in GPUS if name not in offered(GPUS)}


def test_an_unset_list_of_visible_gpus_differs_from_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.visible_names() is None
    for text, names in (("", []), ("-1", []), ("0, 2", ["0", "2"]), ("1,-1,0", ["1"]), ("GPU-ab", ["GPU-ab"])):
        monkeypatch.setenv(devices.VISIBLE, text)
        assert devices.visible_names() == names
