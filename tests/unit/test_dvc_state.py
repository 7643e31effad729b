"""What is read of dvc.lock without DVC."""

from pathlib import Path

import dvc_state
import pytest
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
    assert dvc_state.words_of_lock() >= NAMES and "train@other" not in dvc_state.words_of_lock()


def test_without_the_file_there_are_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dvc_state.words_of_lock() == set()
