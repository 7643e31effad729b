"""Refuses a .json file that is one object around lists of rows, as {"train": [...], "test": [...]}, {"data": [...]}."""

import itertools
import re
from pathlib import Path

from zerolora.data.formats import FORMS
from zerolora.data.published import LEFT_OUT, of_entries, others_of, setting_of, settled, split_of
from zerolora.data.readers import chunks
from zerolora.errors import UserError, shown

JSON = re.compile(r".+\.json(\.\w+)?", re.IGNORECASE)
ROWS, SIZE = 2, 1 << 16  # of a chunk


def check_not_nested(root: Path, path: Path, columns: dict[str, str]) -> None:
    """Raise UserError, with the `sources` to set, if a file is a single object with lists of objects that is no row.

    root: the data set's path. columns: the columns that the config maps.
    """
    if not JSON.fullmatch(path.name):
        return
    records = (value for chunk in chunks(path, ROWS, SIZE) for _, value in chunk.records())
    value, *others = [*itertools.islice(records, 2)] or [None]
    fields = {field for form in FORMS.values() for field in form.fields}
    known = {*fields, *(column.partition(".")[0] for column in columns.values())}
    if others or not isinstance(value, dict) or known & value.keys():
        return
    lists = [str(name) for name, held in value.items() if isinstance(held, list) and held and isinstance(held[0], dict)]
    if not lists:
        return
    if len(lists) == 1:
        raise UserError(
            f"{path}: is one object with the rows in its list {shown(lists[0])}; write that list alone into the file, "
            "as in [{...}, {...}], or an object a line into a .jsonl file"
        )
    splits = settled({name: split_of(name) for name in lists})
    left_out = others_of({name: (split, name) for name, split in splits.items()})
    folder = path.parent if root == path else root
    inside = path.parent.relative_to(folder)
    entries = [
        ((inside / f"{name}.json").as_posix(), setting_of(split))
        for name, split in splits.items()
        if name not in left_out
    ]
    without = f", {LEFT_OUT}: {', '.join(left_out)}" if left_out else ""
    raise UserError(
        f"{path}: is one object whose values are lists of rows ({', '.join(lists)}); write each list as a file of its "
        f"own, and path: {folder} with {of_entries(entries)}{without}"
    )
