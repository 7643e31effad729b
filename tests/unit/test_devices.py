"""The configured device: an unusable GPU is refused in one line, cpu hides all GPUs."""

from typing import Any

import pytest
import yaml
from conftest import ROOT, refusal
from pretended_driver import PretendedDriver

from zerolora.config.settings import HardwareSettings
from zerolora.errors import UserError
from zerolora.machine import devices
from zerolora.planner.hardware import GPUS, offered
from zerolora.planner.machine_limits import check_gpu


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a torch built for CUDA 13.0, like the lock's wheels, on x86_64."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.delenv(devices.VISIBLE, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, driver: PretendedDriver | None) -> None:
    monkeypatch.setattr(devices, "driver_library", lambda: driver)


def refused(device: str = "cuda", gpus: int = 1) -> str:
    text = refusal(devices.obey, device, gpus)
    assert text.startswith("hardware.device is cuda, but ")
    return text


def test_unusable_gpu_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert "no NVIDIA driver (libcuda.so.1); run where the GPUs are" in refused()
    pretend(monkeypatch, PretendedDriver(9.0))
    assert "2 GPUs are needed and 1 visible; ask for more" in refused(gpus=2)
    monkeypatch.setenv(devices.VISIBLE, "-1")
    pretend(monkeypatch, PretendedDriver(start=100))
    assert "a GPU is needed and none visible (CUDA_VISIBLE_DEVICES=-1)" in refused()
    pretend(monkeypatch, PretendedDriver(9.0, start=803))
    assert "cannot start (cuInit returned 803)" in refused()
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cpu", None))
    assert "torch 2.13.0+cpu is built for CPUs alone" in refused()
    monkeypatch.setattr(devices, "_torch_version", lambda: {"hip": "6.4"})
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+rocm6.4", None))
    assert "torch 2.13.0+rocm6.4 is built for AMD's GPUs (ROCm), which zerolora does not use; install" in refused()


def test_cpu_torch_refers_to_the_locks_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cpu", None))
    said = devices.unsupported((7, 0), "V100")
    assert said and "and the torch of envs/requirements.lock carries kernels for sm_75, sm_80" in said


@pytest.mark.parametrize(
    ("built_for", "driver", "names"),
    [
        ("13.0", (12, 4), ("goes up to CUDA 12.4", "built for CUDA 13.0", "needs driver 580.65", "for CUDA 12")),
        ("12.8", (11, 8), ("goes up to CUDA 11.8", "built for CUDA 12.8", "needs driver 525.60", "for CUDA 11")),
    ],
)
def test_old_driver(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: tuple[int, int], names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0", built_for))
    pretend(monkeypatch, PretendedDriver(9.0, cuda=driver))
    text = refused()
    assert all(name in text for name in names), text


@pytest.mark.parametrize(("built_for", "driver"), [("13.2", (13, 0)), ("12.6", (13, 0)), ("12.9", (12, 2))])
def test_driver_of_the_same_or_a_later_major_version_suffices(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: tuple[int, int]
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0", built_for))
    pretend(monkeypatch, PretendedDriver(9.0, cuda=driver))
    devices.obey("cuda")


def test_gpu_without_kernels_in_the_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, PretendedDriver(9.0, 7.0))
    said = "pretended GPU 1 has compute capability 7.0, and torch 2.13.0+cu130 carries kernels for sm_75, sm_80, sm_86"
    assert said in refused() and "(`make TORCH=cu12`, docs/gpu.md)" in refused()


@pytest.mark.parametrize(("capability", "build"), [((10, 0), "cu13"), ((12, 0), "cu13"), ((3, 5), None)])
def test_build_of_torch_for_a_gpu_is_named(
    capability: tuple[int, int], build: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu126", "12.6"))
    assert devices.unsupported((7, 0), "V100") is None
    said = devices.unsupported(capability, "this GPU")
    assert said and (f"make TORCH={build}" if build else "none of the locks has one") in said


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        *((each, False) for each in (5.0, 6.1, 7.0, 7.2, 13.0)),
        *((each, True) for each in (7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1)),
    ],
)
def test_compute_capabilities_of_the_locks_wheel(capability: float, runs: bool) -> None:
    """Release wheels have no PTX, which later GPUs could compile (build_env_setup.py, _ptx_arches)."""
    assert devices.runs_on(divmod(round(10 * capability), 10), devices.of_wheel("13.0")) == runs


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({"gpu": "V100-32GB", "compute_capability": 7.0}, "V100-32GB has compute capability 7.0"),
        ({"gpu": "V100-16GB", "compute_capability": 8.0}, "V100-16GB has compute capability 7.0"),
        ({"compute_capability": 7.0}, "a GPU as V100-32GB has compute capability 7.0"),
        ({"compute_capability": 5.0}, "a GPU as V100-32GB has compute capability 5.0"),
    ],
)
def test_render_refuses_unsupported_gpus(monkeypatch: pytest.MonkeyPatch, hardware: dict[str, Any], said: str) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(UserError, match=f"^hardware: {said}, and torch 2.13.0.cu130 carries kernels for sm_75"):
        check_gpu(HardwareSettings(probe=None, disk="nvme", **hardware))


