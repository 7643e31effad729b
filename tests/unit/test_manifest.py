"""A stage does not read files that are not those of their manifest."""

from pathlib import Path

import pytest

from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, write_json
from zerolora.model import manifest
from zerolora.model.manifest import check_intact


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "rows.arrow").write_bytes(b"0123456789")
    write_json(tmp_path / MANIFEST, {"files": describe(tmp_path)})
    return tmp_path


def test_intact_files_pass(directory: Path) -> None:
    check_intact(directory, "zerolora prepare")


@pytest.mark.parametrize("content", [b"01234", b"0123456780"], ids=["truncated", "one byte changed"])
def test_a_changed_file_is_named(directory: Path, content: bytes) -> None:
    (directory / "rows.arrow").write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.arrow: is not the file that .*; run `zerolora prepare` again"):
        check_intact(directory, "zerolora prepare")


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / "rows.arrow").unlink()
    with pytest.raises(UserError, match=r"rows\.arrow: is missing; run `zerolora prepare` again"):
        check_intact(directory, "zerolora prepare")


def test_large_files_are_compared_by_size_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_BYTES", 5)
    (directory / "rows.arrow").write_bytes(b"0123456780")
    check_intact(directory, "zerolora prepare")
    (directory / "rows.arrow").write_bytes(b"01234567")
    with pytest.raises(UserError, match="is not the file"):
        check_intact(directory, "zerolora prepare")
