"""The store of base weights, with a hub on 127.0.0.1 that records its requests."""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, begun, project_environment, refusal
from fork_server import Started
from loopback_hub import REPOSITORY, REVISION, Hub, serving, use

from zerolora.config.settings import FetchHub
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import is_restored, restore
from zerolora.fetch.weight_store import store_folder
from zerolora.files import sha256
from zerolora.model.manifest import located

SETTINGS = FetchHub(repository=REPOSITORY, revision=REVISION, license="MIT")
FILE = "model.safetensors"
OTHER_FILE_SYSTEM = Path("/dev/shm")  # noqa: S108 (a tmpfs)


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    with serving(Hub(files, large=frozenset({FILE}))) as server:
        use(monkeypatch, server.endpoint)
        yield server


def fetched(clone: Path) -> Path:
    """Fetch the model in a clone, and return its weights."""
    fetch(SETTINGS, clone / "weights/tiny", clone / "models/tiny")
    return clone / "weights/tiny" / FILE


def downloads(hub: Hub) -> int:
    """Return how often the weights were downloaded."""
    return sum(asked.method == "GET" and asked.path == f"/lfs/{FILE}" for asked in hub.asked)


def blobs() -> list[Path]:
    return [path for path in (store_folder() / "blobs").glob("*") if path.is_file()]


FETCH = ("zerolora", "stage", "fetch", "--settings", SETTINGS.model_dump_json(), "--weights", "weights/tiny",
         "--output", "models/tiny")  # fmt: skip


def begin(clone: Path, hub: Hub) -> Started:
    """Begin `zerolora stage fetch` in a clone."""
    clone.mkdir(exist_ok=True)
    return begun(*FETCH, directory=clone, HF_ENDPOINT=hub.endpoint, HF_TOKEN="")


def test_a_second_clone_shares_the_bytes_and_asks_for_nothing(hub: Hub, tmp_path: Path, tiny_model: Path) -> None:
    first = fetched(tmp_path / "a")
    assert downloads(hub) == 1 and sha256(first) == sha256(tiny_model / FILE)
    hub.asked.clear()
    second = fetched(tmp_path / "b")
    assert hub.asked == [] and first.samefile(second)
    assert (tmp_path / "a/models/tiny/manifest.json").read_bytes() == (
        tmp_path / "b/models/tiny/manifest.json"
    ).read_bytes()
    assert stat.S_IMODE(second.stat().st_mode) & 0o222 == 0
    assert not any((store_folder() / "downloads").iterdir())
    # A clone that has the results of others alone restores by the manifest, whatever the pin.
    shutil.rmtree(tmp_path / "b/weights")
    shutil.rmtree(store_folder() / "pins")
    restore(tmp_path / "b/models/tiny", tmp_path / "b/weights/tiny")
    assert hub.asked == [] and first.samefile(second)
    assert located(tmp_path / "b/weights/tiny.json") == tmp_path / "b/weights/tiny"


def test_small_files_of_a_project_are_its_own(hub: Hub, tmp_path: Path) -> None:
    config = fetched(tmp_path / "a").with_name("config.json")
    assert config.stat().st_nlink == 1 and not config.is_symlink() and config.stat().st_mode & 0o200


def test_two_processes_download_once(hub: Hub, tmp_path: Path) -> None:
    hub.failures = ["stall"]
    first = begin(tmp_path / "a", hub)
    assert hub.stalled.wait(120)
    second = begin(tmp_path / "b", hub)
    while "another process downloads this model" not in second.errors():
        assert second.runs(), second.errors()
        time.sleep(0.05)
    hub.released.set()
    for process in (first, second):
        assert process.wait() == 0, process.errors()
    assert (tmp_path / "a/weights/tiny" / FILE).samefile(tmp_path / "b/weights/tiny" / FILE)
    assert downloads(hub) == 1


def test_a_killed_download_leaves_no_half_file(hub: Hub, tmp_path: Path, tiny_model: Path) -> None:
    hub.failures = [*[""] * (len(hub.files) - 1), "stall"]  # the weights come last
    process = begin(tmp_path / "a", hub)
    assert hub.stalled.wait(120)
    process.kill()
    hub.released.set()
    assert blobs() == [] and not (tmp_path / "a/weights/tiny").exists()
    assert sha256(fetched(tmp_path / "b")) == sha256(tiny_model / FILE)


