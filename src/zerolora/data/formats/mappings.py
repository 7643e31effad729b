"""The columns of common layouts that no form has by its own names, by which `init` proposes `columns`."""

from collections.abc import Iterable

from zerolora.types import RowKind
from zerolora.yaml_file import written

MAPPINGS: dict[RowKind, list[dict[str, str]]] = {
    "texts": [
        *({"instruction": question, "input": "context", "output": answer}
          for question in ("instruction", "question") for answer in ("response", "answer", "output")),
        *({"instruction": "instruction", "input": "input", "output": answer} for answer in ("response", "answer")),
        *({"instruction": "instruction", "output": answer} for answer in ("response", "answer", "completion")),
        *({"prompt": question, "completion": answer}
          for question in ("question", "query", "prompt", "problem")
          for answer in ("answer", "response", "solution", "output")),
        *({"prompt": "input", "completion": answer} for answer in ("output", "target", "answer", "response")),
        {"prompt": "inputs", "completion": "targets"},
        {"prompt": "user", "completion": "assistant"},
        {"prompt": "message_1", "completion": "message_2"},
        {"prompt": "article", "completion": "highlights"},
        *({"prompt": text, "completion": "summary"} for text in ("document", "dialogue", "article", "text")),
    ],
    "pairs": [
        {"messages": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"},
    ],
    "labelled": [],
}  # fmt: skip
"""The column of each field. A layout that is missing here is mapped by hand."""


def mappings_of(columns: Iterable[str], rows: RowKind = "texts") -> list[dict[str, str]]:
    """Return the mappings whose columns all are there, in any case. columns: also the fields of objects, as in
    input.messages."""
    names = {name.lower(): name for name in columns}
    return [
        {field: names[column] for field, column in mapping.items()}
        for mapping in MAPPINGS[rows]
        if names.keys() >= {*mapping.values()}
    ]


def mapping_text(columns: Iterable[str]) -> str:
    """Return the first mapping of texts as a setting, empty without one."""
    for mapping in mappings_of(columns):
        return f"{{{', '.join(f'{field}: {written(column)}' for field, column in mapping.items())}}}"
    return ""
