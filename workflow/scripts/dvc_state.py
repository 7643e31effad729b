"""What DVC knows of the stages: which receipts dvc.lock has, and what its cache can restore."""

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import receipts
import yaml
from receipts import Receipt

from zerolora.files import write_text

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
RWLOCK = Path(".dvc/tmp/rwlock")
CONFIGS = (Path(".dvc/config"), Path(".dvc/config.local"))
SUMMARY = Path(".snakemake/dvc-lock.json")


class LockSummary:
    """Which receipt dvc.lock has of each stage, and which files of DVC's cache hold the stage's outputs.

    DVC takes seconds to say so, and is asked only if one of its files has changed since.
    """

    def __init__(self) -> None:
        self.digest = _digest_of([PIPELINE, Path("config/runs.yaml"), LOCK, *CONFIGS])
        self.lock = _digest_of([LOCK, *CONFIGS])
        self.stages: dict[str, dict[str, Any]] = {}
        """By stage, the md5 of its receipt and `{path: [size, time]}` of the cache's files."""
        self.is_current = False
        self._in_lock: dict[str, dict[str, Any]] = {}
        """The same, whatever dvc.yaml has now."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(SUMMARY.read_text(encoding="utf-8"))
            if known["lock"] == self.lock:
                self._in_lock = dict(known["stages"])
            if known["digest"] == self.digest:
                self.stages, self.is_current = dict(known["stages"]), True

    def has_receipt(self, stage: str) -> bool:
        """Return whether dvc.lock has the receipt of a stage that is there."""
        entry = self.stages.get(stage)
        return entry is not None and entry["receipt"] == md5_of(receipts.path_of(stage))

    def is_recorded(self, stage: str) -> bool:
        """Return whether dvc.lock has a stage's receipt, and DVC's cache the stage's outputs."""
        return self.has_receipt(stage) and all(
            stamp and _stamp(path) == stamp for path, stamp in self.stages[stage]["files"].items()
        )

    def may_restore(self, stage: str, wanted: Callable[[Receipt], bool]) -> bool:
        """Return whether dvc.lock may have a stage with a `wanted` receipt. False is certain."""
        entry = self._in_lock.get(stage)
        if entry is None:
            return stage in self._words
        with suppress(OSError, ValueError):  # then DVC judges its cache
            for path, known in entry["files"].items():
                if "".join(Path(path).parts[-2:]) == entry["receipt"] and known and _stamp(path) == known:
                    receipt = receipts.parse(Path(path).read_text(encoding="utf-8"))
                    return receipt is not None and wanted(receipt)
        return True

    @functools.cached_property
    def _words(self) -> set[str]:
        """The words of dvc.lock, among which is the name of each stage that it has, however the file is laid out: to
        parse it takes seconds for a thousand runs."""
        with suppress(OSError):
            return set(re.split(r"[\s'\":,{}\[\]]+", LOCK.read_text(encoding="utf-8", errors="replace")))
        return set()


def write_summary(known: Iterable[Any]) -> None:
    """Write what dvc.lock and DVC's cache have now of DVC's stages (LockSummary)."""
    here = Path.cwd()
    stages = {}
    for stage in known:
        files: dict[str, Any] = {}
        receipt = None
        for out in stage.outs:
            if not out.use_cache or not out.hash_info:
                continue
            if os.path.relpath(out.fs_path) == str(receipts.path_of(stage.addressing)):
                receipt = out.hash_info.value
            for path in _cached_files(out):
                file = path.relative_to(here) if path.is_relative_to(here) else path
                files[str(file)] = _stamp(str(file))
        if receipt:
            stages[stage.addressing] = {"receipt": receipt, "files": files}
    SUMMARY.parent.mkdir(exist_ok=True)
    now = LockSummary()
    write_text(SUMMARY, json.dumps({"digest": now.digest, "lock": now.lock, "stages": stages}))


def _digest_of(files: Iterable[Path]) -> str:
    """Return a hash of files, of which any may be missing, without a project's own path (make_site_cache_private)."""
    result = hashlib.sha256()
    for file in files:
        with suppress(OSError):
            lines = file.read_bytes().splitlines()
            result.update(b"\n".join([str(file).encode(), *(line for line in lines if b"site_cache_dir" not in line)]))
    return result.hexdigest()