def test_a_damaged_file_of_the_store_is_fetched_again(
    hub: Hub, tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = fetched(tmp_path / "a")
    blob = store_folder() / "blobs" / sha256(weights)
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    assert sha256(fetched(tmp_path / "b")) == sha256(tiny_model / FILE)
    assert f"{blob}: is damaged, and is fetched again" in caplog.text
    assert downloads(hub) == 2
    restore(tmp_path / "a/models/tiny", tmp_path / "a/weights/tiny")
    assert weights.samefile(tmp_path / "b/weights/tiny" / FILE) and downloads(hub) == 2


def test_a_base_that_another_project_damages_is_replaced_in_all(hub: Hub, tmp_path: Path, tiny_model: Path) -> None:
    """Two projects hold hard links to one file of the store; a byte is changed through one, and its time set back."""
    own, other = fetched(tmp_path / "a"), fetched(tmp_path / "b")
    for clone in ("a", "b"):
        restore(tmp_path / clone / "models/tiny", tmp_path / clone / "weights/tiny")
    times = own.stat()
    other.chmod(0o644)
    with other.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert other.stat().st_mtime_ns == times.st_mtime_ns and own.samefile(other)
    third = fetched(tmp_path / "c")
    for clone in ("a", "b"):
        assert not is_restored(tmp_path / clone / "models/tiny", tmp_path / clone / "weights/tiny")
        restore(tmp_path / clone / "models/tiny", tmp_path / clone / "weights/tiny")
    assert [sha256(path) for path in (own, other, third)] == [sha256(tiny_model / FILE)] * 3
    assert own.samefile(third) and downloads(hub) == 2


def test_weights_are_hashed_again_after_a_month(
    hub: Hub, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(tmp_path / "a")
    model, weights = tmp_path / "a/models/tiny", tmp_path / "a/weights/tiny"
    restore(model, weights)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 29 * 86400)
    assert is_restored(model, weights)
    monkeypatch.setattr(time, "time", lambda: now + 31 * 86400)
    assert not is_restored(model, weights)
    restore(model, weights)
    assert is_restored(model, weights)


def test_other_bytes_than_the_hub_lists_are_refused(hub: Hub, tmp_path: Path) -> None:
    content = hub.files[FILE]
    hub.listed[FILE] = content[:-1] + bytes([content[-1] ^ 1])
    assert f"{FILE} is not the file that the hub lists, of sha256" in refusal(fetched, tmp_path / "a")
    assert blobs() == [] and not (tmp_path / "a/models/tiny").exists()
    hub.listed.clear()
    fetched(tmp_path / "a")


def test_a_store_on_another_file_system_is_linked_to(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir=OTHER_FILE_SYSTEM) as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip(f"{OTHER_FILE_SYSTEM} is no file system of its own")
        monkeypatch.setenv("ZEROLORA_STORE", folder)
        first, second = fetched(tmp_path / "a"), fetched(tmp_path / "b")
        assert downloads(hub) == 1 and first.samefile(second)
        assert first.is_symlink() and first.readlink().is_relative_to(folder)
        restore(tmp_path / "a/models/tiny", tmp_path / "a/weights/tiny")
        assert downloads(hub) == 1


def test_a_store_that_cannot_be_written_is_read_and_named(hub: Hub, tmp_path: Path) -> None:
    """Root without the right to pass by permissions. Two starts of the command: 10 s."""
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    store = store_folder()
    store.mkdir(0o555)
    done = fetch_as(without, tmp_path / "a", hub)
    assert done.returncode == 0, done.stderr
    said = f"{store / 'locks'}: cannot be written (Permission denied); the weights are downloaded to weights/tiny, for"
    assert said in done.stderr
    assert downloads(hub) == 1 and list(store.iterdir()) == []
    store.chmod(0o755)
    fetched(tmp_path / "b")
    store.chmod(0o555)
    hub.asked.clear()
    done = fetch_as(without, tmp_path / "c", hub)
    assert done.returncode == 0 and "cannot be written" not in done.stderr
    assert hub.asked == []
    store.chmod(0o755)


def fetch_as(user: list[str], clone: Path, hub: Hub) -> "subprocess.CompletedProcess[str]":
    clone.mkdir()
    variables = project_environment(ROOT) | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": ""}
    return subprocess.run([*user, *FETCH], cwd=clone, env=variables, text=True, capture_output=True, check=False)


def test_a_download_of_an_earlier_release_is_adopted(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    weights = tmp_path / "a/weights/tiny"
    snapshot_download(REPOSITORY, revision=REVISION, allow_patterns=["*.safetensors", "*.json"], local_dir=weights)
    assert downloads(hub) == 1
    fetched(tmp_path / "a")
    assert downloads(hub) == 1 and (weights / FILE).samefile(blobs_of(weights))


def blobs_of(weights: Path) -> Path:
    return store_folder() / "blobs" / sha256(weights / FILE)


def test_a_store_of_a_group_stays_one(hub: Hub, tmp_path: Path) -> None:
    store_folder().mkdir()
    store_folder().chmod(0o2775)
    before = os.umask(0o077)
    try:
        fetched(tmp_path / "a")
    finally:
        os.umask(before)
    modes = {
        path.relative_to(store_folder()).parts[0]: stat.S_IMODE(path.stat().st_mode)
        for path in store_folder().iterdir()
    }
    assert modes == dict.fromkeys(("blobs", "pins", "downloads", "locks"), 0o2775)
    files = {path.parent.name: stat.S_IMODE(path.stat().st_mode) for path in store_folder().glob("*/*")}
    assert files == {"blobs": 0o444, "pins": 0o444, "locks": 0o664}


def test_the_name_of_the_store_is_absolute_and_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROLORA_STORE", "weights")
    assert refusal(store_folder) == ("ZEROLORA_STORE='weights': is not an absolute path; use one, as in /data/zerolora")
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZEROLORA_STORE", str(tmp_path / "file"))
    assert refusal(store_folder).endswith(": is not a directory; give the path of one")
    monkeypatch.delenv("ZEROLORA_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_folder() == tmp_path / "zerolora/weights"
