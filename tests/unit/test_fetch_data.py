"""Data sets from the hub: requests, files and errors."""

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_hub import REPOSITORY, REVISION, Hub, serving, use

from zerolora import data as kinds
from zerolora.config.settings import FetchAdapterSettings, FetchDataSettings
from zerolora.data import readers
from zerolora.errors import UserError
from zerolora.fetch.data_sets import fetch_adapter, fetch_data
from zerolora.files import describe, sha256
from zerolora.methods.peft_format import ADAPTER, CONFIG
from zerolora.model import added_tokens

SETTINGS = FetchDataSettings(
    repository=REPOSITORY, revision=REVISION, files=["data/train-*.parquet", "extra.jsonl"], license="MIT"
)


def changed(**values: Any) -> FetchDataSettings:
    return SETTINGS.model_copy(update=values)


WANTED = {
    "data/train-0.parquet": bytes(range(256)) * 400,
    "data/train-1.parquet": b"PAR1" * 30_000,
    "extra.jsonl": b'{"text": "\xe7\x8e\x8b"}\r\n',
}
OTHERS = {
    "README.md": b"---\nlicense: mit\n---\n",
    "data.py": b"raise SystemExit",
    "data/test-0.parquet": b"PAR1",
    "data/train.pkl": b"\x80\x04.",
    "extra.json": b"[]",
}
LARGE = frozenset({"data/train-0.parquet", "data/train-1.parquet"})
TOKEN = "hf_1234567890abcdef"  # noqa: S105


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return monkeypatch


def isolate(client: pytest.MonkeyPatch, home: Path) -> None:
    client.delenv("HF_TOKEN", raising=False)
    client.setenv("HF_XET_CACHE", str(home / "xet"))
    client.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    client.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "cache"))
    client.setattr("huggingface_hub.constants.AGENT_HARNESSES_PATH", str(home / "agents"), raising=False)
    client.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(client: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(OTHERS | WANTED, LARGE)) as server:
        use(client, server.endpoint)
        yield server


def tree(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory, hidden or not."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_requests_and_written_files(hub: Hub, tmp_path: Path) -> None:
    fetch_data(SETTINGS, tmp_path / "hub/out")
    assert hub.downloads() == sorted(WANTED)
    assert all(f"/{REVISION}" in asked.path for asked in hub.asked if REPOSITORY in asked.path)
    assert {asked.token for asked in hub.asked} == {None}
    written = tree(tmp_path / "hub/out")
    manifest = json.loads(written.pop("manifest.json"))
    assert written == WANTED
    assert [path.name for path in (tmp_path / "hub").iterdir()] == ["out"]
    assert not (tmp_path / "hub/out/.cache").exists()
    out = tmp_path / "hub/out"
    files = {name: {"bytes": len(data), "sha256": sha256(out / name)} for name, data in WANTED.items()}
    assert manifest == {"source": {"repository": REPOSITORY, "revision": REVISION}, "license": "MIT", "files": files}


def test_second_fetch_gives_the_same_bytes(hub: Hub, tmp_path: Path) -> None:
    fetch_data(SETTINGS, tmp_path / "one")
    first = tree(tmp_path / "one")
    (tmp_path / "one/data/stray.json").write_text("[]")
    (tmp_path / "one/extra.jsonl").write_text("changed")
    fetch_data(SETTINGS, tmp_path / "one")
    fetch_data(changed(files=SETTINGS.files[::-1]), tmp_path / "two")
    assert tree(tmp_path / "one") == first
    assert tree(tmp_path / "two") == first


NAMES = st.lists(
    st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\:"), min_size=1, max_size=8).filter(
        lambda part: part[0] != "."
    ),
    min_size=1,
    max_size=3,
).map("/".join)


@given(files=st.dictionaries(NAMES, st.binary(max_size=200), min_size=1, max_size=3), large=st.booleans())
@settings(max_examples=25)
def test_any_bytes_and_names_are_fetched(files: dict[str, bytes], large: bool) -> None:
    served = {f"{name} 100%?#.csv": data for name, data in files.items()}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as client:
        isolate(client, Path(folder))
        with serving(Hub(served, frozenset(served) if large else frozenset())) as server:
            use(client, server.endpoint)
            fetch_data(changed(files=["*.csv"]), Path(folder, "out"))
        written = tree(Path(folder, "out"))
        assert json.loads(written.pop("manifest.json"))["files"] == describe(Path(folder, "out"))
        assert written == served


PACKINGS = ["", *(f".{packing}" for packing in kinds.COMPRESSIONS)]
READABLE = [f"rows.{kind}{packing}" for kind in kinds.TEXTS for packing in PACKINGS]
READABLE += [f"rows.{kind}" for kind in kinds.TABLES] + ["ROWS.Parquet", "a.b.JSON.GZ"]


