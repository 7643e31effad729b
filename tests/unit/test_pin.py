"""`zerolora pin`: commits for what a config names by branch, tag or name, from a hub on loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback_hub import REPOSITORY, REVISION, Hub, asking, serving

CONFIG = """\
# A comment stays.
model: {repository}@main
fetch:
  hub:
    a: {{repository: {repository}}}  # the small one
    b:
      repository: {repository}
      revision: main
      license: unknown
    pinned: {{repository: {repository}, revision: {other}, license: mit}}
  data:
    c:
      repository: {repository}   # rows
      files: ['*.jsonl']
  directory: {{}}
train: {{learning_rate: 1e-4}}
"""
OTHER = "f" * 40


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({"README.md": b"# It"})) as server:
        server.card = {"license": "apache-2.0"}
        yield server


def pin(folder: Path, hub: Hub, **variables: str) -> Any:
    return asking(hub, folder, "pin", "--config", "config.yaml", **variables)


def test_names_and_branches_become_commits(tmp_path: Path, hub: Hub) -> None:
    path = tmp_path / "config.yaml"
    long = "".join(f"# é {number}\n" for number in range(5_000))  # read by libyaml
    path.write_text(long + CONFIG.format(repository=REPOSITORY, other=OTHER))
    done = pin(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == [
        f"model: main is {REVISION} now",
        f"fetch.hub.a.revision: the main branch is {REVISION} now",
        f"fetch.hub.b.revision: main is {REVISION} now",
        f"fetch.data.c.revision: the main branch is {REVISION} now",
    ]
    text = path.read_text()
    pinned = {"repository": REPOSITORY, "revision": REVISION, "license": "apache-2.0"}
    values = yaml.safe_load(text)
    assert values["model"] == f"{REPOSITORY}@{REVISION}"
    assert values["fetch"] == {
        "hub": {
            "a": pinned,
            "b": pinned,
            "pinned": {"repository": REPOSITORY, "revision": OTHER, "license": "mit"},
        },
        "data": {"c": {**pinned, "files": ["*.jsonl"]}},
        "directory": {},
    }
    for comment in ("# A comment stays.\n", "# the small one\n", f"      revision: {REVISION}  # main\n", "# rows\n"):
        assert comment in text
    again = pin(tmp_path, hub)
    assert again.returncode == 0 and "config.yaml: nothing to pin" in again.stderr + again.stdout
    assert path.read_text() == text


def test_line_ends_stay(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "config.yaml").write_bytes(f"a: é\r\nmodel: {REPOSITORY}\r\nb: 1\r\n".encode())
    assert pin(tmp_path, hub).returncode == 0
    expected = f"a: é\r\nmodel: {REPOSITORY}@{REVISION}\r\nb: 1\r\n"
    assert (tmp_path / "config.yaml").read_bytes() == expected.encode()


def test_an_alias_is_written_once_and_invalid_entries_are_left(tmp_path: Path, hub: Hub) -> None:
    """What is invalid is for the config's own check."""
    entries = f"a: &it {{repository: {REPOSITORY}}}, b: *it, c: {{repository: [1], revision: [2]}}, d: 3"
    (tmp_path / "config.yaml").write_text(f"fetch: {{hub: {{{entries}}}, data: 7}}\nmodel: [x]\n")
    done = pin(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    pinned = {"repository": REPOSITORY, "revision": REVISION, "license": "apache-2.0"}
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["fetch"]
    assert written == {
        "hub": {"a": pinned, "b": pinned, "c": {"repository": [1], "revision": [2]}, "d": 3},
        "data": 7,
    }


@pytest.mark.parametrize(
    ("model", "offline", "said"),
    [
        ("some/other", "", "model some/other: no such model, or a private one"),
        (f"{REPOSITORY}@v9", "", f"model {REPOSITORY} at v9: the repository has no such commit"),
        (REPOSITORY, "1", f"model {REPOSITORY} must be downloaded, and HF_HUB_OFFLINE is set"),
    ],
)
def test_what_the_hub_lacks_is_one_line_and_nothing_is_written(
    tmp_path: Path, hub: Hub, model: str, offline: str, said: str
) -> None:
    text = f"fetch: {{hub: {{a: {{repository: {REPOSITORY}}}}}}}\nmodel: {model}\n"
    (tmp_path / "config.yaml").write_text(text)
    done = pin(tmp_path, hub, HF_HUB_OFFLINE=offline)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr
    assert (tmp_path / "config.yaml").read_text() == text
