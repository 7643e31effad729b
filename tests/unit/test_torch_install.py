"""The build of torch that `make` installs: the one that the driver can run, from the indexes in pip's settings."""

import hashlib
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pip
import pytest
from conftest import ROOT, refusal
from pretended_driver import PretendedDriver

from zerolora.machine import devices, torch_install

RELEASE = "2.13.0"
CU12 = ("cuda-toolkit[cublas]==12.6.3", "some-gpu-library-cu12==1.0")
CU13 = ("cuda-toolkit[cublas]==13.0.3", "some-gpu-library-cu13==1.0")


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """Write a wheel that only has metadata, and return its path."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


def pin(path: Path) -> str:
    name, version = path.name.split("-")[:2]
    return (
        f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with this one's pip alone, whose installation would take most of the test."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / ".venv", with_pip=False)
    (folder / "pip").symlink_to(Path(pip.__file__).parent)
    (site,) = (folder / ".venv/lib").glob("python*/site-packages")
    (site / "pip.pth").write_text(str(folder))
    return folder / ".venv"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose lock has PyPI's build of torch, and the folder that pip takes wheels from."""
    monkeypatch.chdir(tmp_path)
    folder, envs = tmp_path / "wheels", tmp_path / "envs"
    folder.mkdir()
    envs.mkdir()
    default = wheel(folder, "torch", RELEASE, CU13)
    (envs / "requirements.hashes").write_text(pin(default))
    for name, library in (("cu12", "some-gpu-library-cu12"), ("cu13", "some-gpu-library-cu13")):
        toolkit = wheel(folder, "cuda-toolkit", "12.6.3" if name == "cu12" else "13.0.3")
        (envs / f"{name}.hashes").write_text(pin(toolkit) + pin(wheel(folder, library, "1.0")))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(devices, "driver_version", lambda: "550.54")
    return folder


def drive(monkeypatch: pytest.MonkeyPatch, *cuda: int) -> None:
    """Pretend a driver for this CUDA version; none without."""
    driver = PretendedDriver(8.0, cuda=(cuda[0], cuda[1])) if cuda else None
    monkeypatch.setattr(devices, "driver_library", lambda: driver)


def make(environment: Path, *build: str) -> int:
    return torch_install.main(["wheel", str(environment / "bin/python"), *build])


def installed(environment: Path) -> dict[str, str]:
    done = subprocess.run(
        [environment / "bin/python", "-m", "pip", "freeze"], stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(line.partition("==")[::2] for line in done.stdout.replace(" @ ", "==").splitlines())


def version(environment: Path) -> str:
    return torch_install._version(str(environment / "bin/python"))


def test_driver_chooses_the_build_and_its_libraries(
    environment: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """First CUDA 13, then CUDA 12, whose libraries replace those of 13. Some seconds: pip runs eight times."""
    other = wheel(index, "torch", f"{RELEASE}+cu126", CU12)
    python = str(environment / "bin/python")
    drive(monkeypatch, 13, 0)
    assert make(environment) == 0 and version(environment) == RELEASE
    assert torch_install.main(["libraries", python]) == 0
    assert {"some-gpu-library-cu13", "cuda-toolkit"} <= set(installed(environment))
    assert capfd.readouterr() == ("", "")
    drive(monkeypatch, 12, 4)
    assert make(environment) == 0 and version(environment) == f"{RELEASE}+cu126"
    digest = hashlib.sha256(other.read_bytes()).hexdigest()
    assert f"has no hash of it: sha256 {digest}" in capfd.readouterr().err
    assert torch_install.main(["libraries", python]) == 0
    here = installed(environment)
    assert here["cuda-toolkit"] == "12.6.3" and "some-gpu-library-cu12" in here and "some-gpu-library-cu13" not in here
    assert not (environment / "torch").exists()


def test_a_build_that_cannot_be_had_is_named(
    environment: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The driver's choice falls back to pip's build; the user's is refused."""
    drive(monkeypatch, 12, 4)
    assert make(environment) == 0 and version(environment) == RELEASE
    said = capfd.readouterr().err
    assert "zerolora: the NVIDIA driver 550.54 goes up to CUDA 12.4, and pip has no torch 2.13.0+cu126" in said
    assert "set PIP_EXTRA_INDEX_URL" in said and "installing the build that pip has" in said
    assert make(environment, "cu12") == 2
    assert capfd.readouterr().err.count("\n") == 1
    drive(monkeypatch)
    assert make(environment, "cpu") == 2
    assert "pip has no torch 2.13.0+cpu" in capfd.readouterr().err


def test_a_wheel_with_another_hash_is_refused(
    environment: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drive(monkeypatch)
    wheel(index, "torch", RELEASE, ("something-else",))
    assert make(environment) == 2
    assert "has none of the hashes in envs/requirements.hashes" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("cuda", "build"), [((), None), ((11, 8), None), ((12, 2), "cu12"), ((13, 0), "cu13"), ((14, 1), "cu13")]
)
def test_build_for_a_driver(cuda: tuple[int, ...], build: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, *cuda)
    assert torch_install.fitting() == build


@pytest.mark.parametrize(
    ("system", "build", "wanted"),
    [
        ("Linux", "cu13", ["torch===2.13.0", "torch==2.13.0+cu130"]),
        ("Linux", "cu12", ["torch==2.13.0+cu126"]),
        ("Linux", "cpu", ["torch==2.13.0+cpu"]),
        ("Darwin", "cpu", ["torch===2.13.0", "torch==2.13.0+cpu"]),
        ("Linux", None, ["torch==2.13.0"]),
    ],
)
def test_requirement_of_a_build(
    system: str, build: str | None, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    assert torch_install.requirements(RELEASE, build) == wanted


def test_a_damaged_lock_is_named(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = index.parent / "envs/requirements.hashes"
    lock.write_text(lock.read_text()[:5])
    assert torch_install.main(["wheel", sys.executable]) == 2
    lock.unlink()
    assert torch_install.main(["wheel", sys.executable]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("zerolora: envs/requirements.hashes has no line torch==VERSION; restore it")
    assert second.startswith("zerolora: envs/requirements.hashes: No such file or directory")


def test_an_unknown_build_is_refused() -> None:
    said = refusal(torch_install.install_wheel, "python", "cu11")
    assert said == "TORCH=cu11 is not a build; use one of cpu, cu13, cu12"


def test_it_runs_before_anything_is_installed() -> None:
    """With the standard library alone, as the Makefile calls it."""
    code = "import sys, zerolora.machine.torch_install as step; sys.exit(step.main(['wheel', 'python', 'none']))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "zerolora: TORCH=none is not a build; use one of cpu, cu13, cu12\n")


def test_the_locks_release_has_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert torch_install.pinned() == RELEASE and len(torch_install.hashes_of_torch()) > 4


@pytest.mark.parametrize(
    ("before", "asked", "again"),
    [("", [], False), ("", ["TORCH=cu12"], True), ("cu12", ["TORCH=cu12"], False), ("cu12", [], False)],
)
def test_make_installs_another_build_on_request(before: str, asked: list[str], again: bool, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", *(f"envs/{path.name}" for path in (ROOT / "envs").iterdir())):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv/installed").write_text(f"{before}\n")
    command = ["make", "--dry-run", "--no-print-directory", ".venv/installed"]
    done = subprocess.run([*command, *asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("torch_install wheel .venv/bin/python" in done.stdout) == again
    assert not again or f"torch_install wheel .venv/bin/python {asked[0].partition('=')[2]}\n" in done.stdout
