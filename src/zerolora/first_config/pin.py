"""Writes commits of the Hugging Face Hub into a config, for branches, tags and names without a revision.

The file's text is edited where a value stands, so that comments and layout stay. What is pinned already stays as it is.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.config.file import publish, read_values
from zerolora.config.shorthands import PINNED
from zerolora.config.values import UNKNOWN_LICENSE
from zerolora.errors import UserError, printable
from zerolora.fetch.hub_client import explained_errors
from zerolora.first_config.given_model import REPOSITORY
from zerolora.yaml_file import composed

COMMIT = re.compile(r"[0-9a-f]{40}")
KINDS = {"hub": "model", "adapter": "adapter", "data": "data set"}
"""What the groups of `fetch` have on the hub."""


class Edit(NamedTuple):
    """A replacement in the text, from `start` to `end`."""

    start: int
    end: int
    text: str


def pin(config: Path) -> Iterator[str]:
    """Look up what is not pinned in `config` and write it; yield a line for each.

    Raises UserError if the file is not YAML, or a repository or revision does not exist; then nothing is written.
    """
    read_values(config)
    text = config.read_bytes().decode()  # with its own line ends
    _, root = composed(text)
    edits: list[Edit] = []
    lines: list[str] = []
    for key, node in _pairs(root):
        if key.value == "model" and isinstance(node, yaml.ScalarNode):
            edits += _shorthand(node, text, lines)
        for group, entries in _pairs(node) if key.value == "fetch" else ():
            for name, entry in _pairs(entries) if group.value in KINDS else ():
                edits += _entry(f"fetch.{group.value}.{name.value}", KINDS[group.value], entry, text, lines)
    for edit in sorted({*edits}, reverse=True):  # an alias repeats an entry
        text = text[: edit.start] + edit.text + text[edit.end :]
    if edits:
        publish(config, text)
    yield from dict.fromkeys(lines)


def _shorthand(node: yaml.ScalarNode, text: str, lines: list[str]) -> list[Edit]:
    match = REPOSITORY.fullmatch(node.value)
    if not match or PINNED.fullmatch(node.value) or Path(node.value).is_dir():
        return []
    repository, revision = match.groups()
    commit, _ = _looked_up("model", repository, revision)
    lines.append(_line("model", revision, commit))
    return [Edit(*_span(node), f"{repository}@{commit}{_remark(node, revision, text)}")]


def _entry(where: str, kind: str, entry: yaml.Node, text: str, lines: list[str]) -> list[Edit]:
    values = {key.value: node for key, node in _pairs(entry) if isinstance(node, yaml.ScalarNode)}
    repository, revision, license_ = (values.get(key) for key in ("repository", "revision", "license"))
    unreadable = revision is None and any(key.value == "revision" for key, _ in _pairs(entry))  # by the config's check
    if repository is None or unreadable or (revision is not None and COMMIT.fullmatch(revision.value)):
        return []
    named = None if revision is None else str(revision.value)
    commit, stated = _looked_up(kind, repository.value, named)
    lines.append(_line(f"{where}.revision", named, commit))
    edits, more = [], ""
    if revision is None:
        more += _added("revision", _quoted(commit), entry)
    else:
        edits.append(Edit(*_span(revision), f"{_quoted(commit)}{_remark(revision, named, text)}"))
    if stated and license_ is None:
        more += _added("license", stated, entry)
    elif stated and license_ is not None and license_.value == UNKNOWN_LICENSE:
        edits.append(Edit(*_span(license_), stated))
    if more:
        edits.append(Edit(repository.end_mark.index, repository.end_mark.index, more))
    return edits


def _added(key: str, value: str, entry: yaml.Node) -> str:
    """Return the text of a further key of a mapping, to stand after one of its values."""
    assert isinstance(entry, yaml.MappingNode)
    if entry.flow_style:
        return f", {key}: {value}"
    return f"\n{' ' * entry.value[0][0].start_mark.column}{key}: {value}"


def _quoted(commit: str) -> str:
    """Return a commit as YAML: one of digits and an e is a number otherwise."""
    return f"'{commit}'" if re.fullmatch(r"[0-9]+e?[0-9]*", commit) else commit


def _looked_up(kind: str, repository: str, revision: str | None) -> tuple[str, str | None]:
    """Return the commit of a revision, by default of the main branch, and the licence that the repository states."""
    from huggingface_hub import HfApi

    with explained_errors(f"{kind} {repository}" + (f" at {revision}" if revision else ""), kind):
        ask: Any = HfApi().dataset_info if kind == "data set" else HfApi().model_info
        about = ask(repository, revision=revision)
    stated = getattr(about.card_data, "license", None) if about.card_data else None
    if not COMMIT.fullmatch(str(about.sha)):
        raise UserError(f"{kind} {repository}: the hub names no commit; set `revision` by hand")
    return about.sha, stated if isinstance(stated, str) and re.fullmatch(r"[\w.+-]+", stated) else None


def _line(where: str, revision: str | None, commit: str) -> str:
    return f"{where}: {revision or 'the main branch'} is {commit} now"


def _remark(node: yaml.Node, revision: str | None, text: str) -> str:
    """Return a comment with the revision that stood there, if the value ends its line."""
    rest = text[node.end_mark.index :].partition("\n")[0]
    return f"  # {printable(revision)}" if revision and not rest.strip() else ""


def _span(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def _pairs(node: yaml.Node | None) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return the entries of a mapping with plain keys; none of another node."""
    if not isinstance(node, yaml.MappingNode):
        return []
    return [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
