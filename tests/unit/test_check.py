"""`zerolora check`: what is here against what a config needs, with a remedy in one line."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import check_table
from pretended_driver import PretendedDriver

from zerolora.check import machine as facts
from zerolora.check.check_command import check
from zerolora.check.check_table import short, shows, table
from zerolora.check.machine import Driver, FileSystem, GpuHere, Lock, Machine, Partition, Slurm, Torch, partition
from zerolora.check.needs import Needs, needs_of
from zerolora.check.rows import Check, rows
from zerolora.config.file import load
from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.machine import devices
from zerolora.units import GIB

GPU = GpuHere("A100", 80 * GIB, (8, 0), None, 0)
WORKSTATION = Machine(
    host="node1",
    python="3.11.7",
    lock=Lock(256, (), ()),
    torch=Torch("2.13.0+cu130", "13.0", None, devices.of_wheel("13.0", "x86_64")),
    driver=Driver("580.95.05", (13, 0), None),
    gpus=(GPU, GPU),
    tools=("c++", "Python.h", "ninja", "CUDA 13.0"),
    cores=64,
    memory=512 * GIB,
    available=500 * GIB,
    disks=(FileSystem(("results", "work"), 900 * GIB), FileSystem(("weight store", ".dvc/cache"), 90 * GIB)),
    slurm=None,
    submits=False,
)
"""A machine on which the recipe of TWO_GPUS can run."""


@pytest.fixture(scope="module")
def two_gpus() -> Needs:
    """The needs of a recipe for two GPUs of 32 GiB."""
    return needs_of(load(ROOT / "config/recipes/qwen2.5-14b-2x32gb/config.yaml"))


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend the torch of the lock, whatever is installed."""
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def row(name: str, machine: Machine, needs: Needs | None) -> Check:
    return next(each for each in rows(machine, needs) if each.name == name)


def test_nothing_is_missing_on_a_machine_that_fits(two_gpus: Needs) -> None:
    checked = rows(WORKSTATION, two_gpus)
    assert {each.mark for each in checked if each.name != "Slurm"} == {"right"}
    assert row("GPUs", WORKSTATION, two_gpus).here == "2 × A100, 80.00 GiB, 8.0, free"
    assert row("driver", WORKSTATION, two_gpus).here == "580.95.05, up to CUDA 13.0"


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"lock": Lock(256, ("peft==0.21.2",), ())}, "packages", "peft==0.21.2 missing; run `make`"),
        ({"torch": None}, "torch", "torch is not installed; run `make`"),
        (
            {"torch": Torch("2.13.0+cpu", None, "torch 2.13.0+cpu is built for CPUs alone; install", ())},
            "torch",
            "CPUs",
        ),
        ({"driver": None, "gpus": ()}, "driver", "no NVIDIA driver found (libcuda.so.1); run where the GPUs are"),
        ({"driver": Driver("550.54", (12, 4), "goes up to CUDA 12.4; update")}, "driver", "CUDA 12.4"),
        ({"gpus": ()}, "GPUs", "2 GPUs needed; run where the GPUs are"),
        ({"gpus": (GPU,)}, "GPUs", "2 GPUs needed and 1 visible; ask for more, or use fewer train.ranks_per_node"),
        (
            {"gpus": (replace(GPU, memory=24 * GIB),) * 2},
            "GPUs",
            "less memory than hardware.gpu_memory; set gpu_memory: 24GiB",
        ),
        ({"gpus": (replace(GPU, capability=(7, 5)),) * 2}, "GPUs", "set compute_capability: 7.5"),
        ({"gpus": (replace(GPU, fault="no kernels; use another"),) * 2}, "GPUs", "no kernels; use another"),
        ({"memory": 64 * GIB}, "memory", "less than hardware.host_memory; set host_memory: 64GiB"),
    ],
)
def test_what_is_missing_has_a_remedy(two_gpus: Needs, changed: dict[str, Any], name: str, said: str) -> None:
    seen = row(name, replace(WORKSTATION, **changed), two_gpus)
    assert seen.mark == "missing"
    assert said in seen.remedy


