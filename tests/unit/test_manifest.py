"""Stages refuse files that do not match their manifest."""

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


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"01234", "is not the file that .*"), (b"0123456780", "is not the file that .*"), (None, "is missing")],
    ids=["truncated", "one byte changed", "missing"],
)
def test_changed_or_missing_file_is_named(directory: Path, content: bytes | None, message: str) -> None:
    check_intact(directory, "zerolora stage prepare")
    (directory / "rows.arrow").unlink()
    if content is not None:
        (directory / "rows.arrow").write_bytes(content)
    with pytest.raises(UserError, match=rf"rows\.arrow: {message}; run `zerolora stage prepare` again"):
        check_intact(directory, "zerolora stage prepare")


def test_large_files_are_compared_by_size(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_BYTES", 5)
    (directory / "rows.arrow").write_bytes(b"0123456780")
    check_intact(directory, "zerolora stage prepare")
    (directory / "rows.arrow").write_bytes(b"01234567")
    with pytest.raises(UserError, match="is not the file"):
        check_intact(directory, "zerolora stage prepare")
