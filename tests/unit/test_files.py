"""Files appear whole or not at all, and errors of the operating system are one line."""

import ctypes
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.errors import UserError, explained
from zerolora.files import canonical, describe, read_json, staged_directory, write_json, write_text
from zerolora.units import gib, parse_bytes


def test_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_directory(target) as staged:
        (staged / "a").write_text("old")
    with pytest.raises(RuntimeError), staged_directory(target) as staged:
        (staged / "a").write_text("half")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_new_directory_replaces_the_whole_old_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("a", "b"):
        with staged_directory(target) as staged:
            (staged / name).write_text(name)
    assert [path.name for path in target.iterdir()] == ["b"]


def test_linked_file_is_replaced(tmp_path: Path) -> None:
    """DVC links outputs to its cache; writing through the link would corrupt the cache."""
    cached = tmp_path / "cached"
    cached.write_text("cached")
    (tmp_path / "out.json").hardlink_to(cached)
    write_json(tmp_path / "out.json", {"new": 1})
    assert cached.read_text() == "cached"


def test_invalid_json_names_file_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json: not valid JSON .*run `zerolora y` again"):
        read_json(tmp_path / "x.json", "zerolora y")


def test_describe_skips_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "manifest.json").write_text("{}")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert describe(tmp_path) == {"a": {"sha256": empty, "bytes": 0}}


@given(st.dictionaries(st.text(), st.integers()))
def test_canonical_json_ignores_key_order(value: dict[str, int]) -> None:
    assert canonical(value) == canonical(dict(reversed(value.items())))


@pytest.mark.parametrize(
    ("text", "count"), [("1B", 1), ("80GiB", 80 * 2**30), ("32 GB", 32 * 10**9), ("1.5MiB", 1572864)]
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80", "GiB", "-1GiB", "0GiB", "1 gb", "80G"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="with its unit"):
        parse_bytes(text)


def test_gib() -> None:
    assert gib(3 * 2**29) == "1.50 GiB"


def test_staged_file_has_the_usual_mode(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out") as staged:
        (staged / "a").touch(0o600)
    (tmp_path / "other").touch()
    assert (tmp_path / "out/a").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_umask_is_respected_and_not_changed_by_an_import(tmp_path: Path) -> None:
    code = """
import os, stat, sys
from pathlib import Path
os.umask(0o027)
calls = []
real, os.umask = os.umask, lambda mask: calls.append(mask)
from zerolora.files import staged_directory
assert not calls
with staged_directory(Path(sys.argv[1])) as staged:
    (staged / "a").touch(0o600)
os.umask = real
assert stat.S_IMODE((Path(sys.argv[1]) / "a").stat().st_mode) == 0o640
assert os.umask(0) == 0o027
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=True)


def test_importing_a_light_module_leaves_the_process_unchanged() -> None:
    """Without modules that need torch, since torch itself changes the process."""
    code = """
import importlib, locale, logging, os, pkgutil, signal, sys
import numpy, pydantic, tokenizers, tqdm, typer, yaml  # other libraries' own changes

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("torch is heavy")

sys.meta_path.insert(0, NoTorch())

def state():
    return (
        dict(os.environ), os.getcwd(), list(sys.path), sys.excepthook, sys.getrecursionlimit(),
        [signal.getsignal(number) for number in signal.valid_signals()], locale.setlocale(locale.LC_ALL),
        list(logging.root.handlers), logging.root.level, logging.getLogger("zerolora").handlers,
        open("/proc/self/status").read().split("Umask:")[1].split()[0], sorted(os.listdir("/proc/self/fd")),
    )

calls = []
os.umask = calls.append
import zerolora
light = []
for module in pkgutil.walk_packages(zerolora.__path__, "zerolora.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    before = state()
    try:
        importlib.import_module(module.name)
    except ImportError:  # of torch
        continue
    after = state()
    differing = [number for number, (a, b) in enumerate(zip(before, after)) if a != b]
    assert not differing and not calls, (module.name, differing, calls)
    light.append(module.name)
assert {"zerolora.cli", "zerolora.files", "zerolora.config.file", "zerolora.data.prepare"} <= set(light), light
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_stale_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    stale = [f".out.{host}.{dead.pid}.tmp", f".out.{host}.{dead.pid}.old.tmp"]
    others = [f".out.{host}.1.tmp", f".out.other-host.{dead.pid}.tmp", f".out2.{host}.{dead.pid}.tmp"]
    for name in stale + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("")
    (tmp_path / f".out.json.{host}.{dead.pid}.tmp").write_text("half")
    with staged_directory(tmp_path / "out") as staged:
        (staged / "a").write_text("")
        assert staged.name == f".out.{host}.{os.getpid()}.tmp"
    write_text(tmp_path / "out.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "out", "out.json"])


def test_directory_replacement_is_atomic(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_directory(target) as staged:
        (staged / "a").write_text("")
    missing, done = 0, threading.Event()

    def watch() -> None:
        nonlocal missing
        while not done.is_set():
            missing += not target.exists()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(50):
        with staged_directory(target) as staged:
            (staged / "a").write_text("")
    done.set()
    watcher.join()
    assert missing == 0


def test_directory_replacement_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library of macOS and musl have no renameat2."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for name in ("a", "b"):
        with staged_directory(tmp_path / "out") as staged:
            (staged / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/b"]


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_link_or_file_is_replaced_by_a_directory(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    if kind != "dangling":
        other.mkdir()
        (other / "file").write_text("")
    if kind == "file":
        (tmp_path / "out").write_text("")
    else:
        (tmp_path / "out").symlink_to(other)
    with staged_directory(tmp_path / "out") as staged:
        (staged / "new").write_text("")
    assert (tmp_path / "out/new").is_file() and not (tmp_path / "out").is_symlink()
    assert kind == "dangling" or (other / "file").is_file()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["directory", "read-only", "dangling", "full"])
def test_system_errors_name_file_and_remedy(tmp_path: Path, kind: str) -> None:
    folder, dangling, read_only, full = tmp_path, tmp_path / "x.json", Path("/proc/version"), Path("/dev/full")
    dangling.symlink_to("gone")
    cases: dict[str, tuple[Callable[[], Any], str]] = {
        "directory": (folder.read_text, f"{folder}: Is a directory; give the path of a file"),
        "read-only": (read_only.unlink, "/proc/version: "),
        "dangling": (dangling.read_text, f"{dangling}: is a link to 'gone', which does not exist; correct or remove"),
        "full": (lambda: full.write_text("x" * 100_000), "No space left on device; "),
    }
    action, expected = cases[kind]
    with pytest.raises(OSError) as caught:
        action()
    assert explained(caught.value).startswith(expected)
    assert len(explained(caught.value).splitlines()) == 1


def test_arrows_error_in_a_staged_directory_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, staged_directory(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    remedy = "free some space there, or write to another disk"
    assert explained(caught.value) == f"{tmp_path}/out: No space left on device; {remedy}"


def test_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("")
    with pytest.raises(UserError, match=r"caf\\xe9.*not UTF-8; rename it"):
        describe(tmp_path)