@pytest.mark.parametrize(("name", "changed"), [("driver", {"driver": None, "gpus": ()}), ("memory", {"memory": GIB})])
def test_a_machine_that_submits_jobs_needs_no_gpus_itself(two_gpus: Needs, name: str, changed: dict[str, Any]) -> None:
    seen = row(name, replace(WORKSTATION, **changed, submits=True), two_gpus)
    assert seen.mark == "note" and seen.remedy.startswith("nodes may differ, and each job checks its own; here ")


def test_gpus_that_others_use_are_a_note(two_gpus: Needs) -> None:
    seen = row("GPUs", replace(WORKSTATION, gpus=(GPU, replace(GPU, used=7 * GIB))), two_gpus)
    assert seen.mark == "note" and seen.here.endswith("7.00 GiB in use")


def test_another_version_of_a_package_is_a_note() -> None:
    other = replace(WORKSTATION, lock=Lock(256, (), ("peft 0.20 instead of 0.21.2",)))
    assert row("packages", other, None).mark == "note"


def test_a_config_for_cpus_needs_no_driver() -> None:
    needs = needs_of(load(ROOT / "config/config.yaml"))
    bare = replace(WORKSTATION, driver=None, gpus=(), torch=Torch("2.13.0+cpu", None, "built for CPUs", ()))
    assert not [each for each in rows(bare, needs) if each.mark == "missing"]


def test_disk_is_compared_with_what_unfinished_runs_write(two_gpus: Needs) -> None:
    full = replace(two_gpus, written={"results": 600 * GIB, "work": 400 * GIB}, unknown=())
    first, second = (each for each in rows(WORKSTATION, full) if each.name == "disk")
    assert first.mark == "missing" and first.needed == "1000.00 GiB" and first.remedy.startswith("100.00 GiB short")
    assert second.mark == "right"


def test_models_that_were_not_fetched_have_no_size_yet(two_gpus: Needs) -> None:
    assert two_gpus.unknown == ("qwen2-5-14b-instruct",)
    assert row("disk", WORKSTATION, two_gpus).needed == "qwen2-5-14b-instruct, known once fetched"


def test_a_run_writes_adapter_checkpoints_and_merged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as render's own check of the disk."""
    text = (ROOT / "config/config.yaml").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "resources/models/smollm2-135m-instruct"
    model.mkdir(parents=True)
    small = ROOT / "config/recipes/models/llama-3-8b.json"
    (model / "config.json").write_bytes(small.read_bytes())
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "data").symlink_to(ROOT / "data")
    needs = needs_of(load(Path("config.yaml")))
    assert needs.unknown == () and set(needs.written) == {"results", "work", "weight store", ".dvc/cache"}
    parameters = 8_030_261_248  # of Llama 3 8B
    assert needs.written["weight store"] == 4 * parameters  # in fp32, as on a CPU
    assert needs.written["work"] > 4 * parameters
    (tmp_path / "results/default/adapter").mkdir(parents=True)
    (tmp_path / "results/default/adapter/manifest.json").touch()
    assert needs_of(load(Path("config.yaml"))).written == {}


def test_a_teacher_is_fetched_and_its_probabilities_are_written_once_for_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load((ROOT / "config/recipes/llama-3.1-8b-distill-70b-8x80gb/config.yaml").read_text())
    sizes = {"llama-8b-instruct": "llama-3-8b", "llama-70b-instruct": "llama-3-70b"}
    hub = {name: {"repository": f"meta/{name}", "revision": "0" * 40, "license": "Llama-3.1"} for name in sizes}
    grid = {"taught": {"dataset": "rows", "over": {"train.distill.alpha": [0.25, 0.5]}}}
    config |= {"fetch": {"hub": hub}, "runs": {}, "grids": grid}
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.safe_dump(config))
    before = needs_of(load(Path("config.yaml")))
    assert (before.unknown, before.unprepared) == (("llama-70b-instruct", "llama-8b-instruct"), ("rows",))
    needed = row("disk", WORKSTATION, before).needed
    assert needed.endswith("known once fetched and a teacher's probabilities on rows, known once prepared")
    for name, size in sizes.items():
        (place := tmp_path / "resources/models" / name).mkdir(parents=True)
        (place / "config.json").write_bytes((ROOT / f"config/recipes/models/{size}.json").read_bytes())
    fetched = needs_of(load(Path("config.yaml")))
    assert fetched.written["weight store"] == 2 * (8_030_261_248 + 70_553_706_496)
    write_json(
        tmp_path / "results/data/rows/stats.json",
        {"train_supervised_tokens": 1_000_000, "validation_supervised_tokens": 1_000},
    )
    prepared = needs_of(load(Path("config.yaml")))
    assert prepared.unprepared == ()
    for folder in ("results", ".dvc/cache"):
        assert prepared.written[folder] - fetched.written[folder] == 1_001_000 * (6 * 64 + 8)
    write_json(tmp_path / "results/taught/teacher/manifest.json", {})
    computed = needs_of(load(Path("config.yaml")))
    assert computed.written["results"] == fetched.written["results"]
    assert computed.written["weight store"] == 2 * 8_030_261_248


