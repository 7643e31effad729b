"""What differs between two commits of a project, as atoms, and a clone with some of them.

Every file that differs belongs to one of: the config (settings of the run, by key), rows of a data file, code (by
commit), a file or folder that a setting names, or the rest. So the clone with all atoms has what the bad commit has,
whatever a stage reads; the rest, such as docs, is one atom that is split only if it turns out to be a cause.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.bisect import row_changes, run_values
from zerolora.bisect.delta import Atom, State
from zerolora.bisect.revisions import (
    LOCK,
    POINTER,
    Clone,
    changed_files,
    commits_between,
    content_at,
    files_at,
    title_of,
)
from zerolora.bisect.run_values import CONFIG, OF_CONFIG, Key, Values
from zerolora.files import canonical, sha256
from zerolora.units import counted

CODE = ("src", "workflow", "Snakefile", "dvc.yaml", "pyproject.toml", "setup.py")
"""The code of a project that contains it."""
OWN_CODE = "src/zerolora/"
GENERATED = ("results", "resources", "work", "data/hub", "data/packages")
"""Folders that stages write."""


class SettingChange(NamedTuple):
    """A key of the settings."""

    key: Key


class FileChange(NamedTuple):
    """A file of no other kind."""

    path: str


class CommitChange(NamedTuple):
    """The code of a commit."""

    commit: str


class AllCode(NamedTuple):
    """The code as a whole, where no line of commits leads from one to the other."""


@dataclass
class Changes:
    """Two commits of a project, for one run."""

    good: str
    bad: str
    run: str
    good_values: Values
    bad_values: Values
    atoms: list[Atom] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Those that change the code, in order."""
    files: dict[str, row_changes.RowDifference] = field(default_factory=dict)
    """Data files that are split into rows."""
    harmless: list[str] = field(default_factory=list)
    """Files of the bad commit alone that only its settings name. A probe always has them, and those of the good commit:
    they do nothing until a setting names them."""
    has_code: bool = True
    """Whether the project contains the code, of which each probe then runs its own."""
    other_package: bool = False
    """Whether the package that a project without code was run with differs, as dvc.lock says."""
    named: set[str] = field(default_factory=set)
    """Texts among the settings, of which some are names of files."""
    unversioned: list[str] = field(default_factory=list)
    """Files and folders that the settings name and neither commit has."""
    outside: list[str] = field(default_factory=list)
    """Those that they name by an absolute path, which a probe reads where they are."""

    def apply(self, state: State, clone: Clone, runner: Mapping[str, Any]) -> str:
        """Have the clone at a state, and return a hash of everything that its results depend on. `runner`: what runs
        it.

        Raises UserError if a change cannot be applied without others.
        """
        clone.reset(self.good)
        clone.take(self.bad, [*self.harmless, *(each.path for each in state if isinstance(each, FileChange))])
        self._apply_code(state, clone)
        clone.bring_data(self._is_needed)
        for path, difference in self.files.items():
            clone.write(path, difference.content(state))
        # What is in no commit, and data that DVC has, is in no tree of git.
        hashes = {path: sha256(clone.project / path) for path in self.files}
        for path in self.unversioned:
            hashes |= clone.copy(path)
        for path in self.outside:
            hashes |= clone.hashes(path)
        self.write_config(state, clone, 1)
        tree = clone.tree(self.unversioned)
        clone.forget_compiled(("src", "workflow"))
        return hashlib.sha256(canonical([tree, hashes, runner]).encode()).hexdigest()

    def write_config(self, state: State, clone: Clone, repeats: int) -> None:
        """Write the config of a state, for several seeds."""
        keys = frozenset(each.key for each in state if isinstance(each, SettingChange))
        values = run_values.mixed(self.good_values, self.bad_values, keys)
        clone.write(str(CONFIG), run_values.nested(values, self.run, repeats).encode())

    def _is_needed(self, data: str) -> bool:
        """Return whether a setting names data, something in it or something that it is in, unless its rows are written
        for each probe."""
        named = any(_is_below(data, (each,)) or _is_below(each, (data,)) for each in self.named)
        return named and data not in self.files

    def _apply_code(self, state: State, clone: Clone) -> None:
        chosen = {each.commit for each in state if isinstance(each, CommitChange)}
        count = len(chosen)
        if AllCode() in state or (count and count == len(self.commits)):
            clone.take(self.bad, CODE)
        elif count and chosen == {*self.commits[:count]}:
            clone.take(self.commits[count - 1], CODE)
        else:
            for commit in (each for each in self.commits if each in chosen):
                clone.apply(commit, CODE)


