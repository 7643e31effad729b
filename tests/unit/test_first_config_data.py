"""`zerolora init --data`: a data set of a hub on loopback, and published splits of it or of a folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from conftest import served
from loopback_hub import REPOSITORY, REVISION, Hub, asking, serving

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.data.prepare import prepare
from zerolora.files import read_json
from zerolora.first_config.given_model import given_model


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"instruction": f"add {number}", "output": f"it is {number}"} for number in range(first, first + count)]


def jsonl(count: int, first: int = 0) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows(count, first)).encode()


def parquet(count: int, first: int = 0) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(count, first)), sink)
    return bytes(sink.getvalue())


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({})) as server:
        server.card = {"license": "mit"}
        yield server


def init(folder: Path, hub: Hub, data: str = REPOSITORY, **variables: str) -> Any:
    options = ("--model", "model", "--data", data, "--output", "config.yaml")
    return asking(hub, folder, "init", *options, **variables)


def values(folder: Path) -> Any:
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_a_data_set_of_the_hub_is_fetched_and_prepared_as_written(folder: Path, hub: Hub) -> None:
    """With the stages' own commands; no file is downloaded twice."""
    hub.files |= {
        "data/train-00000-of-00002.parquet": parquet(30),
        "data/train-00001-of-00002.parquet": parquet(30, 30),
        "data/test-00000-of-00001.parquet": parquet(10, 60),
        "README.md": b"---\nlicense: mit\n---\n",
        "script.py": b"raise SystemExit",
        ".gitattributes": b"",
    }
    result = init(folder, hub, f"{REPOSITORY}@main")
    assert result.returncode == 0, result.stderr
    fetched, splits, *columns, data, row, _, _, _, _ = result.stdout.splitlines()
    assert [column.split(": ")[1][:7] for column in columns] == ["read as"] * 2
    assert fetched.startswith(f"fetched {REPOSITORY} at {REVISION}: 3 files, ")
    assert splits == (
        "splits  as published: data/test-00000-of-00001.parquet is test; trained on: data/train-*-of-*.parquet"
    )
    assert "some/data@main: 57 rows of alpaca, " in data and "; 3 more for validation and 10 for the test" in data
    assert "add " in row and "「it is " in row
    text = (folder / "config.yaml").read_text()
    assert len(text.splitlines()) <= 14
    assert "  # revision: of main; license: of its README.md\n" in text
    config = values(folder)
    assert config["fetch"]["data"] == {
        "rows": {"repository": REPOSITORY, "revision": REVISION, "license": "mit", "files": ["data/*"]}
    }
    entry = config["prepare"]["rows"]
    assert entry["path"] == "data/hub/rows" and entry["split"] == {"validation": 3, "test": 0}
    sources = {"data/test-00000-of-00001.parquet": {"split": "test"}, "data/train-*-of-*.parquet": {}}
    assert entry["sources"] == sources

    downloads = [asked for asked in hub.asked if asked.method == "GET" and asked.path.endswith(".parquet")]
    resolved = resolve(load(folder / "config.yaml"))
    settings = resolved.fetch_data["rows"].model_dump_json()
    done = asking(hub, folder, "stage", "fetch_data", "--settings", settings, "--output", "data/hub/rows")
    assert done.returncode == 0, done.stderr
    assert len(downloads) == 3
    assert [one for one in hub.asked if one.method == "GET" and one.path.endswith(".parquet")] == downloads
    (folder / "small").mkdir()
    given = given_model("model", folder / "small")
    prepare(resolved.prepare["rows"], given.files / "manifest.json", folder / "prepared")
    stats = read_json(folder / "prepared/stats.json", "")
    assert [stats[f"{split}_rows"] for split in ("train", "validation", "test")] == [57, 3, 10]


def test_one_split_needs_no_sources(folder: Path, hub: Hub) -> None:
    hub.files |= {"train.jsonl": jsonl(40), "dataset_infos.json": b"{}", "LICENSE": b"MIT"}
    hub.card = {}
    result = init(folder, hub)
    assert result.returncode == 0, result.stderr
    assert "splits " not in result.stdout
    entry = values(folder)["fetch"]["data"]["rows"]
    assert entry["files"] == ["train.jsonl"] and entry["license"] == "unknown"
    assert "  # revision: of the main branch; its README.md states no licence\n" in (folder / "config.yaml").read_text()
    prepared = values(folder)["prepare"]["rows"]
    assert "sources" not in prepared and prepared["split"] == {"validation": 2, "test": 2}


def test_the_default_config_of_the_readme_is_used(folder: Path, hub: Hub) -> None:
    header = yaml.safe_dump(
        {
            "license": ["mit", "cc0-1.0"],
            "configs": [
                {"config_name": "more", "data_files": [{"split": "train", "path": "more/*.jsonl"}]},
                {"config_name": "default", "data_files": [
                    {"split": "train", "path": "main/a.jsonl"}, {"split": "validation", "path": "main/b.jsonl"}]},
            ],
        }
    )  # fmt: skip
    hub.card = {"license": ["mit", "cc0-1.0"]}
    hub.files |= {"README.md": f"---\n{header}---\n".encode(), "more/x.jsonl": jsonl(90)}
    hub.files |= {"main/a.jsonl": jsonl(40), "main/b.jsonl": jsonl(9, 40)}
    result = init(folder, hub)
    assert result.returncode == 0, result.stderr
    assert "configs default is used; not used: more\n" in result.stdout
    assert not [one for one in hub.asked if one.path.endswith("more/x.jsonl") and one.method == "GET"]
    config = values(folder)
    entry = config["fetch"]["data"]["rows"]
    assert entry["files"] == ["main/*"] and entry["license"] == "mit AND cc0-1.0"
    assert config["prepare"]["rows"]["sources"] == {"main/a.jsonl": {}, "main/b.jsonl": {"split": "validation"}}
    assert config["prepare"]["rows"]["split"] == {"validation": 0, "test": 2}


