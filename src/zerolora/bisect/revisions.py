"""Two commits of a project, and a clone in which probes run, so that nothing in the user's folder changes."""

import configparser
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from zerolora.bisect.run_values import OF_CONFIG
from zerolora.errors import UserError, shown
from zerolora.files import Stamp, sha256, stamp
from zerolora.git_environment import git_environment

POINTER = ".dvc"
"""Ending of DVC's files that stand for data."""
LOCK = "dvc.lock"
NO_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"} | dict.fromkeys(
    ("GIT_CONFIG_GLOBAL", "HOME", "XDG_CONFIG_HOME"), os.devnull
)
"""Variables with which git reads no settings but those of a repository."""
NOTHING: Mapping[str, str] = {}
FICLONE = 0x40049409  # linux/fs.h


def git(*arguments: str, directory: Path = Path(), given: bytes = b"", more: Mapping[str, str] = NOTHING) -> bytes:
    """Return what a command of git prints, without hooks. `more`: of its environment.

    Raises UserError with git's last line if it fails.
    """
    command = ["git", "-c", f"core.hooksPath={os.devnull}", *arguments]
    environment = git_environment() | {**more}
    try:
        done = subprocess.run(command, cwd=directory, env=environment, input=given, capture_output=True, check=False)
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
    output = git("diff-tree", "-r", "--relative", "--name-only", "-z", good, bad, "--", ".")
    return list(filter(None, output.decode().split("\0")))


def commits_between(good: str, bad: str, paths: Sequence[str]) -> list[str]:
    """Return the commits on the first-parent line from good to bad that change some paths, the first one first; none if
    good is not on that line, so that no commits lead from one to the other."""
    line = git("rev-list", "--first-parent", bad).decode().split()
    if good not in line or not paths:
        return []
    known = git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}", "--", *paths).decode().split()
    # Without simplification of history: a commit that is reverted later counts as well.
    return [commit for commit in known if git("diff-tree", "-r", "--name-only", f"{commit}^1", commit, "--", *paths)]


def title_of(commit: str) -> str:
    """Return a commit's short name and subject."""
    return git("log", "-1", "--no-show-signature", "--format=%h %s", commit).decode().strip()


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


def export(commit: str, under: str, folder: Path) -> None:
    """Write the files of a commit below a folder of the project to another one, whatever its attributes keep out of
    archives."""
    inside = [path for path in files_at(commit) if path.startswith(f"{under}/")]
    with tempfile.TemporaryDirectory() as own:
        own_index = {"GIT_INDEX_FILE": str(Path(own, "index"))}
        git("read-tree", commit, more=own_index)
        given = "".join(f"{path}\0" for path in inside).encode()
        git("checkout-index", f"--prefix={own}/", "-z", "--stdin", given=given, more=own_index)
        if inside:
            shutil.move(Path(own, _prefix(), under), folder / under)


class Clone:
    """A clone of the project that borrows the user's objects of git, and DVC's cache."""

    def __init__(self, folder: Path, good: str) -> None:
        """Make the clone in `folder`, unless it is there."""
        self.root = folder.absolute()
        self.project = self.root / _prefix()
        top = Path(git("rev-parse", "--show-toplevel").decode().strip())
        if not self.root.is_dir():
            unfinished = self.root.with_name(f"{self.root.name}.tmp")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a command that was killed
            git("clone", "--quiet", "--shared", "--no-checkout", str(top), str(unfinished))
            git("read-tree", "--reset", "-u", good, directory=unfinished)
            _share_cache(unfinished / _prefix())
            unfinished.rename(self.root)
        self._hashes: dict[Path, tuple[Stamp | None, str]] = {}
        self._pointers: bytes | None = None
        self._compiled: bytes | None = None

    def git(self, *arguments: str, given: bytes = b"", more: Mapping[str, str] = NOTHING) -> bytes:
        """Return what a command of git prints in the clone's project."""
        return git(*arguments, directory=self.project, given=given, more=more)

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
        """Apply a commit's changes of these paths, byte by byte: from object to object, without the user's settings of
        `git apply`. Raises UserError if they conflict with what is there."""
        before = self.git("write-tree").decode().strip()
        with tempfile.TemporaryDirectory() as folder:
            own = NO_SETTINGS | {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            self.git("read-tree", before, more=own)
            options = ("--binary", "--full-index", "--find-renames", "--no-ext-diff", "--no-textconv")
            change = self.git("diff-tree", "-p", *options, f"{commit}^1", commit, "--", *paths, more=own)
            self.git("apply", "--3way", "--cached", "--whitespace=nowarn", "-", given=change, more=own)
            after = self.git("write-tree", more=own).decode().strip()
        git("read-tree", "-m", "-u", before, after, directory=self.root)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files or folders that git tracks, here and from git's index."""
        self.git("rm", "-r", "-f", "--quiet", "--ignore-unmatch", "--", *paths)

    def write(self, path: str, content: bytes) -> None:
        """Write a file in the place of one that may be a link into DVC's cache."""
        file = self.project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(content)

    def tree(self, without: Sequence[str]) -> str:
        """Return the hash of all files that git tracks or would track, without dvc.lock and some files or folders."""
        project = self.project.relative_to(self.root)
        patterns = (re.sub(r"([^\w/])", r"\\\1", (project / path).as_posix()) for path in without)
        (self.root / ".git/info").mkdir(exist_ok=True)
        (self.root / ".git/info/exclude").write_text("".join(f"/{pattern}\n" for pattern in patterns), encoding="utf-8")
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
                env=git_environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                self._pointers = content
                return
        raise UserError(f"dvc pull: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")

    def copy(self, path: str) -> dict[str, str]:
        """Have a file or folder of the user's that is in no commit as it is now, and return its files' SHA-256."""
        hashes = self.hashes(path)
        for former in _files_in(self.project / path):
            if str(former.relative_to(self.project)) not in hashes:
                former.unlink()
        if Path(path).is_dir():
            (self.project / path).mkdir(parents=True, exist_ok=True)
        for file, expected in hashes.items():
            target = self.project / file
            if target.is_dir():
                shutil.rmtree(target)
            if not target.is_file() or self.sha256(target) != expected:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                _copy(Path(file), target)
        return hashes

    def hashes(self, path: str) -> dict[str, str]:
        """Return the SHA-256 of a file of the user's, or of the files in a folder."""
        return {str(file): self.sha256(file) for file in _files_in(Path(path))}

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 of a file, which is read again only if it has changed."""
        now, (then, known) = stamp(file), self._hashes.get(file, (None, ""))
        if now is None or now != then:
            known = sha256(file)
            self._hashes[file] = now, known
        return known


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the files below a folder, of links too."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path, followlinks=True):
        yield from (file for name in names if (file := Path(folder, name)).is_file())


def _copy(source: Path, target: Path) -> None:
    """Copy a file; on a file system that can, both share their blocks until one is written."""
    with source.open("rb") as read, target.open("wb") as written:
        try:
            fcntl.ioctl(written.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, written, 2**20)
    shutil.copystat(source, target)


def _share_cache(project: Path) -> None:
    """Have a clone use the user's cache of DVC, with its results, and the user's own settings of DVC."""
    if not (project / ".dvc/config").is_file():
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
    with (project / ".dvc/config.local").open("w", encoding="utf-8") as written:
        local.write(written)