@pytest.mark.parametrize("name", [name for name in GPUS if not name.startswith("V100")])
def test_render_accepts_every_other_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, None)
    check_gpu(HardwareSettings(probe=None, disk="nvme", gpu=name, compute_capability=GPUS[name].capability))


def test_render_refuses_an_old_driver_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = HardwareSettings(probe=None, disk="nvme", compute_capability=8.0)
    pretend(monkeypatch, PretendedDriver(8.0, cuda=(12, 4)))
    monkeypatch.setattr("shutil.which", lambda _: None)
    said = "the NVIDIA driver .* goes up to CUDA 12.4, and torch 2.13.0.cu130 is built for"
    with pytest.raises(UserError, match=said):
        check_gpu(hardware)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    check_gpu(hardware)


def test_architectures_match_as_in_cuda() -> None:
    assert devices.runs_on((8, 9), ["sm_86"]) and not devices.runs_on((8, 0), ["sm_86"])
    assert devices.runs_on((9, 0), ["sm_90a"]) and not devices.runs_on((10, 0), ["sm_90"])
    assert devices.runs_on((10, 0), ["sm_80", "compute_90"]) and not devices.runs_on((8, 6), ["compute_90"])


def test_table_is_that_of_the_installed_wheel() -> None:
    import torch

    if torch.version.cuda is None:
        pytest.skip("torch is built for CPUs alone here")
    assert tuple(str(torch._C._cuda_getArchFlags()).split()) == devices.of_wheel(torch.version.cuda)


@pytest.mark.parametrize("file", ["README.md", "docs/gpu.md", "envs/conda.yaml"])
def test_documents_name_the_required_driver(file: str) -> None:
    """PyPI's wheels of this torch are built for CUDA 13; check both tables when the locked version changes."""
    lock = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")
    assert "\ntorch==2.13.0" in lock
    assert f"NVIDIA driver {devices.DRIVERS[13]} or" in " ".join((ROOT / file).read_text(encoding="utf-8").split())


def test_recipes_use_supported_gpus() -> None:
    configs = sorted((ROOT / "config").rglob("config.yaml"))
    hardware = [(yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("hardware", {}) for path in configs]
    capabilities = {each["compute_capability"] for each in hardware if each.get("device") == "cuda"}
    assert len(capabilities) > 2
    assert all(devices.runs_on(divmod(round(10 * each), 10), devices.of_wheel("13.0")) for each in capabilities)
    assert not {each.get("gpu") for each in hardware} & {name for name in GPUS if name not in offered(GPUS)}


def test_an_unset_list_of_visible_gpus_differs_from_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.visible_names() is None
    for text, names in (("", []), ("-1", []), ("0, 2", ["0", "2"]), ("1,-1,0", ["1"]), ("GPU-ab", ["GPU-ab"])):
        monkeypatch.setenv(devices.VISIBLE, text)
        assert devices.visible_names() == names
