"""Published splits and configs are never pooled: the error contains sources to paste, and they are accepted."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from goldens import prepare_settings

from zerolora.config.settings import TaskRowsSettings
from zerolora.data.published import of_entries, published
from zerolora.data.source_files import sources_of
from zerolora.data.task_rows import task_rows
from zerolora.errors import UserError


def write(folder: Path, names: str) -> None:
    for name in names.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")


def refusal(folder: Path, **changed: Any) -> tuple[str, dict[str, Any]]:
    """Return the error's line, and its YAML."""
    with pytest.raises(UserError) as caught:
        sources_of(prepare_settings(path=str(folder), **changed))
    line = str(caught.value)
    assert "\n" not in line
    pasted = re.search(r"set (sources: \{.*\}) and (split: \{.*?\})[;,]", line)
    assert pasted, line
    return line, yaml.safe_load(f"{pasted[1]}\n{pasted[2]}")


def files_by_split(folder: Path, pasted: dict[str, Any]) -> dict[str | None, list[str]]:
    result: dict[str | None, list[str]] = {}
    for source in sources_of(prepare_settings(path=str(folder), **pasted)):
        result.setdefault(source.settings.split, []).extend(
            path.relative_to(folder).as_posix() for path in source.files
        )
    return result


# Files, the error's sources, and its split (validation and test rows; the defaults are 2 and 3).
FOLDERS: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("train.jsonl test.jsonl", {"train.jsonl": {}, "test.jsonl": {"split": "test"}}, (2, 0)),
    (
        "train.csv validation.csv test.csv",
        {"train.csv": {}, "validation.csv": {"split": "validation"}, "test.csv": {"split": "test"}},
        (0, 0),
    ),
    ("TRAIN.JSONL Dev.JSONL", {"TRAIN.JSONL": {}, "Dev.JSONL": {"split": "validation"}}, (0, 3)),
    ("a-train.json a-valid.json", {"a-train.json": {}, "a-valid.json": {"split": "validation"}}, (0, 3)),
    ("train.json val.json.gz", {"train.json": {}, "val.json.gz": {"split": "validation"}}, (0, 3)),
    # As `datasets` reads eval.
    ("train.json eval.json", {"train.json": {}, "eval.json": {"split": "test"}}, (2, 0)),
    (
        "train.json eval.json test.json",
        {"train.json": {}, "eval.json": {"split": "validation"}, "test.json": {"split": "test"}},
        (0, 0),
    ),
    (
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test-00000-of-00001.parquet",
        {"data/test-00000-of-00001.parquet": {"split": "test"}, "data/train-*-of-*.parquet": {}},
        (2, 0),
    ),
    (
        "data/train/1.jsonl data/train/2.jsonl data/test/1.jsonl",
        {"data/test": {"split": "test"}, "data/train": {}},
        (2, 0),
    ),
    ("train.jsonl held_out.jsonl", {"train.jsonl": {}, "held_out.jsonl": {"split": "test"}}, (2, 0)),
    ("my-holdout.jsonl rest.jsonl", {"my-holdout.jsonl": {"split": "test"}, "rest.jsonl": {}}, (2, 0)),
    ("trainset.jsonl devset.jsonl", {"trainset.jsonl": {}, "devset.jsonl": {"split": "validation"}}, (0, 3)),
    ("trainData.json testData.json", {"trainData.json": {}, "testData.json": {"split": "test"}}, (2, 0)),
    ("Test/a.csv Training/a.csv", {"Test": {"split": "test"}, "Training": {}}, (2, 0)),
    (
        "data/train_sft-00000-of-00001.parquet data/test_sft-00000-of-00001.parquet",
        {
            "data/train_sft-00000-of-00001.parquet": {},
            "data/test_sft-00000-of-00001.parquet": {"split": "test"},
        },
        (2, 0),
    ),
    ("dev.jsonl devtest.jsonl", {"dev.jsonl": {"split": "validation"}, "devtest.jsonl": {"split": "test"}}, (0, 0)),
    # YAML would read the name as a number.
    ("2023/train.jsonl 2023/test.jsonl", {"2023/train.jsonl": {}, "2023/test.jsonl": {"split": "test"}}, (2, 0)),
    # Other files are divided.
    ("more.jsonl test.jsonl", {"more.jsonl": {}, "test.jsonl": {"split": "test"}}, (2, 0)),
    ("test.jsonl", {"test.jsonl": {"split": "test"}}, (2, 0)),
    ("träin,train.jsonl test.jsonl", {"träin,train.jsonl": {}, "test.jsonl": {"split": "test"}}, (2, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("names", "sources", "drawn"), FOLDERS, ids=[names for names, *_ in FOLDERS])
def test_published_splits_are_refused_with_sources_to_paste(
    tmp_path: Path, names: str, sources: dict[str, Any], drawn: tuple[int, int]
) -> None:
    write(tmp_path, names)
    line, pasted = refusal(tmp_path)
    assert pasted["sources"] == sources
    assert (pasted["split"]["validation"], pasted["split"]["test"]) == drawn
    assert re.search(r"contains the published splits? ", line)
    actual = files_by_split(tmp_path, pasted)
    for split, files in actual.items():
        words = {"test": ("test", "eval", "hold", "held"), "validation": ("val", "dev", "eval")}.get(
            split or "", ("train", "more", "rest")
        )
        assert all(any(word in file.lower() for word in words) for file in files)


@pytest.mark.parametrize(
    "names",
    [
        "a.jsonl b.jsonl",
        "train-00000-of-00002.parquet train-00001-of-00002.parquet",
        "train.jsonl more.jsonl",
        "train/en/a.jsonl train/de/a.jsonl",
        "en/2024.jsonl de/2024.jsonl",
        "latest.jsonl contest.jsonl validity.jsonl trained.jsonl devices.jsonl",
        "train_test_split.jsonl",
    ],
)
def test_other_folders_are_read_whole(tmp_path: Path, names: str) -> None:
    write(tmp_path, names)
    (source,) = sources_of(prepare_settings(path=str(tmp_path)))
    assert len(source.files) == len(names.split())


def test_named_file_of_a_split_is_read(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl test-0.jsonl test-1.jsonl")
    assert len(sources_of(prepare_settings(path=str(tmp_path / "test-0.jsonl")))) == 1
    (source,) = sources_of(prepare_settings(path=str(tmp_path), sources={"test-*.jsonl": {}}))
    assert [path.name for path in source.files] == ["test-0.jsonl", "test-1.jsonl"]


HUB = " ".join(
    f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("train", "test")
)
MAIN = {
    "main/train-00000-of-00001.parquet": {},
    "main/test-00000-of-00001.parquet": {"split": "test"},
}


def test_configs_are_refused_with_sources_of_one(tmp_path: Path) -> None:
    """As GSM8K on the hub."""
    write(tmp_path, HUB)
    line, pasted = refusal(tmp_path)
    assert "contains the published splits test, train and the configs main, socratic, which would be pooled" in line
    assert "which is main alone" in line
    assert pasted["sources"] == MAIN
    assert pasted["split"] == {"validation": 2, "test": 0}
    assert set(files_by_split(tmp_path, pasted)) == {None, "test"}
    write(tmp_path / "other", "en/train.jsonl de/train.jsonl")
    line, pasted = refusal(tmp_path / "other")
    assert "contains the configs de, en, which would be pooled" in line
    assert pasted["sources"] == {"de": {}}


@pytest.mark.parametrize("split", [None, "train"])
def test_source_that_pools_splits_is_refused(tmp_path: Path, split: str | None) -> None:
    write(tmp_path, HUB)
    line, pasted = refusal(tmp_path, sources={"main": {"split": split}})
    assert re.search(r"/main: contains the published splits test, train, which would be pooled", line)
    assert pasted["sources"] == MAIN
    line, _ = refusal(tmp_path, sources={"main/*": {}})
    assert "contains the published splits test, train, which would be pooled" in line


@pytest.mark.parametrize("name", ["2023", "no", "null", "1e5", "On", "a b", "-", "1.5", "~"])
def test_names_that_yaml_misreads_are_quoted(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "a.jsonl test.jsonl")
    assert refusal(tmp_path)[1]["sources"] == {f"{name}/a.jsonl": {}, f"{name}/test.jsonl": {"split": "test"}}
    assert of_entries([(name, "")]) == f'sources: {{"{name}": {{}}}}'
    assert of_entries([("north/no.jsonl", "")]) == "sources: {north/no.jsonl: {}}"


@pytest.mark.parametrize("name", ["test", "dev", "test_sft", "validation_matched", "eval"])
def test_source_folder_is_checked_by_its_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, f"train/a.jsonl train/b.jsonl {name}/a.jsonl {name}/b.jsonl")
    line, pasted = refusal(tmp_path, sources={"train": {}, name: {}})
    split = "test" if "test" in name or name == "eval" else "validation"
    assert f"/{name}: contains the published split {split}, which would be trained on" in line
    assert pasted["sources"] == {name: {"split": split}} and line.endswith("; the other entries of sources stay")
    for chosen in ("train", split):
        assert (
            len(sources_of(prepare_settings(path=str(tmp_path), sources={"train": {}, name: {"split": chosen}}))) == 2
        )


def test_folder_of_a_held_out_split_needs_a_split(tmp_path: Path) -> None:
    write(tmp_path, "a/test/1.jsonl b.jsonl")
    line, pasted = refusal(tmp_path, sources={"a": {}, "b.jsonl": {}})
    assert "contains the published split test, which would be trained on" in line
    assert pasted["sources"] == {"a": {"split": "test"}} or pasted["sources"] == {"a/test": {"split": "test"}}
    sources = {"a": {"split": "train"}, "b.jsonl": {}}
    assert len(sources_of(prepare_settings(path=str(tmp_path), sources=sources))) == 2


README = """---
license: mit
configs:
- config_name: small
  data_files:
  - {split: train, path: "s/*.jsonl"}
- config_name: default
  data_files:
  - {split: train, path: ["b/1.jsonl", "b/2.jsonl"]}
  - {split: test, path: b/exam.jsonl}
---
# A data set
"""


def test_readme_defines_configs_and_splits(tmp_path: Path) -> None:
    write(tmp_path, "s/1.jsonl b/1.jsonl b/2.jsonl b/exam.jsonl")
    assert len(sources_of(prepare_settings(path=str(tmp_path)))) == 1
    (tmp_path / "README.md").write_text(README)
    line, pasted = refusal(tmp_path)
    assert "the configs default, small, which would be pooled" in line
    assert pasted["sources"] == {"b/1.jsonl": {}, "b/2.jsonl": {}, "b/exam.jsonl": {"split": "test"}}
    assert set(files_by_split(tmp_path, pasted)) == {None, "test"}


def test_readme_of_the_data_set_applies_to_source_folders(tmp_path: Path) -> None:
    write(tmp_path, "s/1.jsonl b/1.jsonl b/2.jsonl b/exam.jsonl c/1.jsonl c/d/2.jsonl")
    (tmp_path / "README.md").write_text(README)
    line, pasted = refusal(tmp_path, sources={"b": {}, "s": {}})
    assert "/b: contains the published splits test, train, which would be pooled" in line
    assert pasted["sources"] == {"b/1.jsonl": {}, "b/2.jsonl": {}, "b/exam.jsonl": {"split": "test"}}
    assert len(sources_of(prepare_settings(path=str(tmp_path), sources={"s": {}, "c": {}}))) == 2
    (tmp_path / "README.md").rename(tmp_path / "b/README.md")
    (tmp_path / "b/README.md").write_text(README.replace("b/", ""))
    line, pasted = refusal(tmp_path, sources={"b": {}})
    assert pasted["sources"] == {"b/1.jsonl": {}, "b/2.jsonl": {}, "b/exam.jsonl": {"split": "test"}}


@pytest.mark.parametrize("entry", ["data_dir: {}", "data_dir: ./{}/", "data_dir: {}, data_files: '*.jsonl'"])
def test_configs_may_be_folders(tmp_path: Path, entry: str) -> None:
    write(tmp_path, "a/1.jsonl b/1.jsonl")
    configs = [f"{{config_name: {name}, {entry.format(name)}}}" for name in "ba"]
    (tmp_path / "README.md").write_text(f"---\nconfigs: [{', '.join(configs)}]\n---\n")
    line, pasted = refusal(tmp_path)
    assert "contains the configs a, b, which would be pooled" in line and "which is b alone" in line
    assert pasted["sources"] == {"b": {}}
    if "data_files" not in entry:
        write(tmp_path, "b/test.jsonl")
        assert refusal(tmp_path)[1]["sources"] == {"b/1.jsonl": {}, "b/test.jsonl": {"split": "test"}}


@pytest.mark.parametrize(
    "text",
    ["", "---\n", "---\n[\n---\n", "---\nconfigs: [3, {data_files: {path: 3}}]\n---\n", "---\nconfigs:\n---\n",
     "---\nconfigs: [{data_files: [{split: 3, path: /etc/*}]}, {data_files: ../*}, {data_files: '**a'}]\n---\n",
     "---\nlicense: [\n---\n", "---\n" + "[" * 2000 + "\n---\n", "\xff", "# configs: [\n", "---\nconfigs: [\n",
     "---\nlicense: mit\n---\n" + "configs: [\n" * 200_000],
)  # fmt: skip
def test_readme_without_configs_changes_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, "a.jsonl b.jsonl")
    (tmp_path / "README.md").write_text(text, encoding="latin-1")
    assert len(sources_of(prepare_settings(path=str(tmp_path)))) == 1