CLUSTER = Slurm((Partition("cpu", 8, 64 * GIB, 0), Partition("gpu", 2, 512 * GIB, 8)), None, True)


@pytest.mark.parametrize(
    ("changed", "mark", "said"),
    [
        ({}, "right", ""),
        ({"partitions": CLUSTER.partitions[:1]}, "missing", "no partition has 1 such node"),
        (
            {"partitions": (), "fault": "fatal: no controller"},
            "note",
            "jobs cannot be submitted from here (sinfo: fatal",
        ),
    ],
)
def test_partitions_are_compared_with_the_config(
    two_gpus: Needs, changed: dict[str, Any], mark: str, said: str
) -> None:
    seen = row("Slurm", replace(WORKSTATION, slurm=replace(CLUSTER, **changed)), two_gpus)
    assert (seen.mark, said in seen.remedy) == (mark, True)


def test_a_cluster_without_accounting_is_noted(two_gpus: Needs) -> None:
    silent = replace(WORKSTATION, slurm=replace(CLUSTER, accounting=False))
    assert row("accounting", silent, two_gpus).mark == "note"


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("cpu*|8|64000|(null)", 0),
        ("gpu|4|515000+|gpu:a100:8(S:0-1)", 8),
        ("gpu|4|515000|gpu:4", 4),
        ("mixed|2|1000|gpu:a100:2,gpu:l40s:1,mps:400", 3),
        ("other|2|1000|shard:gpu:4", 0),
    ],
)
def test_gres_of_a_partition(line: str, gpus: int) -> None:
    assert partition(line).gpus == gpus


