"""Checkpoint files: round trip, corruption, choice on resume, a full disk. No model, no engine."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import served
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from training_plan import training_plan

from zerolora.config import compared as settings_module
from zerolora.config.compared import compared
from zerolora.config.settings import TrainSettings
from zerolora.errors import UserError
from zerolora.train.checkpoint import format as format_of_checkpoints
from zerolora.train.checkpoint import store
from zerolora.train.checkpoint.format import (
    CorruptCheckpoint,
    State,
    header,
    newest_first,
    read,
    read_chosen,
    write,
)
from zerolora.train.checkpoint.resume_key import FREE
from zerolora.train.checkpoint.store import Checkpoints, differences
from zerolora.train.starting_factors import extract

RESUME_KEY = {"train.seed": 1, "train.learning_rate": 0.1, "data": "abc"}
FINGERPRINT: dict[str, Any] = {"steps": 9, "settings": {}, "code": "x"}


def state_of(step: int, size: int = 3) -> State:
    parts = {part: {"a.b": torch.arange(size) + float(step)} for part in ("weight", "exp_avg", "exp_avg_sq")}
    loop = {"loss": torch.arange(step, dtype=torch.float64), "loss_by_source": torch.zeros(1, dtype=torch.float64)}
    best = {"a.b": torch.arange(size) - 1.0}
    return State(step, parts, step - 1, loop, 1.5, 2, best_step=2, best=best, loss_scale={"cur_scale": 4.0})


def test_round_trip(tmp_path: Path) -> None:
    written = state_of(4)
    actual, manifest = read(write(tmp_path, written, RESUME_KEY, FINGERPRINT))
    assert (actual.step, actual.updates, actual.seconds, actual.resumes) == (4, 3, 1.5, 2)
    assert actual.loss_scale == {"cur_scale": 4}
    assert manifest["resume_key"] == RESUME_KEY and manifest["run_fingerprint"] == FINGERPRINT
    for part, tensors in written.parts.items():
        assert torch.equal(actual.parts[part]["a.b"], tensors["a.b"])
    assert torch.equal(actual.loop["loss"], written.loop["loss"])
    assert actual.best_step == 2 and torch.equal(actual.best["a.b"], written.best["a.b"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.safetensors"]
    (tmp_path / "other").touch()
    assert (tmp_path / "step-00000004.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    """NumPy has no bf16, so its arrays cannot be hashed."""
    parts = {"start": {"a": torch.randn(3, 2).to(dtype), "b": torch.tensor(1.5, dtype=dtype)}}
    actual, _ = read(write(tmp_path, State(0, parts, 0, {}, 0.0), RESUME_KEY, FINGERPRINT))
    assert all(torch.equal(actual.parts["start"][name], tensor) for name, tensor in parts["start"].items())


@given(offset=st.integers(0, 10**6), flip=st.integers(0, 255))
def test_any_flipped_or_missing_byte_is_corrupt(
    tmp_path_factory: pytest.TempPathFactory, offset: int, flip: int
) -> None:
    path = write(tmp_path_factory.mktemp("flip"), state_of(4), RESUME_KEY, FINGERPRINT)
    content = bytearray(path.read_bytes())
    offset %= len(content)
    if flip:
        content[offset] ^= flip
    path.write_bytes(content if flip else content[:offset])
    with pytest.raises(CorruptCheckpoint):
        read(path)


def training(folder: Path, key: dict[str, Any] = RESUME_KEY, fingerprint: dict[str, Any] = FINGERPRINT) -> Checkpoints:
    return Checkpoints(folder, key, fingerprint, every_minutes=10)


def forged(folder: Path, **changed: Any) -> Path:
    """Return a checkpoint with a changed manifest (... removes a key) and valid hashes."""
    path = write(folder, state_of(4), RESUME_KEY, FINGERPRINT)
    values = header(path) | changed
    if "whole" in changed:
        values = changed["whole"]
    else:
        values = {key: value for key, value in values.items() if value is not ...}
    text = values if isinstance(values, str) else json.dumps(values)
    save_file(load_file(path), path, {"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    return path


WRONG: list[Any] = [..., None, "x", [], {"a": []}, -1]
FIELDS = ("step", "steps", "updates", "seconds", "resumes", "loss_scale", "resume_key", "run_fingerprint", "tensors")


@pytest.mark.parametrize(
    "changed", [*({"whole": text} for text in ("[]", "null", "{}", '"x"', "[" * 100_000)), {"tensors": {}}], ids=str
)
def test_invalid_manifest_is_corrupt(tmp_path: Path, changed: dict[str, Any]) -> None:
    said = "its tensors are not those of its manifest" if "tensors" in changed else ""
    with pytest.raises(CorruptCheckpoint, match=said):
        read(forged(tmp_path, **changed))


@pytest.mark.parametrize("key", FIELDS)
def test_manifest_value_of_another_type_is_corrupt(tmp_path: Path, key: str) -> None:
    for value in WRONG:
        if (key, value) in (("resume_key", {"a": []}), ("run_fingerprint", {"a": []})):
            continue
        with pytest.raises(CorruptCheckpoint, match=rf"{key}.* of its manifest: "):
            read(forged(tmp_path, **{key: value}))


@pytest.mark.parametrize(("keep", "left"), [(1, [2, 5, 8]), (2, [2, 4, 5, 8]), (3, [2, 3, 4, 5, 8])])
def test_last_and_best_survive_beside_newer_checkpoints(tmp_path: Path, keep: int, left: list[int]) -> None:
    saver = Checkpoints(tmp_path, RESUME_KEY, FINGERPRINT, every_minutes=10, keep=keep)
    write(saver.folder, state_of(8), RESUME_KEY, FINGERPRINT)
    for step in (1, 2, 3, 4, 5):  # the best is 2
        saver.write(state_of(step))
    saver.wait()
    assert sorted(header(path)["step"] for path in saver.folder.iterdir()) == left


def test_a_damaged_checkpoint_is_set_aside_and_never_deleted(tmp_path: Path) -> None:
    saver = Checkpoints(tmp_path, RESUME_KEY, FINGERPRINT, every_minutes=10, keep=1)
    whole = write(saver.folder, state_of(3), RESUME_KEY, FINGERPRINT)
    for content in (b"torn", b"torn again"):
        newest = saver.folder / "step-00000004.safetensors"
        newest.write_bytes(content)
        path, [line] = saver.choose("auto")
        assert path == whole and f"{newest} is passed over: " in line and "; it is now damaged-step-00000004" in line
    whole.write_bytes(b"torn as well")
    assert saver.choose("auto")[0] is None
    for step in (1, 2, 3, 4, 5):
        saver.write(dataclasses.replace(state_of(step), best_step=None))
    saver.wait()
    actual = {path.name: path.read_bytes() for path in saver.folder.glob("damaged-*")}
    assert sorted(actual.values()) == [b"torn", b"torn again", b"torn as well"]
    assert [path.name for path in saver.folder.glob("step-*")] == ["step-00000005.safetensors"]


def test_checkpoint_of_another_version_ends_the_run(tmp_path: Path) -> None:
    saver = training(tmp_path)
    other = forged(saver.folder, format=2)
    content = other.read_bytes()
    with pytest.raises(UserError) as error:
        saver.choose("auto")
    assert str(error.value) == (
        f"{other}: another version of zerolora wrote this checkpoint (format 2; this version reads 3); finish the run "
        "with that version, or set train.resume: never to train from the beginning"
    )
    assert other.read_bytes() == content
    # A newer checkpoint of this version is resumed, and the unreadable one stays.
    for step in (5, 6, 7):
        saver.write(dataclasses.replace(state_of(step), best_step=None))
    saver.wait()
    assert other.read_bytes() == content
    assert saver.choose("auto")[0] == saver.folder / "step-00000007.safetensors"
    assert saver.choose("never") == (None, [])
    assert (saver.folder / f"earlier-{other.name}").read_bytes() == content


def test_unreadable_checkpoint_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives EIO, as for a failed disk, for the first byte of a process's memory."""
    monkeypatch.setattr(format_of_checkpoints, "PAUSES", (0.0, 0.0))
    saver = training(tmp_path)
    older = write(saver.folder, state_of(3), RESUME_KEY, FINGERPRINT)
    newest = saver.folder / "step-00000004.safetensors"
    newest.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"step-00000004.safetensors: Input/output error; .* train.resume: never"):
        saver.choose("auto")
    with pytest.raises(UserError, match="Input/output error"):
        saver.choose(str(newest))
    assert newest.is_symlink() and older.exists()
    assert saver.choose("never") == (None, [])
    assert (saver.folder / f"earlier-{newest.name}").is_symlink()