@pytest.mark.parametrize(
    "header",
    ["configs: 3", "configs: {data_files: b.jsonl}", "configs: !!python/name:os.system", "configs: [!!bool x]",
     "configs: [!!float '']", "configs: [!!int '']", "configs: [!!timestamp x]", "configs: &a [*a]",
     "license: [\nconfigs: [{data_files: [{split: test, path: b.jsonl}]}]", "configs: [{data_files: b\xff.jsonl}]",
     "configs: [" + "{}, " * 5000],
)  # fmt: skip
def test_broken_configs_of_a_readme_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    """b.jsonl may be held out."""
    monkeypatch.setattr("zerolora.data.published.LONGEST_README", 1 << 14)
    write(tmp_path, "a.jsonl b.jsonl")
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n", encoding="latin-1")
    with pytest.raises(UserError, match=r"README\.md: its header .*; correct it, or remove configs from it") as raised:
        sources_of(prepare_settings(path=str(tmp_path)))
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 600


def test_other_keys_of_a_readme_may_be_broken(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl b.jsonl")
    (tmp_path / "README.md").write_text(
        "---\nlicense: !!bool x\n0: 010\nconfigs: [{data_files: [{split: test, path: b.jsonl}]}]\n---\n"
    )
    assert published(tmp_path, [tmp_path / "b.jsonl"]).splits == {tmp_path / "b.jsonl": "test"}


def test_too_many_patterns_in_a_readme_are_refused(tmp_path: Path) -> None:
    """2 KB of aliases stand for 60 * 60 * 60 of them."""
    write(tmp_path, "a.jsonl")
    patterns, entries, configs = (
        "[" + ", ".join([each] * 60) + "]" for each in ("x", "{path: *p}", "{data_files: *e}")
    )
    (tmp_path / "README.md").write_text(f"---\np: &p {patterns}\ne: &e {entries}\nconfigs: {configs}\n---\n")
    with pytest.raises(
        UserError, match=r"README.md: its `configs` list more than 10,000 patterns of files; list fewer"
    ):
        sources_of(prepare_settings(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["README.md", "a.jsonl"])
def test_pipe_does_not_block(tmp_path: Path, name: str) -> None:
    write(tmp_path, "b.jsonl")
    os.mkfifo(tmp_path / name)
    if name == "README.md":
        assert len(sources_of(prepare_settings(path=str(tmp_path)))) == 1
    else:
        with pytest.raises(UserError, match=r"a\.jsonl: is a pipe or a device; a file is expected"):
            sources_of(prepare_settings(path=str(tmp_path)))


def test_pattern_without_files_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl README.md")
    with pytest.raises(UserError, match=r"/b-\*: no data file has such a name; correct the pattern"):
        sources_of(prepare_settings(path=str(tmp_path), sources={"b-*": {}}))
    (source,) = sources_of(prepare_settings(path=str(tmp_path), sources={"*": {}}))
    assert [path.name for path in source.files] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("splits", "block"),
    [
        (["train", "test"], "{train: {}, test: {split: test}}"),
        (["train_sft", "test_sft"], "{train_sft: {}, test_sft: {split: test}}"),
        (["train", "dev", "eval"], "{train: {}, dev: {split: validation}, eval: {split: test}}"),
        (["train", "valid", "eval", "test"], "{train: {}, valid: {split: validation}, eval: {split: validation}, "),
        (["en", "no"], '{en: {}, "no": {}}'),
        (
            ["train_sft", "test_sft", "train_gen", "test_gen"],
            "{train_sft: {}, test_sft: {split: test}}, without train_gen",
        ),
        (["train_1M", "train", "train_2M"], "{train: {}}, without train_1M, train_2M, which would be pooled"),
    ],
)
def test_saved_dict_of_splits_is_refused_with_its_sources(tmp_path: Path, splits: list[str], block: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(UserError) as caught:
        sources_of(prepare_settings(path=str(tmp_path)))
    assert f"; set path: {tmp_path} with sources: {block}" in str(caught.value)
    assert all(split in str(caught.value).partition("; set")[0] for split in splits)


OF_NAMES: list[tuple[str, dict[str, Any], str]] = [
    # As OpenMathInstruct-2.
    (
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/train_1M-00000-of-00001.parquet "
        "data/train_2M-00000-of-00001-0123456789abcdef.parquet",
        {"data/train-00000-of-00002.parquet": {}, "data/train-00001-of-00002.parquet": {}},
        "train, train_1M, train_2M, which are different splits, which would be pooled; .* without train_1M, train_2M",
    ),
    # As ultrafeedback_binarized.
    (
        " ".join(f"data/{split}_{of}-00000-of-00001.parquet" for split in ("train", "test") for of in ("gen", "prefs")),
        {"data/test_gen-00000-of-00001.parquet": {"split": "test"}, "data/train_gen-00000-of-00001.parquet": {}},
        "test_gen, test_prefs, train_gen, train_prefs, which are .* without test_prefs, train_prefs",
    ),
    ("en/train_a.json en/train_b.json", {"en/train_a.json": {}}, "train_a, train_b, .* without train_b"),
    ("train_v1.json train_v2.json", {"train_v1.json": {}}, "train_v1, train_v2, .* without train_v2"),
    ("train_sft/1.json train_gen/1.json test/1.json", {"test": {"split": "test"}, "train_gen": {}}, "t train_sft"),
    ("train/all.json train/train_1M.json", {"train/all.json": {}}, "train, train_1M, .* without train_1M"),
    # As MNLI: without the name of train, the keyword or the first.
    (
        "train.json test_matched.json test_mismatched.json",
        {"train.json": {}, "test_matched.json": {"split": "test"}},
        "test_matched, test_mismatched, which .* without test_mismatched",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("names", "sources", "said"), OF_NAMES, ids=[names for names, *_ in OF_NAMES])
def test_names_of_one_split_are_not_pooled(tmp_path: Path, names: str, sources: dict[str, Any], said: str) -> None:
    write(tmp_path, names)
    line, pasted = refusal(tmp_path)
    assert re.search(said, line), line
    assert _expanded(tmp_path, pasted["sources"]) == _expanded(tmp_path, sources)
    files_by_split(tmp_path, pasted)


def _expanded(folder: Path, sources: dict[str, Any]) -> dict[str, Any]:
    return {
        path.relative_to(folder).as_posix(): entry
        for name, entry in sources.items()
        for path in ([folder / name] if (folder / name).is_dir() else folder.glob(name))
    }


def test_pattern_of_several_names_is_refused_and_each_may_be_named(tmp_path: Path) -> None:
    write(tmp_path, "train-1.json train_1M-1.json")
    line, pasted = refusal(tmp_path, sources={"train*": {}})
    assert "train, train_1M, which are different splits" in line and pasted["sources"] == {"train-1.json": {}}
    both: dict[str, Any] = {"train-*.json": {}, "train_1M-*.json": {}}
    assert len(sources_of(prepare_settings(path=str(tmp_path), sources=both))) == 2


@pytest.mark.parametrize(
    "names",
    [
        "train-00000-of-00002.parquet train-00001-of-00002-0123456789abcdef.parquet",
        "train_1.json train_2.json",
        "train.part1.jsonl train.part2.jsonl.gz",
        "train_shard-01.csv train_shard-02.csv",
        "train0.json train1.json",
        "train_1M-00000-of-00002.parquet train_1M-00001-of-00002.parquet",
    ],
)
def test_numbers_of_shards_are_no_names(tmp_path: Path, names: str) -> None:
    write(tmp_path, names)
    (source,) = sources_of(prepare_settings(path=str(tmp_path)))
    assert len(source.files) == 2


def test_names_in_a_readme_are_different_splits(tmp_path: Path) -> None:
    write(tmp_path, "a/1.json a/2.json b/1.json")
    entries = "{split: train, path: 'a/*'}, {split: train_1M, path: 'b/*'}"
    (tmp_path / "README.md").write_text(f"---\nconfigs: [{{config_name: default, data_files: [{entries}]}}]\n---\n")
    line, pasted = refusal(tmp_path)
    assert "train, train_1M, which are different splits" in line
    assert pasted["sources"] == {"a": {}}


def test_evaluation_tasks_pool_no_names(tmp_path: Path) -> None:
    write(tmp_path, "data/test_sft.jsonl data/test_gen.jsonl")
    settings = TaskRowsSettings(path=str(tmp_path / "data"), whole=False)
    with pytest.raises(UserError, match=r"data: contains the published splits test_gen, test_sft, .* set file: test_"):
        task_rows(settings, tmp_path / "out.jsonl")


def test_evaluation_tasks_pool_no_splits(tmp_path: Path) -> None:
    write(tmp_path, "data/train.jsonl data/test.jsonl")
    settings = TaskRowsSettings(path=str(tmp_path / "data"), whole=False)
    with pytest.raises(UserError, match=r"data: contains the published splits test, train, .* set file: test.jsonl"):
        task_rows(settings, tmp_path / "out.jsonl")
