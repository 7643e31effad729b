"""Splits and configs that a data set was published with, recognized by the names of its files and by its README.md.

The README.md of a hub data set may say in its `configs` what the names do not (split_names.py).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zerolora.config.schema import Split
from zerolora.data.sources_block import LEFT_OUT, block
from zerolora.data.split_names import split_of
from zerolora.errors import UserError, shown
from zerolora.yaml_file import value_of

LONGEST_README = 1 << 20  # bytes of it that are read; its header stands first
MOST_PATTERNS = 10_000
CONFIGS = re.compile(r"""^["']?configs["']?\s*:""", re.MULTILINE)
FRONT = re.compile(r"\A\ufeff?---\r?\n(.*?)\r?\n---\s*(?:\n|\Z)", re.DOTALL)
Key = TypeVar("Key")


class Published(NamedTuple):
    """The split ("" if unnamed) and config of each file, and the configs in the order of the README.md."""

    splits: dict[Path, str]
    configs: dict[Path, str]
    declared: list[str]


def check_not_pooled(
    root: Path, folder: Path, files: Sequence[Path], split: Split, chosen: str | None = None, named: bool = False
) -> None:
    """Raise UserError, with the `sources` to write, if the files of one source are of several published splits or
    configs, or if they are all held out and its entry of `sources` does not say what they are for.

    root: the data set's path. folder: the part of it that is the source. chosen: the split that its entry names.
    named: the entry is a file or a pattern, not a folder.
    """
    result = published(root, files, folder)
    splits = set(result.splits.values())
    held_out = splits - {"", "train"}
    configs = sorted({result.configs[path] for path in files if result.splits[path] or result.declared})
    several = configs if len(configs) > 1 and not named else []
    if not several and not (held_out and (len(splits) > 1 or not (chosen or named))):
        return
    first = next((name for name in ("default", *result.declared, *several) if name in several), "")
    settings = {
        path: LEFT_OUT if several and result.configs[path] != first else setting_of(result.splits[path])
        for path in files
    }
    used = {result.splits[path] for path in files if settings[path] != LEFT_OUT}
    numbers = ", ".join(f"{name}: {0 if name in used else getattr(split, name)}" for name in ("validation", "test"))
    names = sorted(splits - {""})
    contents = []
    if len(names) > 1 or held_out:
        contents.append(f"the published split{'s' * (len(names) > 1)} {', '.join(names)}")
    contents += [f"the configs {', '.join(several)}"] * bool(several)
    why = "would be pooled" if several or len(splits) > 1 else "would be trained on"
    raise UserError(
        f"{folder}: contains {' and '.join(contents)}, which {why}; write {block(root, settings)} and split: "
        f"{{{numbers}}}{f', which is {first} alone' if several else ''}; an entry without split is divided as split "
        f"says{'; the other entries of sources stay' * (folder != root)}"
    )


def published(root: Path, files: Sequence[Path], folder: Path | None = None) -> Published:
    """Return the splits and configs of files below `root`, by their names there and by what the README.md of `root`
    says, and that of the source's `folder`."""
    splits, configs = {}, {}
    declared = {**_declared(root), **_declared(folder or root)}
    for path in files:
        name, split = declared.get(path) or _named(path.relative_to(root) if path != root else Path(path.name))
        configs[path], splits[path] = name, split
    listed = dict.fromkeys(name for path, (name, _) in declared.items() if path in splits)
    return Published(settled(splits), configs, list(listed))


def settled(splits: Mapping[Key, str]) -> dict[Key, str]:
    """Return splits with another name for eval: `datasets` takes it for test; beside a test split it can only be for
    validation."""
    as_eval = "validation" if "test" in splits.values() else "test"
    return {key: as_eval if split == "eval" else split for key, split in splits.items()}


def _named(path: Path) -> tuple[str, str]:
    """Return the config and split that a file's path names: the split by its last part that names one, the config by
    the folders above all that do."""
    result = [split_of(part) for part in path.parts]
    split = next((each for each in reversed(result) if each), "")
    above = next((number for number, each in enumerate(result) if each), len(result) - 1)
    return "/".join(path.parts[:above]) or ".", split


def setting_of(split: str) -> str:
    """Return what the entry in `sources` of files of a split says."""
    return f"split: {split}" if split in ("validation", "test") else ""


def _declared(folder: Path) -> Mapping[Path, tuple[str, str]]:
    """Return the config and split of the files that the folder's README.md lists; a file of two configs is listed by
    its first."""
    result: dict[Path, tuple[str, str]] = {}
    for config in _configs_of(folder / "README.md"):
        if not isinstance(config, dict):
            continue
        name, entries, inside = str(config.get("config_name", "default")), config.get("data_files"), folder
        if directory := config.get("data_dir"):
            inside = next(iter(_globbed(folder, directory)), folder)
            for path in _matching(folder, directory) if entries is None else ():
                result.setdefault(path, (name, _named(path.relative_to(folder))[1]))  # the files' names say the splits
        for entry in entries if isinstance(entries, list) else [entries]:
            split, patterns = "train", entry
            if isinstance(entry, dict):
                split, patterns = split_of(str(entry.get("split", "train"))), entry.get("path")
            for pattern in patterns if isinstance(patterns, list) else [patterns]:
                for path in _matching(inside, pattern):
                    result.setdefault(path, (name, split))
    return result


def _configs_of(readme: Path) -> list[Any]:
    """Return `configs` of a README.md's front matter; empty if it has none.

    Raises UserError if they cannot be read, since files that they hold out would be trained on, or if they list more
    than MOST_PATTERNS patterns, each of which is a look at the folder.
    """
    if not readme.is_file():
        return []
    with readme.open("rb") as file:
        text = file.read(LONGEST_README).decode(errors="surrogateescape")
    front = FRONT.match(text)
    header = front[1] if front else text if len(text) >= LONGEST_README and text.startswith("---") else ""
    try:
        configs = value_of(header, "configs")
        if configs is not None and not isinstance(configs, list):
            raise UserError(f"has configs: {shown(configs)}, which is not a list")
    except (ValueError, UserError) as error:
        if not CONFIGS.search(header):
            return []
        raise UserError(
            f"{readme}: its header {error}, and its configs may name files of other splits; correct it, or remove "
            "configs from it"
        ) from None
    if configs is None:
        return []
    if sum(map(_patterns, configs)) > MOST_PATTERNS:
        raise UserError(f"{readme}: its `configs` list more than {MOST_PATTERNS:,} patterns of files; list fewer")
    return configs


def _patterns(config: Any) -> int:
    """Return how many patterns a config of a README.md lists."""
    entries = config.get("data_files") if isinstance(config, dict) else None
    paths = [each.get("path") if isinstance(each, dict) else each for each in _listed(entries)]
    return sum(len(_listed(each)) for each in paths)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matching(folder: Path, pattern: Any) -> list[Path]:
    result = _globbed(folder, pattern)
    return sorted(inner for path in result for inner in ([path] if path.is_file() else path.rglob("*")))


def _globbed(folder: Path, pattern: Any) -> list[Path]:
    if not isinstance(pattern, str) or not pattern or ".." in pattern or pattern.startswith("/"):
        return []
    try:
        return list(folder.glob(pattern))
    except (ValueError, NotImplementedError, OSError):
        return []
