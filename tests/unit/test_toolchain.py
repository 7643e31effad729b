"""What DeepSpeed compiles when training starts is named by render where a tool for it is missing."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, refusal

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.log import LOGGER
from zerolora.machine import devices, toolchain
from zerolora.planner import machine_limits
from zerolora.strategies import STRATEGIES
from zerolora.types import Device

Tool = Callable[[str, str], None]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Leave no tool on PATH but those that the returned function adds, with the text that each prints."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", toolchain.UNCHECKED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setattr(toolchain, "TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(toolchain, "headers", lambda: folder)

    def add(name: str, prints: str = "") -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{prints}'\n")
        path.chmod(0o755)

    return add


def nvcc(release: str) -> str:
    return f"Cuda compilation tools, release {release}, V{release}.1"


def test_every_missing_tool_is_named(tools: Tool) -> None:
    said = " ".join(toolchain.lacking("async_io", "cuda", "13.0"))
    assert all(name in said for name in ("apt-get install g++", "python3-dev", "ninja", "CUDA toolkit 13.0")), said
    assert "libaio" not in said  # without a compiler nobody can tell


def test_nothing_is_missing_where_all_tools_are(tools: Tool) -> None:
    for name, text in (("c++", ""), ("ninja", ""), ("Python.h", ""), ("nvcc", nvcc("13.0"))):
        tools(name, text)
    # The stand-in of a compiler links everything; nvcc is looked for in bin/ of the toolkit that it belongs to.
    assert toolchain.lacking("async_io", "cuda", "13.0") == []
    assert toolchain.lacking("quantizer", "cuda", "13.0") == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here: apt-get install g++")
def test_libaio_is_compiled_and_linked_with_the_users_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of libaio in a folder that only CFLAGS and LDFLAGS name."""
    (tmp_path / "libaio.h").write_text("int io_submit(int context, long number, void *requests);\n")
    source = tmp_path / "libaio.c"
    source.write_text("int io_submit(int context, long number, void *requests) { return 0; }\n")
    command = ["c++", "-x", "c", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libaio.so")]
    subprocess.run(command, check=True)
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path}")
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    assert toolchain.links_libaio()
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path} -Dio_submit=something_else")
    assert not toolchain.links_libaio()
    monkeypatch.setenv("CFLAGS", "")
    monkeypatch.setenv("LDFLAGS", "-nostdlib -L/nowhere")
    assert not toolchain.links_libaio()


@pytest.mark.parametrize(
    ("toolkit", "cuda", "fault"),
    [
        ("13.0", "13.0", None),
        ("12.4", "12.6", None),
        ("13.1", "13.0", "is 13.1, and torch is built for CUDA 13.0"),
        ("12.9", "13.0", "is 12.9, and torch is built for CUDA 13.0"),
    ],
)
def test_toolkit_of_another_version(tools: Tool, toolkit: str, cuda: str, fault: str | None) -> None:
    tools("nvcc", nvcc(toolkit))
    said = toolchain.toolkit_fault(cuda)
    assert said is None if fault is None else said is not None and fault in said and "set CUDA_HOME" in said


def test_user_may_accept_another_toolkit(tools: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    tools("nvcc", nvcc("12.9"))
    monkeypatch.setenv(toolchain.UNCHECKED, "1")
    assert toolchain.toolkit_fault("13.0") is None


def test_cuda_home_without_nvcc(tools: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    said = toolchain.toolkit_fault("13.0")
    assert said and said.startswith(f"{tmp_path} has no nvcc that runs; install the CUDA toolkit 13.0")


def test_operation_that_deepspeed_was_installed_with_needs_no_tool(
    tools: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "git_version_info_installed.py").write_text("installed_ops = {'async_io': True, 'quantizer': False}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert toolchain.lacking("async_io", "cpu", None) == []
    assert toolchain.lacking("quantizer", "cpu", None) != []


@pytest.mark.parametrize(
    ("strategy", "device", "said"),
    [
        ("zero3_nvme", "cpu", "compiles DeepSpeed's async_io when training starts, and no C++ compiler"),
        ("zero3_quantized", "cuda", "compiles DeepSpeed's quantizer"),
        ("zero3_qgz", "cuda", "compiles DeepSpeed's quantizer"),
    ],
)
def test_strategies_that_compile_are_refused_with_an_alternative(
    tools: Tool, strategy: str, device: Device, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    (reason,) = machine_limits.uncompiled(STRATEGIES[strategy], device)
    assert reason.startswith(f"render.strategy is {strategy}, which ") and said in reason
    assert reason.endswith("; or use zero3_offload" if strategy == "zero3_nvme" else "; or use zero3")


def test_other_strategies_compile_nothing() -> None:
    compiling = {name for name, each in STRATEGIES.items() if each.compiled}
    assert compiling == {"zero3_nvme", "zero3_quantized", "zero3_qgz"}


def test_compilers_of_nodes_are_not_judged_where_jobs_are_submitted(
    tools: Tool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = resolve(load(ROOT / "config/config.yaml")).runs["default"].render
    monkeypatch.setattr(LOGGER, "propagate", True)
    said = refusal(machine_limits.check, settings, "zero3_nvme")
    assert said.startswith("render.strategy is zero3_nvme")
    tools("sbatch", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    machine_limits.check(settings, "zero3_nvme")
    assert "training runs on its own nodes" in caplog.text
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert refusal(machine_limits.check, settings, "zero3_nvme") == said


@pytest.mark.parametrize(
    ("device", "kernels", "refused"), [("cuda", "liger", True), ("cuda", "off", False), ("cpu", "liger", False)]
)
def test_fused_kernels_need_a_c_compiler_on_gpus(tools: Tool, device: Device, kernels: str, refused: bool) -> None:
    run = resolve(load(ROOT / "config/config.yaml")).runs["default"].render
    settings = run.model_copy(update={"device": device, "kernels": kernels})
    said = list(machine_limits.without_launchers(settings))
    assert bool(said) == refused
    if refused:
        assert "train.kernels is liger" in said[0] and "no C compiler (gcc, clang) is on PATH" in said[0]
        assert said[0].endswith("or set train.kernels: off")
    tools("clang", "")
    tools("Python.h", "")
    assert not list(machine_limits.without_launchers(settings))
