"""Data sets of the hub: exactly the pinned files, nothing that could be run, whole or not at all."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, project_environment
from loopback_hub import REVISION, Hub, hub_environment, serve

from zerolora.files import canonical, sha256


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "hub"
    (files / "data").mkdir(parents=True)
    for part in range(2):
        rows = [{"instruction": f"{part}-{number}", "output": "x" * 100} for number in range(200)]
        (files / f"data/train-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (files / "data/notes.md").write_text("notes")
    (files / "evil.py").write_text("raise SystemExit")
    with serve(files) as served:
        yield served


def fetch(hub: Hub, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Fetch with the real client, in a process of its own: the hub's address is read once."""
    settings = {"repository": "some/data", "revision": REVISION, "files": ["data/*.jsonl"], "license": "MIT"} | settings
    return subprocess.run(
        [str(BIN / "zerolora"), "fetch-data", "--settings", canonical(settings), "--output", str(folder / "out")],
        env=project_environment(folder) | hub_environment(hub, folder),
        capture_output=True,
        text=True,
        check=False,
    )


def test_only_the_pinned_files_are_asked_for_and_written(hub: Hub, tmp_path: Path) -> None:
    result = fetch(hub, tmp_path)
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert sorted(manifest["files"]) == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert manifest["source"] == {"repository": "some/data", "revision": REVISION}
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == sha256(tmp_path / "out" / name) == sha256(hub.files / name)
    assert all("main" not in path and "evil" not in path and "notes" not in path for path in hub.asked)
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert written == {"data", "manifest.json", *manifest["files"]}
    before = (tmp_path / "out/manifest.json").read_bytes()
    assert fetch(hub, tmp_path).returncode == 0
    assert (tmp_path / "out/manifest.json").read_bytes() == before


def test_a_connection_that_breaks_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = "data/train-1.jsonl"
    result = fetch(hub, tmp_path)
    assert result.returncode == 2
    assert "cannot be downloaded" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    hub.breaks = None
    assert fetch(hub, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"files": ["*.parquet"]}, "no file matches *.parquet; there are data/notes.md, data/train-0.jsonl"),
        ({"files": ["*"]}, "data/notes.md is no data file, so it is not taken"),
        ({"files": ["*.py"]}, "evil.py is no data file, so it is not taken"),
        ({"revision": "f" * 40}, "no such commit"),
        ({"repository": "some/other"}, "no such repository, or it is private: then set HF_TOKEN"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    result = fetch(hub, tmp_path, **settings)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_gated_repository_says_what_to_set(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    result = fetch(hub, tmp_path)
    assert result.returncode == 2
    assert "is gated; accept its terms and set HF_TOKEN" in result.stderr


@pytest.mark.slow  # the client tries again for twenty seconds
def test_no_network_is_one_line_and_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:9"
    result = fetch(hub, tmp_path)
    assert result.returncode == 2
    assert "cannot be downloaded" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