def changes(good: str, bad: str, run: str, values: tuple[Values, Values]) -> Changes:
    """Return what differs between two commits for a run. Raises UserError if data cannot be read."""
    good_values, bad_values = run_values.alike(*values)
    before, after = files_at(good), files_at(bad)
    result = Changes(good, bad, run, good_values, bad_values)
    result.has_code = any(path.startswith(OWN_CODE) for path in before & after)
    result.other_package = not result.has_code and _codes(good) != _codes(bad)
    differing = [path for path in changed_files(good, bad) if path != LOCK and not _is_below(path, OF_CONFIG)]
    left = dict.fromkeys(differing)
    data = [atom for path in _split_data(result, left) for atom in row_changes.atoms(result.files[path])]
    keys = run_values.differing(result.good_values, result.bad_values)
    result.atoms += [_setting(key, result) for key in keys]
    result.atoms += data
    if result.has_code:
        result.atoms += _code(result, left)
    of_good, of_bad = (run_values.named_files(each) for each in (result.good_values, result.bad_values))
    named = result.named = of_good | of_bad
    for path in [path for path in left if not (path in before and path in after)]:
        file = path.removesuffix(POINTER)
        if _is_below(file, [*(of_good ^ of_bad)]) and not _is_below(file, [*(of_good & of_bad)]):
            result.harmless += [path] if path in after else []
            left.pop(path)
    for root in sorted(named):
        inside = [path for path in left if _is_below(path, (root, root + POINTER))]
        if inside:
            result.atoms.append(_files(root if len(inside) > 1 else inside[0], inside))
        for path in inside:
            left.pop(path)
    if left:
        result.atoms.append(_files(f"{counted(len(left), 'file')} that no setting names", list(left)))
    result.unversioned = sorted(_unversioned(named, before | after))
    result.outside = sorted(_outside(result.good_values, result.bad_values))
    return result


def _codes(commit: str) -> set[tuple[str, str]]:
    """Return the code fingerprints that dvc.lock has, by key; none without the file."""
    lock = yaml.load(content_at(commit, LOCK) or b"", getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    stages = lock.get("stages", {}).values() if isinstance(lock, dict) else ()
    values = [pair for stage in stages for file in stage.get("params", {}).values() for pair in file.items()]
    return {(key, str(value)) for key, value in values if key.split(".")[0] == "code"}


def _setting(key: Key, of: Changes) -> Atom:
    return Atom(run_values.text_of(key, of.good_values, of.bad_values), frozenset({SettingChange(key)}))


def _split_data(of: Changes, left: dict[str, None]) -> list[str]:
    """Return the data files that are split into rows, and take them out of `left`. A data set that moved to another
    file is the file of the bad commit, with the rows of both."""
    result = []
    good, bad = of.good_values, of.bad_values
    pairs = {path: path for path in run_values.data_paths(good, bad)}
    for key in good.keys() & bad.keys():
        if run_values.data_paths({key: bad[key]}) and good[key] != bad[key]:
            pairs[str(bad[key])] = str(good[key])
    for path, former in sorted(pairs.items()):
        inside = [each for each in left if _is_below(each.removesuffix(POINTER), (path,))]
        for file in dict.fromkeys(each.removesuffix(POINTER) for each in inside):
            before, after = content_at(of.good, former if file == path else file), content_at(of.bad, file)
            split = None if before is None or after is None else row_changes.difference(file, before, after)
            if split is None:
                continue
            if former != path:
                moved = [key for key in good if run_values.data_paths({key: bad.get(key)}) and bad.get(key) == path]
                good.update(dict.fromkeys(moved, path))
            of.files[file] = split
            result.append(file)
            for each in (file, file + POINTER, *((former, former + POINTER) if file == path else ())):
                left.pop(each, None)
    return result


def _code(of: Changes, left: dict[str, None]) -> list[Atom]:
    paths = [path for path in left if _is_below(path, CODE)]
    for path in paths:
        left.pop(path)
    of.commits = commits_between(of.good, of.bad, CODE)
    if not paths:
        of.commits = []
        return []
    if not of.commits:
        return [Atom("code, whose commits are not on one line", frozenset({AllCode()}))]
    parts = tuple(Atom(f"commit {title_of(each)}", frozenset({CommitChange(each)})) for each in of.commits)
    if len(parts) == 1:
        return [*parts]
    every = frozenset[object]().union(*(part.changes for part in parts))
    return [Atom(f"code of {counted(len(parts), 'commit')}", every, parts)]


def _files(name: str, paths: Sequence[str]) -> Atom:
    parts = tuple(Atom(path, frozenset({FileChange(path)})) for path in paths)
    return parts[0] if len(parts) == 1 else Atom(name, frozenset(map(FileChange, paths)), parts)


def _unversioned(named: Iterable[str], tracked: set[str]) -> Iterable[str]:
    """Yield the paths of the user's files that settings name and neither commit has."""
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    for name in named:
        if not name or len(name) > 1000 or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            continue
        path = str(Path(name))
        known = path in tracked or path in folders or path + POINTER in tracked or _is_below(path, GENERATED)
        if not known and path != "." and Path(path).exists():
            yield path


def _outside(*values: Values) -> Iterable[str]:
    """Yield what settings name by an absolute path, but for the machine's folders, and those that the project is in."""
    read = ({key: value for key, value in each.items() if key[0] != "machine"} for each in values)
    for name in run_values.named_files(*read):
        is_path = name.startswith("/") and len(name) <= 1000 and "\0" not in name
        if is_path and Path(name).exists() and not Path().absolute().is_relative_to(name):
            yield name


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)
