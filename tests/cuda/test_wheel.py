"""What the project's tables and pages say of torch's build for CUDA is what its wheel says (cuda_build.py)."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from typing import Any

import cuda_build
import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.cuda

FACTS = """
import json, platform, torch
print(json.dumps([torch.version.cuda, torch.cuda.get_arch_list(), platform.machine()]))
"""


@pytest.fixture(scope="module", autouse=True)
def installed() -> dict[str, Distribution]:
    """Return the packages of torch's build for CUDA, by name."""
    if reason := cuda_build.lacking():
        pytest.skip(reason)
    path = cuda_build.path() or sys.path
    return {canonicalize_name(each.metadata["Name"]): each for each in distributions(path=path)}


@pytest.fixture(scope="module")
def wheel(installed: dict[str, Distribution]) -> tuple[str, list[str], str]:
    """Return the version of CUDA that torch is built for, its architectures, and the processor."""
    # Its architectures are only in what it loads: 4 CPU-seconds.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(cuda_build.path())}
    result = subprocess.run([sys.executable, "-c", FACTS], env=environment, capture_output=True, text=True, check=True)
    cuda, architectures, processor = json.loads(result.stdout)
    return cuda, architectures, processor


def needed(torch: Distribution) -> list[Requirement]:
    """Return what torch's metadata needs here for CUDA alone: what the CPU build does not need."""
    requirements = map(Requirement, torch.requires or [])
    here = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [each for each in here if each.name.startswith(("cuda", "nvidia", "triton"))]


def test_cu13_in_names_what_the_wheel_needs(installed: dict[str, Distribution]) -> None:
    """Each requirement of the metadata, and none but libraries of the toolkit besides; versions fit."""
    lines = (ROOT / "envs/cu13.in").read_text(encoding="utf-8").splitlines()
    written = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    ours = {canonicalize_name(each.name): each for each in written}
    theirs = {canonicalize_name(each.name): each for each in needed(installed["torch"])}
    assert theirs.keys() <= ours.keys()
    assert {name for name in ours.keys() - theirs.keys() if not name.startswith("nvidia-nvjitlink")} == set()
    for name, each in theirs.items():
        assert each.extras == ours[name].extras, name
        assert each.specifier.contains(Version(installed[name].version)), name


def test_hashes_pin_each_installed_package(installed: dict[str, Distribution]) -> None:
    """As pip freeze names them, and each requirement of each."""
    text = (ROOT / "envs/cu13.hashes").read_text(encoding="utf-8")
    versions = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    pinned = {canonicalize_name(name): version for name, version in versions}
    assert {name: installed[name].version for name in pinned} == pinned
    for name in pinned:
        for each in map(Requirement, installed[name].requires or []):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                assert each.specifier.contains(installed[canonicalize_name(each.name)].version), f"{name}: {each}"


def test_pages_name_the_wheels_cuda(installed: dict[str, Distribution], wheel: Any) -> None:
    """README and docs/gpu.md: the driver of its version of CUDA, and its lowest compute capability."""
    from zerolora.machine import devices

    cuda, architectures, _ = wheel
    lowest = min(Version(f"{number[:-1]}.{number[-1]}") for number in re.findall(r"sm_(\d+)", " ".join(architectures)))
    driver = devices.DRIVERS[int(cuda.partition(".")[0])]
    for name in ("README.md", "docs/gpu.md"):
        page = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert driver in page, name
    assert f"compute capability {lowest} to " in page
    assert SpecifierSet(f"=={cuda}.*").contains(installed["cuda-toolkit"].version)


def test_gpus_of_the_datasheet_run_on_the_wheel(wheel: Any) -> None:
    """But for those that docs/gpu.md excepts: the table of architectures is the wheel's."""
    from zerolora.machine import devices
    from zerolora.planner.hardware import GPUS

    cuda, architectures, _ = wheel
    assert set(architectures) == set(devices.of_wheel(cuda))
    capabilities = {name: divmod(round(10 * gpu.capability), 10) for name, gpu in GPUS.items()}
    unable = {name for name, each in capabilities.items() if not devices.runs_on(each, architectures)}
    assert unable == {"V100-16GB", "V100-32GB"}