def test_an_unknown_form_of_partitions_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("sbatch", ""), ("sinfo", "PARTITION AVAIL"), ("sacct", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    slurm = facts.slurm_here()
    assert slurm is not None and slurm.partitions == ()
    assert slurm.fault == "lists partitions in another form: PARTITION AVAIL"


def test_gpus_are_listed_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver_library", lambda: PretendedDriver(7.0, 9.0, cuda=(12, 4), memory=32 * GIB))
    monkeypatch.setattr(devices, "driver_version", lambda: "550.54")
    monkeypatch.setattr(devices, "memory_in_use", lambda: {"01" * 16: 3 * GIB})
    driver, gpus = facts.gpus_here(Torch("2.13.0+cu130", "13.0", None, ()))
    assert driver is not None and driver.cuda == (12, 4)
    assert driver.fault and "needs driver 580.65 or later" in driver.fault and "make TORCH=cu12" in driver.fault
    assert [(gpu.memory, gpu.capability, gpu.used) for gpu in gpus] == [
        (32 * GIB, (7, 0), 3 * GIB),
        (32 * GIB, (9, 0), None),
    ]
    assert gpus[0].fault and "make TORCH=cu12" in gpus[0].fault and gpus[1].fault is None


def test_memory_in_use_is_unknown_without_the_management_library() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert devices.memory_in_use() == {}
    else:
        assert all(used >= 0 for used in devices.memory_in_use().values())


def test_packages_are_compared_with_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for name in ("peft-0.20.0", "torch-2.13.0+cu126", "ruamel_yaml_clib-0.2.15"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    lock = tmp_path / "requirements.lock"
    lock.write_text("peft==0.21.2\ntorch==2.13.0\nruamel-yaml-clib==0.2.15\nsafetensors==0.8.0\n    # via peft\n")
    monkeypatch.setattr(sys, "path", [str(site)])
    assert facts.packages(lock) == Lock(4, ("safetensors==0.8.0",), ("peft 0.20.0 instead of 0.21.2",))
    assert facts.packages(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("folder", "known"),
    [
        ("torch-2.13.0+cpu.dist-info", ("torch", "2.13.0+cpu")),
        ("rouge_score-0.1.2-py3.11.egg-info", ("rouge_score", "0.1.2")),
        ("deepspeed-0.19.8.egg-info", ("deepspeed", "0.19.8")),
        ("torch", None),
    ],
)
def test_metadata_of_any_build_is_read(folder: str, known: tuple[str, str] | None) -> None:
    match = facts.METADATA.fullmatch(folder)
    assert (match and match.groups()) == known


def test_installed_packages_are_those_of_importlib() -> None:
    from importlib.metadata import distributions

    names = {facts._normal(each.name): each.version for each in distributions()}
    assert facts._installed() == names


@pytest.mark.parametrize(
    ("encoding", "term", "can"),
    [("utf-8", "xterm-256color", True), ("ascii", "xterm", False), ("utf-8", "linux", False), (None, "xterm", False)],
)
def test_marks_are_plain_where_the_terminal_cannot_show_them(encoding: str | None, term: str, can: bool) -> None:
    assert shows(encoding, {"TERM": term}) == can


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("plain", [False, True])
def test_table_fits_the_terminal(two_gpus: Needs, width: int, plain: bool) -> None:
    text = table(rows(replace(WORKSTATION, driver=None, gpus=(), memory=GIB), two_gpus), width, plain=plain)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() == plain
    assert "run where the GPUs are" in " ".join(text.split())


def test_a_job_logs_its_machine() -> None:
    lines = short(WORKSTATION, "cuda")
    assert lines[0].startswith("node1: Python 3.11.7; torch 2.13.0+cu130, CUDA 13.0") and "256 of 256" in lines[0]
    assert "900.00 GiB free for results, work" in lines[1]
    assert lines[2] == "NVIDIA driver 580.95.05, up to CUDA 13.0; GPUs 2 × A100, 80.00 GiB, 8.0, free"
    assert short(WORKSTATION, "cpu") == lines[:2]


@pytest.mark.parametrize(("missing", "code"), [(True, 1), (False, 0)])
def test_exit_code_says_whether_anything_is_missing(
    missing: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(WORKSTATION, lock=Lock(2, ("peft==0.21.2",), ())) if missing else WORKSTATION
    monkeypatch.setattr("zerolora.check.check_command.this_machine", lambda: here)
    assert check(ROOT / "config/config.yaml") == code
    assert ("1 thing missing for " in capsys.readouterr().out) == missing


def test_a_mistake_in_the_config_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("hardware: {device: tpu}\n")
    with pytest.raises(UserError, match=r"config.yaml:1: hardware.device: 'tpu' is not valid"):
        check(tmp_path / "config.yaml")


def test_the_command_needs_neither_config_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom zerolora.cli import main\nsys.argv = ['zerolora', 'check']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    *_, closing, ending = done.stdout.splitlines()
    assert (closing, ending) == ("Nothing is missing; there is no config to compare with.", "0 False")
    assert "ok  python" in done.stdout and done.stdout.isascii() and done.stderr == ""


def test_the_page_shows_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the machine whose facts the page has, word for word, in the text and in the picture."""
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("zerolora.check.check_command.this_machine", check_table.facts)
    monkeypatch.setattr("zerolora.check.check_command.needs_of", lambda _: check_table.needs())
    monkeypatch.setattr("zerolora.check.check_command.terminal_width", lambda: check_table.WIDTH)
    monkeypatch.setattr("zerolora.check.check_command.shows", lambda _: True)
    monkeypatch.setattr("zerolora.check.rehearsal.faults", lambda _: [])  # the model is on that machine
    assert check(Path(check_table.CONFIG)) == 1
    printed = capsys.readouterr().out.splitlines()
    page = check_table.written((ROOT / "docs/gpu.md").read_text(encoding="utf-8"))
    assert "\n".join(f"    {line}".rstrip() for line in printed) in page
    drawn = ElementTree.fromstring(check_table.picture())  # noqa: S314
    lines: dict[float, str] = {}
    for text in drawn.iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in text.attrib:
            lines[float(text.attrib["y"])] = lines.get(float(text.attrib["y"]), "") + str(text.text)
    told = "".join("".join(lines[y] for y in sorted(lines)).split())
    assert told == "".join(f"$ zerolora check --config {check_table.CONFIG}{''.join(printed)}".split())
