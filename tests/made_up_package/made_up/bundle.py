"""bundle: the adapter as one ZIP file."""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

from made_up.sections import Bundle
from zerolora.export import opened
from zerolora.export.targets.target import ExportTarget, Opened, RunResult


def _check(source: RunResult, settings: Bundle) -> None:
    """Refuse nothing: a ZIP file holds any adapter."""


def _run(source: RunResult, settings: Bundle, output: Path) -> dict[str, Any]:
    kind = zipfile.ZIP_DEFLATED if settings.compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(output / "adapter.zip", "w", kind) as archive:
        for path in sorted(source.adapter.iterdir()):
            archive.write(path, path.name)
    return {}


def _opened(source: RunResult, settings: Bundle, output: Path) -> Opened:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(output / "adapter.zip") as archive:
        archive.extractall(folder)
        return opened.answering(opened.with_adapter(source.weights, Path(folder)), "peft")


TARGET = ExportTarget("bundle", "the adapter as one ZIP file", Bundle, _check, _run, _opened)
