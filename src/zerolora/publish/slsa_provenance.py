"""The builder's statement: what a pushed model was made from, as SLSA's provenance v1 (slsa.dev/spec/v1.0/provenance).

All of it is from the run's config, manifests and receipts, so the same run has the same statement.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora import __version__
from zerolora.evidence import statement
from zerolora.evidence.statement import PROVENANCE, described
from zerolora.files import MANIFEST, sha256
from zerolora.publish.data_files import data_files, hub_address, package_address
from zerolora.publish.finished import FinishedRun, PushedModel, weights_of
from zerolora.publish.run_config import config_of_run, without_absolute_paths
from zerolora.report.provenance import UNCOMMITTED, commit

DOCUMENTATION = "docs/evidence.md"
BUILD_TYPE = f"pkg:generic/zerolora/run-v1#{DOCUMENTATION}"
BUILDER = f"pkg:generic/zerolora/own-machine#{DOCUMENTATION}"
"""A machine of the user's, which nobody watches: SLSA's level 1."""
LOCK = Path("envs/requirements.lock")


def builder_statement(run: FinishedRun, product: PushedModel, byproducts: Mapping[str, str]) -> bytes:
    """Return the statement about the pushed files. `byproducts`: sha256 of the descriptions beside them, by name."""
    config = without_absolute_paths(config_of_run(run))
    code = {stage: receipt["params"]["code"] for stage, receipt in run.receipts.items() if "code" in receipt["params"]}
    trained = next((each["sha256"] for stage, each in run.receipts.items() if stage.startswith("train@")), None)
    details: dict[str, Any] = {
        "builder": {"id": BUILDER, "version": {"zerolora": __version__}},
        "byproducts": [described(name, digest) for name, digest in sorted(byproducts.items())],
    }
    if trained:
        details["metadata"] = {"invocationId": f"sha256:{trained}"}
    return statement.written(
        product.hashes,
        PROVENANCE,
        {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"run": run.name, "what": product.kind, "config": config},
                "internalParameters": {"code": code},
                "resolvedDependencies": [*_model(run), *_data(run), *_adapter(run), *_code()],
            },
            "runDetails": details,
        },
    )


def _model(run: FinishedRun) -> list[dict[str, Any]]:
    """Return the weights of the base model, and the package's file that they were converted from."""
    manifest = run.read(run.model / MANIFEST)
    source = manifest["source"]
    result: list[dict[str, Any]] = []
    if source["source"] == "package":
        result.append(described(source["file"], source["sha256"], uri=package_address(source, source["file"])))
    for name, digest in weights_of(manifest["files"]).items():
        on_hub = source["source"] == "hub"
        address = {"uri": hub_address(source["repository"], source, name)} if on_hub else {}
        result.append(described(f"base model: {name}", digest, **address))
    return result


def _data(run: FinishedRun) -> list[dict[str, Any]]:
    return [
        described(f"data: {file.name}", file.sha256, **({"uri": file.address} if file.address else {}))
        for file in data_files(run)
    ]


def _adapter(run: FinishedRun) -> list[dict[str, Any]]:
    """Return the adapter that training started from, and that one's, and so on."""
    origin = run.read(run.directory / "adapter" / MANIFEST).get("from_adapter")
    result: list[dict[str, Any]] = []
    while origin:
        source = origin.get("source", {})
        address = f"hf://{source['repository']}@{source['revision']}" if {"repository", "revision"} <= {*source} else ""
        name = "initial adapter" if not result else f"initial adapter of {result[-1]['name']}"
        result.append(described(name, origin["sha256"], **({"uri": address} if address else {})))
        origin = origin.get("from_adapter")
    return result


def _code() -> list[dict[str, Any]]:
    """Return the lock file, and the project at its commit, if they are there."""
    result = [described(LOCK.as_posix(), sha256(LOCK))] if LOCK.is_file() else []
    revision = commit()
    if re.fullmatch("[0-9a-f]{40,64}", number := revision.removesuffix(UNCOMMITTED)):
        project: dict[str, Any] = {"name": "project", "digest": {"gitCommit": number}}
        if revision != number:
            project["annotations"] = {"uncommitted": True}
        result.append(project)
    return result
