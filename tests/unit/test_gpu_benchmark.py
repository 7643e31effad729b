"""The GPU benchmark without a GPU: items, failures, budget, continuation, and its mention in the docs."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, served
from transformers import AutoTokenizer

from benchmarks import gpu
from benchmarks.gpu import Item
from zerolora.files import read_json

RESULTS = ROOT / "benchmarks/results"
# The page and the words for each kind of item that was not measured.
PAGES = {
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


def test_items_call_existing_scripts_and_models() -> None:
    planned = gpu.items()
    assert {item.name.split("_qwen")[0] for item in planned} == set(PAGES)
    assert len({item.name for item in planned}) == len(planned)
    for item in planned[1:]:
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
    assert re.search(r"^memory_qwen2.5-7b +400 s  to do$", served(*command, "--list").stdout, re.MULTILINE)


def test_tokenizer_is_trained_without_the_base_model(tmp_path: Path) -> None:
    import contest

    contest.trained_tokenizer(1024).save_pretrained(tmp_path)
    read: Any = AutoTokenizer.from_pretrained(tmp_path)
    text = read.apply_chat_template([{"role": "user", "content": "Is LoRA measured?"}], tokenize=False)
    assert read.decode(read(text)["input_ids"]) == text and len(read) <= 1024
