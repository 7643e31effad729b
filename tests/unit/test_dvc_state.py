"""What is read of dvc.lock without DVC."""

import json
import os
from pathlib import Path

import dvc_state
import pytest
import receipts
import yaml

NAMES = {"resolve", "train@default", "evaluate_base@rows", "task_base@rows-more", "prepare@2024"}


@pytest.mark.parametrize(
    "options",
    [{}, {"indent": 4}, {"default_flow_style": True}, {"default_style": "'"}, {"default_style": '"'}],
    ids=str,
)
def test_each_stage_is_among_the_words_however_the_file_is_laid_out(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = {"schema": "2.0", "stages": {name: {"cmd": "a b", "outs": [{"path": "c", "size": 1}]} for name in NAMES}}
    dvc_state.LOCK.write_text(yaml.safe_dump(lock, **options))  # type: ignore[call-overload]
    summary = dvc_state.LockSummary()
    assert {name for name in {*NAMES, "train@other"} if summary.may_restore(name, lambda _: True)} == NAMES


def test_without_the_file_nothing_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not dvc_state.LockSummary().may_restore("resolve", lambda _: True)


def test_a_receipt_in_the_cache_decides_unless_a_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    receipt = receipts.Receipt({"seed": "1"}, {}, {})
    text = json.dumps(
        {"params": receipt.params, "inputs": receipt.inputs, "outputs": receipt.outputs, "sha256": receipt.digest}
    )
    cached = Path(".dvc/cache/files/md5/ab/cdef")
    cached.parent.mkdir(parents=True)
    cached.write_text(text)
    dvc_state.LOCK.write_text("stages: {resolve: {}, train@default: {}}")
    status = cached.stat()
    files = {str(cached): [status.st_size, status.st_mtime_ns]}
    stages = {"resolve": {"receipt": "abcdef", "files": files}}
    dvc_state.SUMMARY.parent.mkdir()
    dvc_state.SUMMARY.write_text(json.dumps({"digest": "", "lock": dvc_state.LockSummary().lock, "stages": stages}))

    def may(seed: str, stage: str = "resolve") -> bool:
        return dvc_state.LockSummary().may_restore(stage, lambda found: found.params == {"seed": seed})

    assert may("1") and not may("2")
    assert may("2", "train@default"), "a stage that the summary lacks, as one of another branch"
    cached.write_text(f"{text} ")
    assert may("2"), "a file of the cache that has changed is DVC's to judge"
    cached.write_bytes(b"\xff" * status.st_size)
    os.utime(cached, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert may("2"), "bytes that are no receipt are DVC's to judge"
    cached.write_text(text)
    os.utime(cached, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert not may("2")
    dvc_state.LOCK.write_text("stages: {resolve: {}}")
    assert may("2"), "another dvc.lock has other receipts"
