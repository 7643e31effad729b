"""Splits and configs that a data set was published with, and the `sources` block that keeps them apart.

File and folder names contain the split; the README.md of a hub data set may list `configs` that the names do not show.
Names that say the same split, as train_sft and train_1M, are different splits, which may share rows.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from zerolora.config.schema import Split
from zerolora.data import DATA_FILE
from zerolora.errors import UserError, shown
from zerolora.yaml_file import value_of

# The keywords of `datasets` (data_files.py), and other common ones.
KEYWORDS = {
    **dict.fromkeys(("train", "training", "trainset", "trn"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "validset", "valset", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "tst", "devtest", "testdev"), "test"),
    **dict.fromkeys(
        ("eval", "evaluation", "evalset", "heldout", "held_out", "held-out", "holdout", "hold-out"), "eval"
    ),
}
HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
# A keyword between characters that are not letters.
WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(sorted(KEYWORDS, key=len, reverse=True))})(?![^\W\d_])", re.IGNORECASE)
LONGEST_README = 1 << 20  # bytes that are read; the header is at the top
MOST_PATTERNS = 10_000
CONFIGS = re.compile(r"""^["']?configs["']?\s*:""", re.MULTILINE)
FRONT = re.compile(r"\A\ufeff?---\r?\n(.*?)\r?\n---\s*(?:\n|\Z)", re.DOTALL)
SHOWN = 20  # sources in a message
LEFT_OUT = "left out"
# The numbers of shards in a name, as in train-00000-of-00002-0123456789abcdef, train_1 and train.part3; 1M and v2 are
# none.
SHARDS = re.compile(r"[-_. ]*\d+-of-\d+([-_][0-9a-f]{8,})?$")
SHARD = re.compile(r"[-_. ]*((?<![^\W\d_])(part|shard|chunk)[-_. ]*\d+|(?<![^\W_])\d+)(?![^\W_])", re.IGNORECASE)
PLAIN_NAME = "*"
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
Key = TypeVar("Key")


class Published(NamedTuple):
    """The split ("" if unnamed), config and name of the split of each file, and the configs in the order of the
    README.md."""

    splits: dict[Path, str]
    configs: dict[Path, str]
    names: dict[Path, str]
    declared: list[str]


def split_of(name: str) -> str:
    """Return the split that a file, folder or split name contains; "" if none, or more than one."""
    splits = {KEYWORDS[word.lower()] for word in WORD.findall(HUMP.sub("_", name))}
    return splits.pop() if len(splits) == 1 else ""


def variant_of(name: str) -> str:
    """Return a split's name with * for its keyword and without the numbers of shards: * of train-00000-of-00002, *_1m
    of train_1M."""
    marked = SHARDS.sub("", WORD.sub(PLAIN_NAME, HUMP.sub("_", name)).lower())
    return SHARD.sub("", marked)


def others_of(names: Mapping[Key, tuple[str, str]]) -> list[Key]:
    """Return the keys to leave out so that each split has one name, from each key's split and the name of it.

    All splits keep the name that train keeps, as in train_sft and test_sft, or else the keyword alone, or else their
    first name.
    """
    variants: dict[str, dict[str, None]] = {}
    for split, name in names.values():
        variants.setdefault(split, {})[variant_of(name)] = None
    wanted = PLAIN_NAME
    chosen = {}
    for split in sorted(variants, key=lambda split: split != "train"):
        of_split = variants[split]
        chosen[split] = next((each for each in (wanted, PLAIN_NAME) if each in of_split), next(iter(of_split)))
        wanted = chosen[split] if split == "train" else wanted
    return [key for key, (split, name) in names.items() if split and variant_of(name) != chosen[split]]


class Division(NamedTuple):
    """How files of several published splits or configs are divided into sources.

    splits: the published splits. configs: those that would be pooled; empty if there is one. chosen: the one of them
    that is used. names: the names of splits that would be pooled under one; empty if each split has one. left_out:
    those of them that are not used. settings: of each file in `sources`. used: the splits of the files that are used.
    """

    splits: set[str]
    configs: list[str]
    chosen: str
    names: list[str]
    left_out: list[str]
    settings: dict[Path, str]
    used: set[str]

    def entries(self, root: Path) -> list[tuple[str, str]]:
        """Return the names and settings of `sources`."""
        return _entries(root, root, self.settings)


def division(
    root: Path, folder: Path, files: Sequence[Path], chosen: str | None = None, named: bool = False
) -> Division | None:
    """Return how to divide the files of a source that would pool several published splits or configs, or train on
    held-out files; None if it would not. The parameters are those of check_not_pooled."""
    result = published(root, files, folder)
    splits = set(result.splits.values())
    held_out = splits - {"", "train"}
    configs = sorted({result.configs[path] for path in files if result.splits[path] or result.declared})
    several = configs if len(configs) > 1 and not named else []
    first = next((name for name in ("default", *result.declared, *several) if name in several), "")
    taken = [path for path in files if not several or result.configs[path] == first]
    others = _other_names(result, taken)
    if not several and not others and not (held_out and (len(splits) > 1 or not (chosen or named))):
        return None
    settings = {path: setting_of(result.splits[path]) for path in files}
    settings |= dict.fromkeys([*({*files} - {*taken}), *others], LEFT_OUT)
    used = {result.splits[path] for path in files if settings[path] != LEFT_OUT}
    left_out = sorted({result.names[path] for path in others})
    alike = {(result.configs[path], result.splits[path]) for path in others}
    names = sorted({result.names[path] for path in taken if (result.configs[path], result.splits[path]) in alike})
    return Division(splits, several, first, names, left_out, settings, used)


def _other_names(result: Published, files: Sequence[Path]) -> list[Path]:
    """Return the files to leave out so that each split of a config has one name."""
    return [
        path
        for config in dict.fromkeys(result.configs[path] for path in files)
        for path in others_of(
            {path: (result.splits[path], result.names[path]) for path in files if result.configs[path] == config}
        )
    ]


def check_not_pooled(
    root: Path, folder: Path, files: Sequence[Path], split: Split, chosen: str | None = None, named: bool = False
) -> None:
    """Raise UserError, with the `sources` to set, if one source would pool several published splits or configs, or
    train on held-out files.

    root: the data set's path. folder: the source's part of it. chosen: the split in the entry of `sources`. named: the
    entry is a file or a pattern, not a folder.
    """
    result = division(root, folder, files, chosen, named)
    if result is None:
        return
    numbers = ", ".join(
        f"{name}: {0 if name in result.used else getattr(split, name)}" for name in ("validation", "test")
    )
    names = sorted(result.splits - {""})
    without = f", without {', '.join(result.left_out)}" if result.left_out else ""
    contents = []
    if len(names) > 1 or result.splits - {"", "train"}:
        contents.append(f"the published {'splits' if len(names) > 1 else 'split'} {', '.join(names)}")
    if result.configs:
        contents.append(f"the configs {', '.join(result.configs)}")
    if result.names:
        contents.append(f"{', '.join(result.names)}, which are different splits")
    why = "would be pooled" if result.configs or result.names or len(result.splits) > 1 else "would be trained on"
    raise UserError(
        f"{folder}: contains {' and '.join(contents)}, which {why}; set {sources_block(root, result.settings)} and "
        f"split: {{{numbers}}}{f', which is {result.chosen} alone' if result.configs else ''}"
        f"{without}; an entry without split "
        f"is divided by prepare's split{'; the other entries of sources stay' if folder != root else ''}"
    )


def published(root: Path, files: Sequence[Path], folder: Path | None = None) -> Published:
    """Return the splits and configs of files below `root`, from their names and the README.md of `root` and `folder`,
    the source's own."""
    splits, configs, names = {}, {}, {}
    declared = {**_declared(root), **_declared(folder or root)}
    for path in files:
        inside = path.relative_to(root) if path != root else Path(path.name)
        configs[path], splits[path], names[path] = declared.get(path) or _named(inside)
    listed = dict.fromkeys(config for path, (config, *_) in declared.items() if path in splits)
    return Published(settled(splits), configs, names, list(listed))


def settled(splits: Mapping[Key, str]) -> dict[Key, str]:
    """Return splits with eval replaced: by test, as in `datasets`, or by validation if there is a test split."""
    as_eval = "validation" if "test" in splits.values() else "test"
    return {key: as_eval if split == "eval" else split for key, split in splits.items()}


def setting_of(split: str) -> str:
    """Return the setting of a split's files in `sources`."""
    return f"split: {split}" if split in ("validation", "test") else ""


def sources_block(root: Path, settings: Mapping[Path, str]) -> str:
    """Return `sources: {...}` for the files of `root`, with the settings of each, as in "split: test".

    Files with the same settings are joined to their folder or, if their names differ in numbers only, to a pattern.
    Those with the settings LEFT_OUT are skipped.
    """
    return of_entries(_entries(root, root, settings))


def of_entries(entries: Sequence[tuple[str, str]]) -> str:
    """Return `sources: {...}` of entries: names and settings. A name that YAML would not read as text is quoted."""
    block = [
        f"{name if PLAIN.fullmatch(name) and yaml.safe_load(name) == name else json.dumps(name, ensure_ascii=False)}: "
        f"{{{setting}}}"
        for name, setting in entries[:SHOWN]
    ]
    if len(entries) > SHOWN:
        block.append("...")
    return f"sources: {{{', '.join(block)}}}"


def _entries(root: Path, folder: Path, settings: Mapping[Path, str]) -> list[tuple[str, str]]:
    inside = {path: value for path, value in settings.items() if path.is_relative_to(folder)}
    values = set(inside.values())
    if values == {LEFT_OUT}:
        return []
    if folder != root and len(values) == 1:
        return [(folder.relative_to(root).as_posix(), values.pop())]
    result: list[tuple[str, str]] = []
    for child in sorted({folder / path.relative_to(folder).parts[0] for path in inside}):
        if child not in inside:
            result += _entries(root, child, inside)
            continue
        if inside[child] == LEFT_OUT:
            continue
        pattern = re.sub(r"\d+", "*", child.name)
        beside = [path for path in inside if path.parent == folder and fnmatchcase(path.name, pattern)]
        alike = len(beside) > 1 and {inside[path] for path in beside} == {inside[child]}
        entry = ((folder / pattern if alike else child).relative_to(root).as_posix(), inside[child])
        result += [entry] * (entry not in result)
    return result


def _named(path: Path) -> tuple[str, str, str]:
    """Return the config, the split and the split's name in a file's path: the folders above the first part that
    contains a split, the last split, and the last part with more than its keyword, or else the last."""
    splits = [split_of(part) for part in path.parts]
    split = next((each for each in reversed(splits) if each), "")
    above = next((number for number, each in enumerate(splits) if each), len(splits) - 1)
    bare = [_without_ending(part) for part, each in zip(path.parts, splits, strict=True) if each]
    longer = [part for part in bare if variant_of(part) != PLAIN_NAME]
    return "/".join(path.parts[:above]) or ".", split, (longer or bare or [""])[-1]


def _without_ending(name: str) -> str:
    """Return a data file's name without its ending and the numbers of its shard."""
    match = DATA_FILE.fullmatch(name)
    return SHARD.sub("", SHARDS.sub("", name[: match.start(1) - 1] if match else name))


def _declared(folder: Path) -> Mapping[Path, tuple[str, str, str]]:
    """Return the config, the split and the split's name of the files that a folder's README.md lists; the first config
    of a file counts."""
    result: dict[Path, tuple[str, str, str]] = {}
    for config in _configs_of(folder / "README.md"):
        if not isinstance(config, dict):
            continue
        name, inside = str(config.get("config_name", "default")), folder
        if directory := config.get("data_dir"):
            inside = next(iter(_globbed(folder, directory)), folder)
            for path in _matching(folder, directory) if config.get("data_files") is None else ():
                result.setdefault(path, (name, *_named(path.relative_to(folder))[1:]))
        for split, pattern in _patterns(config):
            for path in _matching(inside, pattern):
                result.setdefault(path, (name, split_of(split), split))
    return result


def _configs_of(readme: Path) -> list[Any]:
    """Return `configs` of a README.md's front matter; empty if it has none.

    Raises UserError if they cannot be read, since files that they hold out would be trained on, or if they list more
    than MOST_PATTERNS patterns, each of which reads the folder.
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
    if sum(1 for config in configs or () for _ in _patterns(config)) > MOST_PATTERNS:
        raise UserError(f"{readme}: its `configs` list more than {MOST_PATTERNS:,} patterns of files; list fewer")
    return configs or []


def _patterns(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of the split and the file pattern of each entry of a README.md's config."""
    for entry in _listed(config.get("data_files") if isinstance(config, dict) else None):
        split, patterns = "train", entry
        if isinstance(entry, dict):
            split, patterns = str(entry.get("split", "train")), entry.get("path")
        for pattern in _listed(patterns):
            yield split, pattern


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matching(folder: Path, pattern: Any) -> list[Path]:
    return sorted(
        inner for path in _globbed(folder, pattern) for inner in ([path] if path.is_file() else path.rglob("*"))
    )


def _globbed(folder: Path, pattern: Any) -> list[Path]:
    if not isinstance(pattern, str) or not pattern or ".." in pattern or pattern.startswith("/"):
        return []
    try:
        return list(folder.glob(pattern))
    except (ValueError, NotImplementedError, OSError):
        return []