REFUSED: list[tuple[dict[str, bytes], str, dict[str, str], str]] = [
    ({"a.jsonl": jsonl(40)}, REPOSITORY, {"HF_HUB_OFFLINE": "1"},
     f"data set {REPOSITORY} must be downloaded, and HF_HUB_OFFLINE is set; unset it"),
    ({"a.jsonl": jsonl(40)}, REPOSITORY, {"HF_ENDPOINT": "http://127.0.0.1:9"},
     f"data set {REPOSITORY} cannot be downloaded: "),
    ({"a.jsonl": jsonl(40)}, f"{REPOSITORY}@v9", {}, f"data set {REPOSITORY} at v9: the repository has no such commit"),
    ({}, "some/other", {}, "data set some/other: no such data set, or a private one"),
    ({"a.py": b"raise SystemExit"}, REPOSITORY, {}, f"data set {REPOSITORY}: has no data file (.json, "),
    ({"../../a.jsonl": jsonl(40)}, REPOSITORY, {}, f"data set {REPOSITORY}: has no data file (.json, "),
    ({"test.jsonl": jsonl(40)}, REPOSITORY, {},
     f"--data {REPOSITORY}: has the published split test.jsonl alone, so nothing is left to train on"),
    ({"a.jsonl": jsonl(40) + b"{}\n"}, REPOSITORY, {}, f"{REPOSITORY}/a.jsonl:41: "),
    ({"a.jsonl": jsonl(40), "README.md": b"---\nconfigs: 3\n---\n"}, REPOSITORY, {},
     f"data set {REPOSITORY}/README.md: its header has configs: 3, which is not a list"),
    ({}, "some/data.jsonl", {}, "--data 'some/data.jsonl': there is no such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "data", "variables", "said"), REFUSED)
def test_refusals_are_one_line_and_write_nothing(
    folder: Path, hub: Hub, files: dict[str, bytes], data: str, variables: dict[str, str], said: str
) -> None:
    hub.files |= files
    result = init(folder, hub, data, **variables)
    assert result.returncode == 2, result.stdout
    assert said in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr
    assert not (folder / "config.yaml").exists()


def test_a_folder_with_published_splits_becomes_sources(folder: Path) -> None:
    (folder / "mine").mkdir()
    for name, content in (("train", jsonl(40)), ("valid", jsonl(8, 40)), ("test", jsonl(7, 50))):
        (folder / f"mine/{name}.jsonl").write_bytes(content)
    options = ("--model", "model", "--data", "mine", "--output", "config.yaml")
    result = served("zerolora", "init", *options, directory=folder)
    assert result.returncode == 0, result.stderr
    splits, _, _, data, *_ = result.stdout.splitlines()
    assert splits == "splits  as published: test.jsonl is test; valid.jsonl is validation; trained on: train.jsonl"
    assert "40 rows of alpaca" in data and "8 more for validation and 7 for the test" in data
    entry = values(folder)["prepare"]["mine"]
    sources = {"test.jsonl": {"split": "test"}, "train.jsonl": {}, "valid.jsonl": {"split": "validation"}}
    assert entry["sources"] == sources and entry["path"] == "mine" and entry["split"] == {"validation": 0, "test": 0}


def test_one_of_several_names_of_a_split_is_taken(folder: Path) -> None:
    (folder / "mine").mkdir()
    for name, content in (("train", jsonl(40)), ("train_1M", jsonl(30)), ("test", jsonl(7, 50))):
        (folder / f"mine/{name}.jsonl").write_bytes(content)
    options = ("--model", "model", "--data", "mine", "--output", "config.yaml")
    result = served("zerolora", "init", *options, directory=folder)
    assert result.returncode == 0, result.stderr
    assert "splits  test.jsonl, train.jsonl; not used: train_1M" in result.stdout.splitlines()
    assert values(folder)["prepare"]["mine"]["sources"] == {"test.jsonl": {"split": "test"}, "train.jsonl": {}}


def test_nothing_is_held_out_of_few_rows(folder: Path) -> None:
    (folder / "mine").mkdir()
    for name, content in (("train", jsonl(12)), ("validation", jsonl(2, 12)), ("test", jsonl(2, 14))):
        (folder / f"mine/{name}.jsonl").write_bytes(content)
    options = ("--model", "model", "--data", "mine", "--output", "config.yaml")
    assert served("zerolora", "init", *options, directory=folder).returncode == 0
    (folder / "mine/test.jsonl").unlink()
    result = served("zerolora", "init", *options, "--force", directory=folder)
    assert result.returncode == 0, result.stderr
    assert "12 rows of alpaca" in result.stdout and "2 more for validation and 0 for the test" in result.stdout
    assert values(folder)["prepare"]["mine"]["split"] == {"validation": 0, "test": 0}


def test_a_saved_dataset_dict_becomes_sources(folder: Path) -> None:
    for split, first, count in (("train", 0, 40), ("test", 40, 6)):
        (folder / "saved" / split).mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows(count, first))
        with (
            pyarrow.OSFile(str(folder / "saved" / split / "data-00000-of-00001.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (folder / "saved" / split / "state.json").write_text(json.dumps(state))
    (folder / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    options = ("--model", "model", "--data", "saved", "--output", "config.yaml")
    result = served("zerolora", "init", *options, directory=folder)
    assert result.returncode == 0, result.stderr
    assert values(folder)["prepare"]["saved"]["sources"] == {"train": {}, "test": {"split": "test"}}
    assert "38 rows of alpaca" in result.stdout and "2 more for validation and 6 for the test" in result.stdout