def test_transient_read_error_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = training(tmp_path)
    whole = write(saver.folder, state_of(4), RESUME_KEY, FINGERPRINT)
    content = whole.read_bytes()
    whole.unlink()
    whole.symlink_to("/proc/self/mem")

    def restored(_: float) -> None:
        whole.unlink()
        whole.write_bytes(content)

    monkeypatch.setattr(time, "sleep", restored)
    assert saver.choose("auto") == (whole, [])


def test_unlistable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_of_checkpoints, "PAUSES", ())
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop: Too many levels of symbolic links; remove that link"):
        newest_first(tmp_path / "loop")
    assert newest_first(tmp_path / "none") == []


def test_restarted_run_deletes_earlier_checkpoints_after_its_second(tmp_path: Path) -> None:
    saver = training(tmp_path)
    write(saver.folder, state_of(6), RESUME_KEY, FINGERPRINT)
    assert saver.choose("never") == (None, [])
    names = []
    for step in (1, 2):
        saver.write(dataclasses.replace(state_of(step), best_step=None))
        saver.wait()
        names.append(sorted(path.name for path in saver.folder.iterdir()))
    assert names == [
        ["earlier-step-00000006.safetensors", "step-00000001.safetensors"],
        ["step-00000001.safetensors", "step-00000002.safetensors"],
    ]
    assert training(tmp_path / "other").choose("auto") == (None, [])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_from_a_named_checkpoint_survives_a_preemption(tmp_path: Path, elsewhere: bool) -> None:
    saver = training(tmp_path)
    own = saver.folder
    named = write(tmp_path / "other" if elsewhere else own, state_of(2), RESUME_KEY, FINGERPRINT)
    assert saver.choose(str(named)) == (named, [])
    for step in (3, 4, 5, 6):
        saver.write(dataclasses.replace(state_of(step), best_step=None))
    saver.wait()
    del saver  # and its lock
    assert named.exists()
    chosen, lines = training(tmp_path).choose(str(named))
    assert chosen == own / "step-00000006.safetensors"
    assert lines == [f"{chosen} continues from {named}, which train.resume names"]
    chosen.write_bytes(b"torn")
    chosen, lines = training(tmp_path).choose(str(named))
    assert chosen == own / "step-00000005.safetensors" and "step-00000006.safetensors is passed over" in lines[0]


