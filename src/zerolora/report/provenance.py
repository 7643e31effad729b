"""Provenance of a run: the hashes of its inputs, the commit, and the commands to reproduce it."""

import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerolora.config.overrides import origin_of
from zerolora.files import MANIFEST, read_json, sha256
from zerolora.git_environment import git_environment

NO_REPOSITORY = "not in a git repository"
UNCOMMITTED = " with uncommitted changes"


def provenance(
    run: str, model: Path, data: Path, results: Path, config: Path, lock: Path, kept: Sequence[str]
) -> dict[str, str]:
    """Return the name, number or sha256 of each input. `kept`: stages whose results the user keeps although their code
    has changed. Raises UserError if a manifest is missing."""
    base = read_json(model / MANIFEST, "zerolora stage fetch")
    prepared = read_json(data / "manifest.json", "zerolora stage prepare")
    weights = {name: file["sha256"] for name, file in base["files"].items() if name.endswith(".safetensors")}
    return {
        "run": run,
        "commit": commit(),
        "zerolora": version("zerolora"),
        "base model": ", ".join(f"{key} {value}" for key, value in base["source"].items()),
        "base model's licence": base["license"],
        "base model's parameters": f"{base['parameters']:,}",
        **{f"base {name} sha256": digest for name, digest in weights.items()},
        **{f"data file {path} sha256": digest for path, digest in prepared["read"].items()},
        **{f"prepared {name} sha256": file["sha256"] for name, file in prepared["files"].items()},
        **_of_adapter(read_json(results / "adapter" / MANIFEST, "zerolora stage train")),
        **_values(config),
        **({"kept": f"kept, although their code has changed: {', '.join(kept)}"} if kept else {}),
        "config sha256": sha256(config),
        "lock file sha256": sha256(lock),
    }


def _values(config: Path) -> dict[str, str]:
    """Return what the run had besides the config file, if anything."""
    about = origin_of(config.read_text(encoding="utf-8"))
    return {"values": about} if about else {}


def commit() -> str:
    """Return the checked-out commit, with a note if tracked files differ from it; NO_REPOSITORY without git."""
    answers = []
    for command in (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]):
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, env=git_environment())
        except FileNotFoundError:
            return NO_REPOSITORY
        if result.returncode:
            return NO_REPOSITORY
        answers.append(result.stdout.strip())
    return answers[0] + (UNCOMMITTED if answers[1] else "")


def commands(commit: str, page: str) -> dict[str, str]:
    """Return shell commands by purpose. They run in the project's directory; `page` is the run's page there."""
    revision = commit.removesuffix(UNCOMMITTED)
    if not Path("workflow/Snakefile").is_file():  # not a checkout
        return {"compute it": f"zerolora run {page}"}
    compute = f".venv/bin/snakemake --profile profiles/local {page}"
    if not re.fullmatch("[0-9a-f]{40,64}", revision):
        return {"compute it": compute}
    return {
        "compute it again": f"git checkout {revision}\nmake .venv/installed\n{compute}",
        "take it from DVC's cache or remote, without computing": f".venv/bin/dvc pull\nmake checkout REV={revision}",
    }


def adapter_origin(origin: dict[str, Any]) -> str:
    """Return hash, source and licence of an adapter from the manifest of one that continues from it."""
    source = "".join(f", {key} {value}" for key, value in origin.get("source", {}).items())
    licence = f", {origin['license']}" if "license" in origin else ""
    return f"sha256 {origin['sha256']}{source}{licence}"


def _of_adapter(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of the adapter, and of each adapter that training continued from, latest first."""
    result = {
        f"{name} sha256": file["sha256"] for name, file in manifest["files"].items() if name.endswith(".safetensors")
    }
    origin, before = manifest.get("from_adapter"), "continues from"
    while origin:
        result[before] = f"{origin['directory']} ({adapter_origin(origin)})"
        origin, before = origin.get("from_adapter"), f"{before}, which continues from"
    return result
