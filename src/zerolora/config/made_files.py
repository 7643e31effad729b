"""The directories that stages make of what the config names, by the table of stages: what a path in them depends on."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from zerolora.config.schema import Config
from zerolora.config.stages import STAGES
from zerolora.files import MANIFEST

RESULTS = Path("results")


class MadeFolder(NamedTuple):
    """A directory that a stage makes as a whole, with a manifest."""

    stage: str
    names: Mapping[str, str]
    """Values of the stage's wildcards."""
    manifest: Path

    @property
    def folder(self) -> Path:
        """The directory."""
        return self.manifest.parent

    def concerns(self, path: Path) -> bool:
        """Return whether a path is in the directory or around it. Around results, everything is, and nothing reads it
        all."""
        around = self.folder.is_relative_to(path) and not RESULTS.is_relative_to(path)
        return path.is_relative_to(self.folder) or (around and path != Path())


def made_folders(config: Config) -> list[MadeFolder]:
    """Return the directories that stages make of the config's downloads, data sets, samples, selections and runs."""
    names: dict[str, Iterable[str]] = {
        "source": config.fetch.data,
        "packaged": config.fetch.package_data,
        "adapter": config.fetch.adapter,
        "dataset": config.prepare,
        "sample": config.samples,
        "selection": config.selections,
        "run": config.all_runs,
    }
    result = []
    for stage in STAGES.values():
        if Path(stage.target).name != MANIFEST or not {*stage.wildcards} <= names.keys():
            continue
        for values in itertools.product(*(names[kind] for kind in stage.wildcards)):
            of = dict(zip(stage.wildcards, values, strict=True))
            result.append(MadeFolder(stage.name, of, Path(stage.target.format(**of))))
    return result
