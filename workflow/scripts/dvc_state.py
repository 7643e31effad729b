"""What DVC knows about the stages: which outputs are those of dvc.lock, which can be restored from its cache."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

LOCK = Path("dvc.lock")
RWLOCK = Path(".dvc/tmp/rwlock")


@contextmanager
def repository() -> Iterator[Any]:
    """Open the DVC repository of the project."""
    from dvc.repo import Repo

    with Repo() as repo:
        yield repo


@contextmanager
def locked_stages(repo: Any) -> Iterator[dict[str, Any]]:
    """Lock the repository and yield its stages by name. DVC reads dvc.yaml and dvc.lock once for all that is asked of
    them; to look up each stage by its name it would read both each time."""
    from dvc.repo import lock_repo

    with lock_repo(repo):
        yield {stage.addressing: stage for stage in repo.index.stages}


def record(stages: list[Any]) -> None:
    """Record the outputs of stages of dvc.yaml in DVC's cache and in dvc.lock, as `dvc commit --force` does, and write
    dvc.lock once. Source: commit in dvc/repo/commit.py."""
    for stage in stages:
        stage.save()
        stage.commit()
    if stages:
        stages[0].dvcfile.dump_stages(stages, update_pipeline=False)


def write_cache_list(stages: Iterable[Any], path: Path) -> None:
    """Write which files of DVC's cache hold the outputs of stages: for each its stage, size, time and path, from the
    project's directory on, which may be moved or copied."""
    lines, here = [], Path.cwd()
    for stage in stages:
        for out in stage.outs:
            if not out.use_cache or not out.hash_info:
                continue
            oids = [out.hash_info.value]
            if out.hash_info.isdir and (tree := out.get_obj()):
                oids += [info.value for _, _, info in tree]
            for oid in oids:
                file = Path(out.cache.oid_to_path(oid))
                with suppress(OSError):
                    status = file.stat()
                    file = file.relative_to(here) if file.is_relative_to(here) else file
                    lines.append(f"{stage.addressing}\t{status.st_size}\t{status.st_mtime_ns}\t{file}\n")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def changed_in_cache(path: Path) -> set[str]:
    """Return the stages with files in DVC's cache that are not as such a list has them; none without a list."""
    result = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        stage, _, rest = line.partition("\t")
        size, _, rest = rest.partition("\t")
        time, _, file = rest.partition("\t")
        try:
            status = os.stat(file)  # noqa: PTH116 (thousands of them, at each start)
        except OSError:
            result.add(stage)
            continue
        if (str(status.st_size), str(status.st_mtime_ns)) != (size, time):
            result.add(stage)
    return result


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


