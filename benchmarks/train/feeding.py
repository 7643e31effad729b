"""Seconds of reading the rows of a global batch: as views of the memory-mapped file, and as `datasets` decodes them.

    .venv/bin/python benchmarks/train/feeding.py

64 rows of 1,024 tokens, of which half are supervised, with the columns of SFT, and with those of a teacher at k = 64,
read in a random order from a file that is in the page cache. Writes benchmarks/results/feeding.json.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import pyarrow
from datasets import Dataset
from measuring import RESULTS, by_round, machine, parser_of

from zerolora.data.row_columns import RowColumns
from zerolora.files import write_json
from zerolora.train.objectives.distill import IDS, LABEL, LOG_PROBABILITIES, REST

ROWS, BATCH, TOKENS, SUPERVISED, K, ROUNDS = 512, 64, 1024, 512, 64, 9
TEXTS = ("input_ids", "labels")
TAUGHT = (*TEXTS, IDS, LOG_PROBABILITIES, REST, LABEL)


def main() -> None:
    """Write a file, read it both ways in turn, and write the medians."""
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = written(Path(name) / "rows.arrow")
        order = np.random.default_rng(0).permutation(ROWS)
        columns = RowColumns(rows)
        ways: dict[str, Callable[[list[int], tuple[str, ...]], Any]] = {
            "views": lambda batch, names: list(columns.rows(batch, names)),
            "datasets": lambda batch, names: rows.select_columns(list(names))[batch],
        }
        result: dict[str, Any] = {"machine": machine(("datasets", "pyarrow"))}
        for kind, names in {"texts": TEXTS, "taught": TAUGHT}.items():
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(ROUNDS):
                batch = order[np.arange(number * BATCH, (number + 1) * BATCH) % ROWS].tolist()
                for way, read in ways.items():
                    started = time.process_time()
                    read(batch, names)
                    seconds[way].append(time.process_time() - started)
            result[kind] = {way: by_round([round(each, 6) for each in values]) for way, values in seconds.items()}
            print(kind, {way: f"{1000 * each['median']:.2f} ms" for way, each in result[kind].items()})
        write_json(RESULTS / "feeding.json", result)


def written(file: Path) -> Any:
    """Return prepared rows with a teacher's values, memory-mapped."""
    draw = np.random.default_rng(0)
    counts = {**dict.fromkeys(TEXTS, TOKENS), IDS: SUPERVISED * K, LOG_PROBABILITIES: SUPERVISED * K}
    counts |= dict.fromkeys((REST, LABEL), SUPERVISED)
    kinds = {LOG_PROBABILITIES: np.float16, REST: np.float32, LABEL: np.float32}
    columns = {
        name: pyarrow.ListArray.from_arrays(
            pyarrow.array(np.arange(ROWS + 1) * count, pyarrow.int32()),
            pyarrow.array(draw.integers(1, 9999, ROWS * count).astype(kinds.get(name, np.int32))),
        )
        for name, count in counts.items()
    }
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table)
    return Dataset.from_file(str(file))


if __name__ == "__main__":
    main()
