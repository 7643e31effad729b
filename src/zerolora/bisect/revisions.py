"""Two commits of a project, and a clone in which probes run, so that nothing in the user's folder changes."""

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zerolora.bisect.run_values import OF_CONFIG
from zerolora.errors import UserError, shown

POINTER = ".dvc"
"""Ending of DVC's files that stand for data."""
LOCK = "dvc.lock"
GIT = (
    *("git", "-c", "color.ui=false", "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
)
"""git without the settings of a user that change what it prints, and without hooks."""
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables that name another repository than that of the directory, as in a hook of git."""


def git(*arguments: str, directory: Path = Path(), given: bytes = b"") -> bytes:
    """Return what a command of git prints. Raises UserError with git's last line if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    try:
        done = subprocess.run(
            [*GIT, *arguments], cwd=directory, env=environment, input=given, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError("git: there is no such command; install git, by which two revisions are compared") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"git {arguments[0]}: {lines[-1].removeprefix('fatal: ')}")
    return done.stdout


def commit_of(revision: str) -> str:
    """Return the commit of a revision. Raises UserError if git does not know it."""
    git("rev-parse", "--git-dir")
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    except UserError:
        text = f"{shown(revision)} is no revision that git knows here; `git log --oneline` lists them"
        raise UserError(text) from None


def uncommitted() -> list[str]:
    """Return the tracked files with changes that are in no commit."""
    output = git("diff", "--relative", "--no-renames", "--name-only", "-z", "HEAD", "--", ".")
    return list(filter(None, output.decode().split("\0")))


def files_at(commit: str) -> set[str]:
    """Return the files of a commit, relative to this directory."""
    return set(filter(None, git("ls-tree", "-r", "-z", "--name-only", commit, "--", ".").decode().split("\0")))


def changed_files(good: str, bad: str) -> list[str]:
    """Return the files that differ, in order."""
    output = git("diff", "--relative", "--no-renames", "--name-only", "-z", good, bad, "--", ".")
    return list(filter(None, output.decode().split("\0")))


def commits_between(good: str, bad: str, paths: Sequence[str]) -> list[str]:
    """Return the commits on the first-parent line from good to bad that change some paths, the first one first; none if
    good is not on that line, so that no commits lead from one to the other."""
    line = git("rev-list", "--first-parent", bad).decode().split()
    if good not in line or not paths:
        return []
    known = git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}", "--", *paths).decode().split()
    # Without simplification of history: a commit that is reverted later counts as well.
    return [commit for commit in known if git("diff", "--name-only", f"{commit}^1", commit, "--", *paths)]


def title_of(commit: str) -> str:
    """Return a commit's short name and subject."""
    return git("log", "-1", "--format=%h %s", commit).decode().strip()


def content_at(commit: str, path: str) -> bytes | None:
    """Return a file of a commit, from git or from DVC's cache or remote; None if it has none, or a directory."""
    files = files_at(commit)
    if path in files:
        return git("show", f"{commit}:./{path}")
    if path + POINTER not in files:
        return None
    from dvc.api import read
    from dvc.exceptions import DvcException

    try:
        # Of a revision, DVC takes paths from git's root.
        return bytes(read(_prefix() + path, repo=".", rev=commit, mode="rb"))
    except (DvcException, OSError) as error:
        raise UserError(f"{path} at {commit[:8]}: {' '.join(str(error).split())}; bring it with `dvc pull`") from None


def _prefix() -> str:
    """Return the path of this directory from git's root, with a slash at its end; empty if it is the root."""
    return git("rev-parse", "--show-prefix").decode().removesuffix("\n")


