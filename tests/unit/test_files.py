"""Files appear whole or not at all."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.errors import UserError
from zerolora.files import canonical, describe, read_json, staged_directory, write_json
from zerolora.units import gib, parse_bytes


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_directory(target) as staged:
        (staged / "a").write_text("old")
    with pytest.raises(RuntimeError), staged_directory(target) as staged:
        (staged / "a").write_text("half")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_new_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("a", "b"):
        with staged_directory(target) as staged:
            (staged / name).write_text(name)
    assert [path.name for path in target.iterdir()] == ["b"]


def test_a_linked_file_is_replaced_not_written_through(tmp_path: Path) -> None:
    """DVC links outputs to its cache; writing through the link would corrupt the cache."""
    cached = tmp_path / "cached"
    cached.write_text("cached")
    (tmp_path / "out.json").hardlink_to(cached)
    write_json(tmp_path / "out.json", {"new": 1})
    assert cached.read_text() == "cached"


def test_broken_json_names_file_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json: not valid JSON .*run `zerolora y` again"):
        read_json(tmp_path / "x.json", "zerolora y")


def test_describe_skips_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "manifest.json").write_text("{}")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert describe(tmp_path) == {"a": {"sha256": empty, "bytes": 0}}


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_keys_is_no_difference(value: dict[str, int]) -> None:
    assert canonical(value) == canonical(dict(reversed(value.items())))


@pytest.mark.parametrize(
    ("text", "count"), [("1B", 1), ("80GiB", 80 * 2**30), ("32 GB", 32 * 10**9), ("1.5MiB", 1572864)]
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80", "GiB", "-1GiB", "0GiB", "1 gb", "80G"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="with its unit"):
        parse_bytes(text)


def test_gib() -> None:
    assert gib(3 * 2**29) == "1.50 GiB"


def test_a_staged_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out") as staged:
        (staged / "a").touch(0o600)
    (tmp_path / "other").touch()
    assert (tmp_path / "out/a").stat().st_mode == (tmp_path / "other").stat().st_mode