def test_checkpoint_that_does_not_continue_the_named_one_is_skipped(tmp_path: Path) -> None:
    own = training(tmp_path).folder
    named, other = write(own, state_of(2), RESUME_KEY, FINGERPRINT), state_of(4)
    other.loop["loss"] += 1
    newer = write(own, other, RESUME_KEY, FINGERPRINT)
    chosen, lines = training(tmp_path).choose(str(named))
    assert chosen == named
    why = f"it does not continue from {named}, which train.resume names; it is now earlier-step-00000004.safetensors"
    assert lines == [f"{newer} is passed over: {why}"]


def test_changed_finished_run_restarts_at_its_named_checkpoint(tmp_path: Path) -> None:
    saver = training(tmp_path, RESUME_KEY, FINGERPRINT | {"code": "y"})
    named = write(saver.folder, state_of(2), RESUME_KEY, FINGERPRINT)
    newer = write(saver.folder, state_of(4), RESUME_KEY, FINGERPRINT)
    saver.mark_finished()
    assert saver.choose(str(named)) == (named, [f"{newer} is of a finished run; training starts over from {named}"])
    assert not newer.exists() and named.exists()
    del saver
    assert training(tmp_path).choose(str(named))[0] == named, "a preemption before the first checkpoint"


def test_second_start_leaves_the_factors_of_a_running_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_SECONDS", 0)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    first, second = (training(tmp_path) for _ in range(2))
    first.claim()
    plan = training_plan(lora={"init": "pissa"})
    with pytest.raises(UserError, match=f"this run is being trained by process {os.getpid()}"):
        extract(None, plan, second, sharded=False, device=torch.device("cpu"))
    assert not (second.folder / "start").exists()