class Clone:
    """A clone of the project that borrows the user's objects of git, and DVC's cache."""

    def __init__(self, folder: Path, good: str) -> None:
        """Make the clone in `folder`, unless it is there."""
        self.root = folder.absolute()
        self.project = self.root / _prefix()
        top = Path(git("rev-parse", "--show-toplevel").decode().strip())
        if not (self.root / ".git").is_dir():
            shutil.rmtree(self.root, ignore_errors=True)
            git("clone", "--quiet", "--shared", "--no-checkout", str(top), str(self.root))
            git("read-tree", "--reset", "-u", good, directory=self.root)
            self._share_cache()
        self._pointers: bytes | None = None
        self._compiled: bytes | None = None

    def git(self, *arguments: str, given: bytes = b"") -> bytes:
        """Return what a command of git prints in the clone's project."""
        return git(*arguments, directory=self.project, given=given)

    def reset(self, commit: str) -> None:
        """Have exactly the files of a commit, except for dvc.lock, which goes with the results that are there."""
        lock = self.project / LOCK
        kept = lock.read_bytes() if lock.exists() else None
        git("read-tree", "--reset", "-u", commit, directory=self.root)
        self.put_lock(kept)
        self.remove(OF_CONFIG)
        for path in (self.project / each for each in OF_CONFIG if not Path(each).suffix):
            path.mkdir(parents=True, exist_ok=True)  # DVC wants it there

    def put_lock(self, content: bytes | None) -> None:
        """Write dvc.lock."""
        if content is not None:
            self.write(LOCK, content)

    def take(self, commit: str, paths: Sequence[str]) -> None:
        """Have these files or folders as a commit has them; those that it lacks are removed."""
        if not paths:
            return
        self.remove(paths)
        there = self.git("ls-tree", "--name-only", "-z", commit, "--", *paths).decode().split("\0")
        if there := [path for path in there if path]:
            self.git("checkout", commit, "--", *there)

    def apply(self, commit: str, paths: Sequence[str]) -> None:
        """Apply a commit's changes of these paths. Raises UserError if they conflict with what is there."""
        change = git(
            "diff", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", f"{commit}^1", commit, "--", *paths
        )
        self.git("apply", "--3way", "--index", "-", given=change)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files or folders that git tracks, here and from git's index."""
        self.git("rm", "-r", "-f", "--quiet", "--ignore-unmatch", "--", *paths)

    def write(self, path: str, content: bytes) -> None:
        """Write a file in the place of one that may be a link into DVC's cache."""
        file = self.project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(content)

    def tree(self) -> str:
        """Return the hash of all files that git tracks or would track, without dvc.lock."""
        self.git("add", "--all", "--", ".")
        self.git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", LOCK)
        return self.git("write-tree").decode().strip()

    def forget_compiled(self, folders: Sequence[str]) -> None:
        """Remove what Python has compiled of these folders, if their files have changed since this was called. Python
        goes by a file's size and second, which two versions that are written within a second may share."""
        now = self.git("ls-files", "--stage", "--", *folders)
        if now == self._compiled:
            return
        for folder in folders:
            for file in (self.project / folder).rglob("*.pyc"):
                file.unlink()
        self._compiled = now

    def bring_data(self, needed: Callable[[str], bool]) -> None:
        """Bring the data that DVC's pointers stand for, where it is needed and they have changed."""
        tracked = self.git("ls-files", "-z", "--", f"*{POINTER}").decode().split("\0")
        pointers = [path for path in tracked if path and needed(path.removesuffix(POINTER))]
        content = b"\0".join((self.project / path).read_bytes() for path in pointers)
        if not pointers or content == self._pointers:
            return
        for command in (("checkout", "--force"), ("pull", "--force")):
            done = subprocess.run(
                [sys.executable, "-m", "dvc", command[0], "--quiet", *command[1:], *pointers],
                cwd=self.project,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                self._pointers = content
                return
        raise UserError(f"dvc pull: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")

    def copy(self, path: str) -> None:
        """Copy a file or folder of the user's that is in no commit; files as hard links where the disk can."""
        target = self.project / path
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            shutil.copytree(path, target, copy_function=_linked)
        else:
            _linked(path, str(target))

    def _share_cache(self) -> None:
        """Use the user's cache of DVC, with its results, and the user's own settings of DVC."""
        if not (self.project / ".dvc/config").is_file():
            return
        local, every = configparser.RawConfigParser(), configparser.RawConfigParser()
        for file in (Path(".dvc/config"), Path(".dvc/config.local")):
            if file.is_file():
                # Indented, as DVC writes them, options would continue the line above.
                text = "\n".join(line.strip() for line in file.read_text(encoding="utf-8").splitlines())
                every.read_string(text)
                if file.name == "config.local":
                    local.read_string(text)
        cache = Path(every.get("cache", "dir", fallback="cache").strip("'\""))
        local.remove_option("core", "site_cache_dir") if local.has_section("core") else None
        if not local.has_section("cache"):
            local.add_section("cache")
        local.set("cache", "dir", os.path.normpath(Path(".dvc").absolute() / cache))
        with (self.project / ".dvc/config.local").open("w", encoding="utf-8") as written:
            local.write(written)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