def test_every_readable_kind_is_fetched(client: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(Hub({name: gzip.compress(name.encode()) for name in READABLE})) as server:
        use(client, server.endpoint)
        fetch_data(changed(files=["*"]), tmp_path / "out")
    assert [path.name for path in readers.files_of(tmp_path / "out")] == sorted(READABLE)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rows.py", "not a data file"),
        ("data/rows.json.py", "not a data file"),
        ("rows.pkl", "not a data file"),
        ("rows.tar.gz", "not a data file"),
        ("rows.parquet.gz", "not a data file"),
        ("json", "not a data file"),
        (".rows.json", "hidden"),
        (".cache/huggingface/rows.json", "hidden"),
        ("../rows.json", "hidden"),
        ("manifest.json", "manifest.json is the name of the list"),
        ("data/Manifest.JSON", "manifest.json is the name of the list"),
    ],
)
def test_files_without_rows_are_refused(client: pytest.MonkeyPatch, tmp_path: Path, name: str, why: str) -> None:
    with serving(Hub({"a.json": b"[]", name: b"raise SystemExit", "z.json": b"[]"})) as server:
        use(client, server.endpoint)
        message = refusal(fetch_data, changed(files=["a.json", "*"]), tmp_path / "out")
        assert f"'*' matches what is not fetched: {name} ({why}" in message and "a.json" not in message
        assert server.downloads() == []
        assert not (tmp_path / "out").exists()
        fetch_data(changed(files=["?.json"]), tmp_path / "out")
        assert sorted(tree(tmp_path / "out")) == ["a.json", "manifest.json", "z.json"]