def test_a_difference_is_named_by_its_key() -> None:
    changed = {**RESUME_KEY, "train.seed": 2, "data": "other", "train.new": None}
    assert differences(RESUME_KEY, changed) == ["the data is another", "train.seed was 1 and is 2"]


def key_of(settings: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {**{f"train.{key}": value for key, value in settings.items() if key not in FREE}, "data": "abc", **others}


PLAN = training_plan(lora={"r": 2}, schedule="cosine_with_restarts", schedule_options={"num_cycles": 1.5})
# Without default values, as this version writes keys, and with them, as earlier versions did.
KEYS = {"compared": key_of(compared(PLAN)), "whole": key_of(PLAN.model_dump(mode="json"))}


@pytest.mark.parametrize(("before", "now"), [("whole", "compared"), ("compared", "whole")])
def test_upgrade_with_an_equivalent_key_resumes(tmp_path: Path, before: str, now: str) -> None:
    old = training(tmp_path, KEYS[before])
    paths = [write(old.folder, state_of(step), KEYS[before], FINGERPRINT) for step in (4, 5)]
    other = write(training(tmp_path).folder, state_of(8), RESUME_KEY, FINGERPRINT)
    os.utime(other, (0, 0))
    del old
    new = training(tmp_path, KEYS[now])
    assert new.choose("auto") == (paths[-1], [])
    new.write(dataclasses.replace(state_of(6), best_step=None))
    new.wait()
    del new
    for name in (now, before):  # and back again
        assert training(tmp_path, KEYS[name]).choose("auto") == (paths[-1].with_name("step-00000006.safetensors"), [])
    assert training(tmp_path, KEYS[now]).choose("never") == (None, [])
    assert (paths[-1].parent / f"earlier-{paths[-1].name}").exists()


def test_finished_run_stays_finished_after_an_upgrade(tmp_path: Path) -> None:
    old = training(tmp_path, KEYS["whole"])
    path = write(old.folder, state_of(9), KEYS["whole"], FINGERPRINT)
    old.mark_finished()
    del old
    assert training(tmp_path, KEYS["compared"]).choose("auto") == (path, [])
    lines = [f"{path} is of a finished run; training starts over"]
    assert training(tmp_path, KEYS["compared"], FINGERPRINT | {"code": "y"}).choose("auto") == (None, lines)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"seed": 9}, "train.seed was 1 and is 9"),
        ({"lora": {"r": 4}}, "train.lora.r was 2 and is 4"),
        ({"schedule_options": {}}, "train.schedule_options was {'num_cycles': 1.5} and is {}"),
        ({"weight_decay": 0.5}, "train.weight_decay was 0.0 and is 0.5"),
    ],
)
@pytest.mark.parametrize("before", ["whole", "compared"])
def test_changed_config_restarts_after_an_upgrade(
    tmp_path: Path, before: str, changed: dict[str, Any], why: str
) -> None:
    seed = {"train.seed": 1}
    old = write(training(tmp_path, KEYS[before] | seed).folder, state_of(4), KEYS[before] | seed, FINGERPRINT)
    now = {**PLAN.model_dump(mode="json", exclude_unset=True), "seed": 1, **changed}
    new = training(tmp_path, key_of(compared(training_plan(**now))))
    assert new.choose("auto") == (None, [f"{old} is not resumed, since {why}; training starts over"])
    assert new.folder != old.parent


