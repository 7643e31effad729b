"""What is rebuilt: a run of this project, as it is or at a revision, or what `zerolora push` has published.

default                   results/ of the working tree
default@v1.2              of a revision, whose results are in DVC's cache
./NAME, /path/NAME        a pushed directory
OWNER/NAME[@REVISION]     a pushed repository of the Hugging Face Hub
"""

import configparser
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from zerolora import __version__
from zerolora.errors import UserError, shown
from zerolora.evidence.verify import CARD
from zerolora.evidence.verify import FOLDER as STATEMENTS
from zerolora.fetch.hub_client import explained_errors
from zerolora.files import MANIFEST, canonical, read_object, sha256
from zerolora.git_environment import git_environment
from zerolora.json_kinds import Count, JsonObject, PathBelow, Text, check
from zerolora.publish import croissant, run_crate
from zerolora.publish.finished import PUSH
from zerolora.publish.finished import RECORD as LOCK
from zerolora.publish.push import DIRECTORIES, HUB
from zerolora.publish.record import (
    CHECKPOINTS,
    RECORD,
    ROWS_FOLDER,
    Costs,
    Find,
    Record,
    checkpoints_of,
    contents_of,
    costs_of,
    of_run,
    read_record,
    receipts_here,
    seeds_of,
)
from zerolora.receipt import FOLDER, Receipt, parse
from zerolora.train.checkpoint.names import STEP

BESIDE = (RECORD, CARD, croissant.NAME, run_crate.NAME)
"""Files of a push that describe the model."""
OF_THE_PROJECT = ("config", "envs", "profiles", "src", "workflow")
"""Folders whose uncommitted files belong to a run of the working tree."""
SUBMODULE = "160000 "
"""Begins git's entry of one."""
VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
GITS = re.compile(r"[\w./~^@{}-]+")


class _File(JsonObject):
    sha256: Text
    bytes: Count


class _Push(JsonObject):
    run: Text
    what: Literal["adapter", "merged"]


class _Pushed(JsonObject):
    """The manifest of a push."""

    pushed: _Push
    files: dict[PathBelow, _File]