def md5_of(path: Path) -> str | None:
    """Return the md5 of a file, as DVC names it in its cache; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError:
        return None


def lock_fault() -> str:
    """Return what is wrong with dvc.lock as a file; empty if it can be read."""
    try:
        text = LOCK.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    try:
        if isinstance(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), dict):  # noqa: S506
            return ""
    except (ValueError, yaml.YAMLError):
        pass
    if re.search(r"^<<<<<<< ", text, re.MULTILINE):
        return (
            f"{LOCK}: has the conflict markers of a merge; `git checkout --ours {LOCK}` takes your side's, "
            f"`git checkout --theirs {LOCK}` the other's"
        )
    return f"{LOCK}: is not what DVC wrote; `git checkout {LOCK}` restores it, or delete it"


@contextmanager
def repository() -> Iterator[Any]:
    """Open the DVC repository of the project."""
    from dvc.repo import Repo

    with Repo() as repo:
        yield repo


def record(repo: Any, names: Iterable[str], lost: Iterable[str]) -> tuple[list[str], list[Any]]:
    """Record those of these stages whose outputs, inputs or definition are not those of dvc.lock, and put the outputs
    of `lost` into the cache again, as `dvc commit --force` does. Return their names, and DVC's stages as they are now:
    DVC would read all of dvc.yaml again. Source: commit in dvc/repo/commit.py."""
    from dvc.repo import lock_repo

    with lock_repo(repo):
        # DVC would read dvc.yaml and dvc.lock again for each stage that it looks up by name.
        stages = list(repo.index.stages)
        known = {stage.addressing: stage for stage in stages}
        changed = [name for name in names if name in known and (name in lost or known[name].status())]
        for name in changed:
            known[name].save()
            known[name].commit()
        if changed:  # dvc.lock is written once
            known[changed[0]].dvcfile.dump_stages([known[name] for name in changed], update_pipeline=False)
    return changed, stages


def unchanged_in_lock(repo: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return, by stage, the params in dvc.lock of those stages whose inputs and outputs are the files of dvc.lock, but
    for receipts that are not there."""
    from dvc.dependency.param import ParamsDependency
    from dvc.repo import lock_repo

    result = {}
    with lock_repo(repo):
        known = {stage.addressing: stage for stage in repo.index.stages}
        for name in names:
            stage = known.get(name)
            if stage is None:
                continue
            files = [dep for dep in stage.deps if not isinstance(dep, ParamsDependency)]
            files += [out for out in stage.outs if os.path.relpath(out.fs_path) != str(receipts.path_of(name))]
            if not any(file.workspace_status() for file in files):
                # As DVC reads them: for YAML 1.1, 1e-08 is a text.
                recorded = [dep.hash_info.value or {} for dep in stage.deps if isinstance(dep, ParamsDependency)]
                result[name] = {key: value for values in recorded for key, value in values.items()}
    return result


class CachedStages:
    """The stages of dvc.yaml with what DVC's cache has of their outputs in dvc.lock."""

    def __init__(self, repo: Any) -> None:
        self._repo = repo
        self._stages = {stage.addressing: stage for stage in repo.index.stages}

    def receipt(self, stage: str) -> Receipt | None:
        """Return the receipt of a stage in dvc.lock, if the cache has it."""
        out = self._outputs(stage).get(str(receipts.path_of(stage)))
        if not out or not out.hash_info or not is_intact(out):
            return None
        return receipts.parse(Path(out.cache.oid_to_path(out.hash_info.value)).read_text(encoding="utf-8"))

    def lacking(self, stage: str, receipt: Receipt, sha256_of: Any) -> list[str] | None:
        """Return the outputs of a stage that are not there as the receipt has them; None if the cache lacks one of
        these."""
        wrong = {path for path, digest in receipt.outputs.items() if sha256_of(path) != digest}
        result = []
        for path, out in self._outputs(stage).items():
            within = {each for each in wrong if each == path or each.startswith(path + os.sep)}
            is_receipt = path == str(receipts.path_of(stage))
            if not (within or (is_receipt and md5_of(Path(path)) != out.hash_info.value) or not Path(path).exists()):
                continue
            if not out.hash_info or not out.use_cache or not is_intact(out):
                return None
            result.append(path)
        return result

    def output_of(self, stage: str, path: str) -> str | None:
        """Return the output of a stage that is a file or holds it, if the cache has it; None if not."""
        for output, out in self._outputs(stage).items():
            if (path == output or path.startswith(output + os.sep)) and out.hash_info and is_intact(out):
                return output
        return None

    def restore(self, stage: str, paths: Iterable[str]) -> None:
        """Put outputs of a stage in the place of what is there."""
        from dvc.repo import lock_repo

        with lock_repo(self._repo):
            for path in paths:
                # Repo.checkout would read dvc.yaml and dvc.lock again for each.
                self._outputs(stage)[path].checkout(force=True)

    def drop_damaged(self, stage: str) -> None:
        """Remove what the cache has damaged of a stage's outputs: DVC would link it again."""
        for out in self._outputs(stage).values():
            if out.hash_info:
                is_intact(out, drops=True)

    def _outputs(self, stage: str) -> dict[str, Any]:
        if stage not in self._stages:
            return {}
        return {os.path.relpath(out.fs_path): out for out in self._stages[stage].outs}


def is_intact(out: Any, drops: bool = False) -> bool:
    """Return whether DVC's cache has an output, byte for byte; with `drops`, remove what it has damaged.

    A file that is linked from the cache and was changed in place has changed in the cache as well.
    """
    result = True
    for path in _cached_files(out):
        if md5_of(path) != path.parent.name + path.name.removesuffix(".dir"):
            result = False
            if drops:
                path.unlink(missing_ok=True)
    return result


def _cached_files(out: Any) -> list[Path]:
    """Return the files of DVC's cache that hold an output of dvc.lock: of a directory, its list and its files."""
    if not out.hash_info:
        return []
    oids = [out.hash_info.value]
    if out.hash_info.isdir and (tree := out.get_obj()):
        oids += [info.value for _, _, info in tree]
    return [Path(out.cache.oid_to_path(oid)) for oid in oids]


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 (thousands of them, at each start)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def remove_broken_rwlock() -> None:
    """Remove DVC's list of readers and writers if a kill cut it short.

    DVC clears the entries of dead processes from that list itself, but every command fails if it is not JSON object.
    """
    if _is_whole(RWLOCK):
        return
    from dvc.lock import LockError, make_lock

    # Another DVC may be writing the list at this moment; it holds this lock while it does.
    with suppress(LockError), make_lock(f"{RWLOCK}.lock", tmp_dir=str(RWLOCK.parent)):
        if not _is_whole(RWLOCK):
            print(f"{RWLOCK} was cut short by a kill and is removed", file=sys.stderr)
            RWLOCK.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except FileNotFoundError:
        return True
    except ValueError:
        return False
