"""The rows that a user names: a file, a directory, or a data set of the Hugging Face Hub."""

import glob
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.config.shorthands import slug
from zerolora.config.values import HUB_DATA, RESERVED_RUNS
from zerolora.data import DATA_FILE, ENDINGS
from zerolora.data.published import Division, division
from zerolora.data.readers import NO_DATA, entries_of_saved, files_of
from zerolora.errors import UserError, shown
from zerolora.fetch.hub_client import explained_errors
from zerolora.first_config.given_model import REPOSITORY, license_of
from zerolora.units import byte_size, counted

README = "README.md"


class GivenData(NamedTuple):
    """Rows for the config.

    name: of the data set and its run. text: as the user wrote it. path: of `prepare`. files: their path now.
    sources: of `prepare`; empty for a single one. entry: of `fetch.data`, None for files of this machine. said: lines
    for the user.
    """

    name: str
    text: str
    path: str
    files: Path
    sources: dict[str, dict[str, str]]
    entry: dict[str, Any] | None = None
    said: tuple[str, ...] = ()

    @property
    def published(self) -> set[str]:
        """The splits that sources are."""
        return {entry["split"] for entry in self.sources.values() if "split" in entry}


def given_data(text: str, into: Path) -> GivenData:
    """Return the rows of a file, a directory or NAME[@REVISION].

    Of a repository the commit and the licence are looked up, and the data files downloaded to the client's cache, from
    where the stage `fetch_data` copies them, and linked in `into`. Published splits become sources. Raises UserError if
    there are no such rows, if nothing is left to train on, or if they cannot be looked up.
    """
    path, match = Path(text), REPOSITORY.fullmatch(text)
    if path.exists():
        name = slug(path.stem, "rows", RESERVED_RUNS)
        saved, others = entries_of_saved(path)
        if saved:
            return GivenData(name, text, text, path, _sources(text, saved), said=_said(saved, left_out=others))
        divided = division(path, path, files_of(path), named=path.is_file())
        entries = divided.entries(path) if divided else []
        return GivenData(name, text, text, path, _sources(text, entries), said=_said(entries, divided))
    if not match or DATA_FILE.fullmatch(text):
        raise UserError(
            f"--data {shown(text)}: there is no such file or directory, and it is no name on the hub, as in "
            "tatsu-lab/alpaca; correct it"
        )
    repository, revision = match.groups()
    return _of_hub(text, repository, revision, into)


def _of_hub(text: str, repository: str, revision: str | None, into: Path) -> GivenData:
    from huggingface_hub import HfApi, snapshot_download

    name = f"data set {repository}" + (f" at {revision}" if revision else "")
    with explained_errors(name, "data set"):
        about: Any = HfApi().dataset_info(repository, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in about.siblings or ()}
        header = snapshot_download(repository, repo_type="dataset", revision=about.sha, allow_patterns=README)
    listed = sorted(path for path in sizes if _readable(path))
    if not listed:
        raise UserError(f"{name}: has no data file ({ENDINGS}); choose a data set with some, or download it yourself")
    # The names alone, to read the splits from them and from the README.md before anything is downloaded.
    names = into / "names.only"
    for path in listed:
        (names / path).parent.mkdir(parents=True, exist_ok=True)
        (names / path).touch()
    if README in sizes:
        (names / README).write_bytes((Path(header) / README).read_bytes())
    try:
        divided = division(names, names, files_of(names))
    except UserError as error:
        raise UserError(str(error).replace(str(names), name)) from None
    entries = divided.entries(names) if divided else []
    sources = _sources(text, entries)
    wanted = [path for path in listed if not divided or _used(path, sources)]
    own = slug(repository.partition("/")[2], "rows", RESERVED_RUNS)
    files, patterns = into / own, _patterns(wanted, [*sizes])
    with explained_errors(name, "data set"):
        local = Path(snapshot_download(repository, repo_type="dataset", revision=about.sha, allow_patterns=patterns))
    for path in wanted:
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        (files / path).symlink_to((local / path).resolve())
    entry = {
        "repository": repository, "revision": about.sha, "license": license_of(about.card_data),
        "files": patterns,
    }  # fmt: skip
    size = byte_size(sum(sizes[path] for path in wanted))
    said = (f"fetched {repository} at {about.sha}: {counted(len(wanted), 'file')}, {size}", *_said(entries, divided))
    return GivenData(own, text, f"{HUB_DATA}/{own}", files, sources, entry, said)


def _readable(path: str) -> bool:
    """Return whether `fetch_data` downloads a file and `prepare` reads it."""
    parts = path.split("/")
    return bool(DATA_FILE.fullmatch(parts[-1])) and all(parts) and not any(NO_DATA.fullmatch(part) for part in parts)


def _used(path: str, sources: Iterable[str]) -> bool:
    """Return whether an entry of `sources` is the file, a folder around it, or a pattern that matches it."""
    return any(path == name or path.startswith(f"{name}/") or fnmatchcase(path, name) for name in sources)


def _patterns(wanted: list[str], listed: list[str]) -> list[str]:
    """Return short patterns that match these files and no other of the repository."""
    result: dict[str, None] = {}
    for path in wanted:
        folder, slash, name = path.rpartition("/")
        alike = glob.escape(folder) + slash + re.sub(r"\d+", "*", glob.escape(name))
        for pattern in (f"{glob.escape(folder)}/*" if folder else "*", alike, glob.escape(path)):
            matching = [each for each in listed if fnmatchcase(each, pattern)]
            if {*matching} <= {*wanted}:
                result[pattern if len(matching) > 1 else glob.escape(path)] = None
                break
    return [*result]


def _sources(text: str, entries: list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Return `sources` of names and settings. Raises UserError if none of them is trained on."""
    result: dict[str, dict[str, str]] = {name: yaml.safe_load(f"{{{setting}}}") for name, setting in entries}
    if result and all("split" in entry for entry in result.values()):
        splits = "splits" if len(result) > 1 else "split"
        raise UserError(
            f"--data {text}: has the published {splits} {', '.join(result)} alone, so nothing is "
            "left to train on; name a file of it to train on that"
        )
    return result


def _said(
    entries: list[tuple[str, str]], divided: Division | None = None, left_out: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return lines about published splits and configs. left_out: the names of splits that are not used."""
    lines = []
    if divided and divided.configs:
        others = ", ".join(name for name in divided.configs if name != divided.chosen)
        lines.append(f"configs {divided.chosen} is used; not used: {others}")
    if held_out := [f"{name} is {setting.removeprefix('split: ')}" for name, setting in entries if setting]:
        trained = ", ".join(name for name, setting in entries if not setting)
        lines.append(f"splits  as published: {'; '.join(held_out)}; trained on: {trained}")
    if left_out := divided.left_out if divided else left_out:
        lines.append(f"splits  {', '.join(name for name, _ in entries)}; not used: {', '.join(left_out)}")
    return tuple(lines)
