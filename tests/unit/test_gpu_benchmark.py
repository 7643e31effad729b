"""The GPU benchmark without a GPU: items, failures, budget, continuation, and its mention in the docs."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from conftest import ROOT, SERVERS, project_environment, served
from transformers import AutoTokenizer

from benchmarks import gpu
from benchmarks.gpu import Item
from zerolora.files import read_json

RESULTS = ROOT / "benchmarks/results"
# The page and the words for each kind of item that was not measured.
PAGES = {
    "stages_by_hand": ("gpu", "the stages of a run"),
    "host_syncs": ("speed", "the host's waits"),
    "probe": ("choice", "the rates that the planner assumes"),
    "memory": ("memory", "memory while training"),
    "limit": ("speed", "tokens/s and MFU"),
    "against_reference": ("speed", "the published experiment's way"),
    "against_trl": ("speed", "TRL"),
    "loading": ("speed", "loading"),
    "start_up": ("speed", "start-up"),
    "choice": ("choice", "the choice"),
    "methods": ("methods", ""),
}


ORDER = ("stages_by_hand", "memory", "host_syncs", "against_trl")


def test_items_call_existing_scripts_and_models() -> None:
    planned = gpu.items()
    assert {re.split("_(?:qwen|smollm)", item.name)[0] for item in planned} == set(PAGES)
    # First what shows whether a run works on a GPU, then memory, then speed.
    order = [next(index for index, item in enumerate(planned) if item.name.startswith(name)) for name in ORDER]
    assert order == sorted(order) and order[0] == 0
    assert len({item.name for item in planned}) == len(planned)
    for item in (item for item in planned if item.command[1] != "-m"):
        text = (ROOT / item.command[1]).read_text()
        if item.command[1].startswith("benchmarks/train/"):
            text += (ROOT / "benchmarks/train/contest.py").read_text()
        for option in item.command[2:]:
            assert f'"{option}"' in text if option.startswith("--") else True, (item.name, option)
            assert Path(option).is_file() or not option.endswith(".json")


@pytest.mark.parametrize("kind", PAGES)
def test_pages_state_whether_an_item_was_measured(kind: str) -> None:
    page, what = PAGES[kind]
    text = " ".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split())
    actual = [path for path in RESULTS.glob(f"gpu_{kind}*.json") if "measured" in json.loads(path.read_text())]
    sentence = f"Not measured on a GPU: {what}" if what else "Not measured on a GPU"
    assert (sentence in text) == (not actual), (page, sentence)


def item(name: str, code: str, seconds: int = 5) -> Item:
    return Item(name, seconds, [sys.executable, "-c", code])


def measured(output: Path, name: str) -> dict[str, Any] | None:
    path = output / f"gpu_{name}.json"
    return read_json(path, "gpu.py") if path.is_file() else None


WRITES = "import sys; open(sys.argv[2], 'w').write('{\"a\": 1}')"


def test_failing_or_hanging_item_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_LIMIT", 0)
    planned = [
        item("dies", "import sys; sys.exit('no such kernel')"),
        item("killed", "import os; os.kill(os.getpid(), 9)"),
        item("hangs", "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()", 1),
        item("good", WRITES),
    ]
    gpu.measure_all(planned, tmp_path, 600)
    failed = {name: (measured(tmp_path, name) or {}).get("failed", "") for name in ("dies", "killed", "hangs")}
    assert failed["dies"] == "exit code 1: no such kernel"
    assert failed["killed"].startswith("ended by SIGKILL")
    assert failed["hangs"] == "not done after 3 s"
    assert (measured(tmp_path, "good") or {})["measured"] == {"a": 1}
    listed = gpu.listed(planned, tmp_path).splitlines()
    assert "failed: exit code 1" in listed[0] and listed[3].endswith("done") and listed[4].split()[1] == "16"
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            assert "600" not in child.cmdline()


def test_items_beyond_the_budget_are_left_for_a_later_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = [item("long", WRITES, 500), item("late", "import time; time.sleep(60)", 1), item("short", WRITES, 1)]
    gpu.measure_all(planned, tmp_path, 2)
    assert measured(tmp_path, "long") is None and measured(tmp_path, "late") is None
    assert "left for a later call: long, late" in capsys.readouterr().out
    planned[1] = item("late", WRITES, 1)
    gpu.measure_all(planned, tmp_path, 600)
    before = (tmp_path / "gpu_late.json").stat().st_mtime_ns
    gpu.measure_all([item("late", "raise SystemExit(1)"), *planned], tmp_path, 600)
    assert (tmp_path / "gpu_late.json").stat().st_mtime_ns == before
    assert all(measured(tmp_path, name) for name in ("long", "late", "short"))


def test_missing_gpu_is_one_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode and ended.stderr == "torch sees no GPU\n"
    assert re.search(r"^memory_qwen2.5-7b +150 s  to do$", served(*command, "--list").stdout, re.MULTILINE)


def test_failures_within_an_item_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a stage that fails: the other stages are measured."""
    code = "import json, sys; json.dump({'failures': {'evaluate': 'exit code 2'}}, open(sys.argv[2], 'w'))"
    gpu.measure_all([item("stages", code)], tmp_path, 600)
    text = "done, with failures: evaluate: exit code 2"
    assert text in capsys.readouterr().out and text in gpu.listed([item("stages", code)], tmp_path)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes started with sys.executable forks."""
    monkeypatch.setattr(sys, "executable", str(SERVERS.of(ROOT, project_environment(ROOT)).stand_ins / "python"))


def called(script: ModuleType, model: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script on the CPU with the tiny model, and return its result."""
    few = ("--steps", "2", "--precision", "fp32")
    monkeypatch.setattr(
        sys, "argv", ["script", "--device", "cpu", "--model", str(model), "--output", str(output), *few]
    )
    script.main()
    return dict(json.loads(output.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_every_stage_runs_by_hand(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the item but the GPU; three trainings of two steps, and two evaluations, take seconds."""
    import stages_by_hand as stages

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = called(stages, tiny_model, tmp_path / "stages.json", monkeypatch)
    names = [each["stage"] for each in result["stages"]]
    assert result["failures"] == {} and names[0] == "evaluate_base" and names[-1] == "report" and len(names) == 9
    assert result["two_trainings"] == {"overlapped": False, "failed": None}
    assert result["metrics"]["tuned"]["rows"] == result["metrics"]["base"]["rows"] > 0
    assert "merged_kl" in result["metrics"]["tuned"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_failing_stage_is_recorded(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import stages_by_hand as stages

    every = stages.Stages.commands

    def few(made: Any) -> dict[str, list[str]]:
        return {name: command for name, command in every(made).items() if name in ("evaluate_base", "report")}

    monkeypatch.setattr(stages.Stages, "commands", few)
    monkeypatch.setattr(stages.Stages, "both", lambda _: {"overlapped": True, "failed": None})
    result = called(stages, tiny_model, tmp_path / "stages.json", monkeypatch)
    assert result["stages"][0]["failed"] is None
    assert (
        set(result["failures"]) == {"report", "overlapped"}
        and "exit code 2: zerolora: " in result["failures"]["report"]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_host_waits_are_counted_by_step(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing waits; the warnings are those that torch's own text has."""
    import host_syncs

    assert called(host_syncs, tiny_model, tmp_path / "syncs.json", monkeypatch)["waits_of_a_step"] == 0
    warning = (
        "UserWarning: called a synchronizing CUDA operation (Triggered internally at ../c10/cuda/CUDAFunctions.cpp"
    )
    log = [f"/a/zerolora/train/{line}: {warning}:1.)\n  loss.item()" for line in ("loop.py:7", "loop.py:9")]
    few, more = (host_syncs.counted_in("\n".join([log[0]] * 2 + [log[1]] * count)) for count in (2, 10))
    counted = host_syncs.of_a_step(few, more, 4)
    assert counted["waits_of_a_step"] == 2 and counted["lines"] == {"train/loop.py:9": 2}


def test_tokenizer_is_trained_without_the_base_model(tmp_path: Path) -> None:
    import contest

    contest.trained_tokenizer(1024).save_pretrained(tmp_path)
    read: Any = AutoTokenizer.from_pretrained(tmp_path)
    text = read.apply_chat_template([{"role": "user", "content": "Is LoRA measured?"}], tokenize=False)
    assert read.decode(read(text)["input_ids"]) == text and len(read) <= 1024