def test_absolute_path_is_refused(client: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    with serving(Hub({str(outside): b"[]"})) as server:
        use(client, server.endpoint)
        with pytest.raises(UserError, match="cannot be an absolute"):
            fetch_data(changed(files=["*"]), tmp_path / "hub/out")
    assert not outside.exists()
    assert not list((tmp_path / "hub").iterdir())


@pytest.mark.parametrize("files", [["data/trian-*.parquet"], ["extra.jsonl", "data/trian-*.parquet"]])
def test_pattern_without_a_match_lists_the_files(hub: Hub, tmp_path: Path, files: list[str]) -> None:
    message = refusal(fetch_data, changed(files=files), tmp_path / "out")
    assert message.startswith(f"data set {REPOSITORY} at {REVISION}: `files`: nothing matches 'data/trian-*.parquet'")
    data, other = message.partition("README.md")[::2]
    assert all(name in data for name in [*WANTED, "data/test-0.parquet", "extra.json"]), "data files come first"
    assert "data.py" in other
    assert hub.downloads() == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("count", "end"), [(0, "none, since it contains no file"), (10, "9.json"), (12, ", and 2 more")]
)
def test_at_most_ten_files_are_listed(client: pytest.MonkeyPatch, tmp_path: Path, count: int, end: str) -> None:
    with serving(Hub({f"{number:2}.json": b"[]" for number in range(count)})) as server:
        use(client, server.endpoint)
        message = refusal(fetch_data, changed(files=["*.csv"]), tmp_path / "out")
    assert message.endswith(end) and message.count(".json") == min(count, 10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"repository": "no/such"}, f"no/such at {REVISION}: no such data set, or a private .*`repository`.*HF_TOKEN"),
        ({"repository": "no--such"}, f"no--such at {REVISION} cannot be downloaded: Cannot have --"),
        ({"revision": "f" * 40}, f"some/data at {'f' * 40}: the repository has no such commit; copy `revision`"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_missing_repository_or_revision_is_refused(tmp_path: Path, change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        fetch_data(changed(**change), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("private", "answer", "wrong"),
    [
        (False, (401, "GatedRepo"), None),
        (True, (403, "GatedRepo"), "hf_wrong"),
        (False, (403, None), "hf_wrong"),
        (True, (401, "RepoNotFound"), None),
    ],
)
def test_gated_repository_needs_the_token_and_never_shows_it(
    hub: Hub,
    client: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    private: bool,
    answer: tuple[int, str | None],
    wrong: str | None,
) -> None:
    hub.token, hub.private, hub.refusal = TOKEN, private, answer
    caplog.set_level(logging.DEBUG)
    if wrong:
        client.setenv("HF_TOKEN", wrong)
    message = refusal(fetch_data, SETTINGS, tmp_path / "out")
    assert message.startswith(f"data set {REPOSITORY} at {REVISION}: ")
    assert message.endswith("put a token that may read it into the environment variable HF_TOKEN")
    if answer[1] != "RepoNotFound":
        assert f"access is refused ({answer[0]}: Terms first)" in message
    assert not list(tmp_path.glob("*out*"))

    client.setenv("HF_TOKEN", TOKEN)
    fetch_data(SETTINGS, tmp_path / "out")
    assert TOKEN in {asked.token for asked in hub.asked}
    texts = message + caplog.text + "".join(capfd.readouterr())
    assert TOKEN not in texts
    assert wrong is None or wrong not in texts
    assert not any(TOKEN.encode() in data for data in tree(tmp_path).values())


def test_gated_files_in_xet_storage(hub: Hub, tmp_path: Path) -> None:
    hub.xet, hub.token = True, TOKEN
    with pytest.raises(UserError, match="access is refused .* HF_TOKEN"):
        fetch_data(changed(files=["*.parquet"]), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_failing_xet_storage_is_one_line(hub: Hub, client: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.xet, hub.token = True, TOKEN
    client.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match=f"{REPOSITORY} at {REVISION} cannot be downloaded: .*404"):
        fetch_data(SETTINGS, tmp_path / "out")
    assert any("/reconstructions/" in asked.path for asked in hub.asked)
    assert not list(tmp_path.glob("*out*"))
    assert not any(TOKEN.encode() in data for data in tree(tmp_path).values())


def test_unreachable_hub_is_one_line(client: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(Hub({})) as server:
        use(client, server.endpoint)
    said = f"{REPOSITORY} at {REVISION} cannot be downloaded: .*refused; check the network"
    with pytest.raises(UserError, match=said):
        fetch_data(SETTINGS, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_offline_mode_is_one_line(hub: Hub, client: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"{REPOSITORY} at {REVISION} must .*HF_HUB_OFFLINE is set; unset it"):
        fetch_data(SETTINGS, tmp_path / "out")
    assert hub.asked == []


def test_broken_download_continues_at_its_offset(hub: Hub, client: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    hub.failures = ["break", "break"]
    fetch_data(changed(files=["data/train-0.parquet"]), tmp_path / "out")
    half = len(WANTED["data/train-0.parquet"]) // 2
    got = [asked.range for asked in hub.asked if asked.method == "GET" and asked.path.startswith("/lfs/")]
    assert got == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]
    assert tree(tmp_path / "out")["data/train-0.parquet"] == WANTED["data/train-0.parquet"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("failures", [["reset"], ["break", "error"]])
def test_failed_download_leaves_the_old_files(hub: Hub, tmp_path: Path, failures: list[str], older: bool) -> None:
    if older:
        fetch_data(changed(files=["extra.json"]), tmp_path / "hub/out")
    before = tree(tmp_path / "hub")
    hub.failures = failures * 3
    with pytest.raises(UserError, match=f"{REPOSITORY} at {REVISION} cannot be downloaded: .+; check the network"):
        fetch_data(SETTINGS, tmp_path / "hub/out")
    assert tree(tmp_path / "hub") == before
    assert [path.name for path in (tmp_path / "hub").iterdir()] == ["out"] * older


@pytest.mark.parametrize(
    ("name", "listed", "said"),
    [
        ("data/train-1.parquet", WANTED["data/train-1.parquet"][::-1], "has sha256"),
        ("extra.jsonl", b"{}", "has bytes 17, but the hub lists 2"),
    ],
)
def test_file_unlike_its_listing_is_refused(hub: Hub, tmp_path: Path, name: str, listed: bytes, said: str) -> None:
    hub.listed = {name: listed}
    with pytest.raises(UserError, match=f"{REPOSITORY} at {REVISION}: {name} {said}"):
        fetch_data(SETTINGS, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_interrupted_command_leaves_nothing_and_can_be_repeated(hub: Hub, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    output = tmp_path / "hub/out"
    options = ["--settings", SETTINGS.model_dump_json(), "--output", str(output)]
    command = [sys.executable, "-m", "zerolora", "stage", "fetch_data", *options]
    hub.failures = ["stall"] * 3
    # Shells start background jobs with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with process:
        assert hub.stalled.wait(60)
        assert not output.exists()
        process.send_signal(signal.SIGINT)
        hub.released.set()
        process.communicate(timeout=600)
    assert process.returncode not in (0, 2)
    assert not list((tmp_path / "hub").iterdir())
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    assert {name: data for name, data in tree(output).items() if name != "manifest.json"} == WANTED


@pytest.mark.parametrize("with_tokens", [False, True])
def test_adapter_has_its_added_tokens(client: pytest.MonkeyPatch, tmp_path: Path, with_tokens: bool) -> None:
    files = {CONFIG: b"{}", ADAPTER: b"weights", "training_args.bin": b"a pickle"}
    listed = [{"token": "<note>", "id": 258, "special": False}]
    files |= {added_tokens.FILE: json.dumps(listed).encode()} if with_tokens else {}
    with serving(Hub(files)) as hub:
        use(client, hub.endpoint)
        pinned = FetchAdapterSettings(repository=REPOSITORY, revision=REVISION, license="MIT")
        fetch_adapter(pinned, tmp_path / "theirs")
    actual = added_tokens.of_directory(tmp_path / "theirs")
    assert actual == ([added_tokens.AddedToken("<note>", 258, False)] if with_tokens else [])
    assert not (tmp_path / "theirs/training_args.bin").exists()