@dataclass(frozen=True)
class Original:
    """A run as it was recorded."""

    source: str
    """As the user gave it."""
    run: str
    receipts: dict[str, Receipt]
    """By stage, each after those of its inputs."""
    find: Find
    """Returns the file of a result or an input, where it is at hand."""
    contents: dict[str, str]
    """Outputs with figures, by path."""
    costs: Costs
    version: str
    """Of zerolora."""
    commit: str | None = None
    """Of the project, if it is a run of this one."""
    prefix: str = ""
    """Path of the project in its git repository; empty if it is the whole of it."""
    edited: Mapping[str, str | None] | None = None
    """Of the working tree, sha256 of each file that differs from the commit, None for one that is not there; None for a
    revision or a push."""
    repository: str | None = None
    """Name and commit on the hub, or the pushed directory."""
    record: Record | None = None
    """Of a push."""
    with_paths: frozenset[str] = frozenset()
    checkpoint_files: dict[int, Path] = field(default_factory=dict)
    checkpoint_digests: dict[int, str] = field(default_factory=dict)
    """Of checkpoints that are not at hand."""
    seeds: dict[str, list[float]] = field(default_factory=dict)
    pushed: dict[str, Path] = field(default_factory=dict)
    """Files of the pushed model, by the path of the result."""
    directory: Path = Path()
    """Of a push."""
    listed: dict[str, Any] = field(default_factory=dict)
    """The files of a push: sha256 and bytes, by name."""
    replies: tuple[Path, ...] = ()
    """Files of a push in which replies of served models may be."""
    download: Callable[[], None] = lambda: None
    """Downloads the pushed files, if they are in a repository."""

    @property
    def digest(self) -> str:
        """Digest of what is compared, by which a rebuild that was stopped is continued."""
        receipts = {stage: receipt._asdict() for stage, receipt in self.receipts.items()}
        record = self.record.model_dump(mode="json") if self.record else None
        parts = [self.run, self.commit, self.edited, receipts, record, self.listed, __version__]
        return hashlib.sha256(canonical(parts).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Name of the rebuild's folder."""
        revision = f"@{self.commit[:7]}" if self.commit and self.edited is None else ""
        return f"{self.run}{revision}" if not self.repository else Path(self.repository).resolve().name


def original(source: str, work: Path) -> Original:
    """Return what a source names. A repository is downloaded below `work`.

    Raises UserError if there is none, or it has no receipts.
    """
    folder = Path(source)
    if source in (".", "..") or source.startswith(DIRECTORIES) or (folder / MANIFEST).is_file():
        if not folder.is_dir():
            raise UserError(f"{source}: there is no such directory; name one that `zerolora push` wrote")
        return _of_directory(source, folder, str(folder.resolve()))
    name, _, revision = source.removeprefix(HUB).partition("@")
    if "/" in name:
        return _of_repository(source, name, revision or None, work)
    return _of_revision(source, name, revision) if revision else _of_working_tree(source, name)


def _of_working_tree(source: str, run: str) -> Original:
    remedy = f"finish it: `snakemake --profile profiles/local results/{run}/report.html`"
    if not FOLDER.is_dir():
        raise UserError(f"{shown(source)}: there is no {FOLDER} here, so nothing is known of a run; {remedy}")
    receipts = of_run(run, receipts_here(), remedy)

    def find(path: str) -> Path | None:
        return file if (file := Path(path)).is_file() else None

    checkpoints, commit = checkpoints_of(run), _git("rev-parse", "--verify", "--quiet", "HEAD")
    return Original(
        source,
        run,
        receipts,
        find,
        contents_of(receipts, find),
        costs_of(receipts, find, len(checkpoints)),
        __version__,
        commit=commit,
        prefix=_git("rev-parse", "--show-prefix") or "",
        edited=_edited(commit),
        checkpoint_files=checkpoints,
        seeds=seeds_of(run),
    )


def _edited(commit: str | None) -> dict[str, str | None]:
    """Return the files of the working tree that differ from a commit, and new ones in folders that a run reads."""
    if commit is None:
        names = [str(path) for path in Path("config").rglob("*") if path.is_file()]
    else:
        entries = (_git("ls-files", "--stage") or "").splitlines()
        if module := next((line for line in entries if line.startswith(SUBMODULE)), None):
            raise UserError(
                f"{module.partition(chr(9))[2]}: is a submodule, which a rebuild does not clone; put its files into "
                "the project, or rebuild a push of the run"
            )
        changed = _git("diff", "--name-only", "--no-renames", "--relative", "-z", commit) or ""
        new = _git("ls-files", "--others", "--exclude-standard", "-z", "--", *OF_THE_PROJECT) or ""
        names = [name for name in (changed + new).split("\0") if name]
    return {name: sha256(Path(name)) if Path(name).is_file() else None for name in names}


def _of_revision(source: str, run: str, revision: str) -> Original:
    if not GITS.fullmatch(revision) or not (
        commit := _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    ):
        raise UserError(f"{shown(source)}: git here has no revision {shown(revision)}; `git log` lists them")
    lock = _git("show", f"{commit}:./{LOCK}")
    if lock is None:
        raise UserError(f"{source}: that revision has no {LOCK}, so it has no results; name one that has")
    cache = _Cache(lock)
    receipts: dict[str, Receipt] = {}
    for path in cache.files:
        if Path(path).parent == FOLDER and (file := cache.find(path)):
            receipt = parse(file.read_text(encoding="utf-8", errors="replace"))
            receipts |= {Path(path).stem: receipt} if receipt else {}
    listed = f"{FOLDER}/train@{run}.json" in cache.files
    remedy = (
        "DVC's cache lacks its results: `dvc fetch --all-commits` brings them from the remote"
        if listed
        else f"its {LOCK} has no such run; name another run or revision"
    )
    found = of_run(run, receipts, remedy)
    code = _git("show", f"{commit}:./src/zerolora/__init__.py")
    version = VERSION.search(code) if code else None
    current = checkpoints_of(run)
    return Original(
        source,
        run,
        found,
        cache.find,
        contents_of(found, cache.find),
        costs_of(found, cache.find, len(current)),
        version[1] if version else __version__,
        commit=commit,
        prefix=_git("rev-parse", "--show-prefix") or "",
        # Checkpoints are in no cache: those that are there are of the last training.
        checkpoint_files=current if _is_last(found, run) else {},
    )


def _is_last(receipts: Mapping[str, Receipt], run: str) -> bool:
    """Return whether the last training of a run is the one of these receipts."""
    adapter = f"results/{run}/adapter/{MANIFEST}"
    return Path(adapter).is_file() and sha256(Path(adapter)) == receipts[f"train@{run}"].outputs.get(adapter)


class _Cache:
    """The results of a dvc.lock in DVC's cache, which is only read."""

    def __init__(self, lock: str) -> None:
        self._folder = _cache_folder() / "files/md5"
        stages = (yaml.load(lock, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}).get("stages") or {}  # noqa: S506
        self.files: dict[str, str] = {}
        """md5 of each result, by path."""
        for stage in stages.values():
            for out in stage.get("outs", ()):
                if not out["md5"].endswith(".dir"):
                    self.files[out["path"]] = out["md5"]
                    continue
                if (listed := self._of(out["md5"])).is_file():
                    for entry in json.loads(listed.read_text(encoding="utf-8")):
                        self.files[f"{out['path']}/{entry['relpath']}"] = entry["md5"]

    def find(self, path: str) -> Path | None:
        """Return the cache's file of a result; None if it has none."""
        file = self._of(self.files[path]) if path in self.files else None
        return file if file and file.is_file() else None

    def _of(self, md5: str) -> Path:
        return self._folder / md5[:2] / md5[2:]


def _cache_folder() -> Path:
    """Return DVC's cache, as .dvc/config and .dvc/config.local name it."""
    config = configparser.ConfigParser(strict=False, interpolation=None)
    config.read([".dvc/config", ".dvc/config.local"])
    return Path(".dvc", config.get("cache", "dir", fallback="cache"))


def _of_repository(source: str, name: str, revision: str | None, work: Path) -> Original:
    from huggingface_hub import HfApi, snapshot_download

    described = f"model {name}" + (f" at {revision}" if revision else "")
    with explained_errors(described, "model"):
        info = HfApi().model_info(name, revision=revision)
        names = {each.path for each in HfApi().list_repo_tree(name, revision=info.sha)}
        if RECORD not in names or MANIFEST not in names:
            raise UserError(
                f"{source}: has no {RECORD}, so what it was made of is not known; its owner has to push it again with "
                "this version of zerolora"
            )
        folder = work / "pushed" / f"{name.replace('/', '--')}@{(info.sha or '')[:7]}"
        snapshot_download(name, revision=info.sha, local_dir=folder, allow_patterns=[RECORD, MANIFEST])

    def download() -> None:
        with explained_errors(described, "model"):
            snapshot_download(name, revision=info.sha, local_dir=folder, allow_patterns=[*result.listed])

    result = replace(_of_directory(source, folder, f"{name}@{info.sha}"), download=download)
    return result


def _of_directory(source: str, folder: Path, repository: str) -> Original:
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{source}: has no {MANIFEST}, so `zerolora push` did not write it; name one that it wrote")
    manifest = read_object(folder / MANIFEST, "zerolora push")
    check(manifest, _Pushed, folder / MANIFEST, "name a directory that `zerolora push` wrote")
    record = read_record(folder / RECORD)
    receipts = of_run(
        record.run,
        {stage: Receipt(each.params, each.inputs, each.outputs) for stage, each in record.receipts.items()},
        "push it again with this version",
    )
    listed, what = manifest["files"], manifest[PUSH]["what"]
    place = f"results/{record.run}/{what}"
    if what == "merged" and not _is_versioned(receipts, record.run):
        place = f"work/merged/{record.run}"
    # By the list, since a repository's files are not here yet.
    steps = {name: STEP.fullmatch(name.removeprefix(f"{CHECKPOINTS}/")) for name in sorted(listed)}
    checkpoints = {int(match[1]): folder / name for name, match in steps.items() if match}
    stage = f"{'train' if what == 'adapter' else 'merge'}@{record.run}"
    results = [path.removeprefix(f"{place}/") for path in receipts[stage].outputs if path.startswith(f"{place}/")]
    names = {*results, *(record.merged if what == "merged" else ())} - {MANIFEST}
    pushed = {f"{place}/{name}": folder / name for name in sorted(names & listed.keys())}
    if unmade := sorted(listed.keys() - names - {MANIFEST, *BESIDE} - {name for name in listed if _is_included(name)}):
        raise UserError(f"{source}: has {unmade[0]}, which no stage of its record made; push it again")
    return Original(
        source,
        record.run,
        receipts,
        lambda path: pushed.get(path) or _pushed_rows(folder, receipts).get(path),
        record.contents,
        record.costs,
        record.zerolora,
        repository=repository,
        record=record,
        with_paths=frozenset(record.with_paths),
        checkpoint_files=checkpoints,
        checkpoint_digests={int(step): digest for step, digest in record.checkpoints.items()},
        seeds=record.seeds,
        pushed=pushed,
        replies=tuple(folder / name for name in listed if name.startswith(f"{ROWS_FOLDER}/")),
        directory=folder,
        listed=listed,
    )


def _is_included(name: str) -> bool:
    return name.partition("/")[0] in (CHECKPOINTS, ROWS_FOLDER, STATEMENTS)


def _is_versioned(receipts: Mapping[str, Receipt], run: str) -> bool:
    """Return whether the merged weights were results of their stage."""
    settings: dict[str, Any] = json.loads(receipts[f"merge@{run}"].params["settings"])
    return bool(settings.get("version"))


def _pushed_rows(folder: Path, receipts: Mapping[str, Receipt]) -> dict[str, Path]:
    """Return the rows that a push has, by the path of the input: they are named by their sha256."""
    present = {path.name: path for path in (folder / ROWS_FOLDER).glob("*")}
    return {
        path: present[digest] for each in receipts.values() for path, digest in each.inputs.items() if digest in present
    }


def _git(*arguments: str) -> str | None:
    """Return what git says, without the last line end; None if it fails or is not there."""
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, env=git_environment())
    except OSError:
        return None
    return result.stdout.rstrip("\n") if result.returncode == 0 else None
