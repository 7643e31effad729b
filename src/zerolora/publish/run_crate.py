"""The RO-Crate of a pushed run: its stages with the sha256 of what each read and wrote, from the receipts.

Process Run Crate 0.5 on RO-Crate 1.1 (w3id.org/ro/wfrun/process/0.5). Files outside the directory are named only: an
absolute path by its last part.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora import __version__
from zerolora.files import MANIFEST, as_json
from zerolora.git_environment import git_environment
from zerolora.publish.croissant import media_type
from zerolora.publish.finished import FinishedRun, PushedModel

NAME = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
CONTEXT = "https://w3id.org/ro/terms/workflow-run/context"
"""Defines sha256."""
SOFTWARE = f"pkg:generic/zerolora@{__version__}"


def run_crate(run: FinishedRun, product: PushedModel, title: str) -> str | None:
    """Return the metadata of the pushed directory; None outside of git, since a crate must have a date."""
    if (date := date_of_commit()) is None:
        return None
    from rocrate.model.contextentity import ContextEntity
    from rocrate.rocrate import ROCrate

    crate = ROCrate(version="1.1")
    crate.metadata.extra_contexts.append(CONTEXT)
    crate.name, crate.datePublished = title, date
    crate.description = f"The {product.kind} of run {run.name}, trained with zerolora, and how it was made."
    licence = run.read(run.model / MANIFEST)["license"].strip() or "not known"
    crate.license = f"That of this {product.kind} is not stated; the base model's, as the config has it: {licence}."
    profile = {"@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"}
    crate.root_dataset["conformsTo"] = crate.add(ContextEntity(crate, PROFILE, properties=profile))
    software = {
        "@type": "SoftwareApplication",
        "name": "zerolora",
        "softwareVersion": __version__,
    }
    tool = crate.add(ContextEntity(crate, SOFTWARE, properties=software))

    def named(files: Mapping[str, str]) -> Any:
        """Return the entities of files outside the directory: the same for the same name and content, one not in a
        list."""
        entities = []
        for path, digest in sorted(files.items()):
            name = Path(path).name if path.startswith(("/", "~")) else path
            properties = {"@type": "CreativeWork", "name": name, "sha256": digest}
            entities.append(crate.add(ContextEntity(crate, f"#{digest[:16]}/{name}", properties=properties)))
        return entities[0] if len(entities) == 1 else entities

    for stage, receipt in sorted(run.receipts.items()):
        action = crate.add_action(
            tool,
            identifier=f"#{stage}",
            object=named(receipt["inputs"]),
            result=named(receipt["outputs"]),
            properties={"name": f"zerolora stage {stage}", "description": f"The receipt's sha256: {receipt['sha256']}"},
        )
        crate.root_dataset.append_to("mentions", action)
    for name, digest in sorted(product.hashes.items()):
        size = len(product.rewritten[name].encode()) if name in product.rewritten else product.files[name]["bytes"]
        crate.add_file(
            dest_path=name,
            properties={"name": name, "sha256": digest, "contentSize": str(size), "encodingFormat": media_type(name)},
        )
    return as_json(crate.metadata.generate())


def date_of_commit() -> str | None:
    """Return the day of the checked-out commit."""
    command = ["git", "show", "--no-patch", "--format=%cs", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=git_environment())
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
