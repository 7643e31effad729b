"""The GPU benchmark on a CPU: tiny stand-ins of all its items, interrupted, resumed, failing; and what the docs say."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, served
from fork_server import WITHOUT

from benchmarks import gpu
from benchmarks.gpu_kinds import docs, drawn, kinds, plan
from benchmarks.gpu_kinds.plan import Item
from zerolora.files import read_json

HEADING = {
    "item", "kind", "device", "settings", "machine", "driver", "cuda_version", "capability", "gpu_bytes",
    "seconds_used",
}  # fmt: skip
MACHINE: gpu.Machine = {
    "machine": {"date": "2026-01-01"}, "driver": None, "cuda_version": None, "capability": None, "gpu_bytes": None,
}  # fmt: skip
ABSENT = ("snakemake", "dvc", "dvclive", "matplotlib")
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def command(output: Path, device: str = "cpu") -> list[str]:
    script = str(ROOT / "benchmarks/gpu.py")
    return [sys.executable, script, "--output", str(output), "--device", device, "--budget", "3000"]


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which what is absent cannot be imported, and every proxy leads nowhere."""
    for name in ABSENT:
        (tmp_path / "absent" / name).mkdir(parents=True)
        (tmp_path / "absent" / name / "__init__.py").write_text("raise ModuleNotFoundError(__name__, name=__name__)\n")
    path = os.pathsep.join([str(tmp_path / "absent"), str(ROOT / "src")])
    return {**os.environ, **NOWHERE, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


# --- the plan ---


def test_the_plan_covers_what_it_claims() -> None:
    planned = plan.gpu_items("trl")
    assert {item.kind for item in planned} == set(kinds.KINDS) == set(docs.TOPICS)
    assert len({item.name for item in planned}) == len(planned)
    memory = [item.settings for item in planned if item.kind == "memory"]
    stages = {"zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "ddp", "fsdp"}
    assert {each["strategy"] for each in memory} == stages
    assert {each["attention"] for each in memory} == {"flash", "sdpa", "eager"}
    assert {each["method"] for each in memory} == {"lora", "full"}
    assert {each["checkpointing"] for each in memory} == {True, False}
    assert {each["model"] for each in memory} == {f"qwen2.5-{size}b" for size in ("0.5", "1.5", "7", "14", "32")}
    assert {length for each in memory for length in each["lengths"]} == {512, 2048, 8192}


def test_every_kind_has_a_stand_in_and_every_model_a_config() -> None:
    assert {item.kind for item in plan.cpu_items()} == set(kinds.KINDS)
    for item in [*plan.gpu_items("trainer"), *plan.cpu_items()]:
        if "model" in item.settings:
            assert drawn.config_of(item.settings["model"]).is_file(), item.name


def test_the_list_names_items_in_order_with_their_seconds_and_state(tmp_path: Path) -> None:
    planned = plan.gpu_items("trl")
    gpu.result_path(tmp_path, planned[0], "cuda").write_text(json.dumps({**MACHINE, "measured": {}}))
    gpu.result_path(tmp_path, planned[1], "cuda").write_text(json.dumps({**MACHINE, "failed": "out of memory"}))
    lines = gpu.listed(planned, tmp_path, "cuda").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [item.name for item in planned]
    assert "done on 2026-01-01" in lines[0] and "failed: out of memory" in lines[1] and "to do" in lines[2]
    assert lines[-1].split()[1] == str(sum(item.seconds for item in planned))


# --- the budget, failures, interruption ---


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Replace an item's process with a small script: settings["code"] is what it runs, ANSWER where it writes."""
    script = tmp_path / "item.py"
    script.write_text(
        "import json, sys, time\n"
        "asked = json.loads(sys.argv[sys.argv.index('--item') + 1])\n"
        "ANSWER = sys.argv[sys.argv.index('--output') + 1]\n"
        "exec(asked['settings']['code'])\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "LEAST_LIMIT", {"cpu": 0})
    (tmp_path / "out").mkdir()
    yield tmp_path / "out"


WRITES = "open(ANSWER, 'w').write(json.dumps({'predicted': 1, 'measured': 2}))"


def item(label: str, code: str, seconds: int = 5) -> Item:
    return Item("made", label, seconds, {"code": code})


def measured(output: Path, label: str) -> dict[str, Any] | None:
    path = output / f"standin_made_{label}.json"
    return read_json(path, "gpu.py") if path.is_file() else None


def test_an_item_that_fails_or_hangs_is_recorded_and_the_rest_goes_on(by_hand: Path) -> None:
    planned = [
        item("dies", "sys.exit('no such kernel')"),
        item("killed", "import os; os.kill(os.getpid(), 9)"),
        item("hangs", "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()", 1),
        item("good", WRITES),
    ]
    gpu.measure_all(planned, by_hand, "cpu", 600, MACHINE)
    failed = {name: (measured(by_hand, name) or {}).get("failed", "") for name in ("dies", "killed", "hangs")}
    assert failed["dies"] == "exit code 1: no such kernel"
    assert failed["killed"].startswith("ended by SIGKILL")
    assert failed["hangs"] == "not done after 3 s"
    good = measured(by_hand, "good")
    assert good and (good["predicted"], good["measured"]) == (1, 2) and good.keys() >= HEADING
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            assert "600" not in child.cmdline()


def test_what_the_budget_cuts_short_is_left_for_a_later_call(by_hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = [item("long", WRITES, 500), item("late", "time.sleep(60)", 1), item("short", WRITES, 1)]
    gpu.measure_all(planned, by_hand, "cpu", 2.5, MACHINE)
    assert measured(by_hand, "long") is None and measured(by_hand, "late") is None
    assert "left for a later call" in capsys.readouterr().out
    gpu.measure_all([planned[1]], by_hand, "cpu", 2, MACHINE)  # no more time than was not enough
    assert "cut short" not in capsys.readouterr().out
    planned[1] = item("late", WRITES, 1)
    gpu.measure_all(planned, by_hand, "cpu", 600, MACHINE)
    assert all(measured(by_hand, name) for name in ("long", "late", "short"))
    assert not list(by_hand.glob("*.cut"))


def test_what_has_a_result_is_not_measured_again(by_hand: Path) -> None:
    gpu.measure_all([item("one", WRITES)], by_hand, "cpu", 60, MACHINE)
    before = (by_hand / "standin_made_one.json").stat().st_mtime_ns
    gpu.measure_all([item("one", "sys.exit(1)"), item("two", WRITES)], by_hand, "cpu", 60, MACHINE)
    assert (by_hand / "standin_made_one.json").stat().st_mtime_ns == before and measured(by_hand, "two")


def test_memory_that_cannot_be_had_is_recorded_as_such(tmp_path: Path) -> None:
    config = json.loads(drawn.config_of("tiny").read_text()) | {"intermediate_size": 2**38}
    (tmp_path / "giant.json").write_text(json.dumps(config))
    giant = Item("loading", "giant", 60, {"model": str(tmp_path / "giant.json"), "strategies": ["zero2"]})
    gpu.measure_all([giant], tmp_path, "cpu", 600, MACHINE)
    assert read_json(tmp_path / "standin_loading_giant.json", "gpu.py")["failed"].startswith("out of memory: ")


def test_without_a_gpu_cuda_is_refused_in_a_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = served(*command(tmp_path, "cuda"))
    assert ended.returncode and "torch sees no GPU" in ended.stderr and "Traceback" not in ended.stderr
    listed = served(*command(tmp_path, "cuda"), "--list").stdout
    assert "memory_qwen2.5-7b_zero2_lora_checkpointing_flash_bf16" in listed


@pytest.mark.slow
def test_every_kind_writes_a_whole_result_over_an_interruption(tmp_path: Path, alone: dict[str, str]) -> None:
    output = tmp_path / "out"
    process = subprocess.Popen(command(output), env=alone, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 1800
    while len(list(output.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) and psutil.wait_procs(family, timeout=30)[1] == []
    first = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert 2 <= len(first) < len(plan.cpu_items())
    served(*command(output), **NOWHERE, **{WITHOUT: ",".join(ABSENT)}).check_returncode()
    assert {path: path.stat().st_mtime_ns for path in first} == first
    for each in plan.cpu_items():
        found = read_json(output / f"standin_{each.name}.json", "gpu.py")
        assert found.keys() == HEADING | {"predicted", "measured"}, (each.name, found.get("failed"))
        assert found["settings"] == each.settings and found["machine"]["versions"]["deepspeed"]
        # The documents can show it: as a GPU's, it has the GPU's columns besides.
        shown = as_of_a_gpu(found)
        assert len(docs.TOPICS[each.kind].table([shown])) > 2, each.name


def as_of_a_gpu(found: dict[str, Any]) -> dict[str, Any]:
    """Return a stand-in's result with the columns that only a GPU's has."""
    found = json.loads(json.dumps(found)) | {"device": "cuda"}
    rows = found["measured"]
    if found["kind"] == "memory":
        found["measured"] = [{**row, "gpu_allocated": 1, "gpu_reserved": 1} for row in rows]
    if found["kind"] == "reserve":
        row = {"gpu_context": 1, "gpu_connected": 3, "gpu_allocated": 10, "gpu_reserved": 12, "gpu_in_use": 20}
        found["measured"] = {name: kinds.reserve_of(row) for name in rows}
    return found


# --- figures ---


def test_the_parts_of_the_reserve_add_up() -> None:
    row = {"gpu_context": 5, "gpu_connected": 8, "gpu_allocated": 10, "gpu_reserved": 12, "gpu_in_use": 24}
    parts = kinds.reserve_of(row)
    assert parts == {"context": 5, "communication": 3, "allocator": 2, "libraries": 4, "total": 14}
    assert parts["total"] == sum(value for name, value in parts.items() if name != "total")


def test_differences_of_losses_are_relative() -> None:
    found = kinds.differences({"cpu fp32": [2.0, 4.0], "cuda bf16": [2.2, 4.0]}, "cpu fp32")
    assert found == {"cuda bf16": {"mean": pytest.approx(0.05), "worst": pytest.approx(0.1)}}


def test_a_gpu_is_known_by_the_name_that_its_driver_gives() -> None:
    assert kinds.gpu_named("NVIDIA H200") == "H200"
    assert (kinds.gpu_named("NVIDIA H100 80GB HBM3") or "").startswith("H100")
    assert kinds.gpu_named("AMD EPYC") is None


def test_an_older_torch_has_no_kernel_for_rows_of_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    from zerolora.train.attention import has_varlen_kernel

    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None: ...

    assert has_varlen_kernel()
    monkeypatch.setattr(varlen, "varlen_attn", older)
    has_varlen_kernel.cache_clear()
    assert not has_varlen_kernel()
    monkeypatch.undo()
    has_varlen_kernel.cache_clear()


# --- the documents ---


def test_the_documents_say_what_was_measured_on_a_gpu() -> None:
    assert docs.faults(ROOT, ROOT / "benchmarks/results") == []


def test_a_result_replaces_the_sentence_that_there_is_none(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    topic = docs.TOPICS["precision"]
    settings = {"model": "smollm2-135m"}
    result = {
        "kind": "precision", "device": "cuda", "settings": settings,
        "measured": {"relative_difference": {"cuda bf16": {"mean": 1e-4, "worst": 3e-4}}},
    }  # fmt: skip
    (tmp_path / "results").mkdir()
    path = tmp_path / "results/gpu_precision.json"
    for without in ({"device": "cpu"}, {"kind": "memory", "measured": None, "failed": "out of memory"}):
        kept = {name: value for name, value in {**result, **without}.items() if value is not None}
        path.write_text(json.dumps(kept))
        assert docs.measured(tmp_path / "results", "precision") == docs.measured(tmp_path / "results", "memory") == []
    path.write_text(json.dumps(result))
    stale, missing = (each for each in docs.faults(tmp_path, tmp_path / "results") if topic.document in each)
    assert stale.endswith(topic.sentence) and "| smollm2-135m | cuda bf16 | 1.00e-04 | 3.00e-04 |" in missing
    document = tmp_path / topic.document
    text = " ".join(document.read_text().split()).replace(topic.sentence, "\n".join(topic.table([result])))
    document.write_text(text)
    assert not [each for each in docs.faults(tmp_path, tmp_path / "results") if topic.document in each]
    path.unlink()
    (wrong,) = (each for each in docs.faults(tmp_path, tmp_path / "results") if topic.document in each)
    assert "nothing was measured" in wrong
