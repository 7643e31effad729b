"""Splits and configs that a data set was published with, recognized by the names of its files and by its README.md.

The names are those of the Hugging Face hub (`datasets`, data_files.py), and usual ones beside: a word of KEYWORDS in a
file's or folder's name, between characters that are no letters or in testData. The README.md of a hub data set may say
the same in its `configs`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.file import value_of
from zerolora.config.schema import Split
from zerolora.data.sources_block import LEFT_OUT, block
from zerolora.errors import UserError
from zerolora.json_file import read_bytes

KEYWORDS = {
    **dict.fromkeys(("train", "training", "trainset", "trn"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "validset", "valset", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "tst"), "test"),
    **dict.fromkeys(
        ("eval", "evaluation", "evalset", "heldout", "held_out", "held-out", "holdout", "hold-out"), "eval"
    ),
}
HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(sorted(KEYWORDS, key=len, reverse=True))})(?![^\W\d_])", re.IGNORECASE)
LONGEST_README = 1 << 20  # characters
MOST_PATTERNS = 10_000
FRONT = re.compile(r"\A\ufeff?---\r?\n(.*?)\r?\n---\s*(?:\n|\Z)", re.DOTALL)


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
    found = published(folder, files)
    splits = set(found.splits.values())
    held_out = splits - {"", "train"}
    configs = sorted({found.configs[path] for path in files if found.splits[path] or found.declared})
    several = configs if len(configs) > 1 and not named else []
    if not several and not (held_out and (len(splits) > 1 or not (chosen or named))):
        return
    first = next((name for name in ("default", *found.declared, *several) if name in several), "")
    settings = {
        path: LEFT_OUT if several and found.configs[path] != first else _settings(found.splits[path]) for path in files
    }
    used = {found.splits[path] for path in files if settings[path] != LEFT_OUT}
    numbers = ", ".join(f"{name}: {0 if name in used else getattr(split, name)}" for name in ("validation", "test"))
    names = sorted(splits - {""})
    holds = [f"the published splits {', '.join(names)}"] * (len(names) > 1)
    holds += [f"the published split {names[0]}"] * (len(names) == 1 and bool(held_out))
    holds += [f"the configs {', '.join(several)}"] * bool(several)
    why = "would be pooled" if several or len(splits) > 1 else "would be trained on"
    raise UserError(
        f"{folder}: holds {' and '.join(holds)}, which {why}; write {block(root, settings)} and split: {{{numbers}}}"
        f"{f', which is {first} alone' if several else ''}; an entry without split is divided as split says"
    )


def published(folder: Path, files: Sequence[Path]) -> Published:
    """Return the splits and configs of the files of a folder."""
    splits, configs = {}, {}
    declared = _declared(folder)
    for path in files:
        name, split = declared.get(path) or _named(path.relative_to(folder) if path != folder else Path(path.name))
        configs[path], splits[path] = name, split
    # `datasets` takes eval for test; beside a test split it can only be for validation.
    as_eval = "validation" if "test" in splits.values() else "test"
    splits = {path: as_eval if split == "eval" else split for path, split in splits.items()}
    return Published(splits, configs, list(dict.fromkeys(name for name, _ in declared.values())))


def _named(path: Path) -> tuple[str, str]:
    """Return the config and split that a file's path names: the split by its last part that names one, the config by
    the folders above all that do."""
    found = [_split_of(part) for part in path.parts]
    split = next((each for each in reversed(found) if each), "")
    above = next((number for number, each in enumerate(found) if each), len(found) - 1)
    return "/".join(path.parts[:above]) or ".", split


def _split_of(name: str) -> str:
    """Return the split that a name contains; "" if none, or more than one."""
    splits = {KEYWORDS[word.lower()] for word in WORD.findall(HUMP.sub("_", name))}
    return splits.pop() if len(splits) == 1 else ""


def _settings(split: str) -> str:
    return f"split: {split}" if split in ("validation", "test") else ""


def _declared(folder: Path) -> Mapping[Path, tuple[str, str]]:
    """Return the config and split of the files that the folder's README.md lists; a file of two configs is listed by
    its first."""
    result: dict[Path, tuple[str, str]] = {}
    for config in _configs_of(folder / "README.md"):
        if not isinstance(config, dict):
            continue
        name, entries = str(config.get("config_name", "default")), config.get("data_files")
        for entry in entries if isinstance(entries, list) else [entries]:
            split, patterns = "train", entry
            if isinstance(entry, dict):
                split, patterns = _split_of(str(entry.get("split", "train"))), entry.get("path")
            for pattern in patterns if isinstance(patterns, list) else [patterns]:
                for path in _matching(folder, pattern):
                    result.setdefault(path, (name, split))
    return result


def _configs_of(readme: Path) -> list[Any]:
    """Return `configs` of a README.md's front matter; empty if there is none that can be read.

    Raises UserError if they list more than MOST_PATTERNS patterns, each of which is a look at the folder.
    """
    try:
        front = FRONT.match(read_bytes(readme).decode()[:LONGEST_README]) if readme.is_file() else None
        configs = value_of(front[1], "configs") if front else None
    except (OSError, ValueError, UserError):
        return []
    if not isinstance(configs, list):
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
    if not isinstance(pattern, str) or not pattern or ".." in pattern or pattern.startswith("/"):
        return []
    try:
        found = list(folder.glob(pattern))
    except (ValueError, NotImplementedError, OSError):
        return []
    return sorted(inner for path in found for inner in ([path] if path.is_file() else path.rglob("*")))
