"""The columns of common layouts that no form has by its own names, by which `init` proposes `columns`."""

from collections.abc import Iterable

from zerolora.types import RowKind
from zerolora.yaml_file import written

MAPPINGS: dict[RowKind, list[dict[str, str]]] = {
    "texts": [
        {"instruction": "instruction", "input": "context", "output": "response"},
        {"instruction": "instruction", "input": "input", "output": "response"},
        {"instruction": "instruction", "output": "response"},
        {"prompt": "question", "completion": "answer"},
        {"prompt": "query", "completion": "response"},
        {"prompt": "query", "completion": "answer"},
        {"prompt": "question", "completion": "response"},
        {"prompt": "question", "completion": "solution"},
        {"prompt": "prompt", "completion": "response"},
        {"prompt": "prompt", "completion": "answer"},
        {"prompt": "problem", "completion": "solution"},
        {"prompt": "document", "completion": "summary"},
        {"prompt": "dialogue", "completion": "summary"},
        {"prompt": "article", "completion": "highlights"},
        {"prompt": "article", "completion": "summary"},
        {"prompt": "input", "completion": "output"},
    ],
    "pairs": [
        {"messages": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"},
    ],
    "labelled": [],
}
"""The column of each field, the richest first. A layout that is missing here is mapped by hand."""


def mapping_of(columns: Iterable[str], rows: RowKind = "texts") -> dict[str, str]:
    """Return the first mapping whose columns all are there, without those that have a field's own name; empty if there
    is none. columns: also the fields of objects, as in input.messages."""
    names = {*columns}
    for mapping in MAPPINGS[rows]:
        if names.issuperset(mapping.values()):
            return mapping
    return {}


def mapping_text(columns: Iterable[str]) -> str:
    """Return that mapping of texts as a setting, empty without one."""
    mapping = mapping_of(columns)
    return f"{{{', '.join(f'{field}: {written(column)}' for field, column in mapping.items())}}}" if mapping else ""