class DvcStages:
    """The stages of dvc.yaml beside their records in dvc.lock.

    Raises DvcException if either file is broken.
    """

    def __init__(self, repo: Any, writes: bool) -> None:
        """`writes` lets it remove wrong entries of the cache."""
        self._repo, self._writes = repo, writes
        self._graph = repo.index.graph
        self._stages = {stage.addressing: stage for stage in self._graph}
        recorded = yaml.safe_load(LOCK.read_text(encoding="utf-8")) or {}  # DVC has read it, so it is whole
        self.names = set(self._stages)
        self.recorded = [name for name, stage in self._stages.items() if stage.name in recorded.get("stages", {})]
        self._status: dict[str, Any] | None = None

    def damaged(self) -> dict[str, list[str]]:
        """Return, by stage, the outputs that are there but are not those of dvc.lock."""
        result: dict[str, list[str]] = {}
        for name, changes in self._changes().items():
            for change in changes:
                if isinstance(change, dict):
                    for path, kind in change.get("changed outs", {}).items():
                        # "not in cache" is said first, whatever the file holds.
                        changed = kind == "modified" or (kind == "not in cache" and self._is_modified(name, path))
                        if changed and name in self.recorded:
                            result.setdefault(name, []).append(path)
        return result

    def up_to_date(self) -> dict[str, str]:
        """Return {stage: Snakemake's target of it} for the stages that are clean with every stage before them."""
        from networkx import descendants

        changed = self._changes()
        dirty = {stage for name, stage in self._stages.items() if name in changed or name not in self.recorded}
        # An edge leads from a stage to those it depends on.
        return {
            name: stage.cmd.partition("#")[0].split()[-1]  # without its remark
            for name, stage in self._stages.items()
            if stage not in dirty and not descendants(self._graph, stage) & dirty
        }

    def take_for_clean(self, stage: str) -> None:
        """Leave out what DVC says of the changes of a stage itself."""
        self._changes().pop(stage, None)

    def output_of(self, stage: str, path: str) -> str | None:
        """Return the output of `stage` in dvc.lock that is `path` or holds it, None if there is none."""
        for output in self._outputs(stage):
            if path == output or path.startswith(output + os.sep):
                return output
        return None

    def is_cached(self, stage: str, output: str) -> bool:
        """Tell whether DVC's cache has an output of `stage`, byte for byte.

        A file that is linked from the cache and was changed in place has changed in the cache as well: such an entry is
        removed, or DVC would continue to take it for what its name says.
        """
        out = self._outputs(stage)[output]
        if not out.hash_info or not self._is_intact(out.cache, out.hash_info.value):
            return False
        oids = [out.hash_info.value]
        if out.hash_info.isdir:
            oids = [info.value for _, _, info in out.get_obj()]
        lacking = [oid for oid in oids if not self._is_intact(out.cache, oid)]
        return not lacking

    def restore(self, missing: dict[str, list[str]], leave: Iterable[str]) -> dict[str, list[str]]:
        """Check out what is missing of every stage but those to `leave`, where the cache has it; return that by stage.

        `missing` holds, by stage, files that are known to be missing inside outputs that are still there.
        """
        from dvc.repo import lock_repo

        restored: dict[str, list[str]] = {}
        for stage in self.recorded:
            if stage in leave:
                continue
            lacking = {output for output in self._outputs(stage) if not Path(output).exists()}
            lacking |= {output for path in missing.get(stage, []) if (output := self.output_of(stage, path))}
            for output in sorted(lacking):
                if self.is_cached(stage, output):
                    restored.setdefault(stage, []).append(output)
        if restored:
            with lock_repo(self._repo):
                for stage, outputs in restored.items():
                    for output in outputs:
                        # Repo.checkout would read dvc.yaml and dvc.lock again for each.
                        self._outputs(stage)[output].checkout(force=True)
            self._status = None
        return restored

    def lost(self) -> set[str]:
        """Return the stages with outputs that are those of dvc.lock, but not in the cache."""
        return {
            name
            for name, changes in self._changes().items()
            for change in changes
            if name in self.recorded and isinstance(change, dict)
            for path, kind in change.get("changed outs", {}).items()
            if kind == "not in cache" and not self._is_modified(name, path)
        }

    def fill_cache(self, stages: Iterable[str]) -> list[str]:
        """Put those outputs of stages into DVC's cache that it lacks or holds damaged, and return them: those that are
        what dvc.lock says. Of others its record would be untrue."""
        from dvc.repo import lock_repo

        lacking: dict[str, list[str]] = {}
        for stage in stages:
            if stage in self.recorded:
                lacking[stage] = [
                    output
                    for output, out in self._outputs(stage).items()
                    if out.use_cache and out.hash_info and not self.is_cached(stage, output)
                    if not self._is_modified(stage, output)
                ]
        filled = [stage for stage, outputs in lacking.items() if outputs]
        if filled:
            with lock_repo(self._repo):
                for stage in filled:
                    for output in lacking[stage]:
                        self._outputs(stage)[output].commit()
            self._status = None
        return [output for stage in filled for output in lacking[stage]]

    def write_cache_list(self, path: Path) -> None:
        """Write which files of DVC's cache hold the outputs of the stages (write_cache_list)."""
        write_cache_list([self._stages[stage] for stage in self.recorded], path)

    def _is_intact(self, cache: Any, oid: str) -> bool:
        path = Path(cache.oid_to_path(oid))
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except OSError:
            return False
        if digest == oid.removesuffix(".dir"):
            return True
        if self._writes:
            path.unlink()
        return False

    def _is_modified(self, stage: str, output: str) -> bool:
        out = self._outputs(stage)[os.path.normpath(output)]
        return bool(out.exists and out.changed_checksum())

    def _changes(self) -> dict[str, Any]:
        if self._status is None:
            self._status = self._repo.status()
        return self._status

    def _outputs(self, stage: str) -> dict[str, Any]:
        if stage not in self._stages:
            return {}
        return {os.path.relpath(out.fs_path): out for out in self._stages[stage].outs}


def remove(paths: Iterable[str]) -> None:
    """Delete files and directories."""
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except FileNotFoundError:
        return True
    except ValueError:
        return False