def test_long_values_are_not_shown() -> None:
    long = ["a" * 80]
    assert differences({"train.targets": [*long, "b"]}, {"train.targets": [*long, "c"]}) == ["train.targets is another"]


@pytest.fixture
def another_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give weight_decay a default other than its neutral value, 0.0."""
    for section in (TrainSettings, type(PLAN)):
        monkeypatch.setattr(section.model_fields["weight_decay"], "default", 0.3)
    settings_module._keys.cache_clear()
    yield
    settings_module._keys.cache_clear()


@pytest.mark.usefixtures("another_default")
def test_changed_default_differs_from_the_runs_value(tmp_path: Path) -> None:
    recorded = {"train.seed": 1}
    old = write(training(tmp_path, recorded).folder, state_of(4), recorded, FINGERPRINT)
    why = "train.weight_decay was 0.0 and is 0.3"
    lines = [f"{old} is not resumed, since {why}; training starts over"]
    assert training(tmp_path, {**recorded, "train.weight_decay": 0.3}).choose("auto") == (None, lines)
    assert training(tmp_path, {**recorded, "train.weight_decay": 0.0}).choose("auto") == (old, [])


def test_unreadable_checkpoint_of_another_key_is_skipped_with_a_line(tmp_path: Path) -> None:
    version, unread, torn = (tmp_path / name for name in ("version", "unread", "torn"))
    other = forged(training(version, {"data": "other"}).folder, format=2)
    why = "another version of zerolora wrote this checkpoint (format 2; this version reads 3)"
    assert training(version).choose("auto") == (None, [f"{other} is not resumed: {why}; training starts over"])
    for folder, why in ((unread, "Input/output error"), (torn, "not a whole checkpoint")):
        path = training(folder, {"data": "other"}).folder / "step-00000004.safetensors"
        path.parent.mkdir(parents=True)
        if folder == unread:
            path.symlink_to("/proc/self/mem")
        else:
            path.write_bytes(b"torn")
        actual, [line] = training(folder).choose("auto")
        assert actual is None and line.startswith(f"{path} is not resumed: {why}")
        assert line.endswith("; training starts over")
        assert path.is_symlink() or path.read_bytes() == b"torn"


@pytest.mark.parametrize("torn", [False, True])
def test_rank_without_the_chosen_checkpoint_is_one_line(tmp_path: Path, torn: bool) -> None:
    """As on a node with another work/ folder."""
    path = tmp_path / "step-00000004.safetensors"
    if torn:
        path.write_bytes(b"torn")
    with pytest.raises(UserError, match=r"4.safetensors: rank 0 has chosen it, and rank 3 on .* that all nodes share"):
        read_chosen(path, 3)


def test_settings_that_change_the_loss_are_in_the_resume_key() -> None:
    assert not FREE & {
        "learning_rate",
        "global_batch",
        "epochs",
        "max_steps",
        "seed",
        "lora",
        "schedule",
        "weight_decay",
    }


def test_full_disk_is_one_line_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit on the file size stands for a full disk."""
    saver = training(tmp_path)
    saver.write(state_of(2))
    saver.wait()
    program = (
        "import resource, sys; from pathlib import Path; sys.path += sys.argv[2:];"
        "from test_checkpoint import *;"
        "saver = Checkpoints(Path(sys.argv[1]), RESUME_KEY, FINGERPRINT, every_minutes=10);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000));"
        "saver.write(state_of(3, 100000)); saver.wait()"
    )
    command = ["python", "-c", program, str(tmp_path), str(Path(__file__).parent), *sys.path]
    result = served(*command, directory=tmp_path)
    assert "UserError" in result.stderr.splitlines()[-1] and "no checkpoint could be written" in result.stderr
    assert [header(path)["step"] for path in saver.folder.iterdir()] == [2]


def test_named_checkpoint_must_exist(tmp_path: Path) -> None:
    saver = training(tmp_path)
    with pytest.raises(UserError, match="train.resume: .*there is no such file; name another checkpoint, or use"):
        saver.choose(str(tmp_path / "none.safetensors"))
